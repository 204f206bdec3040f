"""State tuning against prompt tuning and LoRA, with as many parameters: a model of Wikipedia learns to read books.

The model is the language model of benchmarks/reduce_study.py. All three train the same number of parameters on the same
windows with the same optimiser: the first states of all layers; a prompt of learned embeddings in front of every
window; matrices of a low rank beside the projections of the token mixers. Three learning rates and two seeds each.
Windows of the training length, and of eight times that, say how much of what was learned fades with the text.

    python -m benchmarks.adapter_study     # all runs that results/adapter_study.json does not hold yet, four minutes
    python -m benchmarks.adapter_study --table     # the table as markdown
"""

import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoTokenizer

from benchmarks import reduce_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from examples.text_data import encode, gather_documents, mean_nll, random_batches, split_documents
from examples.training import train
from modeling_interdomain import InterdomainForCausalLM, add_learned_state

FILE = RESULTS / "adapter_study.json"
TRAINING = {"steps": 40, "batch_size": 4, "sequence_length": 128, "held_out_tokens": 8_000}
# Ranks and virtual tokens for as many parameters as the states have.
RANK, VIRTUAL_TOKENS = 16, 512
RATES = {"state": (1e-2, 3e-2, 1e-1), "LoRA": (1e-3, 5e-3, 2e-2), "prompt": (1e-2, 1e-1, 1.0)}
LONG = 8
SEEDS = (0, 1)


class Adapted(nn.Module):
    """A model that answers for the tokens it is given: none for virtual ones."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, **arguments):
        output = self.model(input_ids=input_ids, **arguments)
        output.logits = output.logits[:, -input_ids.shape[1] :]
        return output


def adapt(model: InterdomainForCausalLM, method: str) -> Adapted:
    """The model with new parameters, which alone are trained."""
    model.requires_grad_(False)
    if method == "state":
        add_learned_state(model)
        return Adapted(model)
    if method == "prompt":
        return Adapted(get_peft_model(model, PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=VIRTUAL_TOKENS)))
    return Adapted(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK)))


def plan(runs: list[dict]) -> Iterator[dict]:
    yield {"method": "none", "learning_rate": 0.0, "seed": 0}
    for seed in SEEDS:
        for method, rates in RATES.items():
            yield from ({"method": method, "learning_rate": rate, "seed": seed} for rate in rates)


@cache
def texts(data: Path, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of books, to learn from and held out."""
    documents = gather_documents([str(data / "corpus" / "books" / "validation.parquet")], 2_000_000)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tuple(encode(tokenizer, part) for part in split_documents(documents, 100_000))


def run_condition(
    method: str, learning_rate: float, seed: int, data: Path, folder: Path, training: dict = TRAINING
) -> dict:
    """Train one adapter and measure it."""
    if not (folder / "config.json").is_file():
        reduce_study.make_language(data, folder, reduce_study.TRAINING)
    model: nn.Module = InterdomainForCausalLM.from_pretrained(folder)
    learned, held_out = texts(data, folder)
    length, parameters, seconds = training["sequence_length"], 0, 0.0
    torch.manual_seed(seed)
    if method != "none":
        model = adapt(model, method)
        parameters = sum(x.numel() for x in model.parameters() if x.requires_grad)
        started = time.perf_counter()
        batches = random_batches(learned, training["batch_size"], length, seed)
        for _ in train(model, batches, steps=training["steps"], learning_rate=learning_rate):
            pass
        seconds = time.perf_counter() - started
    tokens = held_out[: training["held_out_tokens"]]
    losses = {str(n): mean_nll(model, tokens, n) for n in (length, LONG * length)}
    return {"parameters": parameters, "losses": losses, "training_seconds": seconds}


def table(record: dict) -> str:
    """One row a method, at its best learning rate."""
    length = record["training"]["sequence_length"]
    columns = [str(length), str(LONG * length)]
    runs = record["runs"]
    before = next(row for row in runs if row["method"] == "none")["losses"]
    rows = [["none", "0", "", *(f"{before[n]:.3f}" for n in columns), "0"]]
    for method, rates in RATES.items():
        found = [row for row in runs if row["method"] == method]
        if not found:
            rows.append([method, "", "", "not run", "not run", _tokens(method)])
            continue
        by_rate = {rate: [row for row in found if row["learning_rate"] == rate] for rate in rates}
        best = min(filter(by_rate.get, rates), key=lambda rate: _mean(by_rate[rate], columns[0]))
        cells = [", ".join(f"{row['losses'][n]:.3f}" for row in by_rate[best]) for n in columns]
        rows.append([method, f"{found[0]['parameters']:,}", f"{best:g}", *cells, _tokens(method)])
    header = ["adapter", "parameters", "rate", *(f"loss, windows of {n}" for n in columns), "tokens added to a text"]
    about = (
        f"Nats a token of held-out books, one number a seed; {record['training']['steps']} steps of "
        f"{record['training']['batch_size']} x {length} tokens at the best of three learning rates; {len(runs)} of "
        f"{len(list(plan([])))} runs so far."
    )
    return f"{markdown(header, rows)}\n\n{about} {footnote(record)}"


def _tokens(method: str) -> str:
    return f"{VIRTUAL_TOKENS}" if method == "prompt" else "0"


def _mean(rows: list[dict], length: str) -> float:
    return sum(row["losses"][length] for row in rows) / len(rows)


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    run = partial(run_condition, data=arguments.data, folder=reduce_study.RUNS / "language")
    studies.show_or_run(arguments, FILE, {"training": TRAINING}, plan, lambda: run, table)


if __name__ == "__main__":
    main()
