"""What the fused kernels of one layer cost, counted where no GPU is, and the times that follow from it.

The counts are those of real calls in Triton's interpreter (`kernel_counts`): a mixer with heads of 64 and 64 modes in
bfloat16, forward, backward and one decoding step, at two lengths, whose difference is what a token costs. The
compiled binaries of the same kernels are in `kernel_resources`. Times are arithmetic with public figures of the chips:
nothing here has been measured.
"""

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.chips import CHIPS, Chip
from benchmarks.harness import footnote, markdown

HEADS = {"125M": 12, "350M": 16, "760M": 24, "1.3B": 32}  # of 64
LENGTHS = (1024, 4096, 16384, 32768, 65536)
PARTS = ("forward", "backward", "step")
# As many heads as the preparation of inputs takes at a time.
_WIDTH, _CHUNK, _HEADS = 64, 64, 8


class Anchor(NamedTuple):
    """A linear attention with a fixed decay on an H100, 1 x 8192 tokens, 96 heads of 128: milliseconds, published."""

    name: str
    forward: float
    training: float


ANCHORS = (Anchor("FLA", 0.961, 3.426), Anchor("Helion", 0.691, 2.057))
# FlashAttention on an H100, forward and backward, nanoseconds a token and head of 64 at 4,096 tokens, as published.
_FLASH = (4096, 5.0, 7.0)


def linear_attention(width: int, chunk: int) -> dict[str, int]:
    """Operations of a chunkwise linear attention with a fixed decay for a token and head, and its bytes in bfloat16.

    Forward: states (keys times values), scores, their product with the values, the query times the state. Backward:
    states and their gradients, scores and their gradients, three products with each. States lie in memory once a chunk.
    """
    square, local, token, state = 2 * width * width, 2 * chunk * width, 2 * width, 2 * width * width // chunk
    return {
        "forward": 2 * square + 2 * local,
        "training": 2 * square + 2 * local + 5 * square + 5 * local,
        "forward_bytes": 6 * token + 2 * state,
        "training_bytes": 6 * token + 2 * state + 12 * token + 6 * state,
    }


def flash_attention(length: int, width: int) -> dict[str, float]:
    """Operations of causal FlashAttention for a token and head: two products forward, five backward, half of each."""
    forward = 2.0 * length * width
    return {"forward": forward, "training": 3.5 * forward}


def pace(anchor: Anchor) -> dict[str, float]:
    """Operations and bytes a second at which an anchor trains, each as if the other cost nothing."""
    counts, seconds = linear_attention(128, 64), anchor.training / 1e3 / (8192 * 96)
    return {"operations": counts["training"] / seconds, "bytes": counts["training_bytes"] / seconds}


def run(quick: bool = False) -> dict:
    """Counts in a process of its own, where kernels are interpreted."""
    width, chunk, heads = (16, 16, 2) if quick else (_WIDTH, _CHUNK, _HEADS)
    code = f"from benchmarks import kernel_costs as k; print(k.counted({width}, {chunk}, {heads}))"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"The kernels could not be counted:\n{done.stderr}")
    record: dict[str, Any] = {"counts": json.loads(done.stdout.splitlines()[-1]), "width": width, "chunk": chunk}
    record["sums"] = {part: sums(record["counts"][part]) for part in PARTS}
    path = harness.RESULTS / "kernel_costs.json"
    if path.exists() and not quick:
        older = harness.read("kernel_costs")
        record["before"] = older.get("before", {**older["sums"], "commit": older["machine"]["commit"]})
    return record


def counted(width: int, chunk: int, heads: int) -> str:
    """As JSON: for each part and kernel what a token and head cost, and launches.

    Forward and backward: the difference between three chunks and two, without what is there once a layer.
    """
    from benchmarks.kernel_counts import Work

    few, many = (_calls(count * chunk, width, chunk, heads) for count in (2, 3))
    found: dict[str, dict] = {}
    for part in PARTS:
        found[part] = {}
        for name, work in many[part].items():
            if name in ("aten.mm", "aten.mv"):  # projections: as in any attention
                continue
            row, before = vars(work), vars(few[part].get(name, Work()))
            if part == "step":
                row = {key: value / heads for key, value in row.items()}
            else:
                row = {key: (value - before[key]) / (chunk * heads) for key, value in row.items()}
            found[part][name] = row | {"launches": work.launches}
    return json.dumps(found)


def _calls(length: int, width: int, chunk: int, heads: int) -> dict[str, dict]:
    """What one mixer does with `length` tokens, forward and backward, and with one more."""
    import torch

    from benchmarks.kernel_counts import count
    from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM

    config = InterdomainConfig(
        vocab_size=8, hidden_size=heads * width, intermediate_size=width, num_hidden_layers=1,
        num_attention_heads=heads, head_dim=width, feature_dim=width, state_size=width, chunk_size=chunk,
        backend="triton",
    )  # fmt: skip
    mixer = InterdomainForCausalLM(config).bfloat16().model.layers[0].token_mixer
    x = torch.randn(1, length + 1, heads * width, dtype=torch.bfloat16)
    kept: list[torch.Tensor] = []
    parts = {"forward": count(lambda: kept.append(mixer(x[:, :-1])[0]))}
    grad = torch.ones_like(kept[0])
    parts["backward"] = count(lambda: torch.autograd.backward(kept[0], grad))
    cache = InterdomainCache(config)
    with torch.no_grad():
        mixer(x[:, :-1], past_key_values=cache)
        parts["step"] = count(lambda: mixer(x[:, -1:], past_key_values=cache))
    return parts


def sums(kernels: dict[str, dict]) -> dict[str, float]:
    """Of one part: launches, operations and bytes."""
    names = next(iter(kernels.values()))
    return {name: sum(row[name] for row in kernels.values()) for name in names}


def roofline(kernels: dict[str, dict], chip: Chip, tokens_and_heads: float) -> float:
    """Seconds below which the kernels of a part cannot come, one after the other, each at what it needs most."""
    slowest = (
        max(row["matrix"] / chip.matrix, row["vector"] / chip.vector, (row["read"] + row["written"]) / chip.memory)
        for row in kernels.values()
    )
    return tokens_and_heads * sum(slowest)


def paced(record: dict, parts: tuple[str, ...], anchor: Anchor) -> float:
    """Nanoseconds a token and head on an H100 with the operations and the bytes each at the pace of an anchor."""
    rate = pace(anchor)
    operations, moved = (
        sum(sum(record["sums"][part][name] for name in names) for part in parts)
        for names in (("matrix",), ("read", "written"))
    )
    return 1e9 * max(operations / rate["operations"], moved / rate["bytes"])


def table(record: dict) -> str:
    parts = [_of_kernels(record), _of_lengths(record), _before(record), _assumptions(record)]
    return "\n\n".join(part for part in parts if part)


def _of_kernels(record: dict) -> str:
    rows = []
    for part in PARTS:
        for name, work in sorted(record["counts"][part].items()):
            if not name.startswith("aten."):
                rows.append([part, f"`{name}`", *_numbers(work)])
        others = {name: work for name, work in record["counts"][part].items() if name.startswith("aten.")}
        if others:
            rows.append([part, "operators of PyTorch", *_numbers(sums(others))])
        rows.append([part, "all", *_numbers(record["sums"][part])])
    header = ["", "kernel", "launches a layer", "matrix operations", "other operations", "bytes read", "bytes written"]
    return markdown([*header, "bytes on the chip"], rows)


def _numbers(work: dict) -> list[str]:
    names = ("matrix", "vector", "read", "written", "moved")
    return [f"{work['launches']:.0f}", *(f"{work[name]:,.0f}" for name in names)]


def _of_lengths(record: dict) -> str:
    """The 1.3B head shape; what a token and head costs does not depend on the shape, nor on the length."""
    rows = []
    for length in LENGTHS:
        flash = [ns * length / _FLASH[0] for ns in _FLASH[1:]]
        ours = [paced(record, ("forward", "backward"), anchor) for anchor in ANCHORS]
        floors = [
            1e3 * sum(roofline(record["counts"][part], chip, length * HEADS["1.3B"]) for part in PARTS[:2])
            for chip in CHIPS.values()
        ]
        ratios = f"{flash[0] / max(ours):.1f} to {flash[1] / min(ours):.1f}x"
        between = f"{flash[0]:.1f} to {flash[1]:.1f}"
        rows.append([f"{length:,}", *(f"{x:.1f}" for x in ours), between, ratios, *(f"{x:.2f}" for x in floors)])
    names = [f"at {anchor.name}'s pace, ns" for anchor in ANCHORS]
    floors = [f"floor, 1.3B, {chip.name}, ms" for chip in CHIPS.values()]
    return markdown(["tokens", *names, "FlashAttention, ns", "against it", *floors], rows)


def _before(record: dict) -> str:
    if "before" not in record:
        return ""
    rows = []
    for when, found in (("before", record["before"]), ("now", record["sums"])):
        numbers = [f"{found[part]['launches']:.0f}" for part in PARTS]
        numbers += [f"{found[part]['matrix']:,.0f}" for part in PARTS[:2]]
        numbers += [f"{found[part]['read'] + found[part]['written']:,.0f}" for part in PARTS[:2]]
        rows.append([when, *numbers])
    header = ["", *(f"launches, {part}" for part in PARTS), *(f"operations, {part}" for part in PARTS[:2])]
    return markdown([*header, *(f"bytes, {part}" for part in PARTS[:2])], rows)


def _assumptions(record: dict) -> str:
    local = linear_attention(128, 64)
    anchors = "; ".join(
        f"{a.name} {a.forward} and {a.training} ms, so {pace(a)['operations'] / 1e12:.0f} TFLOP/s and "
        f"{pace(a)['bytes'] / 1e12:.1f} TB/s"
        for a in ANCHORS
    )
    chips = ", ".join(f"{c.name} {c.matrix / 1e12:.0f} and {c.memory / 1e12:.2f}" for c in CHIPS.values())
    return (
        f"Predicted, not measured. Operations and bytes a token and head of {record['width']} (a step: one token), "
        f"counted in Triton's interpreter on real calls, bfloat16, chunks of {record['chunk']}, projections left out; "
        'bytes in sectors of 32, each once a launch; "on the chip": each time. Nanoseconds a token and head, forward '
        "and backward, on an H100: operations and bytes each at the pace of a linear attention with a fixed decay "
        f"({local['training']:,} operations and {local['training_bytes']:,} bytes at width 128; forward, and forward "
        f"with backward, at 1 x 8192 x 96 x 128: {anchors}), whichever is slower. FlashAttention: "
        f"{_FLASH[1]:.0f} to {_FLASH[2]:.0f} ns at {_FLASH[0]:,} tokens, in proportion to the length. Floors: one "
        f"layer at batch 1, dense bfloat16 TFLOP/s and TB/s by the maker ({chips}), no launch and no tail counted; "
        f"in proportion to the heads ({', '.join(f'{name} {heads}' for name, heads in HEADS.items())}). "
        + footnote(record)
    )
