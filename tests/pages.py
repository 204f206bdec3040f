"""The pages of this repository, wherever they lie, and what of them is prose."""

import os
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_NOT_OURS = {"runs", "build", "dist", "__pycache__"}
TABLE = re.compile(r"<!-- table: \w+ -->.*?<!-- end -->", flags=re.DOTALL)


def pages() -> list[Path]:
    """Every markdown file but those in folders that programs write or that are hidden."""
    found = []
    for folder, folders, files in os.walk(REPOSITORY):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_OURS]
        found += [Path(folder, name) for name in files if name.endswith(".md")]
    return sorted(found)


def page_name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def outside_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$|^    .*?$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> list[str]:
    """The lines that someone wrote to be read: no tables, code, headings or pictures."""
    text = re.sub(r"^```.*?^```$", "", TABLE.sub("", text), flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if line.strip() and not re.match(r"[|#!]|    ", line)]


def anchors(page: Path) -> set[str]:
    """What headings are called in links: lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", outside_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """Target and anchor of every link to a place in this repository."""
    found = [link for link in re.findall(r"\]\(([^)\s]+)\)", outside_code(page)) if "://" not in link]
    parts = [link.partition("#") for link in found]
    return [(page.parent / path if path else page, anchor) for path, _, anchor in parts]
