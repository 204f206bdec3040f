"""What a sparse branch is made of: its parts by name, their budgets, and what a cache holds of them."""

import math
from typing import NamedTuple

# A name that stands for several parts.
PRESETS = {"hax": "lsh+key_selection"}
PARTS = ("lsh", "key_selection", "sliding_window", "sink", "dilated", "full")


class Budget(NamedTuple):
    """How many keys a part of a branch sees, of each of how many bins."""

    part: str
    keys: int
    bins: int


def budgets(config, name: str) -> list[Budget]:
    """The parts of a branch by its name; `sparse_keys` is split evenly, "full" has a budget of its own."""
    parts = PRESETS.get(name, name).split("+")
    shared = [part for part in parts if part != "full"]
    keys = config.sparse_keys // len(shared) if shared else 0
    bins = {"lsh": 2**config.sparse_hash_size if config.sparse_hash == "sign" else config.sparse_hash_size}
    return [
        Budget(part, config.max_position_embeddings if part == "full" else keys, bins.get(part, 1)) for part in parts
    ]


def check_parts(config, name: str, groups: int) -> None:
    """Refuse what no branch can be made of, beside a recurrence with so many groups of values."""
    parts = PRESETS.get(name, name).split("+")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(
            f'sparse_attention must be {", ".join((*PRESETS, *PARTS))}, or some of them joined by "+"; got '
            f"{', '.join(map(repr, unknown))}."
        )
    if repeated := sorted({part for part in parts if parts.count(part) > 1}):
        raise ValueError(f"sparse_attention = {name!r} names {', '.join(repeated)} more than once: name it once.")
    shared = len([part for part in parts if part != "full"])
    if shared and config.sparse_keys % shared:
        raise ValueError(
            f"sparse_keys = {config.sparse_keys} cannot be split evenly among the {shared} parts of {name!r}: make it "
            f"a multiple of {shared}."
        )
    heads = groups if config.sparse_num_heads is None else config.sparse_num_heads
    if heads < 1 or groups % heads:
        raise ValueError(f"sparse_num_heads = {heads} must be a divisor of the {groups} groups of values.")
    if "lsh" in parts and config.sparse_hash == "sign" and config.sparse_hash_size > 12:
        raise ValueError(
            f'sparse_hash = "sign" makes 2 to the power of sparse_hash_size = {config.sparse_hash_size} bins: 12 bits '
            "are the most."
        )
    if "lsh" in parts and config.sparse_hash == "argmax" and config.sparse_hash_size < 2:
        raise ValueError(
            f'sparse_hash = "argmax" needs at least 2 bins, got sparse_hash_size = {config.sparse_hash_size}; for one '
            'bin ask for "sliding_window".'
        )


def numbers_kept(config, name: str, groups: int, width: int) -> tuple[int, int]:
    """What a cache holds of one sequence: of the convolutions, and of the memory."""
    conv_state, states = kept_shapes(config, name, groups, width)
    return sum(map(math.prod, conv_state)), sum(map(math.prod, states.values()))


def kept_shapes(config, name: str, groups: int, width: int) -> tuple[list[tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The shapes, of one sequence, of the conv state of the convolutions, and of the states by their names."""
    heads, dim = config.sparse_num_heads or groups, config.sparse_key_dim
    entry = dim + groups * width // heads
    parts = {budget.part: budget for budget in budgets(config, name)}
    shapes: dict[str, tuple[int, ...]] = {"sparse_seen": ()}
    chosen = parts.pop("key_selection", None)
    if chosen is not None or ("lsh" in parts and config.sparse_hash_center is not None):
        shapes["sparse_sums"] = (heads, 2, dim)
    if chosen is not None:
        shapes["sparse_entries"] = (heads, chosen.keys, entry)
        shapes["sparse_scores"] = shapes["sparse_places"] = (heads, chosen.keys)
    for i, budget in enumerate(parts.values()):
        shapes[f"sparse_ring{i}"] = (heads, budget.bins, budget.keys, entry)
        shapes[f"sparse_ring{i}_places"] = (heads, budget.bins, budget.keys)
    return [(2 * heads * dim, config.conv_kernel - 1)], shapes
