"""Gates of time and of the write, and the delta rule: against loops in float64 that form every state."""

import functools

import pytest
import torch

from modeling_interdomain import interdomain_attention, interdomain_step
from modeling_interdomain.ops.diagonal.step import step_tables
from modeling_interdomain.ops.interdomain.entry import take_step
from modeling_interdomain.ops.interdomain.gates import (
    decay_gated_state,
    gated_state_after,
    total_gated_decay,
)
from modeling_interdomain.ops.interdomain.replay import replay_tables
from tests.operator_checks import COEFFICIENTS, PRODUCTS, SHAPES, assert_close, everything, inputs

KINDS = {
    "gates": ("log_gate", "write_gate"),
    "forget": ("log_gate",),
    "write": ("write_gate",),
    "delta": ("delta",),
    "all": ("log_gate", "write_gate", "delta"),
}


def gated(shape, names, coefficients="full", strength=0.1, dtype=torch.float64, **options):
    """Arguments with some gates; keys of about length one, so that the delta rule does not blow up."""
    arguments = inputs(SHAPES.get(shape, shape), coefficients, dtype=torch.float64, **options)
    batch, length, groups, feature_dim = arguments["key"].shape
    generator = torch.Generator().manual_seed(7)

    def uniform():
        return torch.rand(batch, length, groups, generator=generator, dtype=torch.float64)

    gates = {"log_gate": -strength * uniform(), "write_gate": 0.5 + uniform(), "delta": uniform()}
    if "delta" in names:
        arguments["key"] = arguments["key"] / (3 * feature_dim * arguments["log_decay"].shape[1] ** 0.5)
    return {
        k: None if v is None else v.detach().to(dtype).requires_grad_()
        for k, v in (arguments | {k: gates[k] for k in names}).items()
    }


def as_the_formulas_say(
    query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, output_final_state,
    product="bilinear", log_gate=None, write_gate=None, delta=None,
):  # fmt: skip
    """One head, one mode and one column after the other; slow, and without a helper of the package."""
    batch, length, heads, _ = query.shape
    groups, width = key.shape[2], key.shape[3]
    size = log_decay.shape[1]
    decay = torch.exp(torch.complex(log_decay[..., 0], log_decay[..., 1]))
    beta = torch.complex(input_matrix[..., 0], input_matrix[..., 1])
    outputs = [[[None] * heads for _ in range(length)] for _ in range(batch)]
    states = []
    for b in range(batch):
        for g in range(groups):
            state = torch.complex(initial_state[b, g, 0], initial_state[b, g, 1])
            matrix = torch.eye(size, dtype=state.dtype)
            if coefficient_matrix is not None:
                pairs = torch.complex(coefficient_matrix[g, ..., 0], coefficient_matrix[g, ..., 1])
                matrix = pairs if pairs.ndim == 2 else torch.diag(pairs)

            def answer(row, state, matrix=matrix):
                u, gamma = (matrix @ state).split([width, value.shape[3]], dim=-1)
                total = 0
                for m in range(size):
                    pulled = (row * u[m]).sum()
                    if product == "bilinear":
                        total = total + (pulled * gamma[m]).real
                    elif product == "hermitian":
                        total = total + (pulled * gamma[m].conj()).real
                    else:
                        total = total + 4 * pulled.real * gamma[m].real
                return total

            for t in range(length):
                f = 1 if log_gate is None else log_gate[b, t, g].exp()
                state = torch.stack([f * decay[g, m] * state[m] for m in range(size)])
                written = value[b, t, g]
                if delta is not None:
                    written = written - delta[b, t, g] * answer(key[b, t, g], state)
                w = 1 if write_gate is None else write_gate[b, t, g]
                state = state + torch.stack([w * beta[g, m] * torch.cat([key[b, t, g], written]) for m in range(size)])
                for h in range(g * (heads // groups), (g + 1) * (heads // groups)):
                    outputs[b][t][h] = answer(query[b, t, h], state)
            states.append(torch.stack([state.real, state.imag]))
    output = torch.stack([torch.stack([torch.stack(row) for row in rows]) for rows in outputs])
    return output, torch.stack(states).unflatten(0, (batch, groups))


@functools.cache
def problem(shape, kind, product="bilinear", coefficients="full"):
    """Arguments, and what the definition makes of them."""
    arguments = gated(shape, KINDS[kind], coefficients)
    return arguments, everything(arguments, backend="recurrent", product=product)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("product", "coefficients"), list(zip(PRODUCTS, COEFFICIENTS)))
def test_the_definition_is_what_the_formulas_say(kind, product, coefficients):
    arguments = gated((2, 6, 4, 2, 3, 2, 3), KINDS[kind], coefficients)
    found = everything(arguments, backend="recurrent", product=product)
    assert_close(found, everything(arguments, as_the_formulas_say, product=product), 1e-10)


def stepped(take, query, key, value, initial_state, *parameters, mask=None, **gates):
    """All tokens by steps of one token each, in place; outputs and the last state."""
    state, outputs = initial_state.detach().clone(), []
    for t in range(query.shape[1]):
        now = {name: x[:, t] for name, x in gates.items()}
        here = None if mask is None else mask[:, t]
        outputs.append(take(query[:, t], key[:, t], value[:, t], *parameters, state=state, mask=here, **now))
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("product", "coefficients"), list(zip(PRODUCTS, COEFFICIENTS)))
def test_steps_are_the_definition(kind, product, coefficients, assert_same):
    arguments = {
        k: None if v is None else v.detach() for k, v in gated("odd_length", KINDS[kind], coefficients).items()
    }
    expected = interdomain_attention(**arguments, product=product, backend="recurrent", output_final_state=True)
    names = ("query", "key", "value", "initial_state", "log_decay", "input_matrix", "coefficient_matrix")
    tensors, gates = [arguments[name] for name in names], {name: arguments[name] for name in KINDS[kind]}
    step = functools.partial(interdomain_step, product=product)
    assert_same(stepped(step, *tensors, **gates), expected)

    def as_a_mixer(query, key, value, *parameters, state, mask, log_gate=None, write_gate=None, delta=None):
        gates = tuple(None if x is None else x[:, None] for x in (log_gate, write_gate, delta))
        tables = functools.partial(step_tables, *parameters, product)
        tokens, parameters = (x[:, None] for x in (query, key, value)), lambda: parameters
        options = {"product": product, "normalize": False, "mask": mask, "backend": "auto"}
        return take_step(*tokens, parameters=parameters, tables=tables, state=state, gates=gates, **options)

    assert_same(stepped(as_a_mixer, *tensors, **gates), expected)


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_pads_leave_the_state_of_a_step_alone(kind, assert_same):
    arguments = {k: v.detach() for k, v in gated((2, 7, 2, 1, 3, 4, 5), KINDS[kind]).items()}
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1]])
    names = ("query", "key", "value", "initial_state", "log_decay", "input_matrix", "coefficient_matrix")
    tokens = {k: v for k, v in arguments.items() if k in ("query", "key", "value", *KINDS[kind])}
    rest = {k: v for k, v in arguments.items() if k not in (*tokens, "initial_state")}
    gates = {name: arguments[name] for name in KINDS[kind]}
    output, state = stepped(interdomain_step, *(arguments[name] for name in names), mask=mask, **gates)
    for row, real in enumerate(mask.bool()):
        alone = {k: v[row : row + 1, real] for k, v in tokens.items()}
        alone |= {"initial_state": arguments["initial_state"][row : row + 1], "backend": "recurrent"}
        expected = interdomain_attention(**alone, **rest, output_final_state=True)
        assert_same((output[row : row + 1, real], state[row : row + 1]), expected)
        assert not output[row, ~real].any()


def test_a_narrow_state_is_stepped_in_float32():
    arguments = {k: v.detach().float() for k, v in gated((2, 1, 2, 1, 3, 4, 5), KINDS["all"]).items()}
    state = arguments.pop("initial_state").bfloat16()
    _, expected = interdomain_attention(**arguments, initial_state=state.float(), output_final_state=True)
    tokens = {k: arguments.pop(k)[:, 0] for k in ("query", "key", "value", *KINDS["all"])}
    interdomain_step(**tokens, **arguments, state=state)
    torch.testing.assert_close(state, expected.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tables", [False, True], ids=["no-tables", "tables"])
@pytest.mark.parametrize("pads", [False, True], ids=["all-real", "pads"])
def test_replay_is_the_definition(kind, tables, pads, assert_same):
    arguments = {k: v.detach() for k, v in gated((2, 9, 2, 2, 3, 4, 5), KINDS[kind]).items()}
    arguments |= {"query": arguments["key"]}
    mask = torch.ones(2, 9, dtype=torch.bool)
    if pads:
        mask[0, ::3], mask[1] = False, False
    parameters = arguments["log_decay"], arguments["input_matrix"]
    gates = {name: arguments[name] for name in KINDS[kind]}
    readout = {"coefficient_matrix": arguments["coefficient_matrix"], "product": "hermitian"}
    found = gated_state_after(
        arguments["initial_state"], arguments["key"], arguments["value"], mask, *parameters,
        *(replay_tables(*parameters, 9) if tables else ()), **gates, **readout,
    )  # fmt: skip
    for row, real in enumerate(mask):
        expected = arguments["initial_state"][row : row + 1]
        if real.any():
            tokens = {k: arguments[k][row : row + 1, real] for k in ("query", "key", "value", *KINDS[kind])}
            _, expected = interdomain_attention(
                **tokens, log_decay=parameters[0], input_matrix=parameters[1], **readout, initial_state=expected,
                backend="recurrent", output_final_state=True,
            )  # fmt: skip
        assert_same(found[row : row + 1], expected)


def test_a_state_passes_tokens_that_write_nothing(assert_same):
    """What sequence parallelism adds up: a first piece's state after a second piece, and what the second brings."""
    arguments = {k: v.detach() for k, v in gated((2, 12, 2, 2, 3, 4, 5), KINDS["gates"]).items()}
    with torch.no_grad():
        arguments["log_gate"][1, 8, 1] = -torch.inf
    first = {k: v[:, :7] if v.shape[1] == 12 else v for k, v in arguments.items()}
    second = {k: v[:, 7:] if v.shape[1] == 12 else v for k, v in arguments.items()}
    _, whole = interdomain_attention(**arguments, backend="recurrent", output_final_state=True)
    _, left = interdomain_attention(**first, backend="recurrent", output_final_state=True)
    _, right = interdomain_attention(
        **second | {"initial_state": None}, backend="recurrent", output_final_state=True
    )  # fmt: skip
    mask = torch.ones(2, 5, dtype=torch.bool)
    total = total_gated_decay(mask[:, :2], second["log_gate"][:, :2])
    total = total + total_gated_decay(mask[:, 2:], second["log_gate"][:, 2:])
    assert total.shape == (2, 3)
    assert_same(decay_gated_state(left, total, arguments["log_decay"]) + right, whole)


REFUSED = {
    "positive": ({"log_gate": 0.1}, {}, "log_gate must be at most 0, the logarithm of a factor up to 1, got 0.1."),
    "nan": ({"log_gate": float("nan")}, {}, "log_gate must be at most 0, the logarithm of a factor up to 1, got nan."),
    "normalised": ({"delta": 0.5}, {"normalize": True}, "delta needs the plain readout: use normalize=False, or leave"),
} | {
    backend: ({"write_gate": 0.5}, {"backend": backend}, f"backend {backend!r} has no gates and no delta rule: with ")
    for backend in ("fft", "scan", "associative_scan", "triton")
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_said(what):
    gates, options, sentence = REFUSED[what]
    arguments = {k: v.detach() for k, v in gated("short", ()).items()} | {"initial_state": None}
    gates = {k: torch.full_like(arguments["key"][..., 0], x) for k, x in gates.items()}
    with pytest.raises(ValueError) as raised:
        interdomain_attention(**arguments, **gates, **options)
    assert str(raised.value).startswith(sentence) and "\n" not in str(raised.value)
    if options.get("backend") in ("fft", "scan", "associative_scan"):
        return
    now = {k: arguments.pop(k)[:, 0] for k in ("query", "key", "value")} | {k: x[:, 0] for k, x in gates.items()}
    width = now["key"].shape[-1] + now["value"].shape[-1] + int("normalize" in options)
    state = arguments["log_decay"].new_ones(1, 3, 2, 4, width)
    del arguments["initial_state"]
    with pytest.raises(ValueError) as raised:
        interdomain_step(**now, **arguments, state=state, **options)
    assert str(raised.value).startswith(sentence) and bool((state == 1).all())


def test_a_mixer_that_asks_for_kernels_is_told():
    arguments = {k: v.detach() for k, v in gated((2, 1, 2, 2, 3, 4, 5), ("delta",)).items()}
    state, gates = arguments["initial_state"].clone(), (None, None, arguments["delta"])
    parameters = tuple(arguments[k] for k in ("log_decay", "input_matrix", "coefficient_matrix"))
    tables, options = functools.partial(step_tables, *parameters, "real"), {"product": "real", "mask": None}
    tokens = (arguments[k] for k in ("query", "key", "value"))
    with pytest.raises(ValueError, match="^backend 'triton' has no gates and no delta rule"):
        take_step(
            *tokens, parameters=lambda: parameters, tables=tables, state=state, gates=gates, normalize=False,
            backend="triton", **options,
        )  # fmt: skip
    assert state.equal(arguments["initial_state"])


def test_exported_graphs_have_no_gates():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value, log_decay, input_matrix, log_gate):
            return interdomain_attention(query, key, value, log_decay, input_matrix, log_gate=log_gate)[0]

    arguments = gated("short", ("log_gate",), dtype=torch.float32)
    names = ("query", "key", "value", "log_decay", "input_matrix", "log_gate")
    with pytest.raises(Exception, match="Exported graphs have no gates and no delta rule"):
        torch.export.export(Layer(), tuple(arguments[name].detach() for name in names))
