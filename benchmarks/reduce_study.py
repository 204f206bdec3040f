"""What fewer modes cost, and what refitting saves: a language model and one that recalls, M from 32 to 16, 8 and 4.

The language model learns Wikipedia, the other the associative recall of examples/recall.py with the start that learns
it (benchmarks/recall_study.py). Both are trained once and kept; then `python -m conversion reduce` is applied in parts:
modes dropped, the strongest alone, with nothing made up for; C refit to them; modes chosen greedily; modes moved. What
there is to lose is the loss of the model without its token mixers.

    python -m benchmarks.reduce_study     # all runs that results/reduce_study.json does not hold yet, about 10 minutes
    python -m benchmarks.reduce_study --table     # the tables as markdown
"""

import copy
import statistics
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks import recall_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from conversion.reduce import kernel_errors, reduce_model, reduced_config
from examples.quickstart import save_checkpoint
from examples.text_data import encode, gather_documents, mean_nll, random_batches, split_documents, train_tokenizer
from examples.training import train
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "reduce_study.json"
RUNS = Path("runs/reduce_study")
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "state_size": 32,
    "start": "random",
}
TRAINING = {"steps": 800, "batch_size": 8, "sequence_length": 256, "learning_rate": 3e-3, "held_out_tokens": 8_000}
RECALL = {"condition": "posterior, uniform, even", "pairs": 8, "length": 64, "steps": 1500, "learning_rate": 3e-3}
MODELS = ("language", "recall")
SIZES = (16, 8, 4)
WHOLE, SILENT = "as trained", "without token mixers"
HOW = {
    "dropped": {"greedy": False, "refit": False},
    "refit": {"greedy": False, "move": False},
    "greedy, refit": {"move": False},
    "refit, moved": {"greedy": False},
    "greedy, refit, moved": {},
}


def plan(runs: list[dict]) -> Iterator[dict]:
    for model in MODELS:
        yield from ({"model": model, "state_size": SHAPE["state_size"], "how": how} for how in (WHOLE, SILENT))
        yield from ({"model": model, "state_size": size, "how": how} for size in SIZES for how in HOW)


@cache
def documents(data: Path) -> tuple[list[str], list[str]]:
    """What the language model learns from, and what it is measured on."""
    found = gather_documents([str(data / "corpus" / "wiki" / "train-000.parquet")], 8_000_000)
    return split_documents(found, 100_000)


def make_language(data: Path, folder: Path, training: dict) -> None:
    text, _ = documents(data)
    tokenizer = train_tokenizer(text, SHAPE["vocab_size"])
    torch.manual_seed(0)
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = InterdomainForCausalLM(InterdomainConfig(**SHAPE, **ends, max_position_embeddings=1024))
    batches = random_batches(encode(tokenizer, text), training["batch_size"], training["sequence_length"])
    for progress in train(model, batches, steps=training["steps"], learning_rate=training["learning_rate"]):
        if progress.step % 100 == 0:
            print(f"step {progress.step}: loss {progress.loss:.3f}", flush=True)
    save_checkpoint(model.eval(), tokenizer, folder)


def make_recall(folder: Path, recall: dict) -> None:
    model = recall_study.make_model(recall["condition"], SHAPE["state_size"])
    batches, asked = (recall_batches(recall, seed) for seed in (0, 1000))
    recall_study.train_and_ask(model, batches, asked, recall["steps"], recall["learning_rate"])
    model.eval().save_pretrained(folder)


def recall_batches(recall: dict, seed: int):
    return recall_study.make_batches(recall["pairs"], recall["length"], False, seed)


@torch.no_grad()
def run_condition(
    model: str, state_size: int, how: str, data: Path, runs: Path = RUNS, training: dict = TRAINING, recall=RECALL
) -> dict:
    """Reduce a trained model, which is made when it is not there yet, and measure it."""
    folder = runs / model
    if not (folder / "config.json").is_file():
        with torch.enable_grad():
            make_language(data, folder, training) if model == "language" else make_recall(folder, recall)
    found = InterdomainForCausalLM.from_pretrained(folder).eval()
    errors = None
    if how == SILENT:
        for layer in found.model.layers:
            layer.token_mixer.o_proj.weight.zero_()
    elif how != WHOLE:
        whole = found
        found = reduce_model(whole, reduced_config(whole.config, state_size), torch.float32, **HOW[how])
        errors = list(kernel_errors(whole, found).values())
    if model == "recall":
        batches = [batch for _, batch in zip(range(8), recall_batches(recall, 1000))]
        accuracy, loss = recall_study.evaluate(found, batches)
        return {"accuracy": accuracy, "loss": loss, "kernel_errors": errors}
    tokens = encode(AutoTokenizer.from_pretrained(folder), documents(data)[1])[: training["held_out_tokens"]]
    return {"loss": mean_nll(found, tokens, training["sequence_length"]), "kernel_errors": errors}


def table(record: dict) -> str:
    """For each model a row a way of reducing it, a column a state size."""
    by_run = {(row["model"], row["state_size"], row["how"]): row for row in record["runs"]}
    size = SHAPE["state_size"]
    rows = []
    for how in HOW:
        cells = [how]
        for model in MODELS:
            whole = by_run[model, size, WHOLE]
            for reduced in SIZES:
                cells.append(_cell(by_run.get((model, reduced, how)), whole))
        rows.append(cells)
    header = ["", *(f"{model}, M = {reduced}" for model in MODELS for reduced in SIZES)]
    language, recall = ([by_run[model, size, how] for how in (WHOLE, SILENT)] for model in MODELS)
    about = (
        f"Language: nats a token above the {language[0]['loss']:.3f} of M = {size} ({language[1]['loss']:.3f} without "
        f"token mixers). Recall: right answers, of {recall[0]['accuracy']:.1%} with M = {size} "
        f"({recall[1]['accuracy']:.1%} without token mixers). In brackets the relative error of the kernels, the mean "
        "over the layers. One seed each."
    )
    return f"{markdown(header, rows)}\n\n{about} {footnote(record)}"


def _cell(row: dict | None, whole: dict) -> str:
    if row is None:
        return "not run"
    value = f"{row['accuracy']:.1%}" if "accuracy" in row else f"{row['loss'] - whole['loss']:+.3f}"
    return f"{value} ({statistics.mean(row['kernel_errors']):.2f})"


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    fresh = {"training": TRAINING, "recall": RECALL, "shape": copy.deepcopy(SHAPE)}
    studies.show_or_run(arguments, FILE, fresh, plan, lambda: partial(run_condition, data=arguments.data), table)


if __name__ == "__main__":
    main()
