"""The operator and its gradients against themselves at an earlier commit, in turns in one process."""

import importlib
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import footnote, in_ms, markdown, time_in_turns, unpack, verify_operator
from benchmarks.operator_cpu import CHUNK, _inputs
from modeling_interdomain import interdomain_attention

# Before the backward pass was written out.
COMMIT = "a580ee4"
REQUIRED = 1.25
PACKED = 16  # tokens of a document


def run(quick: bool = False) -> dict:
    before = _at(COMMIT)
    seconds = 0.2 if quick else 8.0
    lengths = [64, 128] if quick else [1024, 4096]
    rows = []
    for length in lengths:
        tokens, parameters = _inputs(length)
        arguments = [x.requires_grad_() for x in (*tokens, *parameters)]
        for name, places in (("whole", {}), ("packed", {"cu_seqlens": torch.arange(0, length + 1, PACKED)})):
            if name == "packed" and length > 1024:
                continue  # seconds a call before
            functions = {
                side: partial(_forward_and_backward, attention, arguments, places)
                for side, attention in (("before", before), ("now", interdomain_attention))
            }
            times = time_in_turns(functions, seconds)
            ratio = times["before"]["median"] / times["now"]["median"]
            rows.append({"length": length, "documents": name, **times, "ratio": ratio})
    return {"relative_error": verify_operator(), "before": COMMIT, "required": REQUIRED, "rows": rows}


def _forward_and_backward(attention, arguments: list[torch.Tensor], places: dict) -> tuple:
    output, _ = attention(*arguments, backend="chunk", chunk_size=CHUNK, **places)
    return torch.autograd.grad(output.sum(), arguments)


def _at(commit: str):
    """`interdomain_attention` of the package at a commit, imported under another name."""
    folder = unpack(commit, Path(tempfile.mkdtemp()))
    package = folder / "modeling_interdomain_before"
    (folder / "modeling_interdomain").rename(package)
    (package / "__init__.py").write_text("")  # the operator alone: a model is registered once
    sys.path.insert(0, str(folder))
    return importlib.import_module("modeling_interdomain_before.op_interdomain").interdomain_attention


def table(record: dict) -> str:
    rows = [
        [
            f"{row['length']:,}",
            "one document" if row["documents"] == "whole" else f"documents of {PACKED}",
            *map(in_ms, _sides(row)),
            f"{row['ratio']:.2f}x",
            f"{record['required']}x" if row["documents"] == "whole" else "",
        ]
        for row in record["rows"]
    ]
    header = ["tokens", "", f"commit {record['before']}, ms", "now, ms", "faster", "required"]
    about = "Forward and backward, 12 heads of 64, batch 1, float32; medians (20th to 80th percentile)."
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])


def _sides(row: dict) -> tuple[dict, dict]:
    return row["before"], row["now"]
