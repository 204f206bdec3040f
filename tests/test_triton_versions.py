"""Kernels and the version of Triton that is installed; `make test-oldest` runs this with the oldest one."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from modeling_interdomain.ops.common import launch
from modeling_interdomain.ops.common.tiles import arithmetic

# The newest compiler makes kernels whole in test_benchmarks; the oldest reads them here.
_oldest = (lambda test: test) if os.environ.get("VERSIONS") == "oldest" else pytest.mark.slow


@_oldest
def test_the_compiler_reads_every_kernel():
    """In a process of its own, because kernels of this one are interpreted."""
    pytest.importorskip("triton", reason="Triton is not installed on this machine.")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "from benchmarks.kernel_resources import parse_all; print(parse_all())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


@pytest.fixture
def assemblers(monkeypatch):
    """Gives Triton's knobs assemblers of these releases of CUDA."""
    launch._no_sound_assembler.cache_clear()
    yield lambda usual, newer: _assemblers(monkeypatch, usual, newer)
    launch._no_sound_assembler.cache_clear()


def _assemblers(monkeypatch, usual: str, newer: str | None):
    tools = SimpleNamespace(ptxas=SimpleNamespace(path="usual", version=usual))
    if newer is not None:
        tools.ptxas_blackwell = SimpleNamespace(path="newer", version=newer)
    monkeypatch.setattr(launch, "triton", SimpleNamespace(knobs=SimpleNamespace(nvidia=tools)))
    return tools


def test_an_assembler_that_is_not_sound_gives_way_to_the_newer_one(assemblers):
    tools = assemblers("12.8", "12.9")
    assert launch._no_sound_assembler() is None
    assert tools.ptxas == "newer"


def test_a_sound_assembler_stays(assemblers):
    tools = assemblers("13.0", "12.9")
    assert launch._no_sound_assembler() is None
    assert tools.ptxas.path == "usual"


@pytest.mark.parametrize("newer", [None, "12.8"])
def test_without_a_sound_assembler_no_kernel_runs(assemblers, newer):
    tools = assemblers("12.8", newer)
    assert "ptxas 12.8, gives matrix products" in launch._no_sound_assembler()
    assert tools.ptxas.path == "usual"


def _moved_on(function: ast.FunctionDef) -> list[str]:
    """Names that a loop gives the value of another that began as the same thing, which Triton takes for no change."""
    begins, found = {}, []

    def plain(node):
        simple = isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        return (node.targets[0].id, node.value.id) if simple and isinstance(node.value, ast.Name) else None

    for statement in function.body:
        if isinstance(statement, (ast.For, ast.While)):
            pairs = filter(None, map(plain, ast.walk(statement)))
            found += [f"{a} = {b}" for a, b in pairs if begins.get(a) and begins.get(a) == begins.get(b)]
        elif pair := plain(statement):
            begins[pair[0]] = begins.get(pair[1], pair[1])
    return found


def test_a_loop_carries_what_moves_on_from_name_to_name():
    """The interpreter runs kernels as Python, where `b = a` in a loop is an assignment whatever a and b began as."""
    example = "def f():\n    x = zero\n    y = zero\n    for i in range(3):\n        y = x\n        x = i\n"
    assert _moved_on(ast.parse(example).body[0]) == ["y = x"]
    assert _moved_on(ast.parse(example.replace("y = zero", "y = zeros()")).body[0]) == []
    files = [x for x in Path(launch.__file__).parents[1].rglob("*.py") if "triton" in x.read_text()]
    assert len(files) > 15
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert _moved_on(node) == [], f"{file.name}: {node.name}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_can_write_down_how_products_are_made(dtype):
    """As JSON, which it does of a kernel's constants when it has a hook or keeps what it has timed."""
    pytest.importorskip("triton", reason="Triton is not installed on this machine.")
    assert json.loads(json.dumps(arithmetic(dtype))) == list(arithmetic(dtype))
    assert arithmetic(dtype).storage == dtype
