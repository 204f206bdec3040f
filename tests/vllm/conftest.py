"""Folders with small models; everything here is skipped where vLLM is not installed."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

INSTALLED = find_spec("vllm") is not None
if INSTALLED:  # before it is imported: an engine in this process, quiet, that asks nobody and binds no core
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def pytest_collection_modifyitems(items):
    if not INSTALLED:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                reason = "vLLM is not installed here: `make test-vllm` prepares an environment of its own."
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def make_folder(make_model, tmp_path):
    """`make_folder(name, model_dtype, **changes)`: a small model, in float32 by default, and its folder.

    Its heads are of the smallest size that vLLM's attention has on a CPU.
    """

    def make(name: str = "interdomain", model_dtype: torch.dtype = torch.float32, **changes):
        model = make_model(name, dtype=model_dtype, **{"head_dim": 32, "state_dtype": "float32"} | changes)
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        return model, folder

    return make
