"""The workshop paper's layer on CIFAR-10 in sequence form, at a size that fits a laptop: patches instead of pixels.

Four configurations (Fourier features or shifted cosines, shared or per-head keys and values) against causal and
bidirectional softmax, all with the same images in the same order. Then what the start that remembers does here: two of
them with it (and the hermitian product that it is made for), and the language model's layer with it and with a random
one.

    python -m benchmarks.image_study --data ../shared/data/cifar10     # all runs that the results do not hold yet
    python -m benchmarks.image_study --data ../shared/data/cifar10 --speed    # training speed of all, in turns
    python -m benchmarks.image_study --table                           # the table as markdown
"""

import functools
import statistics
from collections.abc import Iterator

import torch
from transformers import AutoModelForSequenceClassification

from benchmarks import readme, studies
from benchmarks.harness import RESULTS, footnote, markdown
from examples.classify_images import RECIPE, REPOSITORY, Images, accuracy, load_images, train_classifier
from examples.training import read_recipe
from modeling_interdomain import InterdomainConfig

FILE = RESULTS / "image_study.json"
CONDITIONS = ("shared-fourier", "per-head-fourier", "shared-shifted", "per-head-shifted")
CONDITIONS += ("softmax-causal", "softmax-bidirectional")
RECALL = {"start": "recall", "product": "hermitian", "coefficient_init": "posterior"}
LANGUAGE = {
    "normalize": False,
    "input_norm": True,
    "feature_map": "silu_l2",
    "conv_kernel": 4,
    "state_size": 64,
    "product": None,
}
# A configuration in another way than its folder says.
CHANGED = {
    "shared-fourier, recall": ("shared-fourier", RECALL),
    "per-head-fourier, recall": ("per-head-fourier", RECALL),
    "language layer, random": ("per-head-fourier", LANGUAGE | {"start": "random"}),
    "language layer, recall": ("per-head-fourier", LANGUAGE | {"start": "recall"}),
}
# The recipe's learning rates stay: larger ones drive the readout's normaliser through zero, and nothing is learned.
TRAINING = {"steps": 400, "patch_size": 4}
TEST_IMAGES, SEEDS = 4000, (0,)


def make_model(condition: str, seed: int, images: Images, training: dict = TRAINING):
    """The configuration in `configuration/` with fewer tokens, in four chunks."""
    torch.manual_seed(seed)
    name, changes = CHANGED.get(condition, (condition, {}))
    fields, _ = InterdomainConfig.get_config_dict(REPOSITORY / "configuration" / f"workshop-{name}")
    tokens = images.pixels.shape[2] * images.pixels.shape[3] // training["patch_size"] ** 2 + 1
    shape = {"patch_size": training["patch_size"], "chunk_size": -(-tokens // 4)}
    config = InterdomainConfig.from_dict(fields | shape | changes)
    return AutoModelForSequenceClassification.from_config(config)


def run_condition(condition: str, seed: int, train: Images, test: Images, training: dict = TRAINING) -> dict:
    """Train one configuration and count the test images it gets right."""
    model = make_model(condition, seed, train, training)
    steps = list(train_classifier(model, train, make_recipe(training), training["steps"], seed))
    return {
        "parameters": model.num_parameters(),
        "train_loss": statistics.mean(step.loss for step in steps[-50:]),
        "accuracy": accuracy(model, test),
    }


def endless_runs(train: Images) -> dict[str, Iterator]:
    """Training of every configuration, to be timed."""
    return {name: train_classifier(make_model(name, 0, train), train, make_recipe(), 10**9) for name in CONDITIONS}


def make_recipe(training: dict = TRAINING) -> dict:
    return read_recipe(RECIPE) | training


def table(record: dict) -> str:
    rows, speed = [], record.get("speed", {})
    for name in (*CONDITIONS, *CHANGED):
        found = [row for row in record["runs"] if row["condition"] == name]
        if found:
            values = [row["accuracy"] for row in found]
            spread = f" ({min(values):.1%} to {max(values):.1%})" if len(values) > 1 else ""
            rows.append(
                [
                    name,
                    f"{found[0]['parameters']:,}",
                    f"{statistics.mean(values):.1%}{spread}",
                    f"{statistics.mean(row['train_loss'] for row in found):.3f}",
                    f"{speed[name]['median']:,.0f}" if name in speed else "not measured",
                ]
            )
    training = record["training"]
    recipe = make_recipe(training)
    patch = training["patch_size"]
    about = (
        f"{training['steps']} steps of {recipe['batch_size']} images, {patch} x {patch} pixels a token, peak learning "
        f"rate {recipe['learning_rate']:g}; accuracy on {record['test_images']:,} test images."
    )
    header = ["configuration", "parameters", "accuracy", "training loss at the end", "images/s"]
    return f"{markdown(header, rows)}\n\n{about} {footnote(record)}"


def plan(runs: list[dict]) -> Iterator[dict]:
    yield from ({"condition": name, "seed": seed} for seed in SEEDS for name in (*CONDITIONS, *CHANGED))


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data/cifar10", speed=True).parse_args()
    fresh = {"training": TRAINING, "test_images": TEST_IMAGES}
    if arguments.table:
        print(table(studies.load(FILE, fresh)))
        return
    torch.set_num_threads(arguments.threads)
    if arguments.speed:
        train = load_images(arguments.data, "train", 1000)
        studies.write_speed(FILE, fresh, endless_runs(train), make_recipe()["batch_size"])
    else:
        train, test = load_images(arguments.data, "train"), load_images(arguments.data, "test", TEST_IMAGES)
        run = functools.partial(run_condition, train=train, test=test)
        studies.run_missing(FILE, fresh, plan, run, "python -m benchmarks.image_study", arguments.part, arguments.runs)
    readme.update()


if __name__ == "__main__":
    main()
