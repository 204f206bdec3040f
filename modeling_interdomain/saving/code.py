"""The code that travels with a checkpoint, so that it loads where this package is not installed.

The library's loader copies one folder and finds what a file needs by a pattern that knows `from .name import` alone. So
each module is written under its path with underscores (`ops/ssd/chunk.py` becomes `ops_ssd_chunk.py`), its imports are
rewritten, and the tables name only the parts of which the saved model is made. A configuration has the fields of all
families, so these travel too, in one file, with what those parts say of themselves. This module itself never travels.
"""

import ast
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
# The library's loader asks a folder for `module.Class`, so these keep their names.
ENTRIES = ("configuration_interdomain", "modeling_interdomain", "classifier_interdomain")
FIELDS = "configuration_fields"
# Modules with tables of what layers are made of, the tables, and the fields of a configuration that name their parts.
_NAMING = ("registry", "mixers.specifications", "feed_forwards.configuration")
_TABLES = {"TOKEN_MIXERS": "mixers_per_layer", "FEED_FORWARDS": "feed_forwards_per_layer"}
_ATTENTION = {"softmax", "inner_function"}
# The library copies, saves again and downloads what a file names, and asks for the classifier's file only later.
_NAMED = """

def _other_entries():
    from .classifier_interdomain import InterdomainForSequenceClassification  # named for the library's loader alone
"""


def _is_gated(config) -> bool:
    return bool(config.gate_names)


def _is_warped(config) -> bool:
    return config.gates == "warp"


def _reads_at_points(config) -> bool:
    return "window" in config.mixers_per_layer and config.window_memory and config.window_points > 0


# What is imported where it is first needed, and when a model of a configuration needs it.
_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "mixers.sparse.branch": lambda config: any(config.sparse_per_layer),
    "mixers.sparse.parts": lambda config: any(config.sparse_per_layer),
    "mixers.softmax.dynamic_mask": lambda config: not _ATTENTION.isdisjoint(config.mixers_per_layer),
    "ops.common.window": lambda config: not _ATTENTION.isdisjoint(config.mixers_per_layer),
    "mixers.interdomain.gated": _is_gated,
    "mixers.interdomain.gates": _is_gated,
    "mixers.interdomain.warped": _is_warped,
    "ops.interdomain.gates": _is_gated,
    "ops.interdomain.gates_chunk": _is_gated,
    "ops.interdomain.triton_delta": lambda config: config.delta_rule,
    "ops.interdomain.warp": _is_warped,
    "ops.interdomain.triton_gates": _is_gated,
    "ops.interdomain.naive": lambda config: config.backend == "recurrent" or _is_gated(config),
    "ops.interdomain.prefix": lambda config: config.backend in ("fft", "associative_scan"),
    "ops.interdomain.scan": lambda config: config.backend == "scan",
    "ops.interdomain.triton_scan": lambda config: config.backend == "scan",
    "generation.batch": lambda config: False,
    "generation.prompt_store": lambda config: False,
    "generation.serving": lambda config: False,
    "model_cache.state_tuning": lambda config: config.learned_state,
    "layers.learned_state": lambda config: config.learned_state,
    "ops.common.slots": lambda config: False,
    "ops.common.spans": lambda config: False,
    "ops.diagonal.export": lambda config: False,
    "mixers.window.points": _reads_at_points,
    "mixers.window.pieces": lambda config: False,
    "parallel.sequence": lambda config: False,
}
_ABSENT = (
    'raise ImportError("The code of this checkpoint is without {module}: install modeling-interdomain, and load the '
    "model without trust_remote_code, or write all code into its folder: python -m modeling_interdomain.saving.whole "
    'FOLDER.")'
)


def write_code(config, folder: str | os.PathLike, whole: bool = False) -> None:
    """Write the code that a model of this configuration needs into a folder; without one, that of any model.

    `whole`: with what is needed where somebody asks for it, such as continuous batching and the prompt store.
    """
    for name, text in flat_code(config, whole).items():
        Path(folder, f"{name}.py").write_text(text, encoding="utf-8")


def flat_code(config, whole: bool = False) -> dict[str, str]:
    """The modules that a model of this configuration needs, as `{flat name: source}`; without one, those of any."""
    absent = set[str]()
    if config is not None and not whole:
        absent = {module for module, needed in _OPTIONAL.items() if not needed(config)}
    code, seen = dict[str, str](), set[str]()

    def add(module: str) -> None:
        if module in seen:
            return
        seen.add(module)
        source = (PACKAGE / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        if module in _NAMING and config is not None:
            source = _tables_of(source, config)
        text, found = _flattened(source, module, absent)
        for each in found:
            add(each)
        # After what it needs, which may stand in the same file.
        code[_flat(module)] = code.get(_flat(module), "") + text

    for entry in ENTRIES:
        add(entry)
    code[ENTRIES[1]] += _NAMED
    if config is not None:
        code[FIELDS] = _without_unnamed(code[FIELDS], "".join(x for name, x in code.items() if name != FIELDS))
    return code


def _flat(module: str) -> str:
    """The name of the file in which a module travels."""
    return FIELDS if module.endswith((".configuration", ".specifications")) else module.replace(".", "_")


def _flattened(source: str, module: str, absent: set[str]) -> tuple[str, list[str]]:
    """The source with flat imports, and the modules that it needs."""
    lines, found = source.splitlines(keepends=True), []
    for node in _relative_imports(source):
        # The module that an import names, from the place of this one.
        target = ".".join([*module.split(".")[: -node.level], node.module])
        start, end = node.lineno - 1, node.end_lineno
        if target in absent:
            refusal = " " * node.col_offset + _ABSENT.format(module=target) + "\n"
            lines[start:end] = [refusal, *[""] * (end - start - 1)]  # the places of the others stay
            continue
        found.append(target)
        if _flat(target) == _flat(module):
            lines[start:end] = [""] * (end - start)
            continue
        written = "." * node.level + node.module
        lines[start] = lines[start].replace(f"from {written} import", f"from .{_flat(target)} import")
    return "".join(lines), found


@functools.cache  # a training run saves the same code with every checkpoint
def _relative_imports(source: str) -> tuple[Any, ...]:
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level)


@functools.lru_cache(maxsize=8)  # of the last few kinds of models
def _without_unnamed(whole: str, others: str) -> str:
    """A file without the classes that neither it nor the others name, as those of other token mixers."""
    text = whole
    for node in reversed(ast.parse(whole).body):  # from the last, which builds on others
        if isinstance(node, ast.ClassDef):
            rest = text.replace(f"\n\n\n{ast.get_source_segment(whole, node)}", "")
            if not re.search(rf"\b{node.name}\b", rest + others):
                text = rest
    return text


def _tables_of(source: str, config) -> str:
    """Tables with the parts of one configuration; those that are registered elsewhere do not travel."""
    tree: Any = ast.parse(source)
    lines, unused, dropped = source.splitlines(keepends=True), set[str](), []
    for node in tree.body:
        field = _TABLES.get(ast.unparse(node.target)) if isinstance(node, ast.AnnAssign | ast.AugAssign) else None
        for name, part in zip(node.value.keys, node.value.values, strict=True) if field else ():
            if name.value not in getattr(config, field):
                unused.add(ast.unparse(part))
                dropped.append((name.lineno, part.end_lineno))
    for node in _relative_imports(source):
        if {alias.name for alias in node.names} <= unused:
            dropped.append((node.lineno, node.end_lineno))
    gone = {i for first, last in dropped for i in range(first, last + 1)}
    return "".join(line for i, line in enumerate(lines, start=1) if i not in gone)
