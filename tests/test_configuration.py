"""The configuration checks itself, and the presets are the paper's models."""

import ast
import copy
import inspect
import math
import re
import sys
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from modeling_interdomain import InterdomainCache, InterdomainConfig
from modeling_interdomain.cache.recurrent import RecurrentLayer
from modeling_interdomain.layers.common import backend_of
from modeling_interdomain.layers.configuration import ModelFields
from modeling_interdomain.mixers.interdomain.configuration import STARTS
from modeling_interdomain.model_cache.fingerprint import _fields_of
from modeling_interdomain.registry import FEED_FORWARDS, TOKEN_MIXERS
from tests.conftest import LENGTHENED, MIXERS, VARIANTS

PRESETS = sorted(Path(__file__).parents[1].glob("configuration/*/config.json"))
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# Softmax at 125M is the paper's own figure; the others follow from the shapes.
PARAMETERS = {
    "interdomain-125m": 135_416_208,
    "softmax-125m": 134_105_856,
    "interdomain-350m": 377_360_768,
    "softmax-350m": 373_867_520,
    "interdomain-760m": 783_094_848,
    "softmax-760m": 777_856_512,
    "interdomain-1.3b": 1_352_406_784,
    "softmax-1.3b": 1_345_423_360,
    "interdomain-norope-125m": 135_416_208,
    "interdomain-paper-125m": 135_416_208,
    "interdomain-delta-125m": 135_748_416,
    "interdomain-gates-125m": 135_637_680,
    "single-input-125m": 135_453_072,
    "linear-readout-125m": 135_388_560,
    "s4d-125m": 135_425_424,
    "s4d-rope-125m": 135_425_424,
    "s4d-350m": 377_385_344,
    "s4d-760m": 783_131_712,
    "s4d-1.3b": 1_352_455_936,
}
# The paper says 320M and 1.3B, and not how wide the shared MLP is: these counts follow from its other figures.
CHEEMS = {"cheems-320m": 315_349_236, "cheems-1.3b": 1_304_668_128}
CUBE = ("interdomain", "interdomain-norope", "single-input", "linear-readout", "s4d", "s4d-rope")
SHAPES = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 24), "1.3b": (24, 2048, 32)}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.parent.name)
def test_presets_load_and_build(path):
    config = AutoConfig.from_pretrained(path.parent)
    assert isinstance(config, InterdomainConfig)
    images = config.architectures == ["InterdomainForSequenceClassification"]
    with torch.device("meta"):
        model = (AutoModelForSequenceClassification if images else AutoModelForCausalLM).from_config(config)
    counts = PARAMETERS | CHEEMS
    if path.parent.name in counts:
        assert model.num_parameters() == counts[path.parent.name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_shapes_of_the_paper(name):
    config = AutoConfig.from_pretrained(Path(__file__).parents[1] / "configuration" / name)
    shape = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    assert shape == SHAPES[name.rsplit("-", 1)[1]]
    assert (config.vocab_size, config.head_dim, config.feature_dim, config.state_size) == (32000, 64, 64, 64)


def test_the_mechanism_cube_compares_models_of_one_size():
    """The bounds of the paper for its 125M variants."""
    counts = [PARAMETERS[f"{name}-125m"] for name in CUBE]
    assert min(counts) >= 135_379_344 and max(counts) <= 135_462_288
    assert abs(PARAMETERS["s4d-125m"] / PARAMETERS["interdomain-125m"] - 1) < 1e-4


def test_presets_of_a_size_differ_in_the_mechanism_only():
    folder = Path(__file__).parents[1] / "configuration"
    mechanism = {"token_mixers", "state_input", "rope_parameters", "rope_placement"}
    without_a_state = {"start", "output_init_rms", "sparse_gate_init", "sparse_query_init", *STARTS["recall"]}
    first = AutoConfig.from_pretrained(folder / "interdomain-125m").to_dict()
    for name in (*CUBE, "softmax"):
        other = AutoConfig.from_pretrained(folder / f"{name}-125m").to_dict()
        changed = {field for field in other if other[field] != first.get(field)}
        allowed = mechanism | (without_a_state if name == "softmax" else set())
        assert changed <= allowed | {"layer_types", "_name_or_path"}, name


def test_state_sizes_of_the_125m_models():
    """12 layers of 12 heads with 64 modes, 128 columns each, as pairs; keys and values of 2 x 768 a token and layer."""
    folder = Path(__file__).parents[1] / "configuration"
    sizes = {name: AutoConfig.from_pretrained(folder / f"{name}-125m").state_sizes(2048) for name in (*CUBE, "softmax")}
    assert all(sizes[name]["recurrent"] == 12 * 12 * 2 * 64 * 128 == 2_359_296 for name in CUBE)
    assert sizes["interdomain"]["convolution"] == 12 * 3 * 2 * 768
    assert sizes["softmax"] == {"recurrent": 0, "convolution": 0, "keys_values": 12 * 2 * 768 * 2048}


def test_state_sizes_of_cheems_320m():
    """21 SSD layers of 12 heads of 64 x 128, and 3 of inner functions, which keep 2 x 768 a token."""
    config = AutoConfig.from_pretrained(Path(__file__).parents[1] / "configuration" / "cheems-320m")
    assert config.state_sizes(1000) == {"recurrent": 2_064_384, "convolution": 0, "keys_values": 4_608 * 1000}


def test_state_sizes_are_those_of_a_cache(any_model, random_ids):
    cache = InterdomainCache(any_model.config)
    any_model(random_ids(1, 5), past_key_values=cache)
    sizes = {"recurrent": 0, "convolution": 0, "keys_values": 0}
    for name, layer in zip(any_model.config.mixers_per_layer, cache.layers, strict=True):
        if isinstance(layer, RecurrentLayer):
            windows, everything = (sum(x.numel() for x in held) for held in (layer.conv_state, layer.held()))
            sizes["recurrent"] += layer.state.numel()
            sizes["keys_values" if name == "window" else "convolution"] += windows
            if memory := everything - windows - layer.state.numel():
                sizes["sparse"] = sizes.get("sparse", 0) + memory
        else:
            sizes["keys_values"] += layer.keys.numel() + layer.values.numel()
    assert any_model.config.state_sizes(5) == sizes


def test_the_tests_meet_every_mixer_with_every_feed_forward(make_config):
    """What takes `any_model` says something of all pairs; names that other tests have registered are not ours."""
    met = set()
    for name in (*MIXERS, *VARIANTS):
        config = make_config(name)
        met |= set(zip(config.mixers_per_layer, config.feed_forwards_per_layer, strict=True))
    ours = [
        [name for name, part in table.items() if part is None or part.__module__.startswith("modeling_interdomain.")]
        for table in (TOKEN_MIXERS, FEED_FORWARDS)
    ]
    assert set(product(*ours)) <= met


@pytest.mark.parametrize("coefficients", ["full", "diagonal", "identity"])
@pytest.mark.parametrize("rope_placement", [None, "before", "after"])
def test_round_trip(tmp_path, coefficients, rope_placement):
    config = InterdomainConfig(
        coefficient_matrix=coefficients,
        rope_parameters=ROPE,
        rope_placement=rope_placement,
        num_hidden_layers=2,
        token_mixers=["softmax", "interdomain"],
    )
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


def test_layer_types_follow_the_mixers():
    config = InterdomainConfig(num_hidden_layers=3, token_mixers=["softmax", "interdomain", "interdomain"])
    assert config.layer_types == ["full_attention", "linear_attention", "linear_attention"]
    config.layer_types = ["full_attention"] * 3
    assert config.layer_types[1] == "linear_attention"
    assert InterdomainConfig().layer_types == ["linear_attention"] * 12


def test_no_rope_unless_asked_for():
    assert InterdomainConfig().rope_parameters is None
    assert copy.deepcopy(InterdomainConfig()).rope_parameters is None
    assert InterdomainConfig(rope_theta=5000.0).rope_parameters["rope_theta"] == 5000.0


def test_the_older_name_of_rotary_embeddings_asks_for_them():
    config = InterdomainConfig(token_mixers="softmax", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(("width", "expected"), [(768, 2048), (1024, 2816), (1536, 4096), (2048, 5504)])
def test_intermediate_size_is_rounded_up(width, expected):
    assert InterdomainConfig(hidden_size=width, num_attention_heads=width // 64).intermediate_size == expected


FAMILIES = [kind for kind in InterdomainConfig.__mro__[1:] if issubclass(kind, ModelFields)]


def _own_fields(kind):
    return [field for field in fields(kind) if field.name in vars(kind)["__annotations__"]]


def test_every_field_belongs_to_one_family_and_is_described():
    """Where it is declared, and in `help(InterdomainConfig)`."""
    declared = [field.name for kind in FAMILIES for field in _own_fields(kind)]
    inherited = {field.name for field in fields(PreTrainedConfig)}
    assert len(set(declared)) == len(declared)
    assert set(declared) == {field.name for field in fields(InterdomainConfig)} - inherited
    assert set(declared) == _fields_of(InterdomainConfig)
    for kind in FAMILIES:
        for field in _own_fields(kind):
            entry = rf"^    (\w+, )*{field.name}(, \w+)*: "
            assert re.search(entry, inspect.getdoc(kind), re.M) and re.search(entry, InterdomainConfig.__doc__, re.M)


@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_types_of_every_family_are_checked(kind):
    """When a configuration is made, and when a field is assigned."""
    for field in _own_fields(kind):
        wrong = object()
        with pytest.raises(StrictDataclassError, match=field.name):
            InterdomainConfig(**{field.name: wrong})
        with pytest.raises(StrictDataclassError, match=field.name):
            setattr(InterdomainConfig(), field.name, wrong)


def test_fields_are_free_of_torch():
    """What declares them imports the standard library and what other families build on."""
    for path in (Path(__file__).parents[1] / "modeling_interdomain").rglob("configuration.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= sys.stdlib_module_names
            if isinstance(node, ast.ImportFrom):
                top = node.module.split(".")
                assert top[-1] == "configuration" if node.level else top[0] in sys.stdlib_module_names


BAD_FIELDS = {
    "heads that do not divide the width": ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size = 100"),
    "groups that do not divide the heads": ({"num_key_value_heads": 5}, "num_key_value_heads = 5 must divide"),
    "an unknown mixer": ({"token_mixers": "mamba"}, "token_mixers must be made of .*; got mamba"),
    "too few mixers": ({"token_mixers": ["softmax"]}, "token_mixers has 1 names for num_hidden_layers = 12"),
    "an unknown product": ({"product": "dot"}, "product must be one of"),
    "an unknown backend": ({"backend": "cuda"}, "backend must be one of"),
    "an unknown coefficient matrix": ({"coefficient_matrix": "toeplitz"}, "coefficient_matrix must be one of"),
    "an unknown feature map": ({"feature_map": "relu"}, "feature_map must be one of"),
    "an unknown state dtype": ({"state_dtype": "int8"}, "state_dtype must be one of"),
    "an unknown rope placement": ({"rope_placement": "around"}, "rope_placement must be one of"),
    "a rope placement without rope": ({"rope_placement": "before"}, "rope_placement = 'before' needs rope_parameters"),
    "an odd head": (
        {"hidden_size": 36, "num_attention_heads": 4, "rope_parameters": dict(ROPE)},
        "rope_parameters needs an even head_dim",
    ),
    "an odd head beside even features": (
        {"hidden_size": 36, "num_attention_heads": 4, "feature_dim": 8, "rope_parameters": dict(ROPE)},
        "rope_parameters needs an even head_dim and feature_dim, got 9 and 8",
    ),
    "no state": ({"state_size": 0}, "state_size must be a positive integer, got 0"),
    "no kernel": ({"conv_kernel": 0}, "conv_kernel must be a positive integer, got 0"),
    "an unknown state input": ({"state_input": "both"}, "state_input must be one of"),
    "a normalised readout without a query": ({"token_mixers": "s4d", "normalize": True}, "normalize divides by"),
    "rotated Fourier features": (
        {"feature_map": "fourier", "rope_parameters": dict(ROPE), "rope_placement": "after"},
        "feature_map = 'fourier' knows no rotations",
    ),
    "odd Fourier features": ({"feature_map": "fourier", "feature_dim": 5}, "needs an even feature_dim, got 5"),
    "a recurrence that sees later tokens": ({"bidirectional": True}, "bidirectional needs softmax in all layers"),
    "no patch": ({"patch_size": 0}, "patch_size and num_channels must be positive, got 0 and 3"),
    "odd features beside an even head": (
        {"feature_dim": 7, "rope_parameters": dict(ROPE)},
        "rope_parameters needs an even head_dim and feature_dim, got 64 and 7",
    ),
    "no channel": (
        {"patch_size": 2, "num_channels": 0},
        "patch_size and num_channels must be positive, got 2 and 0",
    ),
    "steps in the wrong order": ({"time_step_min": 1.0}, "time_step_min = 1.0 must be positive and at most"),
    "negative rollback": ({"max_rollback": -1}, "max_rollback must not be negative"),
    "steps without an end": ({"time_step_max": math.inf}, "time_step_max = inf, which must be finite"),
    "a negative epsilon": ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a finite number from 0, got -1.0"),
    "an epsilon that is no number": ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number from 0, got"),
    "a negative spread": (
        {"initializer_range": -0.02},
        "initializer_range must be a finite number from 0, got -0.02",
    ),
    "more than all dropped": (
        {"attention_dropout": 1.5},
        "attention_dropout must be a finite number from 0 to 1, got 1.5",
    ),
    "less than none dropped": (
        {"attention_dropout": -0.5},
        "attention_dropout must be a finite number from 0 to 1, got -0.5",
    ),
    "a loss that is no number": (
        {"aux_loss_coef": math.nan},
        "aux_loss_coef must be a finite number from 0, got nan",
    ),
    "a negative loss": ({"aux_loss_coef": -1.0}, "aux_loss_coef must be a finite number from 0, got -1.0"),
    "angles of no base": (
        {"token_mixers": "softmax", "rope_parameters": ROPE | {"rope_theta": None}},
        "rope_theta must be a positive and finite number",
    ),
    "angles without a base": (
        {"token_mixers": "softmax", "rope_parameters": ROPE | {"rope_theta": 0.0}},
        "rope_theta must be a positive and",
    ),
    **{
        f"angles {factor} times slower": (
            {"token_mixers": "softmax", "rope_parameters": ROPE | {"rope_type": "linear", "factor": factor}},
            f"factor must be a positive and finite number, got {factor!r}",
        )
        for factor in (0.0, -2.0, math.nan, "2")
    },
    "angles of an endless base": (
        {"token_mixers": "softmax", "rope_parameters": ROPE | {"rope_theta": math.inf}},
        "rope_theta must be a positive and finite number, got inf",
    ),
}


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_bad_fields_are_named(fields, message):
    with pytest.raises(Exception, match=message):
        InterdomainConfig(**fields)


UNKNOWN_NAMES = {
    "hidden_act": ({"hidden_act": "nope"}, "hidden_act must be an activation of Transformers, .* got 'nope'"),
    "of experts": (
        {"hidden_act": "nope", "feed_forwards": "cdmoe", "num_experts": 16},
        "hidden_act must be an activation of Transformers, .* got 'nope'",
    ),
    "rope_type": (
        {"token_mixers": "softmax", "rope_parameters": ROPE | {"rope_type": "foo"}},
        "rope_type must be one of default, linear, .*; got 'foo'",
    ),
}


@pytest.mark.parametrize(("fields", "message"), UNKNOWN_NAMES.values(), ids=UNKNOWN_NAMES)
def test_names_that_the_library_does_not_know_are_named(fields, message):
    """When a model is made: a configuration needs no PyTorch, and the library's tables do."""
    config = InterdomainConfig(**SMALL | fields)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", LENGTHENED)
@pytest.mark.parametrize(
    ("mixers", "placement"),
    [
        *((mixer, "after") for mixer in ("interdomain", "s4d", "ssd")),
        *(([mixer, "softmax"], None) for mixer in ("interdomain", "s4d", "ssd", "selective_scan")),
        (["interdomain", "inner_function"], "before"),
    ],
    ids=str,
)
def test_a_state_stands_beside_no_angles_of_the_length(kind, mixers, placement, make_config):
    """What it holds cannot be rotated again; nor is a cached hybrid then the whole one, or a row its own."""
    message = f'rope_type "{kind}" changes its angles with the length, and the state of recurrent layers cannot be'
    with pytest.raises(StrictDataclassError) as error:
        make_config(token_mixers=mixers, rope_parameters=LENGTHENED[kind], rope_placement=placement)
    assert message in str(error.value.__cause__)
    config = make_config(token_mixers=mixers, rope_parameters=dict(ROPE), rope_placement=placement)
    config.rope_parameters = dict(LENGTHENED[kind])  # as a checkpoint of before has it
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_a_state_stands_beside_angles_that_stay(kind, make_config):
    more = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    rope = dict(ROPE) | {"rope_type": kind} | ({} if kind == "default" else more)
    make_config(token_mixers=["interdomain", "softmax"], rope_parameters=rope, rope_placement="after")
    # Nothing is rotated, or nothing but keys.
    make_config(rope_parameters=LENGTHENED["dynamic"])
    make_config("softmax", rope_parameters=LENGTHENED["dynamic"])


def test_a_factor_that_is_none_is_none_at_all(make_config):
    """As configurations of other models write it."""
    assert make_config("softmax", rope_parameters=dict(ROPE) | {"factor": None}).rope_parameters["factor"] is None


# What a model computes, over a folder of softmax layers: assigned to its configuration, or an override in loading it.
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
EXPERTS = {"feed_forwards": "cdmoe", "num_experts": 16, "expert_heads": 1, "experts_per_head": 2}
BAD_OVERRIDES = {
    "an unknown mixer": ({"token_mixers": "mamba"}, "token_mixers must be made of .*; got mamba"),
    "an unknown feed-forward": ({"feed_forwards": "moe"}, "feed_forwards must be made of .*; got moe"),
    "too few mixers": ({"token_mixers": ["softmax"]}, "token_mixers has 1 names for num_hidden_layers = 2"),
    "too few branches": ({"token_mixers": "ssd", "sparse_attention": ["hax"]}, "sparse_attention has 1 names"),
    "a branch beside softmax": ({"sparse_attention": "hax"}, "sparse_attention stands beside recurrent layers"),
    "a window without a value": ({"dynamic_mask_window": 4}, 'dynamic_mask_window = 4 .* needs dynamic_mask = "value"'),
    "a mask without attention": ({"token_mixers": "ssd", "dynamic_mask": "hard"}, "dynamic_mask = 'hard' masks atten"),
    "no grid of experts": (
        EXPERTS | {"experts_per_head": 8},
        "num_experts = 16 makes a grid of 4 x 4 .* cannot find experts_per_head = 8",
    ),
    "half a key": (EXPERTS | {"expert_key_dim": 7}, "expert_key_dim must be even"),
    "groups of heads": ({"token_mixers": "ssd", "ssd_groups": 3}, "ssd_groups = 3 must divide"),
    "more inner values than there are": (
        {"token_mixers": "inner_function", "inner_values_per_token": 9},
        "inner_values_per_token = 9",
    ),
    "no rotations": ({"rope_parameters": None, "rope_placement": "after"}, "rope_placement = 'after' needs rope_par"),
    "an unknown state dtype": ({"state_dtype": "int8"}, "state_dtype must be one of"),
    "steps in the wrong order": ({"time_step_min": -1.0}, "time_step_min = -1.0 must be positive and at most"),
    "no output": ({"output_init_rms": -1.0}, "output_init_rms must be positive and finite"),
    "no heads": ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer"),
}


@pytest.fixture(scope="module")
def softmax_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax")
    config = InterdomainConfig(token_mixers="softmax", rope_parameters=dict(ROPE), **SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("fields", "message"), BAD_OVERRIDES.values(), ids=BAD_OVERRIDES.keys())
def test_bad_overrides_are_named(softmax_folder, fields, message):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(softmax_folder, **fields)
    config = AutoConfig.from_pretrained(softmax_folder)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(config)


def test_a_model_of_the_first_layers_takes_the_first_names():
    parts = {"token_mixers": ["ssd", "softmax"], "feed_forwards": ["none", "mlp"], "sparse_attention": ["hax", None]}
    config = InterdomainConfig(**parts, dynamic_mask="position", **SMALL)
    config.num_hidden_layers = 1
    names = {name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
    assert any("layers.0.token_mixer.recurrence" in name for name in names)
    assert not any("mlp" in name or "layers.1" in name for name in names)


def test_a_backend_that_an_operator_has_not_is_auto(make_config):
    config = make_config(backend="fft")
    assert backend_of(config) == "fft" and backend_of(config, ("auto", "chunk")) == "auto"
    assert backend_of(config, ("auto", "fft")) == "fft"


def test_numbers_without_end_are_none():
    for name in ("rms_norm_eps", "initializer_range"):
        with pytest.raises(Exception, match=f"{name} must be a finite number from 0, got inf"):
            InterdomainConfig(**{name: float("inf")})
