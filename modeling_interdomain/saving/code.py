"""The code that travels with a checkpoint, so that it loads where this package is not installed.

The library's loader copies one folder and finds what a file needs by a pattern that knows `from .name import` alone. So
each module is written under its path with underscores (`ops/ssd/chunk.py` becomes `ops_ssd_chunk.py`), its imports are
rewritten, and the registry names only the parts of which the saved model is made. This module itself never travels.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# The library's loader asks a folder for `module.Class`, so these two keep their names.
ENTRIES = ("configuration_interdomain", "modeling_interdomain")
REGISTRY = "registry"
# Tables of the registry, and the fields of a configuration that name their parts.
_TABLES = {"TOKEN_MIXERS": "mixers_per_layer", "FEED_FORWARDS": "feed_forwards_per_layer"}
# What a model can do without, by the backends that need it. A call says which package to install.
_OPTIONAL = {
    "ops.interdomain.prefix": ("fft", "associative_scan"),
    "ops.interdomain.scan": ("scan",),
    "ops.interdomain.triton_scan": ("scan",),
}
_ABSENT = (
    'raise ImportError("The code of this checkpoint is without {module}: install modeling-interdomain, and load the '
    'model without trust_remote_code.")'
)


def write_code(config, folder: str | os.PathLike) -> list[Path]:
    """Write the code that a model of this configuration needs into a folder; returns the files."""
    paths = []
    for name, text in flat_code(config).items():
        path = Path(folder, f"{name}.py")
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def flat_code(config) -> dict[str, str]:
    """The modules that a model of this configuration needs, as `{flat name: source}`, entries first."""
    absent = {module for module, backends in _OPTIONAL.items() if config.backend not in backends}
    wanted, code = list(ENTRIES), {}
    while wanted:
        module = wanted.pop()
        name = module.replace(".", "_")
        if name in code:
            continue
        source = (PACKAGE / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        if module == REGISTRY:
            source = _registry_of(source, config)
        code[name], found = _flattened(source, module, absent)
        wanted += found
    return code


def _flattened(source: str, module: str, absent: set[str]) -> tuple[str, list[str]]:
    """The source with flat imports, and the modules that it needs."""
    lines, found = source.splitlines(keepends=True), []
    for node in _relative_imports(ast.parse(source)):
        # The module that an import names, from the place of this one.
        target = ".".join([*module.split(".")[: -node.level], node.module])
        start, end = node.lineno - 1, node.end_lineno
        if target in absent:
            # As many lines as before: the places of the other imports stay.
            lines[start:end] = [" " * node.col_offset + _ABSENT.format(module=target) + "\n" * (end - start)] + [""] * (
                end - start - 1
            )
            continue
        found.append(target)
        written = "." * node.level + node.module
        lines[start] = lines[start].replace(f"from {written} import", f"from .{target.replace('.', '_')} import")
    return "".join(lines), found


def _relative_imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)


def _registry_of(source: str, config) -> str:
    """The registry with the parts of one configuration; those that are registered elsewhere do not travel."""
    tree, lines, dropped = ast.parse(source), source.splitlines(keepends=True), set()
    kept: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and node.target.id in _TABLES:
            used = getattr(config, _TABLES[node.target.id])
            for key, value in zip(node.value.keys, node.value.values):
                if key.value in used:
                    kept.add(ast.unparse(value))
                else:
                    dropped |= set(range(key.lineno - 1, value.end_lineno))
    for node in _relative_imports(tree):
        names = {alias.name for alias in node.names}
        imported_for_tables = names <= {ast.unparse(v) for v in _parts(tree)}
        if imported_for_tables and not names & kept:
            dropped |= set(range(node.lineno - 1, node.end_lineno))
    return "".join(line for i, line in enumerate(lines) if i not in dropped)


def _parts(tree: ast.Module) -> Iterator[ast.expr]:
    """The classes that the tables name."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and node.target.id in _TABLES:
            yield from node.value.values
