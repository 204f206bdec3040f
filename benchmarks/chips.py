"""What the makers of GPUs say of them, and how many blocks of a kernel fit there."""

from typing import NamedTuple


class Chip(NamedTuple):
    """What the maker says of a chip: operations and bytes a second, and of what its blocks share."""

    name: str
    matrix: float  # bfloat16 on matrix units, dense
    vector: float  # float32 elsewhere, a multiplication and an addition apart
    memory: float
    registers: int = 65536  # of a multiprocessor
    shared: int = 228 * 1024
    threads: int = 2048
    blocks: int = 32


CHIPS = {
    "sm_80": Chip("A100", 312e12, 9.75e12, 2.04e12, shared=164 * 1024),
    "sm_90": Chip("H100", 989e12, 33.5e12, 3.35e12),
    "sm_100": Chip("B200", 2250e12, 37.5e12, 8.0e12),
    "gfx942": Chip("MI300X", 1307e12, 81.7e12, 5.3e12, registers=131072, shared=64 * 1024),
}


def blocks_a_multiprocessor(row: dict, chip: Chip) -> int:
    """How many blocks of a compiled kernel a multiprocessor holds.

    Registers go in units of 8 a thread; NVIDIA's chips keep 1 KiB of shared memory for themselves in each block.
    """
    amd = row["target"].startswith("gfx")
    threads = row["warps"] * (64 if amd else 32)
    registers = -(-row["registers"] // 8) * 8 * threads
    shared = row["shared_bytes"] + (0 if amd else 1024)
    return min(chip.registers // registers, chip.shared // max(shared, 1), chip.threads // threads, chip.blocks)
