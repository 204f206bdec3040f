"""Convert a Mamba of Transformers: the same logits, with everything that works here.

Its layers become "selective_scan" layers without feed-forward; nothing is new or trained. `to-mamba` goes back.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from conversion import from_mamba2, mamba
from conversion.writing import add_arguments as add_writing_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder of the Mamba, or its name on the Hub")
    parser.add_argument("target", type=lambda text: Path(text).resolve(), help="folder to write")
    add_writing_arguments(parser)


def run(options: argparse.Namespace) -> None:
    from_mamba2.run(options, mamba)
