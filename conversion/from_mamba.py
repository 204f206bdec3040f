"""Convert a Mamba of Transformers: the same logits, with everything that works here.

Its layers become "selective_scan" layers without feed-forward; nothing is new or trained. `to-mamba` goes back.
"""

from __future__ import annotations

import argparse

from conversion import from_mamba2, mamba
from conversion.writing import add_folders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser, "folder of the Mamba, or its name on the Hub")


def run(options: argparse.Namespace) -> None:
    from_mamba2.run(options, mamba)
