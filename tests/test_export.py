"""A whole model outside PyTorch: prefill and decoding as exported programs and in onnxruntime."""

import pytest
import torch
from torch.export import Dim

from modeling_interdomain import InterdomainCache, InterdomainForSequenceClassification
from modeling_interdomain.registry import TOKEN_MIXERS
from tests.conftest import EXHAUSTIVE_PAIRS, dtypes_for

MODELS = [
    "interdomain-softmax",
    "s4d",
    "ssd",
    "mamba2",
    "selective-scan",
    "experts",
    "cheems",
    "inner-function",
    "value-mask",
]
SIZES = [(2, 40), (3, 9), (1, 70)]


def _held(cache) -> list[torch.Tensor]:
    """What the next token reads: windows and states, or keys and values, layer by layer."""
    return [
        x for layer in cache.layers for x in (layer.held() if hasattr(layer, "held") else (layer.keys, layer.values))
    ]


def _cache_of(config, held, tokens: int) -> InterdomainCache:
    """A cache that holds copies of these tensors after so many tokens."""
    cache, held = InterdomainCache(config), iter(held)
    for layer, mixer in zip(cache.layers, config.mixers_per_layer, strict=True):
        if not hasattr(layer, "held"):
            layer.update(next(held), next(held))
            continue
        convolved = sum(stream.convolved for stream in TOKEN_MIXERS[mixer].projections(config))
        count = 5 if mixer == "window" else convolved  # keys, values, how many were read, sinks
        windows = [next(held) for _ in range(count)]
        layer.write(windows, {"state": next(held)}, tokens)
    return cache


class Prefill(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True)
        return output.logits, *_held(output.past_key_values)


class Decode(torch.nn.Module):
    """One token from and to the tensors of a cache; the mask says how many went before, and which of them are pads."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, *held):
        cache = _cache_of(self.model.config, held, attention_mask.shape[1] - 1)
        with torch.no_grad():
            logits = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache).logits
        return logits, *_held(cache)


def _prompt(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with pads on the left of the second one."""
    ids = torch.randint(4, 48, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1:, :3] = 0
    return ids, mask


def _any_prompt() -> tuple[dict, dict]:
    batch, length = Dim("batch"), Dim("length", min=2)
    return {0: batch, 1: length}, {0: batch, 1: length}


def _assert_same(found, expected, mask=None, atol=1e-5):
    found, expected = ([torch.as_tensor(x) for x in outputs] for outputs in (found, expected))
    if mask is not None:  # what stands at a pad is nobody's
        real = mask.bool()
        found[0], expected[0] = found[0][real], expected[0][real]
        for outputs in (found, expected):  # keys and values of attention have the tokens of the prompt, too
            outputs[1:] = [
                x.transpose(1, 2)[real] if x.ndim == 4 and x.shape[2] == mask.shape[1] else x for x in outputs[1:]
            ]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)


@pytest.fixture(
    params=[MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:]), *EXHAUSTIVE_PAIRS]
)
def model(request, make_model):
    return make_model(request.param, **dtypes_for(request.param))


# Those that onnxruntime takes half a minute and more to load.
LONG = ("s4d", "selective-scan", "experts", "inner-function", "value-mask")


@pytest.fixture(params=[pytest.param(x, marks=[pytest.mark.exhaustive] * (x in LONG)) for x in MODELS])
def slow_model(request, make_model):
    """With the phases of a random start. Those of the default go up to pi a token, which onnxruntime turns in float32:
    after 70 tokens single numbers of a state of size 20 are 3e-4 off there, and within 3e-5 of float64 here."""
    return make_model(request.param, dtype=torch.float32, state_dtype="float32", start="random")


def test_prefill_with_a_mask(model):
    """Exported while its parameters ask for gradients, as after training."""
    program = torch.export.export(Prefill(model), _prompt(2, 24), dynamic_shapes=_any_prompt()).module()
    for size in SIZES:
        prompt = _prompt(*size)
        with torch.no_grad():
            _assert_same(program(*prompt), Prefill(model)(*prompt), prompt[1])


DECODERS = [
    "interdomain-softmax",
    "s4d-rope",
    "rope-after",
    "ssd",
    "mamba2",
    "selective-scan",
    "cheems",
    "inner-function",
]


def _decoding(make_model, name: str, batch: int = 2, length: int = 24):
    """The module, and its arguments after a prompt with pads."""
    model = make_model(name, **dtypes_for(name)).requires_grad_(False)
    ids, mask = _prompt(batch, length)
    with torch.no_grad():
        held = _held(model(ids, attention_mask=mask, use_cache=True).past_key_values)
    return Decode(model), (ids[:, :1], torch.cat([mask, mask[:, -1:]], dim=1), *held)


def _any_cache(arguments) -> tuple:
    """Any batch, after any number of tokens: keys and values are the tensors with that axis."""
    batch, past = Dim("batch"), Dim("past")
    tokens = arguments[1].shape[1] - 1
    held = tuple({0: batch, 2: past} if x.ndim == 4 and x.shape[2] == tokens else {0: batch} for x in arguments[2:])
    return {0: batch}, {0: batch, 1: past + 1}, held


def _decoded(run, arguments, steps: int = 3) -> list[torch.Tensor]:
    logits, (ids, mask, *held) = [], arguments
    for _ in range(steps):
        found, *held = (torch.as_tensor(x) for x in run(ids, mask, *held))
        logits.append(found)
        ids, mask = found[:, -1:].argmax(-1), torch.nn.functional.pad(mask, (0, 1), value=1)
    return [*logits, *held]


@pytest.mark.parametrize(
    "name", [DECODERS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in DECODERS[1:]), *EXHAUSTIVE_PAIRS]
)
def test_decoding(name, make_model):
    decode, arguments = _decoding(make_model, name)
    program = torch.export.export(decode, arguments, dynamic_shapes=_any_cache(arguments)).module()
    for size in SIZES:
        _, arguments = _decoding(make_model, name, *size)
        _assert_same(_decoded(program, arguments), _decoded(decode, arguments))


def _session(module, arguments, path, dynamic_shapes=None):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the runtime of the exported graph is an extra")
    pytest.importorskip("onnxscript", reason="PyTorch's exporter needs it")
    torch.onnx.export(module.eval(), arguments, dynamic_shapes=dynamic_shapes, dynamo=True, verbose=False).save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return lambda *given: session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})


@pytest.mark.slow
def test_prefill_in_onnxruntime(slow_model, tmp_path):
    run = _session(Prefill(slow_model), _prompt(2, 24), tmp_path / "prefill.onnx", _any_prompt())
    for size in SIZES:
        prompt = _prompt(*size)
        with torch.no_grad():
            _assert_same(run(*prompt), Prefill(slow_model)(*prompt), prompt[1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_in_onnxruntime(name, make_model, tmp_path):
    decode, arguments = _decoding(make_model, name)
    run = _session(decode, arguments, tmp_path / "decode.onnx", _any_cache(arguments))
    for size in SIZES:
        _, arguments = _decoding(make_model, name, *size)
        _assert_same(_decoded(run, arguments), _decoded(decode, arguments), atol=1e-4)


# torch.jit.trace, which writes down what it sees of one input.


class Traced(torch.nn.Module):
    """Logits of ids and of what else is named."""

    def __init__(self, model, *names, **others):
        super().__init__()
        self.model, self.names, self.others = model, names, others

    def forward(self, input_ids, *inputs):
        inputs = dict(zip(self.names, inputs, strict=True))
        return self.model(input_ids, use_cache=False, **inputs, **self.others).logits


def _ids(batch: int, length: int) -> torch.Tensor:
    return _prompt(batch, length)[0]


@torch.no_grad()
def _assert_a_trace_holds(module: Traced, first: tuple, others: list[tuple]) -> None:
    """What was traced with some inputs is right of others."""
    traced = torch.jit.trace(module, first, check_trace=False)
    for inputs in others:
        found, expected = traced(*inputs), module(*inputs)
        if "attention_mask" in module.names:
            found, expected = (x[inputs[1].bool()] for x in (found, expected))
        torch.testing.assert_close(found, expected)


traces = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")


@traces
def test_a_trace_holds_for_other_ids_sizes_and_pads(each_mixer):
    if any(each_mixer.config.sparse_per_layer):
        with pytest.raises(
            ValueError, match="^torch.jit.trace keeps the number of keys that a sparse branch finds; or "
        ):
            torch.jit.trace(Traced(each_mixer), _ids(2, 20))
        return
    others = [(_ids(*size),) for size in ((1, 70), (3, 9), (2, 1))]
    _assert_a_trace_holds(Traced(each_mixer), (_ids(2, 20),), [(_ids(2, 20).flip(1),), *others])
    masks = torch.ones(2, 20, dtype=torch.long), _prompt(2, 20)[1], _prompt(2, 20)[1].flip(0)
    cases = [(_ids(2, 20), mask) for mask in masks]
    for case in cases[:2]:
        _assert_a_trace_holds(Traced(each_mixer, "attention_mask"), case, cases)


@traces
@pytest.mark.each_value
@pytest.mark.parametrize("name", ["position_ids", "cu_seq_lens_q", "seq_idx"])
def test_a_trace_of_packed_documents_holds_for_others(each_mixer, name):
    if any(each_mixer.config.sparse_per_layer):
        pytest.skip("a sparse branch is not traced at all")
    ends = [torch.tensor([0, *end, 20]) for end in ((4, 13), (11, 12), ())]
    numbers = [torch.arange(len(end) - 1).repeat_interleave(end.diff())[None] for end in ends]
    positions = [torch.cat([torch.arange(length) for length in end.diff().tolist()])[None] for end in ends]
    packings = {"position_ids": positions, "cu_seq_lens_q": ends[:2], "seq_idx": numbers}[name]
    cases = [(_ids(1, 20), packing) for packing in packings]
    for case in (cases[0], cases[-1]):
        if "full_attention" not in each_mixer.config.layer_types:
            _assert_a_trace_holds(Traced(each_mixer, name), case, cases)
            continue
        with pytest.raises(
            ValueError, match="^torch.jit.trace makes no masks of packed documents: leave position_ids, "
        ):
            torch.jit.trace(Traced(each_mixer, name), case)


@traces
def test_what_a_trace_cannot_hold_is_refused(each_mixer):
    cache = InterdomainCache(each_mixer.config)
    with pytest.raises(
        ValueError, match="^torch.jit.trace keeps the place where a cache stands: leave past_key_values"
    ):
        torch.jit.trace(Traced(each_mixer, past_key_values=cache), _ids(1, 5))
    with pytest.raises(ValueError, match="^torch.jit.trace of one token knows no more: give it several"):
        torch.jit.trace(Traced(each_mixer), _ids(2, 1))
    assert not int(cache.get_seq_length())


@traces
def test_a_window_is_not_traced(make_model):
    with pytest.raises(ValueError, match="^torch.jit.trace keeps the number of keys that a window finds"):
        torch.jit.trace(Traced(make_model("windowed")), _ids(2, 20))


@traces
@pytest.mark.parametrize("cls", [False, True], ids=["last", "cls"])
@pytest.mark.parametrize("name", ["interdomain", "s4d", "softmax"])
def test_a_trace_of_a_classifier_reads_other_numbers_of_rows(name, cls, make_model):
    """Each its own: a trace of one row gave all rows the answer of the first."""
    model = make_model(name, InterdomainForSequenceClassification, use_cls_token=cls)
    for rows in (1, 2):
        ids = _ids(rows, 20)
        traced = torch.jit.trace(Traced(model), (ids,), check_trace=False)
        for count in (1, 2, 3):
            torch.testing.assert_close(traced(_ids(count, 20)), model(_ids(count, 20)).logits)


@traces
def test_a_trace_of_a_classifier_heeds_later_pads(make_model):
    model = make_model("interdomain", InterdomainForSequenceClassification, use_cls_token=True)
    masks = torch.ones(2, 20, dtype=torch.long), _prompt(2, 20)[1]
    cases = [(_ids(2, 20), mask) for mask in masks]
    traced = torch.jit.trace(Traced(model, "attention_mask"), cases[0], check_trace=False)
    for case in cases:
        torch.testing.assert_close(traced(*case), model(case[0], attention_mask=case[1]).logits)
