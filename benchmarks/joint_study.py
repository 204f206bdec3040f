"""Which keys are worth seeing? Joint recall by core, and by the sparse attention beside it.

The task is `joint` of examples/recall.py: what the value of a key is depends on the context in which it stands. Every
condition sees the same sequences in the same order with the same optimiser; a seed changes the weights and the
sequences. Ten conditions are those of the HAX paper (arXiv 2507.00449, table 1), of the same budget of keys a query, on
three cores; its figures for Mamba and Mamba-2 stand beside; the last is HAX with the branch as the paper starts it. Its
task is larger (5 to 16 contexts and keys, 64 keys, 400,000 steps of 64 sequences), so that orders can be compared and
percentages cannot. Two learning rates with the first seed, the other seed at the better one; a run takes about a minute
of a thread that has a core to itself.

    python -m benchmarks.joint_study             # all runs that results/joint_study.json does not hold yet
    python -m benchmarks.joint_study --table     # the table as markdown
"""

from collections.abc import Iterator
from itertools import product

import torch

from benchmarks import studies
from benchmarks.harness import RESULTS, footnote, markdown
from benchmarks.recall_study import ROPE, train_and_ask
from examples.recall import Joint, joint_batches
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "joint_study.json"
TASK = Joint(smallest=2, largest=4)
LENGTH = 2 * TASK.largest * (2 * TASK.largest + 1) + 2
KEYS = 16
SHAPE = {
    "vocab_size": TASK.vocab_size,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
    "sparse_keys": KEYS,
    "sparse_num_heads": 1,
    "sparse_key_dim": 16,
    "sparse_hash": "sign",
    "sparse_hash_size": 4,
}
TRAINING = {"batch_size": 32, "steps": 500}
LEARNING_RATES, SEEDS = (3e-3, 1e-3), (0, 1)
CORES = {
    "ssd": {  # the layer of Mamba-2
        "token_mixers": "ssd",
        "feed_forwards": "none",
        "ssd_state_size": 16,
        "ssd_head_dim": 64,
        "ssd_conv_kernel": 4,
        "ssd_conv_bias": True,
        "ssd_activation": "silu",
        "ssd_dt_bias": "time_step",
        "ssd_norm": "after_gate",
        "use_output_gate": True,
    },
    "interdomain": {"token_mixers": "interdomain", "start": "recall", "state_size": 16},
    "s4d": {"token_mixers": "s4d", "start": "recall", "state_size": 16},
}
CONDITIONS = {
    "base": {},
    "+D": {"sparse_attention": "dilated"},
    "+SW": {"sparse_attention": "sliding_window"},
    "+SW+D": {"sparse_attention": "sliding_window+dilated"},
    "+A": {"sparse_attention": "sliding_window+sink"},
    "+LSH": {"sparse_attention": "lsh"},
    "+KS": {"sparse_attention": "key_selection"},
    "+HAX": {"sparse_attention": "hax"},
    "base, 2x width": {"hidden_size": 128, "num_attention_heads": 4},
    "Samba": {"rope_parameters": ROPE},  # every other layer attends to a window
    "+HAX, random": {"sparse_attention": "hax", "sparse_gate_init": 1.0, "sparse_query_init": "independent"},
}
# Accuracy in percent, in the order of the conditions.
PAPER = {
    "Mamba": (16.3, 7.8, 18.7, 16.6, 16.4, 11.6, 36.6, 38.0, 34.5, 6.3, None),
    "Mamba-2": (36.6, 19.6, 70.6, 48.6, 49.3, 13.5, 60.1, 74.3, 59.2, None, None),
}


def see_latest(mixer, arguments: tuple, keywords: dict) -> tuple[tuple, dict]:
    """Softmax attention to the latest keys alone, as in Samba: a hook before the mixer, which knows no cache."""
    places = torch.arange(arguments[0].shape[1])
    ages = places[:, None] - places
    return arguments, keywords | {"attention_mask": ((ages >= 0) & (ages < KEYS))[None, None]}


def plan(runs: list[dict]) -> Iterator[dict]:
    kinds = [{"condition": name, "core": core} for name, core in product(CONDITIONS, CORES)]
    yield from studies.rates_then_seeds(runs, kinds, LEARNING_RATES, SEEDS)


def make_model(condition: str, core: str, seed: int = 0) -> InterdomainForCausalLM:
    torch.manual_seed(seed)
    fields = SHAPE | CORES[core] | CONDITIONS[condition] | dict.fromkeys(("bos_token_id", "eos_token_id"))
    if condition == "Samba":
        fields["token_mixers"] = [fields["token_mixers"], "softmax"]
    model = InterdomainForCausalLM(InterdomainConfig(**fields))
    if condition == "Samba":
        model.model.layers[1].token_mixer.register_forward_pre_hook(see_latest, with_kwargs=True)
    return model


def run_condition(condition: str, core: str, learning_rate: float, seed: int, steps: int | None = None) -> dict:
    """Train one condition and ask it about new sequences."""
    model = make_model(condition, core, seed)
    size, steps = TRAINING["batch_size"], TRAINING["steps"] if steps is None else steps
    batches, asked = (joint_batches(TASK, size, torch.Generator().manual_seed(x)) for x in (seed, seed + 1000))
    found = {"parameters": model.num_parameters(), "state_sizes": model.config.state_sizes(LENGTH)}
    return found | train_and_ask(model, batches, asked, steps, learning_rate)


def table(record: dict) -> str:
    """Accuracy by condition and core, beside the paper's."""
    runs = record["runs"]
    header = ["right answers", *CORES, *(f"{name} in the paper" for name in PAPER)]
    rows = []
    for i, name in enumerate(CONDITIONS):
        paper = [f"{figures[i]}%" if figures[i] is not None else "" for figures in PAPER.values()]
        rows.append([name, *(_cell(runs, name, core) for core in CORES), *paper])
    training = record["training"]
    about = (
        f"{len(runs)} runs so far, a number a seed, at the better of the learning rates "
        f"{' and '.join(map(str, LEARNING_RATES))} as far as they were run. {TASK.smallest} to {TASK.largest} "
        f"contexts and keys, {TASK.values} values (chance {1 / TASK.values:.1%}), up to {LENGTH} tokens; "
        f"{training['steps']:,} steps of {training['batch_size']} sequences; {KEYS} keys a query."
    )
    return f"{markdown(header, rows)}\n\n{about} {footnote(record)}"


def _cell(runs: list[dict], name: str, core: str) -> str:
    found = studies.best_runs(runs, {"condition": name, "core": core}, SEEDS[0])
    return ", ".join(f"{row['accuracy']:.1%}" for row in found) or "not run"


def main() -> None:
    fresh = {"training": TRAINING, "shape": SHAPE, "task": TASK._asdict()}
    studies.show_or_run(studies.parser(__doc__).parse_args(), FILE, fresh, plan, lambda: run_condition, table)


if __name__ == "__main__":
    main()
