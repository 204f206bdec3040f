"""Kernels and the version of Triton that is installed; `make test-oldest` runs this with the oldest one."""

import os
import subprocess
import sys

import pytest

# The newest compiler makes kernels whole in test_benchmarks; the oldest reads them here.
pytestmark = [] if os.environ.get("VERSIONS") == "oldest" else [pytest.mark.slow]


def test_the_compiler_reads_every_kernel():
    """In a process of its own, because kernels of this one are interpreted."""
    pytest.importorskip("triton", reason="Triton is not installed on this machine.")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "from benchmarks.kernel_resources import parse_all; print(parse_all())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
