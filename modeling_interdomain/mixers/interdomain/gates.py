"""What a token says of the state itself: how much of it stays, how strongly it writes, and the delta rule.

With f_t, w_t and d_t a number a token and group, and "answer" what the state says when it is asked for the token's key,

    X_t = f_t lambda X_{t-1} + w_t beta (x) [k~_t ; v~_t - d_t answer_t]

Forgetting and writing are those of Mamba and Gated DeltaNet (arXiv 2412.06464), the correction is the delta rule
("Linear Transformers Are Secretly Fast Weight Programmers", arXiv 2102.11174): a key that comes again is given its new
value instead of one more. All three start where they leave a layer nearly as it is without them.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ...layers.common import FULL_PRECISION
from ...ops.common.decay import as_complex, decay_powers
from ...ops.interdomain.gates import Gates, gated_state_after

# At the start: half of the state is left after 100 tokens (f = 0.993), a token writes as without a gate (w = 1), and of
# what is answered a fiftieth is taken back.
FORGET_START, WRITE_START, DELTA_START = -5.0, 0.54, -4.0
_AGES = 256  # in tokens, at which `what_keys_find` looks
_LEAST = 1e-16  # of what is divided by: where nothing is answered, nothing is taken back


def gate_tokens(
    names: Sequence[str],
    projected: Sequence[torch.Tensor],
    key: torch.Tensor,
    key_size: torch.Tensor | None,
) -> list[torch.Tensor]:
    """`[B, T, G]` each, in at least float32, of linear maps of tokens: log f, w, and the two numbers that d is made of.

    Args:
        names: of the maps: "forget" or "warp" (which gives the step of time, 1 at the start), "write", "delta".
        projected: the maps, `[B, T, G]` each.
        key: `[B, T, G, R]`.
        key_size: `[G]`, the mean squared length of a key, for "delta" alone, which gives d over it, and the squared
            length of the key as it is written, or of a mean one where that is longer, which is no matter of gradients.
    """
    found: dict[str, torch.Tensor] = {}
    for name, x in zip(names, projected, strict=True):
        x = x if x.dtype in FULL_PRECISION else x.float()
        if name == "forget":
            found[name] = F.logsigmoid(-FORGET_START - x)
        elif name in ("write", "warp"):
            found[name] = F.softplus(x + WRITE_START)
        else:
            found[name] = torch.sigmoid(x + DELTA_START) / key_size
            found["size"] = _written_size(key, found.get("write"), key_size).detach()
    return list(found.values())


def _written_size(key: torch.Tensor, write: torch.Tensor | None, key_size: torch.Tensor) -> torch.Tensor:
    """The squared length of keys as they are written, `[B, T, G]`, at least that of a mean one."""
    length = torch.linalg.vector_norm(key.to(key_size.dtype), dim=-1)
    if write is not None:
        length = length * write
    return length.square().maximum(key_size)


def mean_key_size(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The mean squared length `[G]` of keys `weight * x + bias`, `[R]` and `[G, R]`, of normalised x."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide).square().sum() + bias.to(wide).square().sum(-1)).clamp(min=_LEAST)


def what_keys_find(
    log_decay: torch.Tensor, input_matrix: torch.Tensor, coefficients: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a key of length 1 finds at most of a value, and the share up to which it finds no more than was written.

    `[G]` each. The first, the largest of K(a, a) = |C lambda^a beta|^2 over ages a, is what shares are measured by: in
    the mean of keys and from parameters alone, so that it is the same in training, in a step and in any batch. At the
    start a key finds most of itself at once, a = 0; where training turns C so that it finds more later, a share of what
    was found at once would take back more than was written.

    The second, without a gradient, is for a key that every token writes: of the same value it finds K(a, b) for each
    age a of the key, K(b, b) for one alone. Modes that tell ages apart have little beside that, a few modes several
    times as much. From the start that remembers states stay bounded so; of modes and C that training has moved anywhere
    nothing is proved.
    """
    ages = torch.arange(_AGES, device=log_decay.device)
    found = decay_powers(log_decay, ages) * as_complex(input_matrix)[:, None]  # C lambda^a beta, [G, ages, M]
    if coefficients is not None:
        c = as_complex(coefficients).to(found.dtype)
        found = c[:, None] * found if c.ndim == 2 else found @ c.mT
    own = torch.view_as_real(found).square().sum((-2, -1)).amax(1)
    fixed = found.detach()
    every = (fixed @ fixed[:, ::7].mH).real.abs().sum(1).amax(1).clamp(min=_LEAST)
    most = (own.detach() / every).clamp(max=1)
    return own.to(input_matrix.dtype).clamp(min=_LEAST), most.to(input_matrix.dtype)


def operator_gates(names: Sequence[str], gates: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> Gates:
    """Gates as the operators take them, of those of `gate_tokens`.

    Args:
        answers: of `what_keys_find`, for "delta" alone: no token takes back more than that share of what its key finds.
    """
    found = dict(zip((*names, "size") if "delta" in names else names, gates, strict=True))
    delta = found.get("delta")
    if delta is not None:
        own, most = answers
        delta = delta.minimum(most / found["size"]) / own
    return Gates(found.get("forget"), found.get("write"), delta)


def replay_gated(state: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
    """The state after recorded tokens: keys, values and gates, their mask, then what moves a state on.

    That is `log_decay` and `input_matrix`, and tables; of the delta rule what it answers, and C where there is one.
    """
    place = next(i for i, x in enumerate(arguments) if x.dtype == torch.bool)
    key, value, *gates = arguments[:place]
    mask, log_decay, input_matrix, *rest = arguments[place:]
    moves = key, value, mask, log_decay, input_matrix
    if not rest or rest[0].ndim > 1:  # nothing that the delta rule answers; there may be tables
        log_gate, write_gate = gates
        return gated_state_after(state, *moves, *rest, log_gate=log_gate, write_gate=write_gate)
    coefficients = rest[2] if len(rest) > 2 else None
    found = operator_gates(["forget", "write", "delta"][1 - len(gates) :], gates, rest[:2])
    return gated_state_after(state, *moves, **found._asdict(), coefficient_matrix=coefficients, product="hermitian")  # type: ignore[arg-type]
