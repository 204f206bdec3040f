"""The tables of the READMEs: between `<!-- table: NAME -->` and `<!-- end -->` stands what the result files say."""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import REPOSITORY

READMES = (REPOSITORY / "README.md", REPOSITORY / "benchmarks" / "README.md")
MARKED = re.compile(r"<!-- table: (\w+) -->.*?<!-- end -->", re.DOTALL)


def update(*files: Path) -> None:
    """Fill the tables of these files, or of all READMEs that have any."""
    for file in files or READMES:
        text = file.read_text()
        filled = fill(text)
        if filled != text:
            file.write_text(filled)
            print(f"The tables of {file} are new.")


def add_tables(names: Iterable[str], file: Path = READMES[1], before: str = "### Still missing") -> None:
    """Make room in a README for tables that have results now and had none before."""
    text = file.read_text()
    for name in names:
        if (harness.RESULTS / f"{name}.json").exists() and f"<!-- table: {name} -->" not in text:
            room = f"<!-- table: {name} -->\n<!-- end -->\n\n"
            text = text.replace(before, room + before, 1)
    file.write_text(text)


def fill(text: str) -> str:
    """The text with the tables of the result files between its markers."""

    def section(match: re.Match) -> str:
        try:
            return f"<!-- table: {match[1]} -->\n\n{show(match[1])}\n\n<!-- end -->"
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            return match[0]  # where Triton is missing, the table of its kernels stays as it is

    return MARKED.sub(section, text)


def show(name: str) -> str:
    """A table as it stands in a README. A module that reads several result files names them in `SOURCES`."""
    module = importlib.import_module(f"benchmarks.{name}")
    if hasattr(module, "SOURCES"):
        return module.table({source: harness.read(source) for source in module.SOURCES})
    return getattr(module, "short_table", module.table)(harness.read(name))
