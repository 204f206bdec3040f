"""Small models whose outputs depend clearly on their past, and the comparisons that several test files share."""

import copy
import dataclasses
import functools
import importlib
import json
import os
import resource
import signal
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before Triton is imported: kernels then run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers.utils import logging

from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM, InterdomainStaticCache
from modeling_interdomain.generation import lookup as generation_lookup
from modeling_interdomain.ops.common import launch as op_common_launch
from tests.operator_checks import ring_by_place

if torch.cuda.is_available():
    torch.backends.cudnn.allow_tf32 = False  # what is compared is float32
    # A kernel is compiled for one of the configurations that would be timed, each worker has another.
    worker, tuned = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), op_common_launch.tuned

    def _one_configuration(kernel, key, configurations=op_common_launch.CONFIGURATIONS, **options):
        return tuned(kernel, key, [configurations[worker % len(configurations)]], **options)

    op_common_launch.tuned = _one_configuration

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Of heads of 8 numbers, and beyond 16 tokens.
LENGTHENED = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}
PAD = 3
VOCABULARY = 48

EXPERTS = {"num_experts": 48, "expert_heads": 2, "experts_per_head": 3, "expert_key_dim": 6}

MIXERS = {
    "interdomain": {"token_mixers": "interdomain"},
    "interdomain-softmax": {"token_mixers": ["interdomain", "softmax"], "rope_parameters": ROPE},
    "softmax-interdomain": {"token_mixers": ["softmax", "interdomain"], "rope_parameters": ROPE},
    "softmax": {"token_mixers": "softmax", "rope_parameters": ROPE},
}
# Together they put every token mixer before every feed-forward layer: test_configuration.py.
VARIANTS = {
    "grouped": {"num_key_value_heads": 2},
    "one-group": {"num_key_value_heads": 1, "token_mixers": ["interdomain", "softmax"], "start": "random"},
    "wide-features": {"feature_dim": 12},
    "normalized": {"normalize": True},
    "diagonal": {"coefficient_matrix": "diagonal", "feed_forwards": ["none", "mlp"]},
    "identity": {"coefficient_matrix": "identity", "product": "hermitian"},
    "real-product": {"product": "real"},
    "rope-before": {"rope_parameters": ROPE, "rope_placement": "before", "feature_dim": 6},
    "rope-after": {
        "token_mixers": ["softmax", "interdomain"],
        "start": "random",
        "rope_parameters": ROPE,
        "rope_placement": "after",
    },
    "s4d": {"token_mixers": "s4d"},
    "s4d-grouped": {
        "token_mixers": ["s4d", "softmax"],
        "feed_forwards": ["cdmoe", "none"],
        "num_key_value_heads": 2,
        "use_output_gate": True,
        **EXPERTS,
    },
    "s4d-rope": {
        "token_mixers": "s4d",
        "feed_forwards": ["none", "mlp"],
        "rope_parameters": ROPE,
        "rope_placement": "before",
        "feature_dim": 6,
    },
    "single-input": {"state_input": "generic", "rope_parameters": ROPE, "rope_placement": "after"},
    "linear-readout": {"token_mixers": "s4d", "state_input": "key_value", "coefficient_matrix": "diagonal"},
    "fourier": {"feature_map": "fourier", "feature_dim": 6, "normalize": True, "input_norm": False, "product": "real"},
    "fourier-shifted": {"feature_map": "fourier_shifted", "feature_dim": 10, "num_key_value_heads": 1},
    "gated": {"use_output_gate": True, "use_output_norm": True, "input_norm": False},
    "no-convolution": {"conv_kernel": 1},
    "ssd": {
        "token_mixers": "ssd",
        "ssd_state_size": 6,
        "ssd_dt_bias": "time_step",
        "rope_parameters": ROPE,
        "rope_placement": "after",
    },
    "mamba2": {
        "token_mixers": "ssd",
        "feed_forwards": "none",
        "ssd_state_size": 5,
        "ssd_groups": 2,
        "ssd_head_dim": 10,
        "ssd_conv_kernel": 4,
        "ssd_conv_bias": True,
        "ssd_activation": "silu",
        "ssd_dt_bias": "time_step",
        "ssd_dt_limit": [0.01, 2.0],
        "ssd_norm": "after_gate",
        "use_output_gate": True,
    },
    "selective-scan": {
        "num_hidden_layers": 3,
        "token_mixers": "selective_scan",
        "feed_forwards": ["none", "mlp", "cdmoe"],
        "scan_channels": 40,
        "scan_state_size": 5,
        "scan_step_rank": 3,
        **EXPERTS,
    },
    "experts": {"token_mixers": ["interdomain", "softmax"], "feed_forwards": "cdmoe", **EXPERTS},
    "cheems": {
        "token_mixers": ["ssd", "inner_function"],
        "feed_forwards": "cdmoe",
        "ssd_state_size": 6,
        "inner_values": 5,
        "inner_value_dim": 8,
        "rope_parameters": ROPE,
        "rope_placement": "after",
        **EXPERTS,
    },
    "inner-function": {
        "num_hidden_layers": 3,
        "token_mixers": ["inner_function", "interdomain", "inner_function"],
        "feed_forwards": ["mlp", "mlp", "none"],
        "rope_parameters": ROPE,
        "dynamic_mask": "position",
        "inner_values": 5,
        "inner_value_dim": 8,
        "inner_values_per_token": 2,
    },
    "hax": {
        "token_mixers": ["interdomain", "softmax"],
        "rope_parameters": ROPE,
        "sparse_attention": ["hax", None],
        **{"sparse_keys": 8, "sparse_key_dim": 4, "sparse_hash_size": 4},
    },
    "window": {
        "num_hidden_layers": 3,
        "token_mixers": "window",
        "feed_forwards": ["mlp", "none", "cdmoe"],
        "num_key_value_heads": 2,
        "attention_window": 4,
        "attention_sinks": 2,
        "window_share": "counted",
        "window_write_gate": True,
        "window_points": 6,
        "attention_bias": True,
        "rope_parameters": ROPE,
        **EXPERTS,
    },
    "window-alone": {
        "token_mixers": ["window", "softmax"],
        "attention_window": 3,
        "attention_sinks": 0,
        "window_memory": False,
        "rope_parameters": ROPE,
    },
    "value-mask": {"token_mixers": ["interdomain", "softmax"], "dynamic_mask": "value", "num_key_value_heads": 2},
    "forget-gates": {"gates": "forget", "num_key_value_heads": 2},
    "delta-rule": {"token_mixers": ["interdomain", "softmax"], "gates": "forget", "delta_rule": True},
    "warped-time": {"gates": "warp", "num_key_value_heads": 2},
}
EACH_MIXER = (*MIXERS, "s4d", "cheems", "mamba2", "selective-scan", "hax", "window")
# What the oldest and the newest libraries meet; the other variants differ from these by sizes and operators of our own.
AT_ENDS = (*EACH_MIXER, "inner-function", "window-alone", "value-mask", "delta-rule")
# Every token mixer with every feed-forward layer, and every mask; tests of models take each of them, all exhaustive.
_PARTS = {
    "interdomain": {},
    "s4d": {},
    "softmax": {"rope_parameters": ROPE},
    "ssd": {"ssd_state_size": 6, "rope_parameters": ROPE, "rope_placement": "after"},
    "selective_scan": {"scan_channels": 40, "scan_state_size": 5, "scan_step_rank": 3},
    "inner_function": {"rope_parameters": ROPE, "inner_values": 5, "inner_value_dim": 8},
    "window": {"rope_parameters": ROPE, "attention_window": 4, "attention_sinks": 2},
}
_FEED_FORWARDS = {"mlp": {}, "cdmoe": EXPERTS}
PAIRS = {
    f"{mixer}, {feed_forward}": {"token_mixers": mixer, "feed_forwards": feed_forward} | parts | experts
    for mixer, parts in _PARTS.items()
    for feed_forward, experts in _FEED_FORWARDS.items()
}
PAIRS |= {
    f"{pair}, {mask}": PAIRS[pair] | {"dynamic_mask": mask}
    for pair in ("softmax, cdmoe", "inner_function, mlp", "inner_function, cdmoe")
    for mask in ("position", "hard", "value")
}


def edit_config(folder, **changes) -> None:
    """Write other values into the configuration of a saved model."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def dtypes_for(name: str) -> dict:
    """Pairs are compiled and exported in float64, where another order of sums is not to be told from a mistake."""
    state_dtype = "float64" if name in PAIRS else "float32"
    return {"dtype": getattr(torch, state_dtype), "state_dtype": state_dtype}


RECURRENT_PAIRS = [name for name in PAIRS if not name.startswith(("softmax", "inner_function"))]
EXHAUSTIVE_PAIRS = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for name in PAIRS]
# What holds keys that the next forward does not read: tests that compare whole caches leave it out.
WINDOWED = {
    "windowed": {
        "token_mixers": ["inner_function", "interdomain"],
        "inner_value_dim": 8,
        "dynamic_mask": "value",
        "dynamic_mask_window": 4,
    }
}


_BY_POSITION = "a mask by position tells positions that jump from positions that do not"
_HELD = "what a layer of this kind holds is said in the tests of its mixer or mask"
# What a pair, by part of its name, does not meet: {test: {part: reason}}.
NOT_OF_PAIRS = {
    "test_positions_that_jump_are_one_document": {"position": _BY_POSITION, "hard": _BY_POSITION},
    "test_ends_hold_whatever_else_is_given": {"position": _BY_POSITION, "hard": _BY_POSITION},
    "test_early_tokens_show_in_late_logits": {"ssd": "layers with steps as large as these have forgotten by then"},
    "test_layers_hold_what_their_mixers_need": dict.fromkeys(("s4d", "selective_scan", "value", "window"), _HELD),
}


@pytest.hookimpl(tryfirst=True)  # before -m looks for marks
def pytest_collection_modifyitems(items):
    _variants_in_turn(items)
    if os.environ.get("VERSIONS"):
        _few_at_ends(items)
    else:
        _each_value_once([item for item in items if item.get_closest_marker("each_value")])


def _few_at_ends(items) -> None:
    """At an end of the supported libraries a test meets each value of its parameters, and some are slow."""
    for item in items:
        if item.get_closest_marker("once"):
            item.add_marker(pytest.mark.slow)
    _each_value_once([item for item in items if hasattr(item, "callspec") and not item.get_closest_marker("slow")])


def _variants_in_turn(items) -> None:
    """Of a test's other parameters an arrangement of mixers meets all, a variant one in turn.

    Its others are exhaustive, and so is all of the pairs. At an end of the supported libraries some variants are slow.
    """
    cases = defaultdict(list)
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        name = next((values[x] for x in ("model", "each_mixer", "any_model", "recurrent_model") if x in values), None)
        if name in PAIRS:
            for part, reason in NOT_OF_PAIRS.get(item.originalname, {}).items():
                if part in name:
                    item.add_marker(pytest.mark.skip(reason=reason))
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.exhaustive)
        if name in VARIANTS:
            cases[item.path, item.originalname, name].append(item)
            if os.environ.get("VERSIONS") and name not in AT_ENDS:
                item.add_marker(pytest.mark.slow)
    turns = {name: turn for turn, name in enumerate(VARIANTS)}
    for (_, test, name), same in cases.items():
        # Tests begin at different places, so that a variant does not meet the same pads in all of them.
        kept = same[(turns[name] + len(test)) % len(same)]
        for item in same:
            if item is not kept:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.exhaustive)


def _each_value_once(items) -> None:
    """Of a test with several parameters as few cases are fast as have every value of each; the others are slow."""
    tests = defaultdict(dict)
    for item in items:
        values = {(name, repr(value)) for name, value in item.callspec.params.items()}
        tests[item.path, item.originalname][item] = values
    for cases in tests.values():
        for item in cases.keys() - _covering(cases):
            item.add_marker(pytest.mark.slow)


def _covering(cases: dict) -> set:
    """Some of `{case: values}` that together have every value: in turn the one with the most new, or rare, ones."""
    values, seen, chosen = set().union(*cases.values()), Counter(), set()
    while values > seen.keys():
        case = max(cases, key=lambda case: (len(cases[case] - seen.keys()), -sum(seen[value] for value in cases[case])))
        seen.update(cases[case])
        chosen.add(case)
    return chosen


LOG_LEVEL = logging.get_verbosity()


@pytest.fixture(autouse=True)
def library_log():
    """What a program says to the library's log (be quiet, no bars) ends with its test, also if a fixture has run it."""
    yield
    logging.set_verbosity(LOG_LEVEL)
    logging.enable_progress_bar()


@torch.no_grad()
def _strengthen(model: torch.nn.Module, seed: int) -> None:
    """Redraw every weight large enough that tokens, positions and the past all show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("log_a_real", "a_imag", "log_dt", "A_log", "dt_bias")):
            continue
        draw = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            draw = 1 + 0.2 * draw
        elif name.endswith("dynamic_mask.table"):
            draw = 1 + 0.5 * draw
        elif name.endswith((".C", ".B")) or "bias" in name:
            draw = 0.5 * draw
        elif "conv" not in name and "embed" not in name:
            draw = draw * parameter.shape[-1] ** -0.5 * (3 if "lm_head" in name else 1)
        parameter.copy_(draw)


@pytest.fixture
def kernels(monkeypatch):
    """For tests of fused kernels, on a GPU or in Triton's interpreter: what no kernel writes is NaN."""
    if not torch.cuda.is_available():
        if not op_common_launch.interpreted():
            pytest.skip("Without a GPU the kernels need TRITON_INTERPRET=1.")
        _patch_the_interpreter_once(monkeypatch)

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    # Dynamo remembers PyTorch's functions as it finds them the first time: later tests must not find ours gone.
    torch._dynamo.trace_rules.lookup(torch.empty_like)
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


def _patch_the_interpreter_once(monkeypatch) -> None:
    """It would make Triton's language its own again in every call inside a kernel: half of its time.

    And it would work out for every sum and product of integers whether it fits in 32 bits, and then, as it asserts
    nothing unless it debugs, throw that away: a third of what is left. Where offsets are large, `test_kernel_offsets`
    looks at what was read and written.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    done = set()

    def call(function, *args, **kwargs):
        module = function.fn.__module__
        if module not in done:
            interpreter._patch_lang(function.fn)
            done.add(module)
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", _scan_by_slices)
    _remember_types(monkeypatch, interpreter)


def _remember_types(monkeypatch, interpreter) -> None:
    """It would make the type of every result anew, its shape too, and a table of all types: a third of what is left."""
    core, known = interpreter.tl.core, {}
    make_block, make_tensor, in_numpy = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype

    def block_type(self, element_ty, shape):
        key = id(element_ty), *(getattr(size, "value", size) for size in shape)
        if key not in known:  # which keeps the type of elements, and so its id
            make_block(self, element_ty, shape)
            known[key] = dict(vars(self))
        self.__dict__.update(known[key])

    def tensor(self, handle, type):
        key = "tensor", id(type.scalar), *(type.shape if type.is_block() else ())
        if key not in known:
            make_tensor(self, None, type)
            known[key] = dict(vars(self))
        self.__dict__.update(known[key], handle=handle)

    def get_np_dtype(kind):
        key = "numpy", id(kind.scalar)
        if key not in known:
            known[key] = in_numpy(kind), kind
        return known[key][0]

    monkeypatch.setattr(core.block_type, "__init__", block_type)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(interpreter, "_get_np_dtype", get_np_dtype)


def _scan_by_slices(scan, inputs):
    """A prefix along an axis, one call of its function a place: the interpreter makes one a number."""
    numbers = [np.moveaxis(x.handle.data, scan.axis, 0) for x in inputs]
    kinds = [x.dtype for x in inputs]
    places = [tuple(scan.to_tensor(x[0], kind) for x, kind in zip(numbers, kinds, strict=True))]
    for i in range(1, len(numbers[0])):
        here = (scan.to_tensor(x[i], kind) for x, kind in zip(numbers, kinds, strict=True))
        places.append(scan.combine_fn.fn(*places[-1], *here))
    columns = ([x.handle.data for x in column] for column in zip(*places, strict=True))
    return [scan.to_tensor(np.stack(x, scan.axis), kind) for x, kind in zip(columns, kinds, strict=True)]


@pytest.fixture(scope="session")
def make_config():
    """`make_config("softmax" or another name of MIXERS, VARIANTS or PAIRS, **changes)`: a small configuration."""

    def make(name: str = "interdomain", **changes) -> InterdomainConfig:
        arguments = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "state_size": 6,
            "chunk_size": 4,
            "state_dtype": "float64",
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return InterdomainConfig(**arguments | (MIXERS | VARIANTS | PAIRS | WINDOWED)[name] | changes)

    return make


@pytest.fixture(scope="session")
def make_model(make_config):
    """`make_model(name, model_class, dtype, seed, **changes)`: float64 and in evaluation mode by default."""

    def make(name="interdomain", model_class=InterdomainForCausalLM, dtype=torch.float64, seed=0, **changes):
        torch.manual_seed(seed)
        model = model_class(make_config(name, **changes))
        _strengthen(model, seed)
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def copy_model(make_model):
    """`copy_model(name)` is `make_model(name)`, random numbers included, in a quarter of the time."""
    kept = functools.cache(lambda name: (make_model(name), torch.get_rng_state()))

    def copied(name: str) -> InterdomainForCausalLM:
        model, state = kept(name)
        torch.set_rng_state(state)
        return copy.deepcopy(model)

    return copied


@pytest.fixture(params=[*MIXERS, "cheems", *PAIRS])
def model(request, copy_model):
    """Every arrangement of token mixers, and the one without any of them."""
    return copy_model(request.param)


@pytest.fixture(params=[*EACH_MIXER, *PAIRS])
def each_mixer(request, copy_model):
    """Every arrangement of token mixers, every mixer, and one with a sparse branch, but not all of their variants."""
    return copy_model(request.param)


@pytest.fixture(params=[*MIXERS, *VARIANTS, *PAIRS])
def any_model(request, copy_model):
    """Every arrangement of token mixers and every variant of the recurrent one."""
    return copy_model(request.param)


WITHOUT_STATE = ("softmax", "window-alone")


@pytest.fixture(params=[*(name for name in (*MIXERS, *VARIANTS) if name not in WITHOUT_STATE), *RECURRENT_PAIRS])
def recurrent_model(request, copy_model):
    """Every model that has a recurrent layer with a state."""
    return copy_model(request.param)


@pytest.fixture(params=["dynamic", "static"])
def make_cache(request):
    """Both caches, with room for 64 tokens."""
    if request.param == "dynamic":
        return InterdomainCache
    return lambda config: InterdomainStaticCache(config, max_cache_len=64)


@pytest.fixture(scope="session")
def random_ids():
    """`random_ids(batch, length, seed=0)`: token ids that are never the pad token."""

    def draw(batch: int, length: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(PAD + 1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def left_padded(random_ids):
    """`left_padded(lengths, width, seed=0)`: ids and mask with the real tokens at the right end of each row."""

    def make(lengths: list[int], width: int | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
        width = max(lengths) if width is None else width
        mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
        ids = random_ids(len(lengths), width, seed)
        return {"input_ids": torch.where(mask.bool(), ids, PAD), "attention_mask": mask}

    return make


@pytest.fixture(scope="session")
def assert_same():
    """Equal up to the rounding of float64 (and of float32 where `generate()` rounds)."""

    def check(actual, expected, rtol: float = 1e-7, atol: float = 1e-8):
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)

    return check


@pytest.fixture(scope="session")
def assert_gradients_of_each_row():
    """`torch.func` gives each row of ids the gradients that it has alone."""

    def check(model, ids: torch.Tensor):
        parameters = {name: x.detach() for name, x in model.named_parameters()}

        def total(parameters, row):
            logits = torch.func.functional_call(model, parameters, (row[None],), {"use_cache": False}).logits
            return logits.square().sum()

        each = torch.func.vmap(torch.func.grad(total), in_dims=(None, 0))(parameters, ids)
        for row, one in enumerate(ids):
            model.zero_grad()
            total(dict(model.named_parameters()), one).backward()
            assert all(torch.allclose(each[name][row], x.grad) for name, x in model.named_parameters())

    return check


@pytest.fixture(scope="session")
def advance():
    """`advance(model, cache, ids)`: logits of a forward without gradients."""

    def run(model, cache, ids, **inputs):
        with torch.no_grad():
            return model(ids, past_key_values=cache, **inputs).logits

    return run


@pytest.fixture(scope="session")
def contents():
    """`contents(cache)`: copies of everything the next forward reads, layer by layer."""

    def copy(cache) -> list[torch.Tensor]:
        tensors = []
        for layer in cache.layers:
            tensors.append(torch.as_tensor(getattr(layer, "cumulative_length", 0)))
            if hasattr(layer, "commit"):
                layer.commit()
            if getattr(layer, "conv_states", None):
                tensors += [x for x in layer.conv_states.values() if x is not None]
            if getattr(layer, "recurrent_states", None):
                states = dict(getattr(layer, "states", layer.recurrent_states))  # by name, where there are names
                for ring in [name for name in states if f"{name}_places" in states]:
                    states[ring], states[f"{ring}_places"] = ring_by_place(states[ring], states[f"{ring}_places"])
                tensors += [x for x in states.values() if x is not None]
            if layer.__dict__.get("keys") is not None:
                tensors += [layer.keys, layer.values]
        return [x.detach().clone() for x in tensors]

    return copy


@pytest.fixture
def guess_ahead(monkeypatch):
    """`guess_ahead(text)`: prompt lookup guesses what follows in the text `[1, T]`, every third token wrong.

    At every fifth place it guesses nothing.
    """
    guesses = []

    def let(text):
        places = torch.arange(text.shape[1])
        wrong = torch.where(places % 3 == 2, (text + 1) % VOCABULARY, text)

        def likely(self, text):
            count = self.count if len(text) % 5 else 0
            found = wrong[0, len(text) : min(len(text) + count, self.max_length - 1)]
            guesses.append(len(found))
            return found

        monkeypatch.setattr(generation_lookup.LikelyLookup, "likely", likely)

    yield let
    assert sum(guesses) > 1, "the test has guessed next to nothing"


@pytest.fixture
def full_disk():
    """`with full_disk(n)`: no file can grow beyond n bytes."""

    class Limit:
        def __init__(self, size):
            self.size = size

        def __enter__(self):
            self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

        def __exit__(self, *error):
            resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
            signal.signal(signal.SIGXFSZ, self.handler)

    return Limit
