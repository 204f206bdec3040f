"""What processes that hold a piece of one sequence each send: states, against the keys and values of ring attention.

Computed from a configuration, not measured. In a forward each process's state and the last inputs of its convolutions
go to all others, whatever the length; ring attention sends the keys and values of each piece past all others. The
backward pass sends as much again for states; ring attention sends the keys and values again, and their gradients.

Usage:
    python -m benchmarks.exchanged_bytes
    python -m benchmarks.exchanged_bytes --config configuration/interdomain-1.3b --processes 64
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig

from modeling_interdomain import InterdomainConfig

CONFIG = Path(__file__).resolve().parents[1] / "configuration" / "interdomain-125m"
LENGTHS = (8_192, 131_072, 1_048_576)
STATE_BYTES, TOKEN_BYTES = 4, 2  # float32, bfloat16


class Exchange(NamedTuple):
    """Bytes that one layer of one process brings to the others in a forward."""

    states: int
    ring: int


def exchange(config: InterdomainConfig, length: int, processes: int) -> Exchange:
    """Of a layer of a model whose layers are alike, and of softmax attention of its heads, at `length` tokens."""
    sizes = {name: number // config.num_hidden_layers for name, number in config.state_sizes(length).items()}
    states = STATE_BYTES * sizes["recurrent"] + TOKEN_BYTES * sizes["convolution"]
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim
    return Exchange(states, TOKEN_BYTES * keys_and_values * -(-length // processes))


def table(config: InterdomainConfig, processes: int, lengths: Sequence[int] = LENGTHS) -> str:
    lines = [
        "| tokens | a piece | states, kB a layer | ring, kB a layer | states, bytes a token | ring | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for length in lengths:
        piece, found = -(-length // processes), exchange(config, length, processes)
        sent = f"{found.states / 1000:,.0f} | {found.ring / 1000:,.0f}"
        rates = f"{found.states / piece:,.1f} | {found.ring / piece:,.0f} | {found.ring / found.states:,.1f}"
        lines.append(f"| {length:,} | {piece:,} | {sent} | {rates} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="folder with config.json (default: 125M)")
    parser.add_argument("--processes", type=int, default=8, help="pieces of a sequence (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(table(AutoConfig.from_pretrained(options.config), options.processes))


if __name__ == "__main__":
    main()
