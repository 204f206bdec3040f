"""A saved folder carries its code: it loads where the package is not installed."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_relative_import_files

from modeling_interdomain import InterdomainForCausalLM, InterdomainForSequenceClassification, InterdomainModel
from modeling_interdomain.saving import whole
from modeling_interdomain.saving.code import flat_code
from tests.conftest import MIXERS, VARIANTS

PACKAGE = Path(__file__).parents[1] / "modeling_interdomain"
CLASSES = {
    "AutoModel": InterdomainModel,
    "AutoModelForCausalLM": InterdomainForCausalLM,
    "AutoModelForSequenceClassification": InterdomainForSequenceClassification,
}
AUTO_MAP = {
    "AutoConfig": "configuration_interdomain.InterdomainConfig",
    "AutoModel": "modeling_interdomain.InterdomainModel",
    "AutoModelForCausalLM": "modeling_interdomain.InterdomainForCausalLM",
    "AutoModelForSequenceClassification": "classifier_interdomain.InterdomainForSequenceClassification",
    "AutoModelForDecision": "modeling_interdomain.InterdomainForCausalLM",
}

# Runs in a process of its own, in an empty folder; argv: the saved folders' parent, names that cannot be imported.
ELSEWHERE = """
import json, sys
from pathlib import Path

saved, hidden = Path(sys.argv[1]), sys.argv[2].split(",")

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Hide())
for name in hidden:
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} can be imported")

import torch
import transformers
from safetensors.torch import save_file

ids = torch.tensor([[5, 9, 3, 7, 11, 4]])
results, report = {}, {}

def keep(name, model):
    # In a file's memory weights begin anywhere, and some CPUs add up in another order where they are not aligned.
    for weight in model.parameters():
        weight.data = weight.data.clone()
    with torch.no_grad():
        results[name] = model.eval()(ids)[0].contiguous()

report["config"] = type(transformers.AutoConfig.from_pretrained(saved / "AutoModel", trust_remote_code=True)).__name__
for name in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
    auto_class = getattr(transformers, name)
    model = auto_class.from_pretrained(saved / name, trust_remote_code=True)
    report[name] = [type(model).__name__, type(model).__module__.split(".")[0]]
    keep(name, model)
    if name == "AutoModelForCausalLM":
        # Another class from the same folder, generation, and saving again from here.
        body = transformers.AutoModel.from_pretrained(saved / name, trust_remote_code=True)
        report["body"] = type(body).__name__
        keep("body", body)
        mask = torch.ones_like(ids)
        results["generated"] = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        made = auto_class.from_config(model.config, trust_remote_code=True)
        report["from_config"] = type(made).__name__
        try:
            auto_class.from_pretrained(saved / name, trust_remote_code=True, expert_key_dim=7)
        except ValueError as error:
            report["refused"] = str(error)
    model.save_pretrained(f"again-{name}")
    again = auto_class.from_pretrained(f"again-{name}", trust_remote_code=True)
    keep(f"again-{name}", again)

copies = [m for m in sys.modules if m.startswith("transformers_modules.AutoModelForCausalLM") and "registry" in m]
report["copies"] = len(copies)
report["loaded"] = sorted(m for m in sys.modules if m.split(".")[0] in hidden)
save_file(results, "results.safetensors")
Path("report.json").write_text(json.dumps(report))
"""


LAYERS = [("interdomain", "cdmoe"), ("softmax", "mlp"), ("s4d", "none"), ("ssd", "mlp"), ("inner_function", "cdmoe")]
_SCAN = "selective_scan"
# With those above every token mixer is before every feed-forward layer.
OTHER_LAYERS = [
    *(("interdomain", "mlp"), ("s4d", "cdmoe"), ("s4d", "mlp"), ("softmax", "cdmoe")),
    *((_SCAN, "cdmoe"), (_SCAN, "mlp"), ("inner_function", "mlp"), ("ssd", "cdmoe")),
]


@pytest.fixture(
    scope="module",
    params=[LAYERS, pytest.param(OTHER_LAYERS, marks=[pytest.mark.slow, pytest.mark.exhaustive])],
    ids=["layers", "other layers"],
)
def models(request, make_model):
    parts = {
        "num_hidden_layers": len(request.param),
        "token_mixers": [mixer for mixer, _ in request.param],
        "feed_forwards": [feed_forward for _, feed_forward in request.param],
        "dynamic_mask": "value",
    }
    return {
        name: make_model("cheems", model_class, dtype=torch.float32, num_labels=3, feature_dim=6, **parts)
        for name, model_class in CLASSES.items()
    }


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """A folder with one saved folder for each class."""
    folder = tmp_path_factory.mktemp("saved")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return folder


def _load_elsewhere(saved, folder, hidden):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_", "TRANSFORMERS"))}
    environment |= {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", ELSEWHERE, str(saved), ",".join(hidden)]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return load_file(folder / "results.safetensors"), json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module", params=["package-hidden", "package-and-triton-hidden"])
def elsewhere(request, saved, tmp_path_factory):
    """What a process without the package, and perhaps without Triton, computes and reports."""
    hidden = ["modeling_interdomain", *(["triton"] if "triton" in request.param else [])]
    folder = tmp_path_factory.mktemp("elsewhere")
    return folder, *_load_elsewhere(saved, folder, hidden)


@pytest.mark.parametrize("name", CLASSES)
def test_saved_folder_names_every_class(name, saved):
    assert json.loads((saved / name / "config.json").read_text())["auto_map"] == AUTO_MAP


@pytest.mark.parametrize("name", CLASSES)
def test_saved_folder_holds_what_the_model_needs(name, saved, models):
    """Modules of the package under their paths with underscores: those that the entry imports, and no others."""
    shipped = {path.name for path in (saved / name).glob("*.py")}
    for entry in ("modeling_interdomain.py", "classifier_interdomain.py"):  # whichever the library is asked for
        assert shipped == {Path(file).name for file in get_relative_import_files(saved / name / entry)} | {entry}
    modules = {path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")}
    assert shipped <= {"_".join(module.parts) + ".py" for module in modules} | {"configuration_fields.py"}
    assert "saving_code.py" not in shipped
    used = {f"mixers_{mixer}_mixer.py" for mixer in models[name].config.mixers_per_layer}
    mixers = {file for file in shipped if file.endswith("_mixer.py")}
    assert used <= mixers and ("mixers_selective_scan_mixer.py" in used) == ("mixers_selective_scan_mixer.py" in mixers)


@functools.cache  # most modules are the same in every model
def _imported(text: str) -> list[tuple[str, int, list[str]]]:
    """What a module takes from the package: the last name of a module, and the names in it."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]
    return [(node.module, node.lineno, [alias.name for alias in node.names]) for node in nodes]


@pytest.fixture(scope="module")
def source_of():
    """`source_of[flat name of a module]`: the lines of the one that travels under it."""
    modules = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    flat = ["_".join(parts) for parts in modules.values() if parts[-1] != "__init__"]
    assert len(set(flat)) == len(flat)
    return {"_".join(parts): path.read_text().splitlines() for path, parts in modules.items()}


@pytest.mark.once
@pytest.mark.parametrize("name", [*MIXERS, *VARIANTS])
def test_flat_code_differs_in_imports_alone(name, make_config, source_of):
    config = make_config(name)
    code = flat_code(config)
    for module, text in code.items():
        if module in ("registry", "configuration_fields"):
            continue
        before, after = source_of[module], text.splitlines()
        different = [line for old, line in zip(before, after) if old != line]
        assert all(line.lstrip().startswith(("from .", "raise ImportError(")) for line in different)
        for target, _, names in _imported(text):
            assert "." not in target and target in code, f"{module} imports {target}, which does not travel"
            defined = code[target]
            assert all(re.search(rf"\b{x}\b", defined) for x in names)


def test_fields_of_all_families_travel_in_one_file():
    """Every line but the imports of each other, each after what it builds on; no name is there twice."""
    text = flat_code(None)["configuration_fields"]
    for path in PACKAGE.rglob("configuration.py"):
        lines = [line for line in path.read_text().splitlines() if "import" not in line]
        assert "\n".join(lines) in "\n".join(line for line in text.splitlines() if "import" not in line)
    defined = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Assign)]
    names = [ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else node.name for node in defined]
    assert len(set(names)) == len(names)
    assert names.index("ModelFields") < min(i for i, name in enumerate(names) if name.endswith("Fields") and i)


# What a checkpoint may carry, in files and lines: more is argued for where it is added. Last 140 lines, for what was
# silent in remote code too: a cache that has read all, a state of other weights, configurations that make NaN; 40, for
# layers that PEFT copies or wraps, ensembles (vmap) and second derivatives; 80, for masks that hide what a state has
# read; and 45, for gradients by torch.func, sample by sample, forward mode and swaps.
MOST = {"interdomain": (60, 13_780), "softmax": (31, 6_620), "ssd": (45, 9_665)}


@pytest.mark.once
@pytest.mark.parametrize("name", MOST)
def test_little_code_travels(name, make_config):
    code = flat_code(make_config(name))
    files, lines = MOST[name]
    assert len(code) <= files and sum(text.count("\n") for text in code.values()) <= lines


def test_what_does_not_travel_is_named(make_model, tmp_path):
    """A part that a checkpoint lacks is asked for in one sentence."""
    make_model("interdomain").save_pretrained(tmp_path)
    flat = {path.stem: path.read_text() for path in tmp_path.glob("*.py")}
    assert "parallel_sequence" not in flat and "mixers_sparse_branch" not in flat
    sentence = (
        "The code of this checkpoint is without parallel.sequence: install modeling-interdomain, and load the model"
    )
    assert sentence in flat["modeling_interdomain"]


def test_all_code_is_written_where_it_is_asked_for(make_model, tmp_path, monkeypatch):
    """What only some ask for, such as a server, is a command away; without it the sentence names the command."""
    make_model("interdomain").save_pretrained(tmp_path)
    lean = {path.stem for path in tmp_path.glob("*.py")}
    asked = {"generation_batch", "generation_serving", "generation_prompt_store", "parallel_sequence"}
    assert asked.isdisjoint(lean)
    command = "python -m modeling_interdomain.saving.whole FOLDER"
    assert command in (tmp_path / "generation_mixin.py").read_text()
    monkeypatch.setattr(sys, "argv", ["whole", str(tmp_path)])
    whole.main()
    written = {path.stem: path.read_text() for path in tmp_path.glob("*.py")}
    assert written.keys() >= lean | asked and not any(command in text for text in written.values())
    assert set(flat_code(make_model("interdomain").config, whole=True)) == written.keys()


def test_code_is_written_into_folders_of_our_models_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for folder, sentence in (
        (tmp_path / "none", "is not a folder with a saved model."),
        (tmp_path, 'holds a model of type "llama", whose code is not this.'),
    ):
        monkeypatch.setattr(sys, "argv", ["whole", str(folder)])
        with pytest.raises(SystemExit):
            whole.main()
        assert capsys.readouterr().err.endswith(f"{folder} {sentence}\n")
    assert not list(tmp_path.glob("*.py"))


@pytest.mark.parametrize("damage", ["{", '{"model_type": "interdomain", "product": "dot"}'])
def test_a_configuration_that_cannot_be_read_has_no_code_written(damage, make_config, tmp_path, monkeypatch, capsys):
    """Neither beside it nor into the folders that stand before it."""
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    make_config().save_pretrained(tmp_path / "good")
    (tmp_path / "bad" / "config.json").write_text(damage)
    written = sorted((tmp_path / "good").iterdir())
    monkeypatch.setattr(sys, "argv", ["whole", str(tmp_path / "good"), str(tmp_path / "bad")])
    with pytest.raises(SystemExit):
        whole.main()
    assert f"{tmp_path / 'bad'} has a config.json that cannot be read: " in capsys.readouterr().err
    assert sorted((tmp_path / "good").iterdir()) == written and len(list((tmp_path / "bad").iterdir())) == 1


def test_a_configuration_alone_carries_its_code(make_config, tmp_path):
    make_config("s4d").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert {path.stem for path in tmp_path.glob("*.py")} == set(flat_code(make_config("s4d")))


def test_a_saved_folder_names_the_code_beside_it(make_config, tmp_path):
    """Whatever repository the code came from; what else is named stays."""
    config = make_config()
    of_the_hub = {kind: f"user/code--{path}" for kind, path in AUTO_MAP.items()}
    config.auto_map = of_the_hub | {"AutoTokenizer": ["own.T", None]}
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert written == AUTO_MAP | {"AutoTokenizer": ["own.T", None]}


@pytest.mark.parametrize("name", CLASSES)
def test_package_needs_no_trust(name, saved, models):
    auto_class = {
        "AutoModel": AutoModel,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "AutoModelForSequenceClassification": AutoModelForSequenceClassification,
    }[name]
    model = auto_class.from_pretrained(saved / name)
    assert type(model) is CLASSES[name]
    assert type(AutoConfig.from_pretrained(saved / name)) is type(model.config)
    for weight in model.parameters():  # as in ELSEWHERE
        weight.data = weight.data.clone()
    ids = torch.tensor([[5, 9, 3, 7]])
    torch.testing.assert_close(model(ids)[0], models[name](ids)[0], rtol=0, atol=0)


def test_loaded_here_and_saved_again_still_carries_its_code(saved, tmp_path):
    AutoModelForCausalLM.from_pretrained(saved / "AutoModelForCausalLM").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    before = {path.name for path in (saved / "AutoModelForCausalLM").glob("*.py")}
    assert {path.name for path in tmp_path.glob("*.py")} == before


@pytest.mark.slow
def test_classes_elsewhere_are_those_of_the_folder(elsewhere):
    _, _, report = elsewhere
    assert report.pop("config") == "InterdomainConfig"
    assert report.pop("body") == "InterdomainModel"
    assert report.pop("from_config") == "InterdomainForCausalLM"
    assert report.pop("loaded") == []
    assert report.pop("copies") == 1
    assert report.pop("refused") == "expert_key_dim must be even, one half for each product key; got 7."
    assert report == {name: [model_class.__name__, "transformers_modules"] for name, model_class in CLASSES.items()}


@pytest.mark.slow
def test_outputs_elsewhere_are_the_same(elsewhere, models):
    _, results, _ = elsewhere
    ids = torch.tensor([[5, 9, 3, 7, 11, 4]])
    with torch.no_grad():
        for name, model in models.items():
            expected = model(ids)[0]
            torch.testing.assert_close(results[name], expected, rtol=0, atol=0)
            torch.testing.assert_close(results[f"again-{name}"], expected, rtol=0, atol=0)
        language_model = models["AutoModelForCausalLM"]
        torch.testing.assert_close(results["body"], language_model.model(ids)[0], rtol=0, atol=0)
        generated = language_model.generate(ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    assert results["generated"].tolist() == generated.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_saved_again_elsewhere(name, elsewhere, saved):
    folder, _, _ = elsewhere
    again = folder / f"again-{name}"
    files = {path.name for path in (saved / name).glob("*.py")}
    assert {path.name for path in again.glob("*.py")} == files
    auto_map = json.loads((again / "config.json").read_text())["auto_map"]
    assert {key: value.split("--")[-1] for key, value in auto_map.items()} == AUTO_MAP


@pytest.mark.parametrize(
    ("backend", "module"),
    [
        ("recurrent", "naive"),
        ("fft", "prefix"),
        ("associative_scan", "prefix"),
        ("scan", "scan"),
        ("scan", "triton_scan"),
    ],
)
def test_the_code_of_a_backend_travels_where_it_is_asked_for(backend, module, make_config):
    assert f"ops_interdomain_{module}" in flat_code(make_config(backend=backend))
    assert f"ops_interdomain_{module}" not in flat_code(make_config())


@pytest.mark.parametrize(
    ("name", "fields", "module"),
    [
        ("delta-rule", {}, "ops_interdomain_triton_delta"),
        ("interdomain", {"learned_state": True}, "layers_learned_state"),
        ("interdomain", {"learned_state": True}, "model_cache_state_tuning"),
        ("interdomain", {"backend": "recurrent"}, "ops_interdomain_naive"),
        ("forget-gates", {}, "ops_interdomain_naive"),
        ("interdomain", {"backend": "associative_scan"}, "ops_interdomain_prefix"),
        ("window", {}, "mixers_window_points"),
        ("inner-function", {}, "mixers_softmax_dynamic_mask"),
        ("inner-function", {}, "ops_common_window"),
        ("softmax", {}, "mixers_softmax_dynamic_mask"),
        ("hax", {}, "mixers_sparse_branch"),
        ("hax", {}, "mixers_sparse_parts"),
        ("forget-gates", {}, "mixers_interdomain_gated"),
        ("forget-gates", {}, "mixers_interdomain_gates"),
        ("forget-gates", {}, "ops_interdomain_gates"),
        ("forget-gates", {}, "ops_interdomain_gates_chunk"),
        ("forget-gates", {}, "ops_interdomain_triton_gates"),
        ("warped-time", {}, "mixers_interdomain_warped"),
        ("warped-time", {}, "ops_interdomain_warp"),
    ],
)
def test_what_a_configuration_needs_travels_and_with_no_other(name, fields, module, make_config):
    assert module in flat_code(make_config(name, **fields))
    assert module not in flat_code(make_config("interdomain"))


def test_windows_without_a_memory_bring_no_points(make_config):
    assert "mixers_window_points" not in flat_code(
        make_config("window", window_memory=False, window_points=6, window_write_gate=False)
    )


def test_fields_that_nothing_names_do_not_travel(make_config):
    text = flat_code(make_config("softmax"))["configuration_fields"]
    others = "".join(code for name, code in flat_code(make_config("softmax")).items() if name != "configuration_fields")
    for name in re.findall(r"^class (\w+)", text, flags=re.MULTILINE):
        assert len(re.findall(rf"\b{name}\b", text + others)) > 1, name
