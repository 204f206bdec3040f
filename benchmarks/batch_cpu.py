"""Many prompts: one after the other, in padded batches, and with rows that are refilled as they end."""

import random
from functools import partial

import torch

from benchmarks.harness import footnote, markdown, time_in_turns, verify_model
from benchmarks.model_cpu import interdomain
from modeling_interdomain import StateStore

PROMPTS, ROWS, SHORTEST, LONGEST, NEW_TOKENS, ENDS = 24, 8, 8, 128, 96, 32  # a text ends at one of ENDS in a thousand
SHARED = 512  # tokens that all prompts begin with, in the last part
REQUIRED = {"one by one": 1.5, "padded batches": 1.2}


def run(quick: bool = False) -> dict:
    model = interdomain(quick)
    config = model.config
    record = {"relative_error": verify_model(model)}
    draw = random.Random(0)
    prompts = [
        [draw.randrange(config.vocab_size) for _ in range(draw.randint(SHORTEST, LONGEST))]
        for _ in range(4 if quick else PROMPTS)
    ]
    rows = 2 if quick else ROWS
    options = {
        "max_new_tokens": 8 if quick else NEW_TOKENS,
        "eos_token_id": draw.sample(range(config.vocab_size), config.vocab_size * ENDS // 1000),
        "pad_token_id": 0,
        "do_sample": False,
    }
    ways = {"refilled rows": refilled_rows, "one by one": one_by_one, "padded batches": padded_batches}
    record |= measured(model, prompts, rows, options, ways) | {"rows": rows, "required": REQUIRED}
    begin = [draw.randrange(config.vocab_size) for _ in range(SHARED)]
    stores = {"refilled rows, prompt store": with_a_store, "refilled rows": refilled_rows}
    shared = measured(model, [begin + prompt for prompt in prompts], rows, options, stores)
    mixers = [("interdomain", "softmax")[layer % 2] for layer in range(config.num_hidden_layers)]
    hybrid = interdomain(quick, token_mixers=mixers)
    record["parts"] = {
        "every other layer softmax": measured(hybrid, prompts, rows, options, ways) | {"required": REQUIRED},
        f"{SHARED} tokens in front of every prompt": shared | {"required": {}},
    }
    return record


def measured(model, prompts, rows: int, options: dict, ways: dict) -> dict:
    """What each way takes, and the lengths of the answers, which are the same."""
    written: dict[str, list[list[int]]] = {}

    def note(name: str) -> None:
        written[name] = ways[name](model, prompts, rows, options)

    times = time_in_turns({name: partial(note, name) for name in ways}, seconds=0, at_least=3)
    first, *others = written.values()
    if any(other != first for other in others):
        raise SystemExit(f"{', '.join(ways)} do not write the same: no speed is shown.")
    return {"times": times, "lengths": [len(tokens) for tokens in first]}


def with_a_store(model, prompts, rows: int, options: dict) -> list[list[int]]:
    """One that knows nothing yet: what is saved is what the prompts of one call share."""
    model.prompt_store = StateStore()
    try:
        return refilled_rows(model, prompts, rows, options)
    finally:
        model.prompt_store = None


def refilled_rows(model, prompts, rows: int, options: dict) -> list[list[int]]:
    found = model.generate_batch(prompts, max_batch_size=rows, **options)
    return [output.generated_tokens for output in found.values()]


def one_by_one(model, prompts, rows: int, options: dict) -> list[list[int]]:
    return [tokens for prompt in prompts for tokens in padded_batches(model, [prompt], 1, options)]


def padded_batches(model, prompts, rows: int, options: dict) -> list[list[int]]:
    """As many as there are rows at once, each as long as its longest."""
    found = []
    for begin in range(0, len(prompts), rows):
        batch = prompts[begin : begin + rows]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        written = model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()
        found += [_until_the_end(tokens, options["eos_token_id"]) for tokens in written]
    return found


def _until_the_end(tokens: list[int], ends: list[int]) -> list[int]:
    """Without the pads after the first token that ends a text."""
    stop = next((place for place, token in enumerate(tokens, start=1) if token in ends), len(tokens))
    return tokens[:stop]


def table(record: dict) -> str:
    total, rows = sum(record["lengths"]), _rows(record)
    for part, of_part in record.get("parts", {}).items():
        rows += [[f"{part}: {name}", *cells] for name, *cells in _rows(of_part)]
    about = (
        f"The 125M shape, float32: {len(record['lengths'])} prompts of {SHORTEST} to {LONGEST} tokens, answers of "
        f"{min(record['lengths'])} to {max(record['lengths'])}, {total:,} tokens in all, the same in every way; "
        f"{record['rows']} rows."
    )
    header = ["", "tokens written a second", "refilled rows are", "required"]
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])


def _rows(record: dict) -> list[list[str]]:
    """A way each, beside the first."""
    total, first, rows = sum(record["lengths"]), next(iter(record["times"].values()))["median"], []
    for name, taken in record["times"].items():
        low, high = total / taken["p80"], total / taken["p20"]
        required = f"{record['required'][name]:g}x" if name in record["required"] else ""
        speed = f"{total / taken['median']:,.1f} ({low:,.1f} to {high:,.1f})"
        rows.append([name, speed, f"{taken['median'] / first:.2f}x", required])
    return rows
