"""What gates and the delta rule cost beside the plain operator on a CPU, at the head shape of the 125M model, and in
decoding with it; float32.

All sides of a row take turns in one process, so that what else the machine does hits them alike.
"""

from functools import partial

import torch

from benchmarks.harness import (
    footnote,
    gates_at_start,
    largest_error,
    markdown,
    time_in_turns,
    verify_model,
    verify_operator,
)
from benchmarks.model_cpu import _cache_after, interdomain
from benchmarks.operator_cpu import CHUNK, DIM, HEADS, STATE, _inputs
from modeling_interdomain import interdomain_attention
from modeling_interdomain.ops.diagonal.step import StepParameters, step_tables
from modeling_interdomain.ops.interdomain.entry import take_step
from modeling_interdomain.ops.interdomain.gates import Gates

# What each side is called with, and the speed beside the plain operator that it must keep, forward and backward.
SIDES = {"plain": (), "gates": Gates._fields[:2], "delta": Gates._fields}
REQUIRED = {"gates": 0.8, "delta": 0.6}
# A token, or its step alone, may take so much of a plain one.
REQUIRED_STEP = 1.1
MODELS = {"plain": {}, "gates": {"gates": "forget"}, "delta": {"gates": "forget", "delta_rule": True}}


def run(quick: bool = False) -> dict:
    errors = {
        name: verify_operator(partial(_gated_by_name, names=names)) if names != Gates._fields else _delta_error()
        for name, names in SIDES.items()
    }
    seconds, lengths, batches = (0.1, [64], [1]) if quick else (30.0, [1024, 4096], [1, 32])
    models = {side: interdomain(quick, **changes) for side, changes in MODELS.items()}
    return {
        "relative_errors": errors | {f"{side}, a model": verify_model(model) for side, model in models.items()},
        "training": [_many(length, seconds, training=True) for length in lengths],
        "forward": [_many(length, seconds, training=False) for length in lengths],
        "step": [_step(batch, seconds) for batch in batches],
        "decode": [_decode(models, batch, 2 * seconds) for batch in ([1] if quick else [1, 8])],
        "required": REQUIRED,
        "required_step": REQUIRED_STEP,
    }


def _gated_by_name(query, key, *others, names, **options):
    """The plain operator, said with gates that are neutral."""
    gates = {name: torch.full(key.shape[:3], float(name == "write_gate"), dtype=key.dtype) for name in names}
    return interdomain_attention(query, key, *others, **gates, **options)


def _delta_error() -> float:
    """Of chunks with everything in float32 against the definition in float64."""
    tokens, parameters = _inputs(300)
    gates = gates_at_start(tokens[1], *parameters)
    found, expected = (
        interdomain_attention(
            *(x.to(dtype) for x in (*tokens, *parameters)),
            **{name: x.to(dtype) for name, x in gates.items()},
            backend=backend,
        )[0].double()
        for dtype, backend in ((torch.float32, "chunk"), (torch.float64, "recurrent"))
    )
    return largest_error([found], [expected], "The delta rule is wrong")


def _many(length: int, seconds: float, training: bool) -> dict:
    tokens, parameters = _inputs(length)
    gates = gates_at_start(tokens[1], *parameters)
    arguments = [*tokens, *parameters]
    for x in (*arguments, *gates.values()):
        x.requires_grad_(training)

    def call(names):
        chosen = {name: gates[name] for name in names}
        output, _ = interdomain_attention(*arguments, **chosen, backend="chunk", chunk_size=CHUNK)
        return torch.autograd.grad(output.sum(), [*arguments, *chosen.values()]) if training else [output]

    with torch.set_grad_enabled(training):
        times = time_in_turns({side: partial(call, names) for side, names in SIDES.items()}, seconds)
    return {"length": length, **_beside_plain(times)}


def _step(batch: int, seconds: float) -> dict:
    """A step with tables that a layer keeps."""
    tokens, parameters = _inputs(batch)
    gates = {name: x[0] for name, x in gates_at_start(tokens[1], *parameters).items()}
    tokens = [x[0] for x in tokens]
    state = torch.zeros(batch, HEADS, 2, STATE, 2 * DIM)
    kept = StepParameters(partial(step_tables, reused=True), *parameters, "bilinear")

    def call(chosen):
        return take_step(*tokens, kept, state=state, normalize=False, gates=chosen)

    chosen = {
        side: tuple(gates[name] if name in names else None for name in Gates._fields) for side, names in SIDES.items()
    }
    chosen["plain"] = None
    with torch.no_grad():
        times = time_in_turns({side: partial(call, x) for side, x in chosen.items()}, seconds)
    return {"batch": batch, **_beside_plain(times)}


@torch.no_grad()
def _decode(models: dict, batch: int, seconds: float) -> dict:
    """A token of whole models, each with a cache after 32 of them."""
    ids = torch.randint(100, (batch, 32), generator=torch.Generator().manual_seed(1))
    caches = {side: _cache_after(model, ids) for side, model in models.items()}

    def call(side):
        return models[side](ids[:, :1], past_key_values=caches[side])

    return {"batch": batch, **_beside_plain(time_in_turns({side: partial(call, side) for side in models}, seconds))}


def _beside_plain(times: dict) -> dict:
    ratios = {side: times["plain"]["median"] / times[side]["median"] for side in SIDES if side != "plain"}
    return {**times, "ratios": ratios}


def table(record: dict) -> str:
    """A row a size, a column a side: what fits on a page. Times and their spread are in the file."""
    rows = []
    chunks, steps = [f"{x}x" for x in record["required"].values()], [f"{1 / record['required_step']:.2f}x"] * 2
    titles = {"training": "forward + backward", "forward": "forward", "step": "a step", "decode": "a token"}
    for key, title in titles.items():
        for row in record[key]:
            size = f"{row['length']:,} tokens" if "length" in row else f"batch {row['batch']}"
            required = {"training": chunks, "forward": ["", ""]}.get(key, steps)
            cells = [cell for side, most in zip(REQUIRED, required) for cell in (f"{row['ratios'][side]:.2f}x", most)]
            rows.append([f"{title}, {size}", f"{row['plain']['median'] * 1e3:,.2f}", *cells])
    header = ["", "plain, ms", "gates", "required", "gates and delta rule", "required"]
    about = "Speed beside the plain operator; 12 heads of 64, 64 modes. A token: of the 125M model."
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])
