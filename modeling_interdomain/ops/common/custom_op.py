"""Operators of `torch.library` with a gradient, registered from three functions: forward, fake outputs, backward."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .cpu import in_graph, namespace, without_autocast
from .launch import NoDerivative

# Where operators are made of PyTorch's operations.
_DEFINITION = "backend='recurrent', of sparse attention 'dense'; S4D and experts have none"


def differentiable(
    module: str,
    name: str,
    forward: Callable[..., tuple[torch.Tensor, ...]],
    outputs: Callable[..., tuple[torch.Tensor, ...]],
    backward: Callable[..., Sequence[torch.Tensor | None]],
    *,
    count: int,
    kept: tuple[int, ...] = (),
    grad_dtype: Callable[..., torch.dtype] | None = None,
):
    """Register `name` and `name_backward`, both opaque to a graph and both without autocast; the first is returned.

    The backward operator has no gradient, and says so when asked; nor is there a derivative in forward mode.
    `torch.func` takes gradients, and maps both over a batch one by one. The operator of PyTorch is in `registered`.

    Args:
        module: `__name__` of the module that asks.
        forward: annotated, since PyTorch reads its schema from the annotations. No output may be an input.
        outputs: makes empty tensors like those that `forward` returns for the same arguments. An output of shape `[0]`
            was not wanted and has no gradient.
        backward: gets the inputs with the kept outputs behind them, the gradients of all outputs and, for each of the
            first `count` inputs, whether its gradient is wanted. Gives that many gradients, each None or like its
            input. The first output's gradient is always there, and all are contiguous.
        count: how many inputs, the first ones, may have a gradient.
        kept: numbers of the outputs that are saved for `backward` beside the inputs; of these only output 0 has a
            gradient.
        grad_dtype: of the inputs, the dtype of the first output's gradient; as it comes when None.
    """
    path = f"{namespace(module)}::{name}"
    schema = torch.library.infer_schema(forward, mutates_args=())
    arguments, returned = schema.removesuffix(")").split(") -> ")
    more = [f"Tensor kept_{i}" for i in kept] + [f"Tensor? grad_{i}" for i in range(returned.count("Tensor"))]
    schema_backward = f"{', '.join([arguments, *more])}, bool[] needs) -> ({', '.join(['Tensor'] * count)})"
    lists = "Tensor[]" in arguments
    first_grad = arguments.count(",") + 1 + len(kept)

    def run(*inputs):
        with without_autocast(inputs[0].device):
            return forward(*inputs)

    def run_backward(*arguments):
        inputs, grads, needs = arguments[:first_grad], arguments[first_grad:-1], arguments[-1]
        # A backward pass inside autocast would otherwise multiply in its dtype, and a compiled one always.
        with without_autocast(inputs[0].device):
            return _without_none(inputs[0], backward(inputs, grads, needs), needs)

    def like_inputs(*arguments):
        found = [None if x is None else x.new_empty(x.shape) for x in arguments[:count]]
        return _without_none(arguments[0], found, arguments[-1])

    operator = torch.library.custom_op(path, run, mutates_args=(), schema=schema)
    operator.register_fake(outputs)
    operator_backward = torch.library.custom_op(
        f"{path}_backward", run_backward, mutates_args=(), schema=schema_backward
    )
    operator_backward.register_fake(like_inputs)

    def refuse(ctx, *grads):
        refuse_second(f"{path}_backward")

    go_back = with_transforms(operator_backward, refuse, lambda *_, **__: None, lists)

    def save(ctx, inputs, output):
        leaves, ctx.tree = tree_flatten(inputs) if lists else (inputs, None)
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        tensors = [x if isinstance(x, torch.Tensor) else None for x in leaves]
        ctx.save_for_backward(*tensors, *(output[i] for i in kept))
        if kept:
            ctx.mark_non_differentiable(*(output[i] for i in kept if i > 0))
        ctx.set_materialize_grads(False)

    def differentiate(ctx, *grads):
        saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
        leaves = [other if x is None else x for x, other in zip(saved, ctx.others)]
        inputs = tree_unflatten(leaves, ctx.tree) if lists else leaves
        first, *rest = (None if grad is None or grad.shape == (0,) else grad.contiguous() for grad in grads)
        if first is None:
            first = outputs(*inputs)[0].zero_()
        if grad_dtype is not None:
            first = first.to(grad_dtype(*inputs))
        needs = [x is not None and need for x, need in zip(inputs[:count], ctx.needs_input_grad)]
        found = go_back(*inputs, *saved[len(leaves) :], first, *rest, needs)
        others = ([None] * len(x) if isinstance(x, list) else None for x in inputs[count:])
        return *(x if need else None for x, need in zip(found, needs)), *others

    return with_transforms(operator, differentiate, save, lists)


def with_transforms(operator, differentiate: Callable, save: Callable, lists: bool = False) -> Any:
    """The operator with a gradient, and inside `torch.func` as a function of autograd, for PyTorch transforms none that
    is registered. Forward mode, of which it would say that all is constant, is refused; with `lists` any transform."""
    operator.register_autograd(differentiate, setup_context=save)

    class Function(torch.autograd.Function):
        forward, setup_context, backward = map(staticmethod, (operator, save, differentiate))

        @staticmethod
        def vmap(info, dims, *inputs):
            def row(i: int) -> list[Any]:
                return [x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(inputs, dims)]

            found = [Function.apply(*row(i)) for i in range(info.batch_size)]
            return tree_map(lambda *x: torch.stack(x), *found), tree_map(lambda _: 0, found[0])

    def call(*inputs):
        if in_graph():
            return operator(*inputs)
        top = peek_interpreter_stack()
        transforms = top is not None and top.key() != TransformType.Functionalize  # which knows operators alone
        if forward_ad._current_level >= 0 or (transforms and lists):
            raise NoDerivative(
                f"{operator._qualname} has no derivative in forward mode (jvp){', nor any transform' * lists}: use "
                f"torch.autograd.grad, or the definition, {_DEFINITION}."
            )
        return (Function.apply if transforms else operator)(*inputs)

    transformable: Any = call
    transformable.registered = operator
    return transformable


def refuse_second(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} has no gradient of its own (a second derivative): take the operator's definition, which is made of "
        f"PyTorch's operations, {_DEFINITION}."
    )


def _without_none(like: torch.Tensor, grads: Sequence[Any], needs: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """An operator gives tensors: an empty one for a gradient that nobody asked for."""
    return tuple(like.new_empty(0) if x is None or not need else x for x, need in zip(grads, needs, strict=True))
