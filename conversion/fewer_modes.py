"""A trained recurrence with fewer modes: which to keep, where they move, and coefficients that make up for the others.

What a layer does is its kernel (see `modeling_interdomain/mixers/interdomain/initialization.py`): `K(a, b) = f(a)^T W
f(b)`, where f are the 2M real functions Re phi_0, Im phi_0, ... of an age, phi_n(a) = beta_n lambda_n^a, and W is made
of C. With white keys and values the mean squared change of the output is the squared norm of the change of K, `tr(W G W
G)` with G the Gramian of f. In that norm the best kernel on a subset S of the modes is the projection `G_SS^-1 G_SM W
G_MS G_SS^-1`, and the modes are chosen by what it loses. It may be any symmetric matrix, but every product has a form
of its own: Re phi^T S phi with S complex symmetric ("bilinear"), Re phi^H H phi with H positive ("hermitian"), or
4 Re(C phi)^T Re(C phi), positive and of rank M at most ("real"). So the nearest of that form is where an optimiser
begins, which then moves C and the modes themselves, in float64, all groups at once. The kernel of an "s4d" head is
`r f(a)`, linear, and its r may be anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from examples.text_data import InputError
from modeling_interdomain.mixers.interdomain.initialization import gramian, real_gramian
from modeling_interdomain.mixers.interdomain.recurrence import InterdomainRecurrence
from modeling_interdomain.ops.common.decay import as_complex
from modeling_interdomain.ops.diagonal.mixing import mixing_matrix, real_form

# Added to the diagonal of a Gramian of functions of unit size: there are modes that float64 cannot tell apart.
RIDGE = 1e-12
# What a function or a kernel is divided by that is zero.
TINY = 1e-100
STEPS = 150


class Kernel(NamedTuple):
    """What a recurrence does to white tokens, all in float64.

    Attributes:
        log_decay: complex `[G, M]`, log lambda.
        beta: complex `[G, M]`.
        gram: G `[G, 2M, 2M]`.
        weights: W `[G, 2M, 2M]`, or the rows r `[G, P, 2M]` of the P heads of a group.
        linear: whether they are rows.
    """

    log_decay: torch.Tensor
    beta: torch.Tensor
    gram: torch.Tensor
    weights: torch.Tensor
    linear: bool


@torch.no_grad()
def kernel_of(recurrence: InterdomainRecurrence) -> Kernel:
    """The kernel of a layer's recurrence."""
    pairs = recurrence.parameters_of_operator()
    log_decay, beta = (as_complex(x.double()) for x in pairs[:2])
    gram = real_gramian(log_decay.exp(), beta)
    linear = recurrence.degree == 1
    if linear:
        rows = as_complex(recurrence.head_rows(pairs[2]).double())
        weights = _real_rows(rows).unflatten(0, (beta.shape[0], -1))
    else:
        coefficients = None if pairs[2] is None else pairs[2].double()
        weights = mixing_matrix(coefficients, recurrence.product, *beta.shape, gram)
    return Kernel(log_decay, beta, gram, weights, linear)


def kernel_error(before: Kernel, after: Kernel) -> torch.Tensor:
    """`[G]`: the norm of the difference of two kernels over that of the first."""
    transitions = torch.cat([before.log_decay, after.log_decay], dim=1).exp()
    gram = real_gramian(transitions, torch.cat([before.beta, after.beta], dim=1))
    if before.linear:
        difference = torch.cat([before.weights, -after.weights], dim=2)
    else:
        pairs = zip(before.weights, after.weights, strict=True)
        difference = torch.stack([torch.block_diag(one, -other) for one, other in pairs])
    changed = _squared_norm(difference, gram, before.linear).clamp(min=0)
    return (changed / _squared_norm(before.weights, before.gram, before.linear).clamp(min=TINY)).sqrt()


# ---------------------------------------------------------------------------------------------- which modes


def strongest_modes(kernel: Kernel, size: int) -> torch.Tensor:
    """`[G, size]`: the modes whose own part of the kernel is the largest, as if the others were not there."""
    own = _own_blocks(kernel.weights, kernel.linear).flatten(0, 1)
    strength = _squared_norm(own, _own_blocks(kernel.gram).flatten(0, 1), kernel.linear)
    return strength.view(kernel.beta.shape).topk(size, dim=1).indices.sort(dim=1).values


def greedy_modes(kernel: Kernel, size: int) -> torch.Tensor:
    """`[G, size]`: one mode after the other goes, each the one without which the projection of the kernel loses least.

    Modes overlap so much that the other way, from the most useful one on, ends with worse ones.
    """
    groups, modes = kernel.beta.shape
    norms = kernel.gram.diagonal(dim1=1, dim2=2).sqrt()
    values, vectors = torch.linalg.eigh(_scaled(kernel.gram, norms))
    functions = vectors * values.clamp(min=0).sqrt()[:, None]  # of unit size, as vectors `[G, 2M, 2M]`
    functions = functions.where(norms[..., None] > TINY, 0)
    weights = (kernel.weights * norms[:, None]) @ functions
    if not kernel.linear:
        weights = functions.mT @ (norms[..., None] * weights)
    kept = torch.arange(modes).expand(groups, -1)
    while kept.shape[1] > size:
        own = functions.gather(1, _functions(kept)[..., None].expand(-1, -1, 2 * modes))
        root = torch.linalg.cholesky(_ridged(own @ own.mT))
        basis = torch.linalg.solve_triangular(root, own, upper=False)
        duals = torch.linalg.solve_triangular(root.mT, basis, upper=True)  # each orthogonal to all functions but one
        alone, lengths = torch.linalg.qr(duals.unflatten(1, (-1, 2)).mT)  # `[G, m, 2M, 2]`, what a mode has for itself
        read = weights[:, None] @ (alone * (lengths.diagonal(dim1=2, dim2=3) != 0)[:, :, None])
        lost = read.square().sum((2, 3))
        if not kernel.linear:
            lost = 2 * (basis[:, None] @ read).square().sum((2, 3)) - (alone.mT @ read).square().sum((2, 3))
        rest = torch.arange(kept.shape[1]) != lost.argmin(dim=1, keepdim=True)
        kept = kept[rest].view(groups, -1)
    return kept


# ------------------------------------------------------------------------------------- what they are to say


def reduced_parameters(
    recurrence: InterdomainRecurrence, size: int, *, greedy: bool = True, refit: bool = True, move: bool = True
) -> dict[str, torch.Tensor]:
    """The parameters, by name, of a recurrence of `size` modes with nearly the kernel of this one.

    Args:
        recurrence: of an "interdomain" or an "s4d" layer whose configuration `check_reducible` accepts.
        size: modes to keep, fewer than there are.
        greedy: choose them by `greedy_modes`, or by `strongest_modes`.
        refit: make up for the others, or leave the kernel what these modes alone made of it.
        move: let the modes move, too, where the kernel is refit.
    """
    kernel = kernel_of(recurrence)
    modes = (greedy_modes if greedy else strongest_modes)(kernel, size)
    log_decay, beta = kernel.log_decay.gather(1, modes), kernel.beta.gather(1, modes)
    form = _form_of(recurrence, log_decay, beta)
    coefficients = form.nearest(_restricted(kernel.weights, modes, kernel.linear))
    if refit:
        projected = form.nearest(_projected(kernel, modes))
        log_decay, coefficients = _fitted(kernel, form, log_decay, beta, [coefficients, projected], move)
    found = {"B": torch.view_as_real(beta)} | form.parameters(coefficients) | _rates(recurrence, log_decay)
    return {name: x.float() for name, x in found.items()}


def check_reducible(config) -> None:
    """Raise an InputError where a close kernel is no close output, or where heads cannot be refit."""
    names = set(config.mixers_per_layer)
    if config.normalize:
        raise InputError(
            "normalize=True divides by a readout that may come near zero, so that a close kernel is no close output: "
            "such layers keep their modes."
        )
    if config.gate_names:
        raise InputError(
            "Gates and the delta rule weigh each token, and what is refit is a kernel of ages alone: such layers keep "
            "their modes."
        )
    shared = config.num_attention_heads != config.num_key_value_heads
    if "s4d" in names and shared and config.coefficient_matrix != "full":
        raise InputError(
            "Heads of s4d layers that share a group have one coefficient a mode between them, with coefficient_matrix="
            f'"{config.coefficient_matrix}", and cannot each be refit: such layers keep their modes.'
        )


class _Full:
    """C of an "interdomain" layer, in coordinates in which the chosen modes, where they began, are orthonormal."""

    def __init__(self, product: str, log_decay: torch.Tensor, beta: torch.Tensor):
        self.product, self.basis = product, _orthonormalising(log_decay, beta)
        self.inverse = torch.linalg.inv(self.basis)

    def nearest(self, weights: torch.Tensor) -> torch.Tensor:
        basis = real_form(torch.view_as_real(self.basis))
        return torch.view_as_real(nearest_coefficients(basis.mT @ weights @ basis, self.product))

    def coefficients(self, found: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(found) @ self.inverse)

    def weights(self, found: torch.Tensor) -> torch.Tensor:
        return mixing_matrix(self.coefficients(found), self.product, *found.shape[:2], found)

    def parameters(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"C": self.coefficients(found)}


class _Diagonal:
    """One coefficient a mode; where C is the identity it is beta that is multiplied with it."""

    def __init__(self, product: str, log_decay: torch.Tensor, beta: torch.Tensor, identity: bool):
        self.product, self.beta, self.identity = product, beta, identity
        self.size = (beta.abs() * (1 - (2 * log_decay.real).exp()).rsqrt()).clamp(min=TINY)

    def nearest(self, weights: torch.Tensor) -> torch.Tensor:
        found = nearest_coefficients(_own_blocks(weights), self.product)[..., 0, 0]
        return torch.view_as_real(found * self.size)

    def coefficients(self, found: torch.Tensor) -> torch.Tensor:
        return found / self.size[..., None]

    def weights(self, found: torch.Tensor) -> torch.Tensor:
        return mixing_matrix(self.coefficients(found), self.product, *found.shape[:2], found)

    def parameters(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        pairs = self.coefficients(found)
        if self.identity:
            return {"B": torch.view_as_real(torch.view_as_complex(pairs) * self.beta)}
        return {"C": pairs}


class _Rows:
    """The rows of an "s4d" layer, which are its readout times C; where that is the identity, times beta."""

    def __init__(self, recurrence: InterdomainRecurrence, log_decay: torch.Tensor, beta: torch.Tensor):
        self.C, self.beta = recurrence.C, beta
        self.basis = real_form(torch.view_as_real(_orthonormalising(log_decay, beta)))
        self.inverse = torch.linalg.inv(self.basis)

    def nearest(self, weights: torch.Tensor) -> torch.Tensor:
        return weights @ self.basis

    def weights(self, found: torch.Tensor) -> torch.Tensor:
        return found @ self.inverse

    def parameters(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.C is not None and self.C.ndim == 4:
            return self._factors(found)
        row = _complex_rows(self.weights(found))[:, 0]  # one head a group
        readout = row.abs().sqrt()
        rest = torch.where(readout > 0, row / readout, 0)
        if self.C is None:
            return {"readout": readout, "B": torch.view_as_real(rest * self.beta)}
        return {"readout": readout, "C": torch.view_as_real(rest)}

    def _factors(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        """The best of as many rows of C as there are modes; those that no head needs stay as they were."""
        (groups, heads, _), modes = found.shape, self.beta.shape[1]
        left, values, right = torch.linalg.svd(found, full_matrices=False)
        rank = min(heads, modes)
        weights = values[:, :rank].sqrt()
        readout = found.new_zeros(groups, heads, modes)
        readout[..., :rank] = left[..., :rank] * weights[:, None]
        C = self.C.detach()[:, :modes, :modes].double()
        C[:, :rank] = torch.view_as_real(_complex_rows(self.weights(weights[..., None] * right[:, :rank])))
        return {"readout": readout.flatten(0, 1), "C": C}


def _form_of(recurrence: InterdomainRecurrence, log_decay: torch.Tensor, beta: torch.Tensor):
    if recurrence.degree == 1:
        return _Rows(recurrence, log_decay, beta)
    if recurrence.C is not None and recurrence.C.ndim == 4:
        return _Full(recurrence.product, log_decay, beta)
    return _Diagonal(recurrence.product, log_decay, beta, recurrence.C is None)


def nearest_coefficients(weights: torch.Tensor, product: str) -> torch.Tensor:
    """C `[..., m, m]` whose `[C]^T D [C]` is nearest to symmetric matrices `[..., 2m, 2m]`, in the Frobenius norm."""
    (a, b), (c, d) = ([weights[..., i::2, j::2] for j in (0, 1)] for i in (0, 1))
    if product == "hermitian":  # the part that commutes with the imaginary unit, as far as it is positive
        values, vectors = torch.linalg.eigh(torch.complex(a + d, c - b) / 2)
        return values.clamp(min=0).sqrt()[..., None] * vectors.mH
    if product == "bilinear":  # the part that anticommutes: every eigenvalue has a twin of the other sign (Takagi)
        real, imag = (a - d) / 2, (b + c) / 2
        rows = torch.stack([real, imag], dim=-1), torch.stack([imag, -real], dim=-1)
        weights = torch.stack(rows, dim=-3).flatten(-4, -3).flatten(-2)
    values, vectors = torch.linalg.eigh(weights)
    size = weights.shape[-1] // 2
    rows = values[..., size:].clamp(min=0).sqrt()[..., None] * vectors[..., size:].mT
    found = _complex_rows(rows)
    return found if product == "real" else 2 * found


def _fitted(
    kernel: Kernel, form, log_decay: torch.Tensor, beta: torch.Tensor, starts: list[torch.Tensor], move: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """log lambda and coefficients of the smallest error that is found from the best of the starts."""
    size = _squared_norm(kernel.weights, kernel.gram, kernel.linear).clamp(min=TINY)

    def errors(log_decay: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Squared, relative, without the constant 1, `[G]`."""
        transition = log_decay.exp()
        own, across = (
            real_gramian(transition, beta),
            real_gramian(transition, beta, kernel.log_decay.exp(), kernel.beta),
        )
        weights, wanted = form.weights(found), kernel.weights @ across.mT
        if not kernel.linear:
            wanted = across @ wanted
        return (_squared_norm(weights, own, kernel.linear) - 2 * (weights * wanted).sum((-2, -1))) / size

    candidates = torch.stack(starts)
    best = torch.stack([errors(log_decay, start) for start in starts]).argmin(dim=0)
    found = candidates[best, torch.arange(len(best))]
    # A decay stays one.
    moved = [(-log_decay.real).log(), log_decay.imag.clone()]

    def decay() -> torch.Tensor:
        return torch.complex(-moved[0].exp(), moved[1])

    for variables in ([found], [*moved, found]) if move else ([found],):
        _descend(variables, lambda: errors(decay(), found).sum())
    return decay().detach(), found.detach()


def _descend(variables: list[torch.Tensor], error: Callable[[], torch.Tensor]) -> None:
    optimizer = torch.optim.LBFGS(
        [x.requires_grad_() for x in variables], max_iter=STEPS, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = error()
        value.backward()
        return value

    optimizer.step(closure)


@torch.no_grad()
def _rates(recurrence: InterdomainRecurrence, log_decay: torch.Tensor) -> dict[str, torch.Tensor]:
    """The steps of the groups stay as they are."""
    step = recurrence.log_dt.double()[:, None]
    found = {"log_a_real": (-log_decay.real).log() - step, "a_imag": log_decay.imag / step.exp()}
    return found | {"log_dt": recurrence.log_dt.clone()}


# ---------------------------------------------------------------------------------------- parts of matrices


def _squared_norm(weights: torch.Tensor, gram: torch.Tensor, linear: bool) -> torch.Tensor:
    """Of kernels, `[G]`."""
    moved = weights @ gram
    return (weights * (moved if linear else gram @ moved)).sum((-2, -1))


def _functions(modes: torch.Tensor) -> torch.Tensor:
    """`[G, 2m]`: the real functions of modes `[G, m]`."""
    return torch.stack([2 * modes, 2 * modes + 1], dim=-1).flatten(1)


def _restricted(weights: torch.Tensor, modes: torch.Tensor, linear: bool) -> torch.Tensor:
    """W or r without what belongs to other modes."""
    places = _functions(modes)
    if not linear:
        weights = weights.gather(1, places[..., None].expand(-1, -1, weights.shape[2]))
    return weights.gather(2, places[:, None].expand(-1, weights.shape[1], -1))


def _projected(kernel: Kernel, modes: torch.Tensor) -> torch.Tensor:
    """W or r of these modes with which the kernel is nearest, whatever its form."""
    across = kernel.gram.gather(1, _functions(modes)[..., None].expand(-1, -1, kernel.gram.shape[2]))
    own = _restricted(kernel.gram, modes, linear=False)
    rows = _solve(own, across @ kernel.weights.mT)  # [G, 2m, P or 2M]
    return rows.mT if kernel.linear else _solve(own, across @ rows.mT)


def _own_blocks(matrix: torch.Tensor, rows: bool = False) -> torch.Tensor:
    """`[G, M, 2, 2]`, the blocks of single modes on the diagonal of `[G, 2M, 2M]`; of rows `[G, M, P, 2]`, all."""
    blocks = matrix.unflatten(-1, (-1, 2))
    if rows:
        return blocks.movedim(2, 1)
    return blocks.unflatten(1, (-1, 2)).diagonal(dim1=1, dim2=3).movedim(3, 1)


def _real_rows(rows: torch.Tensor) -> torch.Tensor:
    """`[..., 2M]` which times f gives `2 Re rows phi`."""
    return 2 * torch.view_as_real(rows.conj().resolve_conj()).flatten(-2)


def _complex_rows(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `_real_rows`."""
    return torch.complex(rows[..., 0::2], -rows[..., 1::2]) / 2


def _orthonormalising(log_decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """T `[G, m, m]` with `phi = T psi` of orthonormal psi."""
    gram = gramian(log_decay.exp(), beta).conj()
    size = gram.diagonal(dim1=1, dim2=2).real.sqrt()
    return size[..., None].clamp(min=TINY) * torch.linalg.cholesky(_ridged(_scaled(gram, size)))


def _solve(gram: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    size = gram.diagonal(dim1=1, dim2=2).sqrt()
    root, size = torch.linalg.cholesky(_ridged(_scaled(gram, size))), size[..., None].clamp(min=TINY)
    return torch.cholesky_solve(x / size, root) / size


def _scaled(gram: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """The Gramian of the same functions of unit size, or zero."""
    size = size.clamp(min=TINY)
    return gram / size[..., None] / size[:, None]


def _ridged(gram: torch.Tensor) -> torch.Tensor:
    return gram + RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype)
