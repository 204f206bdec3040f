"""Write the operators as a kernel for the Hub: a folder that the library `kernels` loads, without this package.

Usage:
    python -m examples.publish_kernel runs/kernel

The folder holds `build/torch-cpu`, `torch-cuda` and `torch-rocm`, the layout of kernels in Python and Triton, each with
the operators' files as they are, an `__init__.py` and metadata.json, and beside them a card and the licence.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import inspect
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import modeling_interdomain
from examples.text_data import InputError, exit_code
from modeling_interdomain.layers.operators import KERNEL_VERSION, Operators
from modeling_interdomain.mixers.window.points import PointRecurrence  # noqa: F401, imported where a model needs it
from modeling_interdomain.ops.common.spans import join_states, mask_span, remove_span
from modeling_interdomain.ops.experts.entry import find_experts, read_experts, sum_experts
from modeling_interdomain.ops.interdomain.entry import interdomain_attention, interdomain_step
from modeling_interdomain.ops.interdomain.map import interdomain_attention_map
from modeling_interdomain.ops.s4d.entry import s4d_attention, s4d_step
from modeling_interdomain.ops.s4d.map import s4d_attention_map
from modeling_interdomain.ops.selective_scan.entry import selective_scan, selective_scan_step
from modeling_interdomain.ops.sparse.entry import sparse_attention
from modeling_interdomain.ops.sparse.step import sparse_step
from modeling_interdomain.ops.sparse.stream import Bins, Ring, SparseMemory
from modeling_interdomain.ops.ssd.entry import ssd_attention, ssd_step
from modeling_interdomain.ops.ssd.map import ssd_attention_map

PACKAGE = Path(modeling_interdomain.__file__).parent
NAME, LICENSE = "interdomain-attention", "apache-2.0"
BACKENDS = ("cpu", "cuda", "rocm")
# What a kernel exports. What the layers of this package call beside it is there, but is nobody else's business.
PUBLIC = (
    *(interdomain_attention, interdomain_attention_map, interdomain_step, join_states, mask_span, remove_span),
    *(s4d_attention, s4d_attention_map, s4d_step, selective_scan, selective_scan_step),
    *(ssd_attention, ssd_attention_map, ssd_step),
    *(sparse_attention, sparse_step, Bins, Ring, SparseMemory, find_experts, read_experts, sum_experts),
)
CARD = """---
license: {license}
library_name: kernels
tags: [kernel]
---
# The operators of Interdomain Attention

Written by `python -m examples.publish_kernel`; version {version}. They run in PyTorch, on a GPU in kernels of Triton's.

```python
from kernels import get_kernel

operators = get_kernel("user/name", version={version}, trust_remote_code=True)
output, state = operators.interdomain_attention(query, key, value, log_decay, input_matrix)
```

A model of the package takes them with `model.use_kernel("user/name", trust_remote_code=True)`. It has
{names}.
"""


def called_by_layers() -> dict[str, Callable]:
    """The operators, by name, that a class of the package calls."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{PACKAGE.name}.")]
    classes = {each for module in modules for each in vars(module).values() if inspect.isclass(each)}
    tables = [table for each in classes if isinstance(table := getattr(each, "operators", None), Operators)]
    return {name: operator for table in tables for name, operator in vars(table).items()}


def kernel_files(package: Path, entries: Iterable[str]) -> dict[PurePosixPath, str]:
    """The files of a package, by their place in it, that modules like `ops.ssd.chunk` import, and themselves.

    Raises:
        InputError: where one imports anything but these, the standard library, torch and, guarded, triton.
    """
    files: dict[PurePosixPath, str] = {}
    waiting = [tuple(entry.split(".")) for entry in entries]
    while waiting:
        module = waiting.pop()
        inside = package.joinpath(*module)
        place = PurePosixPath(*module, "__init__.py") if inside.is_dir() else PurePosixPath(f"{'/'.join(module)}.py")
        if place in files:
            continue
        if not module or not (package / place).is_file():
            raise InputError(
                f"An operator imports {'.'.join(module) or 'the package itself'}, which is no module of the package."
            )
        files[place] = (package / place).read_text()
        waiting += [module[:size] for size in range(1, len(module))]  # the folders that it stands in
        waiting += _imported(place, ast.parse(files[place]), package)
    return files


def _imported(place: PurePosixPath, tree: ast.Module, package: Path) -> Iterator[tuple[str, ...]]:
    """The modules of the package that a file imports."""
    guarded = {
        id(node)
        for each in ast.walk(tree)
        if isinstance(each, ast.Try) and any(getattr(h.type, "id", "") == "ImportError" for h in each.handlers)
        for line in each.body
        for node in ast.walk(line)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > len(place.parts):
                raise InputError(f"{place} imports from outside of the package, which a kernel does not have.")
            base = (*place.parts[: -node.level], *(node.module.split(".") if node.module else ()))
            inside = [(*base, each.name) for each in node.names]
            submodules = [each for each in inside if (package / PurePosixPath(*each).with_suffix(".py")).is_file()]
            yield from submodules
            if node.module or len(submodules) < len(inside):
                yield base
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            for name in (name.split(".")[0] for name in names):
                known = name == "torch" or name in sys.stdlib_module_names or (name == "triton" and id(node) in guarded)
                if not known:
                    how = " outside of try and except ImportError" if name == "triton" else ""
                    raise InputError(
                        f"{place} imports {name}{how}, and a kernel may import torch and the standard library alone."
                    )


def entry_source(operators: dict[str, Callable]) -> str:
    """The `__init__.py` of a kernel."""
    names = defaultdict(list)
    for name, operator in operators.items():
        names[operator.__module__.removeprefix(PACKAGE.name)].append(name)
    lines = [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    exported = sorted(each.__name__ for each in PUBLIC)
    about = "The operators of Interdomain Attention. Written by examples/publish_kernel.py of its package."
    return "\n".join([f'"""{about}"""', "", *lines, "", f"VERSION = {KERNEL_VERSION}", f"__all__ = {exported}", ""])


def metadata(backend: str, files: dict[PurePosixPath, str]) -> str:
    """What `kernels` asks of a variant; its name in `sys.modules` changes with what the files hold."""
    digests = {str(place): hashlib.sha256(text.encode()).digest() for place, text in sorted(files.items())}
    fingerprint = hashlib.sha256(b"".join(digests.values())).hexdigest()[:10]
    described = {
        "id": f"_{NAME.replace('-', '_')}_{backend}_{fingerprint}",
        "name": NAME,
        "version": KERNEL_VERSION,
        "kernels-minver": "0.17.0",
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {place: base64.b64encode(digest).decode() for place, digest in digests.items()},
        },
    }
    return json.dumps(described, indent=2) + "\n"


def write_kernel(folder: Path, package: Path = PACKAGE) -> list[str]:
    """Write the folder, `build/` in it anew; returns the names of a variant's files."""
    operators = called_by_layers() | {each.__name__: each for each in PUBLIC}
    entries = {each.__module__.removeprefix(f"{PACKAGE.name}.") for each in operators.values()}
    files = {PurePosixPath("__init__.py"): entry_source(operators)} | kernel_files(package, sorted(entries))
    shutil.rmtree(folder / "build", ignore_errors=True)
    for backend in BACKENDS:
        described = {PurePosixPath("metadata.json"): metadata(backend, files)}
        for place, text in (files | described).items():
            path = folder / "build" / f"torch-{backend}" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    names = ", ".join(f"`{name}`" for name in sorted(each.__name__ for each in PUBLIC))
    (folder / "README.md").write_text(CARD.format(license=LICENSE, version=KERNEL_VERSION, names=names))
    shutil.copyfile(PACKAGE.parent / "LICENSE", folder / "LICENSE")
    return [str(place) for place in files]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the kernel")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that holds something")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    folder = options.folder
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise InputError(f"{folder} is not empty: name another folder, or --overwrite.")
    try:
        files = write_kernel(folder)
    except OSError as error:
        raise InputError(f"{folder} could not be written: {error}") from error
    variants = ", ".join(f"torch-{backend}" for backend in BACKENDS)
    print(f"{folder} holds a kernel of version {KERNEL_VERSION}: {len(files)} files for each of {variants}.")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
