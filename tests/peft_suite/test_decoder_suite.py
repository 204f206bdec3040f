"""Runs the tests that PEFT has for decoders, unmodified, on two of our models."""

import importlib
import inspect
import sys
from types import ModuleType

import pytest
import torch
from datasets import Dataset, DatasetDict

from examples.text_data import train_tokenizer
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from tests.sdist import SdistUnavailable, fetch_tests_folder

MODELS = {
    "interdomain": {"token_mixers": ["interdomain", "softmax"]},
    "cheems": {
        "token_mixers": ["ssd", "inner_function"],
        "feed_forwards": "cdmoe",
        "inner_value_dim": 8,
        "ssd_norm": "after_gate",  # of what o_proj reads, PVERA takes the exponential
    },
}
QUOTES = ["So many books, so little time.", "Be yourself; everyone else is already taken."] * 8


def load_decoder_tests() -> ModuleType:
    # The files import each other relatively, so their folder becomes a package, of a name that no other tests have.
    package = ModuleType("peft_tests")
    package.__path__ = [str(fetch_tests_folder("peft"))]
    pytest.register_assert_rewrite("peft_tests")
    sys.modules["peft_tests"] = package
    # A large library that only the tests of image models need.
    diffusers = sys.modules.setdefault("diffusers", ModuleType("diffusers"))
    diffusers.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})
    tests = importlib.import_module("peft_tests.test_decoder_models")
    del sys.modules["diffusers"]
    return tests


try:
    tests = load_decoder_tests()
except SdistUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

# The parameters of the tests refer to these two lists.
tests.PEFT_DECODER_MODELS_TO_TEST[:] = MODELS
tests.SMALL_GRID_MODELS[:] = MODELS
tests.load_dataset_english_quotes = lambda: DatasetDict(train=Dataset.from_dict({"quote": QUOTES}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tokenizer = train_tokenizer(QUOTES, vocab_size=300)
    for name, parts in MODELS.items():
        config = InterdomainConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            state_size=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            eos_token_id=None,  # so that all rows of a batch are continued to the same length
            pad_token_id=tokenizer.pad_token_id,
            **parts,
        )
        InterdomainForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folder, monkeypatch):
    """There the name of the model is the path to it, whatever worker of pytest runs the test."""
    monkeypatch.chdir(folder)


class TestInterdomain(tests.TestDecoderModels):
    """All of PEFT's tests for decoders that take a model; conftest.py names those that cannot pass."""


# The others load models of their own from the Hub.
for name, function in inspect.getmembers(tests.TestDecoderModels, inspect.isfunction):
    if name.startswith("test_") and "model_id" not in inspect.signature(function).parameters:
        setattr(TestInterdomain, name, None)
