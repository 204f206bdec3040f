"""The comparisons of "Wonderful Matrices" (arXiv 2407.16958) at a size that two hours of one core hold.

Three parts, of which each condition sees the same data in the same order with the same optimiser:

encodings    table 1: what mixes tokens, and how it knows their order (a convolution and a skip, the decay alone,
             rotary embeddings). A hybrid's last layer is attention.
placements   table 2: experts in none, the first, the last, two, six or all of eight layers; a layer of experts has as
             many parameters as the gated MLP it replaces, to within 1%.
recall       figure 5: multi-query associative recall at four widths, with a quarter as many pairs as tokens, random
             filler, and answers in the labels alone. That fixes the layout, which a layer could learn instead of
             looking, so the same runs are done with rows that are shifted by 0 to 7 tokens.

All runs have one learning rate, the best of softmax and S4D in benchmarks.condition_study or next to it, and two seeds:
the first of everything, then the second. Text comes from that study's folder; there training multiplies in bfloat16
(autocast), and losses are measured in float32. A run of recall ends once two looks in a row find everything.

    python -m benchmarks.cheems_study --data ../shared/data     # all runs that the results do not hold yet
    python -m benchmarks.cheems_study --table                   # the tables as markdown
"""

import functools
import math
from collections.abc import Iterator

import torch

from benchmarks import condition_study, recall_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from examples.recall import mqar_batches
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "cheems_study.json"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_placement": "before"}
TEXT = {"vocab_size": 2048, "hidden_size": 128, "num_attention_heads": 4, "ssd_state_size": 64}
TRAINING = condition_study.TRAINING | {"steps": 300, "autocast": "bfloat16"}
LEARNING_RATE, SEEDS = 3e-3, (0, 1)
WIDTHS, LENGTH, RECALL_STEPS, SHIFT = (16, 32, 64, 128), 16, 1500, 7

ENCODINGS = {
    "conv": {"ssd_conv_kernel": 4},
    "decay": {"ssd_skip": False},
    "rope": ROPE,
}
_SSD, _HYBRID = {"token_mixers": "ssd"}, ["ssd", "ssd", "ssd"]
TOKEN_MIXERS = {
    "softmax": {"token_mixers": "softmax"},
    "SSD": _SSD,
    "SSD + softmax": {"token_mixers": [*_HYBRID, "softmax"]},
    "SSD + inner function": {"token_mixers": [*_HYBRID, "inner_function"]},
    "SSD + inner function + dynamic mask": {"token_mixers": [*_HYBRID, "inner_function"], "dynamic_mask": "position"},
}
# Softmax attention has rotary embeddings alone, as in the paper.
PAPER_ENCODINGS = {
    "softmax": {"rope": 8.38},
    "SSD": {"conv": 8.56, "decay": 8.62, "rope": 8.33},
    "SSD + softmax": {"conv": 8.48, "decay": 8.56, "rope": 8.18},
    "SSD + inner function": {"conv": 8.43, "decay": 8.49, "rope": 8.12},
    "SSD + inner function + dynamic mask": {"conv": 8.36, "decay": 8.42, "rope": 7.96},
}
EXPERTS = {"num_experts": 176, "expert_heads": 1, "experts_per_head": 8, "expert_key_dim": 32, "intermediate_size": 384}
PLACEMENTS = {
    "none": (),
    "the first": (0,),
    "the last": (7,),
    "two": (3, 7),
    "six": (1, 2, 3, 5, 6, 7),
    "all eight": tuple(range(8)),
}
PAPER_PLACEMENTS = dict(zip(PLACEMENTS, (8.18, 8.06, 8.12, 7.96, 7.52, 7.49)))
RECALL = {name: TOKEN_MIXERS[name] for name in ("softmax", "SSD")} | {
    "inner function": {"token_mixers": "inner_function", "inner_values": 2},
    "inner function + dynamic mask": {
        "token_mixers": "inner_function",
        "inner_values": 2,
        "dynamic_mask": "position",
        "max_position_embeddings": 64,
    },
}


def conditions() -> dict[str, dict[str, dict]]:
    """By part and name, the fields of a configuration."""
    encodings = {
        f"{mixer}, {encoding}": TEXT | {"num_hidden_layers": 4} | TOKEN_MIXERS[mixer] | ENCODINGS[encoding]
        for mixer, figures in PAPER_ENCODINGS.items()
        for encoding in figures
    }
    placements = {
        name: TEXT
        | {"num_hidden_layers": 8, "token_mixers": [*["ssd"] * 7, "inner_function"]}
        | EXPERTS
        | ROPE
        | {"feed_forwards": ["cdmoe" if i in layers else "mlp" for i in range(8)]}
        for name, layers in PLACEMENTS.items()
    }
    recall = {
        f"{name}, {width}": fields
        | ROPE
        | {"vocab_size": 32, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 1}
        | {"ssd_state_size": 64, "inner_value_dim": max(8, width // 2), "bos_token_id": None, "eos_token_id": None}
        for name, fields in RECALL.items()
        for width in WIDTHS
    }
    return {"encodings": encodings, "placements": placements, "recall": recall}


def plan(runs: list[dict]) -> Iterator[dict]:
    """Everything with the first seed, then with the second; the text before recall."""
    known = conditions()
    text = [(part, name) for part in ("encodings", "placements") for name in known[part]]
    recall = [("recall", name, shift) for shift in (0, SHIFT) for name in known["recall"]]
    for seed in SEEDS:
        yield from (item(*what, seed=seed) for what in (*text, *recall))


def item(part: str, condition: str, shift: int = 0, seed: int = 0) -> dict:
    """What tells a run from the others."""
    return {"part": part, "condition": condition, "learning_rate": LEARNING_RATE, "seed": seed, "shift": shift}


def run_condition(part: str, condition: str, learning_rate: float, seed: int, shift: int, data: dict) -> dict:
    """Train one condition, and measure it on held-out text or sequences."""
    config = InterdomainConfig(**conditions()[part][condition])
    if part != "recall":
        return condition_study.train_and_measure(config, learning_rate, seed, data, TRAINING)
    torch.manual_seed(seed)
    model = InterdomainForCausalLM(config)

    def batches(seed: int):
        generator = torch.Generator().manual_seed(seed)
        kind = {"random_filler": True, "hidden_answers": True, "shift": shift}
        return mqar_batches(LENGTH // 4, LENGTH, config.vocab_size, 64, generator, **kind)

    streams = batches(seed), batches(seed + 1000)
    found = recall_study.train_and_ask(model, *streams, RECALL_STEPS, learning_rate, recall_study.SOLVED)
    return {"parameters": model.num_parameters()} | found


def runs_of(runs: list[dict], part: str, name: str, shift: int = 0) -> list[dict]:
    """All seeds of a condition."""
    return [row for row in runs if (row["part"], row["condition"], row["shift"]) == (part, name, shift)]


def table(record: dict) -> str:
    """The three parts, with the paper's figures beside."""
    runs = record["runs"]

    def perplexity(part: str, name: str) -> str:
        found = runs_of(runs, part, name)
        return ", ".join(f"{math.exp(condition_study.score(row)):.1f}" for row in found) or "not run"

    encodings = [
        [
            mixer,
            *(
                f"{perplexity('encodings', f'{mixer}, {name}')} ({figures[name]})" if name in figures else ""
                for name in ENCODINGS
            ),
        ]
        for mixer, figures in PAPER_ENCODINGS.items()
    ]
    placements = []
    for name, figure in PAPER_PLACEMENTS.items():
        found = runs_of(runs, "placements", name)
        parameters = f"{found[0]['parameters']:,}" if found else ""
        placements.append([name, parameters, perplexity("placements", name), str(figure)])
    recall = []
    for name in RECALL:
        for shift in (0, SHIFT):
            cells = [runs_of(runs, "recall", f"{name}, {width}", shift) for width in WIDTHS]
            if any(cells):
                shown = [", ".join(f"{row['accuracy']:.0%}" for row in found) or "not run" for found in cells]
                recall.append([name, "shifted" if shift else "fixed", *shown])
    tables = [
        markdown(["perplexity (the paper's)", "convolution and skip", "decay alone", "rotary embeddings"], encodings),
        markdown(["layers of eight with experts", "parameters", "perplexity", "the paper's"], placements),
    ]
    if recall:
        tables.append(markdown(["recall", "layout", *(f"width {width}" for width in WIDTHS)], recall))
    tokens = condition_study.tokens_of(TRAINING)
    about = (
        f"{len(runs)} of {len(list(plan(runs)))} runs so far. Texts: {tokens:,} tokens a run, vocabulary "
        f"{TEXT['vocab_size']}, width {TEXT['hidden_size']}; perplexity a token, one number a seed. Recall: "
        f"{LENGTH // 4} pairs in {LENGTH} tokens, at most {RECALL_STEPS} steps of 64 sequences; right answers, one "
        f"number a seed. All at the rate {LEARNING_RATE:g}: two seeds and one rate do not tell conditions apart that "
        "lie within some percent."
    )
    return "\n\n".join([*tables, f"{about} {footnote(record)}"])


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()

    def make_run():
        return functools.partial(run_condition, data=condition_study.prepare(arguments.data))

    studies.show_or_run(arguments, FILE, {"training": TRAINING}, plan, make_run, table)


if __name__ == "__main__":
    main()
