"""Arguments that do not fit: every entry of every operator says in one sentence, before a state is touched, which."""

from functools import partial

import pytest
import torch

from modeling_interdomain.ops.common.spans import join_states, mask_span, remove_span
from modeling_interdomain.ops.experts.entry import (
    find_experts,
    keys_of_inputs,
    read_experts,
    sum_experts,
)
from modeling_interdomain.ops.interdomain.entry import interdomain_attention, interdomain_step
from modeling_interdomain.ops.interdomain.map import interdomain_attention_map
from modeling_interdomain.ops.s4d.entry import s4d_attention, s4d_step
from modeling_interdomain.ops.s4d.map import s4d_attention_map
from modeling_interdomain.ops.selective_scan.entry import selective_scan, selective_scan_step
from modeling_interdomain.ops.sparse.entry import sparse_attention
from modeling_interdomain.ops.sparse.step import sparse_step
from modeling_interdomain.ops.sparse.stream import Bins, Ring, SparseMemory, empty_memory
from modeling_interdomain.ops.ssd.entry import ssd_attention, ssd_step
from modeling_interdomain.ops.ssd.map import ssd_attention_map

SIZES = {"B": 2, "T": 5, "H": 4, "G": 2, "R": 3, "D": 4, "M": 6, "N": 3, "P": 5, "E": 4, "W": 7, "S": 2, "d": 3, "k": 2}
SIZES |= {"2": 2, "experts": 12, "h": 2, "n1": 3, "n2": 4, "n1 + n2": 7, "r / 2": 3, "h r": 12}
_PAIRS = {"log_decay": "G, M, 2", "input_matrix": "G, M, 2"}
_STATE = "B, G, 2, M, W"  # W = R + D


def _tokens(rows: str, **axes: str) -> dict[str, str]:
    return {name: f"{rows}, {rest}" for name, rest in axes.items()}


def _entry(function, axes: dict[str, str], **others):
    return function, axes, others


ENTRIES = {}
for _rows in ("B, T", "B"):
    _step = _rows == "B"
    _state = "state" if _step else "initial_state"
    for _name, _whole, _one, _axes in (
        (
            "interdomain",
            interdomain_attention,
            interdomain_step,
            _tokens(_rows, query="H, R", key="G, R", value="G, D") | _PAIRS | {_state: _STATE},
        ),
        (
            "s4d",
            s4d_attention,
            s4d_step,
            _tokens(_rows, key="G, R", value="G, D") | _PAIRS | {"readout": "H, M, 2", _state: _STATE},
        ),
        (
            "ssd",
            ssd_attention,
            ssd_step,
            _tokens(_rows, query="G, N", key="G, N", value="H, P", log_decay="H") | {_state: "B, H, P, N"},
        ),
        (
            "selective_scan",
            selective_scan,
            selective_scan_step,
            _tokens(_rows, query="N", key="N", value="E", step="E") | {"rate": "N, E", "skip": "E", _state: "B, N, E"},
        ),
    ):
        ENTRIES[f"{_name}_step" if _step else _name] = _entry(_one if _step else _whole, _axes)
for _name, _rows in (("interdomain", "B, T"), ("interdomain_step", "B")):
    _function, _axes, _ = ENTRIES[_name]
    ENTRIES[f"{_name}_gates"] = _entry(_function, _axes | _tokens(_rows, log_gate="G", write_gate="G", delta="G"))
_SPARSE = _tokens("B, T", query="S, d", key="S, d", value="S, D", scores="S")
ENTRIES |= {
    "diagonal": _entry(interdomain_attention, {**ENTRIES["interdomain"][1], "coefficient_matrix": "G, M, 2"}),
    "interdomain_map": _entry(
        interdomain_attention_map,
        {"query": "B, T, H, R", "key": "B, T, G, R", **_PAIRS, "coefficient_matrix": "G, M, M, 2"},
    ),
    "s4d_map": _entry(s4d_attention_map, {**_PAIRS, "readout": "H, M, 2"}, length=5),
    "ssd_map": _entry(ssd_attention_map, _tokens("B, T", query="G, N", key="G, N", log_decay="H")),
    "join": _entry(join_states, {"first": _STATE, "second": _STATE, "log_decay": "G, M, 2"}, length=3),
    "mask": _entry(mask_span, {"state": _STATE, "span": _STATE, "log_decay": "G, M, 2"}, since=3),
    "remove": _entry(
        remove_span, {"state": _STATE, "before": _STATE, "after": _STATE, "log_decay": "G, M, 2"}, since=3
    ),
    "sparse": _entry(sparse_attention, _SPARSE, selected_keys=2),
    "read_experts": _entry(read_experts, {"x": "B, T, d", "table": "experts, d", "ids": "B, T, k"}),
    "sum_experts": _entry(sum_experts, {"weights": "B, T, k", "table": "experts, d", "ids": "B, T, k"}),
    "find_experts": _entry(find_experts, {"query": "B, T, 2, h, r / 2", "keys": "h, n1 + n2, r / 2"}, rows=3, count=2),
    "keys_of_inputs": _entry(keys_of_inputs, {"projection": "h r, d", "keys": "h, n1 + n2, r / 2"}, rows=3),
}
MAY_BE_MISSING = ("initial_state", "skip", "coefficient_matrix", "scores", "log_gate", "write_gate", "delta")


def good(name: str) -> dict:
    _, axes, others = ENTRIES[name]
    generator = torch.Generator().manual_seed(0)

    def make(argument: str, named: str) -> torch.Tensor:
        shape = [SIZES[axis] for axis in named.split(", ")]
        if argument == "ids":
            return torch.randint(0, SIZES["experts"], shape, generator=generator)
        x = torch.randn(shape, generator=generator)
        negative = argument == "log_gate" or (argument in ("log_decay", "rate") and "ssd" in name + "selective")
        return -x.abs() if negative else x

    return {argument: make(argument, named) for argument, named in axes.items()} | others


def refused(call, arguments: dict, error=ValueError) -> str:
    """The one sentence, and what must not be touched stays as it was."""
    kept = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"}
    with pytest.raises(error) as raised:
        call(**arguments)
    for name, x in kept.items():
        torch.testing.assert_close(x, arguments[name], rtol=0, atol=0, equal_nan=True)
    (sentence,) = str(raised.value).splitlines()
    return sentence


@pytest.mark.parametrize("name", ENTRIES)
def test_every_argument_that_does_not_fit_is_named(name):
    function, axes, _ = ENTRIES[name]
    function(**good(name))
    for argument, named in axes.items():
        arguments = good(name)
        x = arguments[argument]
        floats = argument != "ids"
        spoilt = {"a list": x.tolist(), "more axes": x[None], "fewer axes": x[0], "elsewhere": x.to("meta")}
        spoilt |= {"complex": x.to(torch.complex64), "of another kind": x.long() if floats else x.float()}
        if argument not in MAY_BE_MISSING:
            spoilt["nothing"] = None
        for place, axis in enumerate(named.split(", ")):
            spoilt[f"{axis} = 0"] = x.narrow(place, 0, 0)
            alone = sum(axis in others.split(", ") for others in axes.values()) == 1 and axis != "h r"
            if not alone or axis == "2":
                spoilt[f"a smaller {axis}"] = x.narrow(place, 0, x.shape[place] - 1)
        for what, wrong in spoilt.items():
            sentence = refused(function, arguments | {argument: wrong})
            # Where sizes differ, either of two may be meant.
            names = [argument] if "=" not in what and "smaller" not in what and what != "elsewhere" else list(axes)
            assert sentence.startswith(tuple(names)), (argument, what, sentence)


@pytest.mark.parametrize(
    "name", ["interdomain", "s4d", "ssd", "selective_scan", "interdomain_map", "ssd_map", "s4d_map"]
)
def test_ends_of_documents_and_rows(name):
    """Of every kind of integers, and before anything is computed; numbers without a sign fall as well."""
    axes, arguments = ENTRIES[name][1], good(name)
    arguments |= {argument: arguments[argument][:1] for argument, x in axes.items() if x.startswith("B, T")}
    arguments.pop("initial_state", None)
    call = partial(ENTRIES[name][0], **arguments)
    kinds = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
    for kind in kinds:
        call(cu_seqlens=torch.tensor([0, 2, 2, 5]).to(kind))
        sentence = refused(call, {"cu_seqlens": torch.tensor([0, 3, 2, 5]).to(kind)})
        assert sentence.startswith("cu_seqlens must never decrease"), sentence
    for ends in (
        [0, 5],
        torch.tensor([0.0, 5.0]),
        torch.tensor([False, True]),
        torch.tensor([[0, 5]]),
        torch.tensor(5),
    ):
        sentence = refused(call, {"cu_seqlens": ends})
        assert sentence.startswith("cu_seqlens must be integers of shape [S + 1]"), sentence
    assert refused(call, {"cu_seqlens": torch.tensor([0, 4])}) == "cu_seqlens must run from 0 to T = 5, got 0 to 4."
    if not name.endswith("_map"):
        for lengths in ([5], torch.tensor([5.0]), torch.tensor([True]), torch.tensor(5), torch.tensor([3, 5])):
            sentence = refused(call, {"lengths": lengths})
            assert sentence.startswith("lengths must be integers of shape [B] = [1]"), sentence
        for kind in kinds:
            call(lengths=torch.tensor([3]).to(kind))
            sentence = refused(call, {"lengths": torch.tensor([6]).to(kind)})
            assert sentence == "lengths must lie between 0 and T = 5, got [6].", sentence


@pytest.mark.parametrize("name", ["interdomain_step", "s4d_step", "ssd_step", "selective_scan_step"])
def test_masks_of_steps(name):
    for mask in ([1, 0], torch.ones(2), torch.ones(3, dtype=torch.bool), torch.ones(2, 1, dtype=torch.long)):
        assert refused(ENTRIES[name][0], good(name) | {"mask": mask}).startswith("mask must "), mask


@pytest.mark.parametrize("read", ["read_experts", "sum_experts"])
@pytest.mark.parametrize("length", [5, 1])  # embedding bags, and rows that are gathered
def test_experts_outside_of_the_table(read, length):
    arguments = {name: x if name == "table" else x[:, :length] for name, x in good(read).items()}
    for wrong in (12, -1, 1 << 40):
        ids = arguments["ids"].clone()
        ids[-1, -1, -1] = wrong
        assert refused(ENTRIES[read][0], arguments | {"ids": ids}) == f"ids must lie between 0 and 11, got {wrong}."
    compiled = torch.compile(ENTRIES[read][0], fullgraph=True, backend="aot_eager")
    with pytest.raises((ValueError, IndexError), match="ids must lie between 0 and 11|index out of range"):
        compiled(**arguments | {"ids": ids})
    for kind in (torch.uint8, torch.int32):
        torch.testing.assert_close(
            ENTRIES[read][0](**arguments | {"ids": arguments["ids"].to(kind)}), ENTRIES[read][0](**arguments)
        )
    assert refused(ENTRIES[read][0], arguments | {"backend": "bag"}).startswith("backend must be one of auto, bags,")


def test_numbers_of_experts():
    for argument, most in {"rows": 7, "count": 4}.items():
        for number in (0, -1, most, 1.5, None):
            sentence = refused(ENTRIES["find_experts"][0], good("find_experts") | {argument: number})
            assert sentence.startswith(f"{argument} must be an integer from 1 to {most - 1}"), sentence


def _sparse(axes: str) -> dict:
    shape = [SIZES[axis] for axis in axes.split(", ")]
    own = torch.arange(shape[0] * shape[-1] * (shape[1] if len(shape) == 3 else 1)).view(shape) % 4 - 1
    tokens = {name: torch.randn(*shape, SIZES[width]) for name, width in (("query", "d"), ("key", "d"), ("value", "D"))}
    return tokens | {"scores": torch.randn(shape), "bins": [Bins(own, own, 3, 2)]}


def test_what_sparse_attention_sees():
    arguments = _sparse("B, T, S") | {"selected_keys": 2}
    _, memory = sparse_attention(**arguments, output_final_state=True)
    step, before = _sparse("B, S") | {"memory": memory}, _copied(memory)
    sparse_step(**step | {"memory": _copied(memory)})
    nan = torch.full_like(arguments["scores"], torch.nan)
    lengths = torch.tensor([5, 0])
    sparse_attention(
        **arguments | {"scores": torch.where(torch.arange(2)[:, None, None] == 1, nan, 0)}, lengths=lengths
    )
    for call, given in ((sparse_attention, arguments), (sparse_step, step)):
        scores, (part,) = given["scores"], given["bins"]
        for changes, message in (
            ({"scores": scores.where(scores > scores.min(), torch.nan)}, "scores hold NaN"),
            ({"bins": [part._replace(key=part.key + 1)]}, "bins.key must lie between -1 and 2, got 3."),
            ({"bins": [part._replace(query=part.query - 1)]}, "bins.query must lie between -1 and 2, got -2."),
            ({"bins": [part._replace(key=part.key.float())]}, "bins.key must be integers, got torch.float32."),
            ({"bins": [part._replace(key=part.key[..., :1])]}, "bins.key must have shape"),
            ({"bins": [part._replace(number=0)]}, "bins need a positive number and keys, got 0 and 2."),
            ({"bins": [part._replace(keys=1.5)]}, "bins need a positive number and keys, got 3 and 1.5."),
            ({"bins": part}, "bins must be a list of Bins"),
            ({"bins": None}, "bins must be a list of Bins"),
        ):
            sentence = refused(call, given | changes)
            assert sentence.startswith(message), sentence
    for name, call, given in (("initial_state", sparse_attention, arguments), ("memory", sparse_step, step)):
        for wrong in (memory.entries, 3, *([None] if name == "memory" else [])):
            assert refused(call, given | {name: wrong}).startswith(f"{name} must be a SparseMemory, got")
        for wrong in (
            memory._replace(entries=memory.entries[:1]),
            memory._replace(scores=memory.scores[..., :1]),
            memory._replace(seen=memory.seen[:1]),
            memory._replace(rings=()),
            memory._replace(rings=(Ring(memory.rings[0].entries, memory.rings[0].places[:, :1]),)),
            empty_memory(2, 2, 3, 4, 0, [(3, 2)], arguments["key"]),
        ):
            assert "it belongs to another layer or batch" in refused(call, given | {name: wrong})
        torch.testing.assert_close(memory, before, rtol=0, atol=0)
    for documents in ([0] * 5, torch.zeros(4)):
        row = {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()} | {"bins": ()}
        row |= {"cu_seqlens": torch.tensor([0, 5]), "documents": documents}
        assert refused(sparse_attention, row).startswith("documents must be None or have shape [T] = [5]")
    for length in (0, 2.0, None):
        assert refused(s4d_attention_map, good("s4d_map") | {"length": length}).startswith("length must be a positive")


def _copied(memory: SparseMemory) -> SparseMemory:
    rings = tuple(Ring(*(x.clone() for x in ring)) for ring in memory.rings)
    return SparseMemory(*(x.clone() for x in memory[:4]), rings)
