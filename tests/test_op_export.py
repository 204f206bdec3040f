"""The operators outside PyTorch: exported once with a variable batch and length, run at others."""

import pytest
import torch
from torch.export import Dim

from modeling_interdomain import interdomain_attention
from modeling_interdomain.ops.diagonal.export import export_attention
from modeling_interdomain.ops.s4d.entry import s4d_attention
from tests.operator_checks import COEFFICIENTS, PRODUCTS, assert_close, everything, inputs, relative_error

OTHERS = [(1, 7), (3, 64), (2, 1100)]


class Layer(torch.nn.Module):
    """Parameters that ask for gradients, as in a model that is being trained."""

    def __init__(self, operator: str):
        super().__init__()
        self.operator = operator
        found = inputs((1, 1, 4, 2, 4, 3, 5), dtype=torch.float32)
        names = ["log_decay", "input_matrix", "coefficient_matrix"]
        self.parameters_of = torch.nn.ParameterList(found[name].detach() for name in names)
        self.readout = torch.nn.Parameter(torch.randn(4, 5, 2))

    def forward(self, query, key, value, lengths, state):
        options = {"initial_state": state, "lengths": lengths, "output_final_state": True}
        if self.operator == "s4d":
            return s4d_attention(key, value, *self.parameters_of[:2], self.readout, **options)
        return interdomain_attention(query, key, value, *self.parameters_of, **options)


def arguments(batch: int, length: int):
    found = inputs((batch, length, 4, 2, 4, 3, 5), dtype=torch.float32)
    query, key, value, state = (found[name].detach() for name in ("query", "key", "value", "initial_state"))
    lengths = torch.tensor([length, 0, length // 2][:batch])
    return query, key, value, lengths, state


def any_size():
    batch, length = Dim("batch"), Dim("length")
    return (*[{0: batch, 1: length}] * 3, {0: batch}, {0: batch})


@pytest.mark.parametrize("length", [1, 16, 700])
@pytest.mark.parametrize(("product", "coefficients"), list(zip(PRODUCTS, COEFFICIENTS)))
def test_the_formulation_is_the_operator(length, product, coefficients):
    """Longer than a block of chunks, so that the doubling over blocks takes part; every gradient."""

    def exported(query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, lengths, **_):
        tensors = query, key, value, log_decay, input_matrix, coefficient_matrix
        return export_attention(*tensors, product, initial_state, None, lengths, 16)

    problem = inputs((3, length, 4, 2, 3, 5, 6), coefficients, phase=128.0)
    for lengths in (None, torch.tensor([0, length, (length + 1) // 2])):
        expected = everything(problem, product=product, backend="chunk", lengths=lengths)
        assert_close(everything(problem, exported, lengths=lengths), expected, 1e-10)


@pytest.mark.parametrize("operator", ["s4d", pytest.param("interdomain", marks=pytest.mark.slow)])
def test_an_exported_program_serves_every_size(operator):
    layer = Layer(operator)
    program = torch.export.export(layer, arguments(2, 100), dynamic_shapes=any_size())
    dtypes = {x.meta["val"].dtype for x in program.graph.nodes if isinstance(x.meta.get("val"), torch.Tensor)}
    assert not any(dtype.is_complex for dtype in dtypes)
    for size in OTHERS:
        expected = layer(*arguments(*size))
        for found, wanted in zip(program.module()(*arguments(*size)), expected, strict=True):
            assert relative_error(found, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["interdomain", "s4d"])
def test_onnxruntime_gives_the_same(operator, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the runtime of the exported graph is an extra")
    pytest.importorskip("onnxscript", reason="PyTorch's exporter needs it")
    layer, path = Layer(operator), tmp_path / "layer.onnx"
    torch.onnx.export(layer, arguments(2, 100), dynamic_shapes=any_size(), dynamo=True).save(path)
    session = onnxruntime.InferenceSession(path)
    for size in OTHERS:
        given = dict(zip(("query", "key", "value", "lengths", "state"), arguments(*size)))
        found = session.run(None, {x.name: given[x.name].numpy() for x in session.get_inputs()})
        for output, wanted in zip(found, layer(**given), strict=True):
            assert relative_error(torch.from_numpy(output), wanted.detach()) < 1e-4


def test_documents_are_refused_by_name():
    class Packed(Layer):
        def forward(self, query, key, value, ends):
            return interdomain_attention(query, key, value, *self.parameters_of, cu_seqlens=ends)

    with pytest.raises(ValueError, match="cu_seqlens cannot be exported: pass the documents as rows, with lengths"):
        torch.export.export(Packed("interdomain"), (*arguments(1, 9)[:3], torch.tensor([0, 4, 9])))
