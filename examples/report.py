"""Results as a JSON file, a table in markdown and a plot, for the evaluations that print all three."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def markdown_table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table; numbers are shown with three digits behind the point."""
    cells = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    lines = ["| " + " | ".join(map(str, header)) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def labels(folders: Sequence[str]) -> list[str]:
    """Names for their curves: their own, or the paths as they were given where two have the same."""
    names = [Path(folder).name for folder in folders]
    return names if len(set(names)) == len(names) else list(folders)


def write_report(
    name: str, curves: dict[str, dict[float, float]], folder: Path, x_label: str, y_label: str, **settings
) -> str:
    """Write `name`.json, .md and .png into the folder and return the table; a curve maps x to y."""
    folder.mkdir(parents=True, exist_ok=True)
    places = sorted({x for curve in curves.values() for x in curve})
    rows = [[label, *(curve.get(x, "") for x in places)] for label, curve in curves.items()]
    table = markdown_table([f"{y_label} at {x_label}", *(f"{x:g}" for x in places)], rows)
    record = {"x": x_label, "y": y_label, "curves": {k: {f"{x:g}": y for x, y in c.items()} for k, c in curves.items()}}
    (folder / f"{name}.json").write_text(json.dumps(record | settings, indent=2) + "\n")
    (folder / f"{name}.md").write_text(table + "\n")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, curve in curves.items():
        axes.plot(*zip(*sorted(curve.items())), marker="o", label=label)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend()
    figure.savefig(folder / f"{name}.png", dpi=120)
    return table
