"""How should an Interdomain layer start? A small comparison of the start of beta and C and of RoPE's place.

The start of beta says how a mode's readout scales with its step Delta: for a step small against the decay the variance
of its state goes as 1 / Delta with beta 1, does not depend on Delta with unit variance, and goes as Delta with
zero-order hold, whose beta is about Delta.

Every condition sees the same bytes in the same order with the same optimiser; seeds change the weights and the batches.
The text is the Python standard library's source, byte by byte, so that a fresh machine can repeat it:

    python -m benchmarks.start_study             # all runs that results/start_study.json does not hold yet
    python -m benchmarks.start_study --table     # the table as markdown
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch

from benchmarks import readme
from benchmarks.harness import footnote, machine
from examples.text_data import gather_documents, random_batches, split_documents
from examples.training import train
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

RESULTS = Path(__file__).parent / "results" / "start_study.json"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
S4D = {"token_mixers": "s4d"}
BYTES = 256

SIZES = {
    "1M": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "state_size": 32},
    "2M": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "state_size": 64},
}
TRAINING = {"steps": 200, "batch_size": 8, "sequence_length": 256, "learning_rate": 3e-3}


def start(beta: str, scale: float, rope: str | None = None, product: str = "bilinear") -> dict:
    fields = {
        "start": "random",
        "input_matrix_init": beta,
        "coefficient_init_scale": scale,
        "rope_placement": rope,
        "product": product,
    }
    return fields | ({"rope_parameters": ROPE} if rope else {})


CONDITIONS = {
    "softmax": {"token_mixers": "softmax", "rope_parameters": ROPE},
    "the paper's form: beta 1, c 1, RoPE before xi": start("one", 1.0, "before"),
    "beta 1, c 0.25": start("one", 0.25),
    "beta unit variance, c 0.25": start("unit_variance", 0.25),
    "zero-order hold, c 1": start("zero_order_hold", 1.0),
    "zero-order hold, c 0.5": start("zero_order_hold", 0.5),
    "zero-order hold, c 0.25": start("zero_order_hold", 0.25),
    "zero-order hold, c 0.1": start("zero_order_hold", 0.1),
    "zero-order hold, c 0.25, RoPE before xi": start("zero_order_hold", 0.25, "before"),
    "zero-order hold, c 0.25, RoPE after xi": start("zero_order_hold", 0.25, "after"),
    "zero-order hold, c 0.1, RoPE after xi": start("zero_order_hold", 0.1, "after"),
    "zero-order hold, c 0.25, hermitian": start("zero_order_hold", 0.25, product="hermitian"),
    "zero-order hold, c 0.25, output norm": start("zero_order_hold", 0.25) | {"use_output_norm": True},
    "zero-order hold, c 0.25, steps 1e-2 to 1": start("zero_order_hold", 0.25)
    | {"time_step_min": 1e-2, "time_step_max": 1.0},
    "zero-order hold, c 0.25, steps 1e-3 to 1": start("zero_order_hold", 0.25) | {"time_step_max": 1.0},
    "S4D-only, zero-order hold, c 0.25": start("zero_order_hold", 0.25) | S4D,
    "S4D-only, zero-order hold, c 1": start("zero_order_hold", 1.0) | S4D,
    "S4D-only, zero-order hold, c 12.5 (c 0.25 and a readout of unit variance)": start("zero_order_hold", 12.5) | S4D,
    "S4D-only, beta 1, c 0.25": start("one", 0.25) | S4D,
}
RUNS = [(size, seed, name) for size, seed in (("1M", 0), ("1M", 1), ("2M", 0)) for name in CONDITIONS]


def stream(documents: list[str]) -> torch.Tensor:
    """All bytes `[N]` of the documents, one after the other."""
    return torch.frombuffer(bytearray("\0".join(documents).encode()), dtype=torch.uint8).long()


def run_condition(size: str, seed: int, name: str, training: dict = TRAINING, held_out_bytes: int = 60_000) -> dict:
    """Train one condition and measure it on held-out text."""
    fit, held_out = (
        stream(documents) for documents in split_documents(gather_documents(), held_out_bytes=held_out_bytes)
    )
    torch.manual_seed(seed)
    model = InterdomainForCausalLM(InterdomainConfig(vocab_size=BYTES, **SIZES[size], **CONDITIONS[name]))
    batches = random_batches(fit, training["batch_size"], training["sequence_length"], seed)
    started = time.perf_counter()
    progress = train(model, batches, steps=training["steps"], learning_rate=training["learning_rate"])
    try:
        losses = [step.loss for step in progress]
        failed = None
    except FloatingPointError as error:
        losses, failed = [], str(error)
    return {
        "size": size,
        "seed": seed,
        "condition": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "output_rms": output_rms(name, size, seed, fit),
        "train_loss": statistics.mean(losses[-20:]) if losses else None,
        "bits_per_byte": None if failed else held_out_bits(model, held_out, training["sequence_length"]),
        "failed": failed,
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def output_rms(name: str, size: str, seed: int, tokens: torch.Tensor) -> float:
    """Root mean square of the first layer's output before o_proj, at the start."""
    torch.manual_seed(seed)
    model = InterdomainForCausalLM(InterdomainConfig(vocab_size=BYTES, **SIZES[size], **CONDITIONS[name])).eval()
    seen = []
    model.model.layers[0].token_mixer.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens[None, :1024])
    return seen[0].square().mean().sqrt().item()


@torch.no_grad()
def held_out_bits(model, tokens: torch.Tensor, sequence_length: int) -> float:
    """Bits per byte over windows of the training length; every byte of a window but its first is predicted."""
    model.eval()
    windows = tokens[: len(tokens) // (sequence_length + 1) * (sequence_length + 1)].view(-1, sequence_length + 1)
    losses = [model(batch, labels=batch).loss.item() * len(batch) for batch in windows.split(16)]
    return sum(losses) / len(windows) / math.log(2)


def table(record: dict) -> str:
    """Held-out bits per byte by condition, one column a size; seeds averaged, their spread in brackets."""
    training = record["training"]
    about = (
        f"{training['steps']} steps of {training['batch_size']} x {training['sequence_length']} bytes, peak "
        f"learning rate {training['learning_rate']}; mean (and range) of two seeds at 1M, one seed at 2M."
    )
    lines = ["| start | output RMS | " + " | ".join(f"{size}, bits per byte" for size in SIZES) + " |"]
    lines.append("|---" * (2 + len(SIZES)) + "|")
    for name in CONDITIONS:
        rows = [row for row in record["runs"] if row["condition"] == name]
        if not rows:
            continue
        cells = []
        for size in SIZES:
            bits = [row["bits_per_byte"] for row in rows if row["size"] == size and row["bits_per_byte"] is not None]
            spread = f" ({min(bits):.3f} to {max(bits):.3f})" if len(bits) > 1 else ""
            tried = any(row["size"] == size for row in rows)
            cells.append(f"{statistics.mean(bits):.3f}{spread}" if bits else "diverged" if tried else "not run")
        lines.append(f"| {name} | {rows[0]['output_rms']:.2g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{about} {footnote(record)}"


def load() -> dict:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"training": TRAINING, "runs": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the runs so far and stop")
    parser.add_argument("--size", choices=SIZES, help="only the runs of this size")
    parser.add_argument("--seed", type=int, help="only the runs of this seed")
    parser.add_argument("--condition", action="append", choices=CONDITIONS, help="only the runs of this condition")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of PyTorch (default: as it has them)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record = load()
    done = {(row["size"], row["seed"], row["condition"]) for row in record["runs"]}
    for size, seed, name in () if arguments.table else RUNS:
        wanted = arguments.size in (None, size) and arguments.seed in (None, seed)
        if (size, seed, name) in done or not wanted or name not in (arguments.condition or CONDITIONS):
            continue
        row = run_condition(size, seed, name)
        record = load()  # another process may have added its runs
        record["runs"].append(row)
        record["machine"] = {**machine(), "command": "python -m benchmarks.start_study"}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{size} seed {seed} {name}: {row['bits_per_byte']} bits per byte in {row['seconds']:.0f} s", flush=True)
    if not arguments.table:
        readme.update()
    print(table(record))


if __name__ == "__main__":
    main()
