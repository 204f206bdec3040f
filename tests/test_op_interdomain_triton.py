"""The fused kernels in Triton's interpreter against the float64 recurrence, and what happens where they cannot run."""

import importlib
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from modeling_interdomain import interdomain_attention, interdomain_step, op_common_launch
from modeling_interdomain.module_common import InterdomainRMSNorm
from modeling_interdomain.module_convolution import CausalConv1d, causal_conv
from modeling_interdomain.module_feature_maps import SiluL2
from modeling_interdomain.module_rotary import rotate
from modeling_interdomain.op_common import document_of_tokens
from tests.operator_checks import (
    COEFFICIENTS,
    EXTREMES,
    PRODUCTS,
    SHAPES,
    assert_close,
    cast,
    everything,
    inputs,
    relative_error,
)

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
on_gpu = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not on_gpu and not op_common_launch.interpreted(), reason="Without a GPU the kernels need TRITON_INTERPRET=1."
)
DEVICE = "cuda" if on_gpu else "cpu"
# On a GPU the matrix units round float32 to three tf32 numbers, in the interpreter not at all.
FLOAT32 = 2e-5 if on_gpu else 2e-6

WIDE_SHAPES = {
    "64_64_64": (1, 70, 2, 2, 64, 64, 64),
    "60_100_48": (1, 40, 2, 1, 60, 100, 48),
    "16_256_16": (1, 20, 1, 1, 16, 256, 16),
    "256_16_128": (1, 34, 1, 1, 256, 16, 128),
    "16_16_256": (1, 34, 1, 1, 16, 16, 256),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh buffers hold NaN, so that an element that no kernel writes shows."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


def check(arguments, dtype, bound, **options):
    """Compare with the recurrence in float64 on the same, already rounded, inputs."""
    tokens = ("query", "key", "value")
    low = cast(arguments, torch.float32) | cast({k: arguments[k] for k in tokens}, dtype)
    expected = everything(cast(low, torch.float64), **(options | {"backend": "recurrent"}))
    low = {k: None if v is None else v.detach().to(DEVICE).requires_grad_() for k, v in low.items()}
    if "cu_seqlens" in options:
        options["cu_seqlens"] = options["cu_seqlens"].to(DEVICE)
    found = {k: v.cpu() for k, v in everything(low, **options, backend="triton").items()}
    assert all(found[f"grad of {name}"].dtype == dtype for name in tokens)
    assert found["state"].dtype == torch.float32 and found["output"].dtype == dtype
    assert_close(found, expected, bound)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("product", "coefficients"),
    [("bilinear", "full"), ("hermitian", "full"), ("real", "full"), ("bilinear", "diagonal"), ("real", "identity")],
)
def test_fused_is_the_recurrence(shape, product, coefficients):
    check(inputs(shape, coefficients), torch.float32, FLOAT32, product=product, chunk_size=16)


@pytest.mark.parametrize("shape", WIDE_SHAPES.values(), ids=WIDE_SHAPES.keys())
def test_sizes_up_to_256(shape):
    check(inputs(shape, decay=0.05), torch.float32, FLOAT32)


@pytest.mark.parametrize("chunk_size", [1, 40, 64, 1000])
def test_any_chunk_size_is_taken(chunk_size):
    check(inputs(SHAPES["one_group"], decay=0.05), torch.float32, FLOAT32, chunk_size=chunk_size)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("coefficients", ["full", "diagonal"])
def test_low_precision(dtype, bound, coefficients):
    check(inputs((2, 100, 2, 2, 16, 16, 16), coefficients, decay=0.05), dtype, bound)


def test_low_precision_leaves_the_state_precise():
    arguments = {k: v.detach() for k, v in inputs((1, 300, 2, 2, 16, 16, 16), decay=0.01).items()}
    low = {k: v.bfloat16() if k in ("query", "key", "value") else v.float() for k, v in arguments.items()}
    _, expected = interdomain_attention(
        **{k: v.double() for k, v in low.items()}, output_final_state=True, backend="recurrent"
    )
    low = {k: v.to(DEVICE) for k, v in low.items()}
    _, state = interdomain_attention(**low, output_final_state=True, backend="triton")
    assert relative_error(state.cpu(), expected) < 1e-5


@pytest.mark.parametrize("extreme", [*EXTREMES.values(), {"decay": 0.9}, {"decay": 1.0}], ids=[*EXTREMES, "0.9", "1.0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_decay_is_right(extreme, dtype):
    """0.9 a token over 64 tokens is just short of e^60, 1.0 beyond: one group on each side of where the way changes."""
    arguments = inputs((1, 150, 2, 2, 4, 4, 5), **extreme)
    if extreme.get("decay") in (0.9, 1.0):
        with torch.no_grad():
            arguments["log_decay"][0, 0, 0] = -extreme["decay"]
            arguments["log_decay"][1, :, 0] *= 0.1
    check_absolute(arguments, dtype, FLOAT32 if dtype == torch.float32 else 2e-2)


def check_absolute(arguments, dtype, bound):
    """The gradient of a mode that is gone at once is zero but for rounding: those are compared in absolute terms."""
    low = cast(arguments, torch.float32) | cast({k: arguments[k] for k in ("query", "key", "value")}, dtype)
    expected = everything(cast(low, torch.float64), backend="recurrent")
    low = {k: v.detach().to(DEVICE).requires_grad_() for k, v in low.items()}
    for name, value in everything(low, backend="triton").items():
        error = (value.cpu().double() - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)
        assert error < bound, (name, error)


@pytest.mark.parametrize("ends", [[0, 33], [0, 1, 33], [0, 1, 2, 18, 33], [0, 16, 32, 33]], ids=str)
@pytest.mark.parametrize("shape", ["odd_sizes", "odd_sizes_one_group"])
def test_packed_documents(ends, shape):
    shape = (1, 33, 4, 1, 3, 10, 7) if shape == "odd_sizes_one_group" else SHAPES["odd_sizes"]
    arguments = inputs(shape, rows=len(ends) - 1)
    check(arguments, torch.float32, FLOAT32, cu_seqlens=torch.tensor(ends), chunk_size=16)


@pytest.mark.parametrize("segments", [2, 3, 7])
@pytest.mark.parametrize("ends", [None, [0, 1, 17, 80, 100]], ids=["rows", "packed"])
def test_rows_cut_into_segments(segments, ends, monkeypatch):
    """What a GPU with more room than rows and groups does; with 7 chunks at most, some segments are empty."""
    module = importlib.import_module("modeling_interdomain.op_interdomain_triton")
    monkeypatch.setattr(module, "_segments", lambda *_: segments)
    arguments = inputs((1, 100, 2, 1, 4, 4, 4), decay=0.02, rows=None if ends is None else len(ends) - 1)
    options = {} if ends is None else {"cu_seqlens": torch.tensor(ends)}
    check(arguments, torch.float32, FLOAT32, chunk_size=16, **options)


@pytest.mark.parametrize(
    ("lanes", "chunks", "processors", "expected"),
    [(256, 64, 132, 1), (12, 1024, 132, 1), (2, 1024, 132, 16), (1, 9, 132, 1)],
)
def test_rows_are_cut_where_the_device_would_idle(lanes, chunks, processors, expected, monkeypatch):
    module = importlib.import_module("modeling_interdomain.op_interdomain_triton")
    monkeypatch.setattr(module, "multiprocessors", lambda device: processors)
    assert module._segments(lanes, chunks, torch.device("cpu")) == expected


@pytest.mark.parametrize("product", PRODUCTS)
def test_normalised_readout(product):
    arguments = inputs(SHAPES["odd_length"], normalize=True, seed=3)
    # Where a denominator comes near zero the quotient is steep: 1e-3 is what float32 leaves of it.
    check(arguments, torch.float32, 1e-3, product=product, normalize=True, chunk_size=16)


def test_without_a_state_or_a_gradient():
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs(SHAPES["odd_length"]).items()}
    del arguments["initial_state"]
    output, state = interdomain_attention(**arguments, backend="triton")
    expected, _ = interdomain_attention(**{k: v.cpu().double() for k, v in arguments.items()}, backend="recurrent")
    assert state is None and relative_error(output.cpu(), expected) < FLOAT32


def test_gradients_of_some_inputs_alone():
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs((1, 18, 2, 1, 4, 4, 4)).items()}
    wide = {k: v.cpu().double() for k, v in arguments.items()}
    for name in arguments:
        grads = []
        for tensors, backend in ((wide, "recurrent"), (arguments, "triton")):
            leaf = tensors[name].clone().requires_grad_()
            output, _ = interdomain_attention(**(tensors | {name: leaf}), backend=backend)
            grads.append(torch.autograd.grad(output.square().sum(), leaf)[0].cpu())
        assert relative_error(grads[1], grads[0]) < 10 * FLOAT32, name


def test_gradients_repeat_bit_for_bit():
    arguments = {k: v.detach().float().to(DEVICE).requires_grad_() for k, v in inputs((1, 33, 2, 1, 4, 4, 4)).items()}
    first, second = (everything(arguments, backend="triton", chunk_size=16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_strided_inputs():
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs(SHAPES["odd_length"]).items()}
    expected, _ = interdomain_attention(**arguments, backend="triton")
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    found, _ = interdomain_attention(**arguments, backend="triton")
    assert torch.equal(found, expected)


def test_the_operator_is_sound():
    """What torch.library checks: schema, fake implementation, autograd registration."""
    module = importlib.import_module("modeling_interdomain.op_interdomain_triton")
    tables = importlib.import_module("modeling_interdomain.op_interdomain_triton_tables")
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs((1, 20, 2, 1, 4, 4, 4)).items()}
    made = tables.make_tables(
        arguments["log_decay"], arguments["input_matrix"], arguments["coefficient_matrix"], "bilinear", 16
    )
    tokens = [arguments[name].requires_grad_() for name in ("query", "key", "value")]
    torch.library.opcheck(
        module._operator, (*tokens, arguments["log_decay"], *made, arguments["initial_state"], None, None, True, False, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


def test_one_graph_under_compile():
    arguments = {k: v.detach().float().to(DEVICE).requires_grad_() for k, v in inputs((1, 20, 2, 1, 4, 4, 4)).items()}

    def run(**tensors):
        output, state = interdomain_attention(**tensors, output_final_state=True, backend="triton")
        return output.sum() + state.square().sum()

    expected = torch.autograd.grad(run(**arguments), list(arguments.values()))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(**arguments), list(arguments.values()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", ["odd_length", "odd_sizes", "one_mode"])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_step_is_the_recurrence(shape, coefficients, product):
    arguments = inputs(SHAPES[shape], coefficients)
    arguments = {k: None if v is None else v.detach().float() for k, v in arguments.items()}
    state = arguments.pop("initial_state")
    token = {name: arguments.pop(name)[:, 0] for name in ("query", "key", "value")}
    mask = torch.arange(state.shape[0]) > 0 if state.shape[0] > 1 else None
    wide = {k: None if v is None else v.double() for k, v in (token | arguments).items()}
    expected_state = state.double()
    expected = interdomain_step(**wide, state=expected_state, product=product, mask=mask)
    state = state.to(DEVICE)
    address = state.data_ptr()
    low = {k: None if v is None else v.to(DEVICE) for k, v in (token | arguments).items()}
    mask = None if mask is None else mask.to(DEVICE)
    found = interdomain_step(**low, state=state, product=product, mask=mask, backend="triton")
    assert state.data_ptr() == address
    assert relative_error(found.cpu(), expected) < FLOAT32
    assert relative_error(state.cpu(), expected_state) < FLOAT32


def test_a_step_with_a_normalised_readout_and_a_bfloat16_state():
    arguments = {k: v.detach().float() for k, v in inputs(SHAPES["odd_length"], normalize=True).items()}
    state = arguments.pop("initial_state").bfloat16()
    token = {name: arguments.pop(name)[:, 0].bfloat16() for name in ("query", "key", "value")}
    expected_state = state.clone().float()
    expected = interdomain_step(**token, **arguments, state=expected_state, normalize=True)
    found = interdomain_step(
        **{k: v.to(DEVICE) for k, v in (token | arguments).items()},
        state=(state := state.to(DEVICE)), normalize=True, backend="triton",
    )  # fmt: skip
    assert found.dtype == state.dtype == torch.bfloat16
    assert relative_error(found.cpu(), expected) < 1e-2 and relative_error(state.cpu(), expected_state) < 1e-2


PREPARATIONS = {
    # name: (B, T, H, G, R, D, K, rope placement, rotated dimensions, norm, window, ends)
    "plain": (2, 20, 2, 2, 8, 8, 4, None, None, True, False, None),
    "one_token": (2, 1, 2, 2, 8, 8, 4, None, None, True, True, None),
    "rope_before": (2, 7, 4, 2, 6, 10, 4, "before", 6, True, True, None),
    "rope_after": (2, 70, 2, 1, 6, 10, 4, "after", 4, True, False, None),
    "packed": (1, 33, 3, 3, 6, 5, 4, "after", 4, True, True, [0, 1, 3, 18, 33]),
    "no_norm": (1, 33, 3, 1, 6, 5, 3, None, None, False, False, [0, 2, 17, 33]),
    "two_taps": (1, 20, 40, 1, 16, 5, 2, None, None, True, True, None),
    "no_convolution": (2, 5, 2, 2, 8, 8, 1, None, None, True, False, None),
}


@pytest.mark.parametrize("case", PREPARATIONS.values(), ids=PREPARATIONS.keys())
def test_the_preparation_of_inputs(case):
    from modeling_interdomain.op_interdomain_triton_prepare import triton_prepare

    batch, length, heads, groups, feature_dim, value_dim, kernel, placement, dim, norm, window, ends = case
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    rows = batch if ends is None else len(ends) - 1
    widths = heads * feature_dim, groups * feature_dim
    leaves = [normal(batch, length, w) for w in (*widths, groups * value_dim)] + [normal(w, kernel) for w in widths]
    if norm:
        leaves += [normal(feature_dim), normal(value_dim), normal(groups, feature_dim), normal(groups, value_dim)]
    windows = [normal(rows, w, kernel - 1) for w in widths] if window else None
    angles = None if placement is None else normal(1, length, dim // 2).repeat(1, 1, 2)
    cos_sin = None if placement is None else (angles.cos(), angles.sin())
    cu_seqlens = None if ends is None else torch.tensor(ends)

    def reference(q, k, v, q_taps, k_taps, *norms):
        outputs, new_windows = [], []
        for side, (x, taps) in enumerate(((q, q_taps), (k, k_taps))):
            conv = CausalConv1d(x.shape[2], kernel)
            del conv.weight
            conv.weight = taps[:, None]
            x, after = causal_conv(conv, x, windows[side] if windows else None, kernel, cu_seqlens)
            x = x.unflatten(-1, (-1, feature_dim))
            x = rotate(x, *cos_sin) if placement == "before" else x
            x = SiluL2()(x)
            outputs.append(rotate(x, *cos_sin) if placement == "after" else x)
            new_windows.append(after)
        outputs.append(v.unflatten(-1, (groups, value_dim)))
        for side, (weight, bias) in enumerate(zip(norms[:2], norms[2:]), start=1):
            rms = InterdomainRMSNorm(weight.shape[0])
            del rms.weight
            rms.weight = weight
            outputs[side] = rms(outputs[side]) + bias
        return outputs, new_windows

    wide = [x.clone().requires_grad_() for x in leaves]
    expected, expected_windows = reference(*wide)
    weights = [normal(*x.shape) for x in expected]
    expected_grads = torch.autograd.grad(sum((x * w).sum() for x, w in zip(expected, weights)), wide)

    def low(tensors):
        return None if tensors is None else tuple(x.float().to(DEVICE) for x in tensors)

    narrow = [x.float().to(DEVICE).requires_grad_() for x in leaves]
    packed = (None, None)
    if ends is not None:
        packed = document_of_tokens(cu_seqlens, length).int().to(DEVICE), cu_seqlens.int().to(DEVICE)
    found, found_windows = triton_prepare(
        *narrow[:3], tuple(narrow[3:5]), tuple(narrow[5:]) or None, low(windows), low(cos_sin), *packed,
        heads, groups, placement, 1e-6, True,
    )  # fmt: skip
    loss = sum((x * w.float().to(DEVICE)).sum() for x, w in zip(found, weights))
    grads = torch.autograd.grad(loss, narrow)
    for a, b in zip((*found, *found_windows, *grads), (*expected, *expected_windows, *expected_grads), strict=True):
        assert b.numel() == 0 or relative_error(a.cpu(), b) < 2e-6


@pytest.mark.parametrize("name", ["interdomain", "grouped", "rope-before", "rope-after", "normalized", "gated"])
def test_a_model_on_fused_kernels(make_model, random_ids, name):
    """Logits, gradients, a prefill in pieces and decoding, against the same model in float64 without kernels."""
    reference = make_model(name, num_hidden_layers=1, token_mixers="interdomain")
    model = make_model(
        name, num_hidden_layers=1, token_mixers="interdomain", dtype=torch.float32, backend="triton",
        state_dtype="float32", chunk_size=16,
    ).to(DEVICE)  # fmt: skip
    ids = random_ids(1, 19)
    expected = reference(ids, labels=ids)
    found = model(ids.to(DEVICE), labels=ids.to(DEVICE))
    bound = 1e-3 if name == "normalized" else 1e-4
    assert relative_error(found.logits.cpu(), expected.logits) < bound
    expected.loss.backward()
    found.loss.backward()
    for (parameter_name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative_error(a.grad.cpu(), b.grad) < 20 * bound, parameter_name
    cache, pieces = None, []
    with torch.no_grad():
        for piece in ids.to(DEVICE).split([16, 2, 1], dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            pieces.append(output.logits)
    assert relative_error(torch.cat(pieces, dim=1).cpu(), expected.logits) < bound


def test_gradient_checkpointing_changes_nothing(make_model, random_ids):
    options = {"dtype": torch.float32, "backend": "triton", "state_dtype": "float32"}
    model = make_model("interdomain", num_hidden_layers=1, **options).to(DEVICE).train()
    ids = random_ids(1, 5).to(DEVICE)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_padded_batch_on_fused_kernels(make_model, left_padded):
    reference = make_model("interdomain", num_hidden_layers=1)
    options = {"dtype": torch.float32, "backend": "triton", "state_dtype": "float32", "chunk_size": 16}
    model = make_model("interdomain", num_hidden_layers=1, **options).to(DEVICE)
    batch = left_padded([3, 20, 9])
    mask = batch["attention_mask"].bool()
    expected = reference(**batch).logits[mask]
    found = model(**{k: v.to(DEVICE) for k, v in batch.items()}).logits.cpu()[mask]
    assert relative_error(found, expected) < 1e-4


def test_a_wrapped_convolution_is_not_bypassed(make_model, random_ids):
    """A hook, an adapter or a quantised layer in place of our module must be called."""
    options = {"dtype": torch.float32, "backend": "triton", "state_dtype": "float32"}
    model = make_model("interdomain", num_hidden_layers=1, **options).to(DEVICE)
    ids = random_ids(1, 6).to(DEVICE)
    before = model(ids).logits
    model.model.layers[0].token_mixer.q_conv.register_forward_hook(lambda module, args, output: 0 * output + 1)
    assert not torch.allclose(model(ids).logits, before)


def test_triton_in_float64_is_refused():
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*float64"):
        interdomain_attention(**inputs(SHAPES["short"]), backend="triton")


def test_heads_too_wide_are_refused():
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs((1, 2, 1, 1, 4, 300, 4)).items()}
    with pytest.raises(ValueError, match=r"up to 256 .* one of these is 300"):
        interdomain_attention(**arguments, backend="triton")


@pytest.fixture
def no_kernels(monkeypatch):
    """As if this machine had no GPU and no interpreter."""
    monkeypatch.setattr(op_common_launch, "interpreted", lambda: False)


@pytest.mark.skipif(on_gpu, reason="On a GPU the kernels do run.")
def test_triton_without_a_gpu_is_refused(no_kernels):
    arguments = cast(inputs(SHAPES["short"]), torch.float32)
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: its kernels need tensors on a GPU"):
        interdomain_attention(**arguments, backend="triton")


def test_a_failing_kernel_is_said_once_and_another_way_runs(monkeypatch, caplog):
    """`fused` as a GPU would see it: the first failure warns, the second call does not try again."""
    calls = []

    def run():
        calls.append(1)
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(op_common_launch, "_failure", [])
    op_common_launch._say_once.cache_clear()
    tensor = torch.empty(1, device="meta")
    monkeypatch.setattr(op_common_launch, "interpreted", lambda: True)
    with caplog.at_level(logging.WARNING):
        assert op_common_launch.fused("auto", [tensor], 4, run) is None
        assert op_common_launch.fused("auto", [tensor], 4, run) is None
    assert len(calls) == 1 and caplog.text.count("without its fused kernels") == 1 and "no C compiler" in caplog.text
    with pytest.raises(ValueError, match="no C compiler"):
        op_common_launch.fused("triton", [tensor], 4, run)


def test_everything_else_works_without_triton():
    """A clean process in which `import triton` fails."""
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, interdomain_attention
        sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        model = InterdomainForCausalLM(InterdomainConfig(**sizes, state_size=4))
        model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        x = torch.randn(1, 3, 2, 4)
        try:
            interdomain_attention(x, x, x, torch.zeros(2, 4, 2), torch.zeros(2, 4, 2), backend="triton")
        except ValueError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed (pip install triton)" in done.stdout


@pytest.mark.parametrize("boundaries", [None, [0, 5, 6, 33]])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("extreme", [None, "gone_at_once", "mixed", "hardly_decaying"])
def test_the_sequential_scan_equals_the_definition(monkeypatch, extreme, coefficients, boundaries):
    """Segments of 8 tokens: with decays that the inverse recurrence survives, and with some that it does not."""
    from modeling_interdomain.op_interdomain_triton_scan import triton_scan_attention

    module = importlib.import_module("modeling_interdomain.op_interdomain")
    monkeypatch.setattr(module, "_scan", triton_scan_attention)
    arguments = inputs(
        (1 if boundaries else 2, 33, 6, 3, 5, 10, 7), coefficients, rows=3 if boundaries else None,
        **EXTREMES.get(extreme, {}),
    )  # fmt: skip
    ends = None if boundaries is None else torch.tensor(boundaries)
    expected = everything(arguments, backend="recurrent", cu_seqlens=ends)
    low = {k: None if x is None else x.detach().float().to(DEVICE).requires_grad_() for k, x in arguments.items()}
    ends = None if ends is None else ends.to(DEVICE)
    found = everything(low, backend="scan", chunk_size=8, cu_seqlens=ends)
    for name, value in expected.items():
        error = (found[name].cpu().double() - value).norm() / value.norm().clamp(min=1e-12)
        assert error < 2e-5, (name, error)
