"""What the version before the package had rooms has written still loads: folders, files of states, pickles."""

import io
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from modeling_interdomain import InterdomainCache
from tests.conftest import EXPERTS, ROPE

BEFORE = "555a879049"  # the last commit with all modules in one folder
REPOSITORY = Path(__file__).parents[1]
KINDS = {
    "interdomain": {},
    "s4d": {"token_mixers": "s4d"},
    "mamba2": {"token_mixers": "ssd", "ssd_conv_kernel": 4, "use_output_gate": True, "ssd_norm": "after_gate"},
    "selective_scan": {"token_mixers": "selective_scan"},
    "hybrid": {"token_mixers": ["interdomain", "softmax"], "rope_parameters": ROPE, "dynamic_mask": "value"},
    "hax": {"sparse_attention": "hax", "sparse_keys": 8, "sparse_key_dim": 4, "sparse_hash_size": 4},
    "cheems": {"token_mixers": ["ssd", "inner_function"], "feed_forwards": "cdmoe", "inner_values": 5, **EXPERTS},
}

# Runs with the package of that commit; argv: the folder to write to.
WRITER = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM

ids = torch.arange(5, 25)[None]
for name, fields in eval(sys.argv[2]).items():
    folder = Path(sys.argv[1], name)
    torch.manual_seed(0)
    model = InterdomainForCausalLM(
        InterdomainConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **fields)
    ).eval()
    model.save_pretrained(folder)
    cache = InterdomainCache(model.config)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        cache.save(folder / "state.safetensors", model)
        torch.save(cache, folder / "cache.pickle")
        torch.save(model, folder / "model.pickle")
        after = model(ids[:, :3], past_key_values=cache, use_cache=True).logits
    save_file({"logits": logits, "after": after}, folder / "results.safetensors")
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """What the package of that commit has written, a folder a kind of model."""
    archive = subprocess.run(
        ["git", "archive", BEFORE, "modeling_interdomain"], cwd=REPOSITORY, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"commit {BEFORE} is not in this clone of the repository")
    package, folder = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(package, filter="data")
    environment = os.environ | {"PYTHONPATH": str(package)}
    command = [sys.executable, "-c", WRITER, str(folder), repr(KINDS)]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(params=KINDS)
def folder(before, request):
    return before / request.param


IDS = torch.arange(5, 25)[None]


@torch.no_grad()
def _check(model, cache, folder):
    results = load_file(folder / "results.safetensors")
    torch.testing.assert_close(model(IDS).logits, results["logits"])
    torch.testing.assert_close(model(IDS[:, :3], past_key_values=cache, use_cache=True).logits, results["after"])


def test_folders_and_states_of_before_load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    _check(model, InterdomainCache.load(folder / "state.safetensors", model), folder)


def test_pickles_of_before_load(folder):
    model = torch.load(folder / "model.pickle", weights_only=False)
    _check(model, torch.load(folder / "cache.pickle", weights_only=False), folder)


@pytest.mark.parametrize(
    "name",
    [
        "cache_window.WindowLayer",
        "cache_window.StaticWindowLayer",
        "module_first_state.FirstState",
        "modeling_interdomain.PatchEmbedding",
        "modeling_interdomain.InterdomainForSequenceClassification",
    ],
)
def test_names_of_before_are_the_classes_of_now(name):
    """Of parts that none of these models has."""
    module, kind = name.split(".")
    found = pickle.loads(f"cmodeling_interdomain.{module}\n{kind}\n.".encode())
    assert found.__name__ == kind and found.__module__ != f"modeling_interdomain.{module}"


# With the code of its own that a folder brings.
READER = """
import sys
import torch
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file

sys.modules["modeling_interdomain"] = None
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(torch.arange(5, 25)[None]).logits
    torch.testing.assert_close(logits, load_file(folder + "/results.safetensors")["logits"])
    assert type(model).__module__.startswith("transformers_modules")
"""


@pytest.mark.slow
def test_code_of_before_loads(before, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", READER, *(str(before / kind) for kind in ("interdomain", "cheems"))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
