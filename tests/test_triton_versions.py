"""Kernels and the version of Triton that is installed; `make test-oldest` runs this with the oldest one."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from modeling_interdomain.ops.common import launch

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
