"""Convert back: an Interdomain model that is a Mamba as one of Transformers, for whatever reads those."""

from __future__ import annotations

import argparse

from conversion import mamba, to_mamba2
from conversion.to_mamba2 import add_arguments as add_arguments


def run(options: argparse.Namespace) -> None:
    to_mamba2.run(options, mamba)
