"""The operators as a kernel of the Hub: what the command writes, how it loads, and models that call it."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import publish_kernel
from modeling_interdomain import (
    InterdomainCache,
    InterdomainForCausalLM,
    cache_fingerprint,
    module_operators,
    op_common,
)
from modeling_interdomain.op_interdomain import append_one
from tests.conftest import PAIRS

kernels = pytest.importorskip("kernels", reason="the library that loads kernels is not installed")

PACKAGE = publish_kernel.PACKAGE
# What layers ask of their tensors before they call an operator: no operators, and the same in a kernel.
HELPERS = {Path(op_common.__file__), append_one.__name__}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the command has written."""
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    assert publish_kernel.main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def kernel(folder):
    return kernels.get_local_kernel(folder)


def places_of(kernel) -> list[Path]:
    """Of its files with operators, within a variant or the package."""
    variant = Path(kernel.__file__).parent
    return [path.relative_to(variant) for path in variant.rglob("*.py") if path != Path(kernel.__file__)]


@pytest.fixture
def rewritten(tmp_path):
    """`rewritten(old, new)`: a kernel of its own whose `__init__.py` says something else."""

    def write(old: str, new: str) -> Path:
        folder = tmp_path / "other"
        publish_kernel.write_kernel(folder)
        for variant in (folder / "build").iterdir():
            source, described = variant / "__init__.py", variant / "metadata.json"
            assert old in source.read_text()
            source.write_text(source.read_text().replace(old, new))
            described.write_text(described.read_text().replace('"_interdomain', f'"_other{abs(hash(new))}'))
        return folder

    return write


# ------------------------------------------------------------------------------------------ the folder


@pytest.mark.parametrize("backend", publish_kernel.BACKENDS)
def test_a_variant_holds_the_operators_as_they_are(folder, backend):
    variant = folder / "build" / f"torch-{backend}"
    files = {str(path.relative_to(variant)) for path in variant.rglob("*") if "__pycache__" not in path.parts}
    written = {name for name in files if name.endswith(".py")} - {"__init__.py"}
    assert files == written | {"__init__.py", "metadata.json"} and len(written) > 50
    for name in written:
        assert (variant / name).read_text() == (PACKAGE / name).read_text()
    described = kernels.Metadata.read_from_file(variant / "metadata.json")
    assert described.name.python_name == "interdomain_attention" and described.id.isidentifier()
    assert (
        described.version == module_operators.KERNEL_VERSION and str(described.backend.backend_type).lower() == backend
    )
    assert set(described.digest.files) == {*written, "__init__.py"}
    described.digest.validate(type(described.digest).hash_variant(described.digest.algorithm, variant))


def test_its_name_changes_with_its_files(folder, tmp_path):
    files = {Path("__init__.py"): "VERSION = 1\n"}
    first, same, second = (
        json.loads(publish_kernel.metadata("cpu", each))["id"] for each in (files, dict(files), {Path("a.py"): ""})
    )
    assert first == same != second


def test_it_runs_without_the_package(folder):
    """In a process that finds neither Transformers nor the package, nor the library that loads kernels."""
    code = """
import importlib.util, sys
sys.modules.update(dict.fromkeys(("modeling_interdomain", "transformers", "kernels", "numpy", "triton")))
spec = importlib.util.spec_from_file_location("alone", sys.argv[1])
sys.modules["alone"] = kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
import torch
x = torch.ones(1, 5, 2, 3, dtype=torch.float64)
table = torch.full((2, 4, 2), -0.5, dtype=torch.float64)
print(kernel.interdomain_attention(x, x, x, table, table)[0].sum().item())
"""
    source = folder / "build" / "torch-cpu" / "__init__.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, source],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=True,
    ).stdout
    x, table = torch.ones(1, 5, 2, 3, dtype=torch.float64), torch.full((2, 4, 2), -0.5, dtype=torch.float64)
    assert float(found) == publish_kernel.interdomain_attention(x, x, x, table, table)[0].sum().item()


def test_it_lives_beside_the_package(kernel):
    """Its registered operators have the same names as the package's, in namespaces of their own."""
    registered = [tuple(name.split("::")) for name in torch._C._dispatch_get_all_op_names()]

    def names_of(root: str) -> set[tuple[str, str]]:
        prefix = "".join(c if c.isalnum() else "_" for c in root)
        spaces = {f"{prefix}_{'_'.join(place.with_suffix('').parts)}": place for place in places_of(kernel)}
        return {(str(spaces[space]), name) for space, name in registered if space in spaces}

    assert len(names_of(kernel.__name__)) > 5 and names_of(kernel.__name__) <= names_of(PACKAGE.name)


def test_a_folder_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert publish_kernel.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} is not empty: name another folder, or --overwrite.\n"
    assert publish_kernel.main([str(tmp_path / "mine.txt")]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt"}
    assert publish_kernel.main([str(tmp_path), "--overwrite"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "build", "README.md", "LICENSE"}


# ------------------------------------------------------------------------------------------ what it may import


def write(root: Path, **files: str) -> Path:
    """Files by their place, two underscores for a slash."""
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_imports_are_followed_through_folders(tmp_path):
    package = write(
        tmp_path,
        ops__entry="def run():\n    from .ssd.chunk import run\n    from . import lazy\n",
        ops__lazy="import math\nimport torch.nn\n",
        ops__ssd__chunk="from ..common import x\nfrom ...top import y\n",
        ops__common="try:\n    import triton\nexcept ImportError:\n    triton = None\n",
        ops__unused="import numpy\n",
        top="",
    )
    for room in ("ops", "ops/ssd"):
        (package / room / "__init__.py").write_text("")
    found = publish_kernel.kernel_files(package, ["ops.entry"])
    rooms = {"ops/__init__.py", "ops/ssd/__init__.py"}
    names = {"ops/entry.py", "ops/lazy.py", "ops/ssd/chunk.py", "ops/common.py", "top.py"}
    assert {str(place) for place in found} == rooms | names


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import numpy as np", "entry.py imports numpy, and a kernel may import torch and the standard library alone."),
        (
            "def f():\n    from transformers import x",
            "entry.py imports transformers, and a kernel may import torch and",
        ),
        ("import triton", "entry.py imports triton outside of try and except ImportError, and a kernel may import"),
        ("from ..other import x", "entry.py imports from outside of the package, which a kernel does not have."),
        ("from . import x", "An operator imports the package itself, which is no module of"),
        ("from .missing import x", "An operator imports missing, which is no module of the package."),
    ],
)
def test_other_imports_are_refused(tmp_path, source, reason):
    with pytest.raises(publish_kernel.InputError, match=f"^{reason}"):
        publish_kernel.kernel_files(write(tmp_path, entry=source), ["entry"])


# ------------------------------------------------------------------------------------------ models that call it


def everything(model, ids) -> list[torch.Tensor]:
    """Logits and gradients, maps of attention, and what a cache gives that takes tokens back."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    logits = model(ids).logits
    logits.square().mean().backward()
    found = [logits.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]
    with torch.no_grad():
        if not any(model.config.sparse_per_layer):
            found += model(ids, output_attentions=True).attentions
        cache = InterdomainCache(model.config)
        cache.activate_past_recording()
        for begin, end, back in ((0, 7, 0), (7, 10, 2), (8, 9, 0), (9, 10, 1), (9, 13, 0)):
            found.append(model(ids[:, begin:end], past_key_values=cache).logits)
            cache.crop(-back)
    return found


def ran(function, *arguments) -> tuple[list[torch.Tensor], dict[Path, set[str]]]:
    """What a function returns, and the functions of each file that it has called."""
    called: dict[str, set[str]] = {}

    def note(frame, event, _):
        if event == "call":
            called.setdefault(frame.f_code.co_filename, set()).add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        found = function(*arguments)
    finally:
        sys.setprofile(None)
    return found, {Path(name): functions for name, functions in called.items()}


def test_a_model_is_the_same_with_the_operators_of_a_kernel(each_mixer, folder, kernel, random_ids):
    model, ids = each_mixer, random_ids(2, 13)
    config = model.config
    if {"softmax", "inner_function"}.issuperset(
        config.mixers_per_layer
    ) and "cdmoe" not in config.feed_forwards_per_layer:
        with pytest.raises(ValueError, match="use_kernel finds no layer in this model that calls an operator"):
            model.use_kernel(folder)
        return
    expected = everything(model, ids)
    model.use_kernel(folder)
    found, called = ran(everything, model, ids)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))

    assert called.keys() & {Path(kernel.__file__).parent / place for place in places_of(kernel)}
    own = {PACKAGE / place for place in places_of(kernel)}
    beside = {(path, name) for path, names in called.items() if path in own for name in names}
    assert not {each for each in beside if not HELPERS & set(each)}


def test_a_store_tells_kernels_apart(make_model, folder, rewritten):
    """A kernel of other code may round otherwise: what it has read is not served to another."""
    model, keys = make_model(), []
    for name in (None, folder, rewritten("VERSION", "VERSION"), None):
        model.use_kernel(name)
        keys.append(cache_fingerprint.reading_fingerprint(model))
    assert keys[0] == keys[3] and len(set(keys)) == 3


def test_it_comes_and_goes(make_model, folder, kernel):
    model = make_model()
    part = model.model.layers[0].token_mixer.recurrence
    assert part.operators is type(part).operators
    model.use_kernel(str(folder))
    for each in (model, copy.deepcopy(model)):
        recurrence = each.model.layers[0].token_mixer.recurrence
        assert recurrence.operators.take_step is kernel.take_step
        assert type(recurrence).operators.take_step is not kernel.take_step  # other models keep theirs
    model.use_kernel(None)
    assert part.operators == type(part).operators


def test_a_named_kernel(make_model, folder, kernel, monkeypatch):
    """The library lets a folder stand for a name of the Hub."""
    monkeypatch.setenv("LOCAL_KERNELS", f"user/interdomain={folder}")
    model = make_model()
    model.use_kernel("user/interdomain")
    assert model.model.layers[0].token_mixer.recurrence.operators.take_step is kernel.take_step


@pytest.mark.parametrize("revision", [None, "v7"])
def test_how_a_named_kernel_is_asked_for(make_model, kernel, monkeypatch, revision):
    asked = []
    monkeypatch.setattr(kernels, "get_kernel", lambda name, **options: asked.append((name, options)) or kernel)
    make_model().use_kernel("user/interdomain", revision=revision, trust_remote_code=True)
    version = {"version": module_operators.KERNEL_VERSION} if revision is None else {"revision": revision}
    assert asked == [("user/interdomain", version | {"trust_remote_code": True})]


@pytest.mark.slow
def test_a_compiled_model_calls_it(make_model, folder, random_ids):
    model, ids = make_model(), random_ids(1, 9)
    expected = model(ids).logits
    model.use_kernel(folder)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(ids).logits, expected)


# ------------------------------------------------------------------------------------------ what is refused


@pytest.fixture
def refused(make_model):
    """`refused(error, reason, name)`: the model says why, and calls the operators that it has called before."""

    def check(error: type[Exception], reason: str, name) -> None:
        model = make_model()
        with pytest.raises(error, match=f"^{reason}") as caught:
            model.use_kernel(name)
        assert "\n" not in str(caught.value)
        recurrence = model.model.layers[0].token_mixer.recurrence
        assert recurrence.operators is type(recurrence).operators

    return check


def test_without_the_library(refused, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    refused(ImportError, r"use_kernel needs the library that loads kernels: pip install kernels\.$", folder)


def test_a_folder_that_is_no_kernel(refused, tmp_path):
    refused(ValueError, f"The kernel {tmp_path} does not load: Cannot find a build variant", tmp_path)


def test_a_name_that_is_not_at_hand(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(ValueError, "The kernel user/nowhere does not load: ", "user/nowhere")


def test_another_version(refused, rewritten):
    folder = rewritten("VERSION = 1", "VERSION = 2")
    refused(ValueError, f"The kernel {folder} has operators of version 2, and these layers call version 1: ", folder)


def test_an_operator_is_missing(refused, rewritten):
    folder = rewritten("few_tables, take_few", "few_tables")
    refused(ValueError, f"The kernel {folder} has no operator take_few, which a layer of this model calls", folder)


def test_an_operator_takes_other_arguments(refused, rewritten):
    folder = rewritten("VERSION", "step_tables = lambda x: x\nVERSION")
    refused(ValueError, f"The operator step_tables of the kernel {folder} takes other arguments", folder)


def test_what_a_layer_calls_is_in_the_kernel(kernel, make_model):
    """The command finds the operators of every class, whatever file it is in."""
    called = publish_kernel.called_by_layers()
    for name in PAIRS:
        for part in make_model(name, InterdomainForCausalLM).modules():
            if isinstance(getattr(part, "operators", None), module_operators.Operators):
                assert vars(part.operators).items() <= called.items()
    assert all(hasattr(kernel, name) for name in called)
