"""Runs the tests that Transformers has for its own models, unmodified, on ours."""

import unittest

import pytest
import torch
from transformers.testing_utils import torch_device

from modeling_interdomain import (
    InterdomainConfig,
    InterdomainForCausalLM,
    InterdomainForSequenceClassification,
    InterdomainModel,
)
from tests import test_fsdp_mixin, test_tensor_parallel_mixin
from tests.test_configuration_common import ConfigTester
from tests.test_fsdp_mixin import FSDPTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin

# The tests that cannot apply, each with its reason. Everything else runs, or is skipped by the library itself.
NOT_APPLICABLE = {
    "test_generation_tester_mixin_inheritance": "GenerationTesterMixin is not in the source distribution.",
}

# By default the distributed tests run only for some of the library's own models; both files offer this switch.
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None


class InterdomainModelTester:
    """Gives the library's tests a tiny configuration, its inputs and the sizes they check against."""

    base_model_class = InterdomainModel
    causal_lm_class = InterdomainForCausalLM
    sequence_classification_class = InterdomainForSequenceClassification

    is_training = True
    batch_size = 4
    seq_length = 7
    vocab_size = 99
    hidden_size = 32
    intermediate_size = 64
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(self, parts):
        self.parts = parts
        self.hidden_size = parts.get("hidden_size", self.hidden_size)

    def config_fields(self):
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": 2,
            "state_size": 8,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rope_placement": "before",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        } | self.parts

    def get_config(self):
        return InterdomainConfig(**self.config_fields())

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        # Row n has n + 1 tokens and then padding.
        attention_mask = torch.ones_like(input_ids).tril().to(torch_device)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}


class TransformersSuite(ModelTesterMixin, TrainingTesterMixin, TensorParallelTesterMixin, FSDPTesterMixin):
    # Tests that look at one class take the first: the one with logits, a loss and generate.
    all_model_classes = (InterdomainForCausalLM, InterdomainModel, InterdomainForSequenceClassification)
    # The library dates a model by the copyright line of its configuration file and would excuse one without a date.
    test_can_init_all_missing_weights_before_2023 = True

    parts = None

    def setUp(self):
        if reason := NOT_APPLICABLE.get(self._testMethodName):
            self.skipTest(reason)
        self.model_tester = InterdomainModelTester(self.parts)

    def test_model_rope_scaling_from_config_1_dynamic(self):
        """A state holds turned keys, which a longer text cannot turn again: such layers refuse what others do."""
        config = self.model_tester.get_config()
        if set(config.layer_types) == {"full_attention"}:
            super().test_model_rope_scaling_from_config_1_dynamic()
            return
        config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 10.0}
        with self.assertRaisesRegex(ValueError, 'rope_type "dynamic" changes its angles with the length'):
            InterdomainModel(config)

    def test_config(self):
        ConfigTester(self, InterdomainConfig, **self.model_tester.config_fields()).run_common_tests()


class InterdomainTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": "interdomain"}


class StateSpaceTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": ["ssd", "s4d"], "feed_forwards": ["none", "mlp"]}


@pytest.mark.slow
class SelectiveScanTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": ["selective_scan", "softmax"], "feed_forwards": ["none", "mlp"]}
    has_attentions = False  # of selective scans: every channel would have a map of its own


class HybridTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": ["interdomain", "softmax"]}


class CheemsTest(TransformersSuite, unittest.TestCase):
    parts = {
        "token_mixers": ["ssd", "inner_function"],
        "feed_forwards": ["cdmoe", "mlp"],  # so that every entry of the tensor parallel plan finds its module
        "hidden_size": 64,  # as the tests of FSDP set it: inner functions want heads that are as wide together
        "num_key_value_heads": 4,
    }


# With those above every token mixer meets every feed-forward layer; both kinds of it in each model, so that every entry
# of the tensor parallel plan finds its module.
@pytest.mark.slow
@pytest.mark.exhaustive
class InterdomainExpertsTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": ["interdomain", "selective_scan"], "feed_forwards": ["cdmoe", "mlp"]}
    has_attentions = False  # of selective scans: every channel would have a map of its own


@pytest.mark.slow
@pytest.mark.exhaustive
class SelectiveScanExpertsTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": ["selective_scan", "interdomain"], "feed_forwards": ["cdmoe", "mlp"]}
    has_attentions = False  # of selective scans: every channel would have a map of its own


@pytest.mark.slow
@pytest.mark.exhaustive
class S4DExpertsTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": ["s4d", "softmax"], "feed_forwards": ["cdmoe", "mlp"]}


@pytest.mark.slow
@pytest.mark.exhaustive
class SoftmaxExpertsTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": ["softmax", "ssd"], "feed_forwards": ["cdmoe", "mlp"]}


@pytest.mark.slow
@pytest.mark.exhaustive
class InnerFunctionExpertsTest(TransformersSuite, unittest.TestCase):
    parts = CheemsTest.parts | {"token_mixers": ["inner_function", "ssd"], "dynamic_mask": "value"}


class SoftmaxTest(TransformersSuite, unittest.TestCase):
    parts = {"token_mixers": "softmax"}


def test_every_skipped_test_exists():
    assert not [name for name in NOT_APPLICABLE if not hasattr(TransformersSuite, name)]
