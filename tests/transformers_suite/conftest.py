"""Makes the test files of the installed Transformers importable as `tests`, next to our own tests of that name."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers.models.auto import modeling_auto

from tests.sdist import SdistUnavailable, fetch_tests_folder

STAND_INS = Path(__file__).parent / "stand_ins"

# Modules that the library's files import, not tests of ours.
collect_ignore = [str(STAND_INS)]

# The library's tests decide by class name which labels a model takes and which class is the base model.
OUR_CLASSES = {
    "MODEL_MAPPING_NAMES": "InterdomainModel",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "InterdomainForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "InterdomainForSequenceClassification",
}

# The marks that the library's files put on their tests.
MARKERS = ("is_training_test", "is_tensor_parallel_test", "is_fsdp_test", "torch_compile_test", "accelerate_tests")
MARKERS += ("flash_attn_test", "flash_attn_3_test", "flash_attn_4_test")


def extend_tests_package(folder: Path) -> None:
    # The library's files import each other as `tests.test_modeling_common`, and pytest has already named this folder
    # `tests.transformers_suite`: one package with three folders serves both, ours first so that nothing hides them.
    package = sys.modules.setdefault("tests", ModuleType("tests"))
    package.__path__ = [*getattr(package, "__path__", ()), str(STAND_INS / "tests"), str(folder)]
    # The processes of the distributed tests start with this path and find the same files through stand_ins/tests.
    sys.path.append(str(STAND_INS))


def name_our_classes() -> None:
    for mapping, class_name in OUR_CLASSES.items():
        getattr(modeling_auto, mapping)["interdomain"] = class_name


try:
    extend_tests_package(fetch_tests_folder("transformers"))
    unavailable = None
except SdistUnavailable as error:
    unavailable = str(error)
else:
    name_our_classes()


def pytest_configure(config):
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: set by the tests of Transformers")


# One of the five models takes the long tests, by marker or name, with the fast ones, the hybrid those of tensor
# parallelism, which start several processes; those of sharded parameters, likewise, are all slow (tests/test_engines.py
# has a fast one).
FAST_MODEL = {
    "test_bc_torch_dtype": "InterdomainTest",
    "is_training_test": "InterdomainTest",
    "is_tensor_parallel_test": "HybridTest",
    "is_fsdp_test": None,
}


def pytest_itemcollected(item):
    for name, model in FAST_MODEL.items():
        if (item.name == name or item.get_closest_marker(name)) and item.parent.name != model:
            item.add_marker(pytest.mark.slow)


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip(unavailable, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return SkippedModule.from_parent(parent, path=module_path) if unavailable else None
