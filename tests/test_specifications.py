"""A configuration does without layers: what it asks of them their classes say without PyTorch, by themselves."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

from modeling_interdomain import InterdomainConfig, TokenMixer
from modeling_interdomain.mixers.interdomain.configuration import GATED_BACKENDS
from modeling_interdomain.ops.interdomain import gates
from modeling_interdomain.registry import FEED_FORWARDS, TOKEN_MIXERS
from modeling_interdomain.saving.code import flat_code
from tests.conftest import MIXERS, PAIRS, VARIANTS, WINDOWED

PACKAGE = Path(__file__).parents[1] / "modeling_interdomain"
# What a configuration may load of ours, beside the families' `configuration.py`.
LIGHT = {"configuration_interdomain", "layers.versions", "mixers.sparse.parts", "mixers.specifications"}
# The files of a checkpoint that make its configuration; all that families say is in the second.
RUN = {"configuration_interdomain", "configuration_fields", "layers_versions"}


def answers(config) -> dict:
    """What a configuration says with the help of its layers' classes."""
    plans = []
    for processes in (1, 2):
        config.distributed_config = type("", (), {"tp_size": processes})
        plans.append(config.base_model_tp_plan)
    del config.distributed_config
    return {
        "json": config.to_json_string(use_diff=False),
        "plans": plans,
        "sizes": config.state_sizes(7),
        "rotated": config.rotated_dims,
        "masks": sorted(config.mask_kinds),
        "windowed": config.windowed_layers,
    }


# Run in processes of their own; argv: a file of configurations and the package's folder, or saved folders.
ALONE = f"""
import json, sys
from pathlib import Path
from types import ModuleType

{inspect.getsource(answers)}

package = sys.modules["modeling_interdomain"] = ModuleType("modeling_interdomain")  # importing it makes all models
package.__path__ = [sys.argv[2]]
from modeling_interdomain.configuration_interdomain import InterdomainConfig

answers(InterdomainConfig())
triton = "triton" in sys.modules  # the library's activations, for which some ask, import it
fields = json.loads(Path(sys.argv[1]).read_text())
found = {{name: answers(InterdomainConfig(**each)) for name, each in fields.items()}}
loaded = [module for name, module in sys.modules.items() if name.startswith("modeling_interdomain.")]
files = [module.__file__ for module in loaded if not hasattr(module, "__path__")]
print(json.dumps([found, files, triton]))
"""
REMOTE = """
import sys
from pathlib import Path
from transformers import AutoConfig

sys.modules["modeling_interdomain"] = None
for folder in map(Path, sys.argv[1:]):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.state_sizes(7), config.base_model_tp_plan
    modules = [name for name in sys.modules if name.startswith(f"transformers_modules.{folder.name}.")]
    print(*(name.split(".")[-1] for name in modules if not hasattr(sys.modules[name], "__path__")))
"""


def _run(program: str, *arguments, folder: Path) -> list[str]:
    environment = os.environ | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_configuration_loads_no_layers_and_says_the_same(make_config, tmp_path):
    """Every kind of model, in a process in which nothing else of the package is imported."""
    names = MIXERS | VARIANTS | PAIRS | WINDOWED
    fields = {name: json.loads(make_config(name).to_json_string()) for name in names}
    (tmp_path / "fields.json").write_text(json.dumps(fields))
    found, files, triton = json.loads(_run(ALONE, tmp_path / "fields.json", PACKAGE, folder=tmp_path)[-1])
    modules = {".".join(Path(file).relative_to(PACKAGE).with_suffix("").parts) for file in files}
    assert {name for name in modules if not name.endswith(".configuration")} == LIGHT and not triton
    here = {name: answers(InterdomainConfig(**each)) for name, each in fields.items()}
    assert found == json.loads(json.dumps(here))


def test_three_files_of_a_checkpoint_make_its_configuration(make_config, tmp_path):
    """And one more where there are sparse branches; the loader copies no others."""
    expected = {"interdomain": RUN, "hax": RUN | {"mixers_sparse_parts"}}
    for name in expected:
        make_config(name).save_pretrained(tmp_path / name)
        needed = get_relative_import_files(tmp_path / name / "configuration_interdomain.py")
        assert {Path(file).stem for file in needed} == expected[name] - {"configuration_interdomain"}
    printed = _run(REMOTE, *(tmp_path / name for name in expected), folder=tmp_path)
    assert [set(line.split()) for line in printed[-2:]] == list(expected.values())


SPECIFIED = {
    "softmax": {"Softmax"},
    "s4d": {"Recurrent", "KeyValue", "S4D", "Interdomain"},  # the last, whose mixer is in a file with what both share
    "window": {"Recurrent", "Window", "Expert"},
    "cheems": {"Recurrent", "SSD", "Softmax", "InnerFunction", "Expert"},
}


@pytest.mark.parametrize("name", SPECIFIED)
def test_what_a_model_does_not_have_is_not_specified_in_its_folder(name, make_config):
    config, found = make_config(name), {"__name__": "configuration_fields"}
    exec(flat_code(config)["configuration_fields"], found)
    assert set(found["TOKEN_MIXERS"]) == set(config.mixers_per_layer)
    specified = {each.removesuffix("Specification") for each in found if each.endswith("Specification")}
    assert specified == SPECIFIED[name] | {"Mixer"}


def test_every_specification_has_its_class():
    assert all(issubclass(kind, TokenMixer) for kind in TOKEN_MIXERS.values())
    assert object not in FEED_FORWARDS.values()


def test_gates_are_asked_for_where_the_operator_has_them():
    assert GATED_BACKENDS == gates.GATED_BACKENDS
