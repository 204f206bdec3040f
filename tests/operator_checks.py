"""Random arguments of the operator, everything that a call gives, and how two of them are compared."""

import pytest
import torch

from modeling_interdomain import InterdomainConfig, InterdomainModel, interdomain_attention

PRODUCTS = ["bilinear", "hermitian", "real"]
COEFFICIENTS = ["full", "diagonal", "identity"]
SHAPES = {
    # name: (B, T, H, G, R, D, M)
    "one_token": (2, 1, 2, 2, 4, 4, 3),
    "short": (1, 5, 3, 3, 4, 4, 4),
    "one_chunk_exactly": (2, 16, 2, 2, 4, 6, 4),
    "odd_length": (2, 63, 4, 2, 5, 7, 6),
    "one_group": (1, 130, 4, 1, 8, 4, 5),
    "odd_sizes": (1, 33, 6, 3, 3, 10, 7),
    "one_mode": (1, 20, 2, 1, 4, 4, 1),
}
EXTREMES = {
    "hardly_decaying": {"decay": 1e-9},
    "gone_at_once": {"decay": 1e4},
    "never_there": {"decay": float("inf")},
    "mixed": {"decay": 400.0},
    "fast_phases": {"phase": 128.0},
}


def inputs(shape, coefficients="full", dtype=torch.float64, decay=0.2, phase=3.0, rows=None, normalize=False, seed=0):
    """Random arguments that all ask for gradients, the initial state included."""
    batch, length, heads, groups, feature_dim, value_dim, size = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    rate = -decay * torch.rand(groups, size, generator=generator, dtype=torch.float64)
    tensors = {
        "query": normal(batch, length, heads, feature_dim),
        "key": normal(batch, length, groups, feature_dim),
        "value": normal(batch, length, groups, value_dim),
        "log_decay": torch.stack([rate, phase * normal(groups, size)], dim=-1),
        "input_matrix": normal(groups, size, 2),
        "coefficient_matrix": {
            "full": normal(groups, size, size, 2) / size**0.5,
            "diagonal": normal(groups, size, 2),
            "identity": None,
        }[coefficients],
        "initial_state": normal(rows or batch, groups, 2, size, feature_dim + value_dim + int(normalize)),
    }
    return {k: None if v is None else v.to(dtype).requires_grad_() for k, v in tensors.items()}


def everything(arguments, attention=interdomain_attention, **options):
    """Output, final state and the gradient of every argument, for a loss on both."""
    output, state = attention(**arguments, output_final_state=True, **options)
    weights = torch.Generator().manual_seed(99)
    loss = sum((x * torch.randn(x.shape, generator=weights, dtype=torch.float64).to(x)).sum() for x in (output, state))
    leaves = {name: x for name, x in arguments.items() if x is not None}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"output": output, "state": state, **{f"grad of {k}": g for k, g in zip(leaves, grads)}}


def relative_error(found, expected):
    scale = expected.double().norm().clamp(min=1e-30)
    return ((found.double() - expected.double()).norm() / scale).item()


def assert_close(found, expected, bound):
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert all(error < bound for error in errors.values()), errors  # not the largest: NaN may not be


def cast(arguments, dtype):
    return {k: None if v is None else v.detach().to(dtype).requires_grad_() for k, v in arguments.items()}


# In which slots of a pool of 7 the states of 4 rows are; below 0 is a row without one.
SLOTS = {"apart": [5, 1, 0, 3], "run": [2, 3, 4, 5], "pads": [5, -1, 0, -1], "two_runs": [5, 6, 1, 2], "none": [-1] * 4}


def pool_of(state, apart):
    """A pool of 7 states like the rows of `state`, with so many numbers between them that are not theirs: both."""
    row = state[0]
    generator = torch.Generator().manual_seed(7)
    buffer = torch.randn(7, row.numel() + apart, generator=generator, dtype=torch.float64).to(state)
    return buffer[:, : row.numel()].unflatten(1, row.shape), buffer


def check_step_of_slots(step, state, slots, bound, **options):
    """A step of four rows in slots of a pool is that of these rows alone, and nothing else in the pool is touched.

    Args:
        step: called with `state`, `mask`, and `state_indices` and options.
        state: `[4, ...]`, as the rows of the pool are to be.
        slots: `[4]`.
    """
    used = [(row, slot) for row, slot in enumerate(slots) if slot >= 0]
    for dtype, apart, masked in ((torch.int32, 0, False), (torch.int64, 5, True)):
        pool, buffer = pool_of(state, apart)
        indices = torch.tensor(slots, device=state.device).to(dtype)
        mask = torch.tensor([True, True, False, True], device=state.device) if masked else None
        real = indices >= 0 if mask is None else mask & (indices >= 0)
        rows, expected_buffer = pool[indices.clamp(min=0).long()], buffer.clone()
        expected = step(state=rows, mask=real)
        for row, slot in used:
            expected_buffer[slot, : rows[row].numel()] = rows[row].flatten()
        before = buffer.clone()
        found = step(state=pool, mask=mask, state_indices=indices, **options)
        assert found.dtype == expected.dtype and not found[~real].any()
        assert relative_error(found, expected) < bound and relative_error(buffer, expected_buffer) < bound
        for _, slot in used:
            before[slot, : rows[0].numel()] = buffer[slot, : rows[0].numel()]
        assert torch.equal(buffer, before)


def check_bad_slots(step, state):
    """What is wrong with the indices of one row is said before its pool is touched."""
    pool, buffer = pool_of(state, 0)
    before = buffer.clone()
    wanted = r"state_indices must be int32 or int64 of shape \[B\] = \[1\], got"
    for indices, message in (
        (torch.ones(1), rf"{wanted} torch.float32 of shape \[1\]\."),
        (torch.tensor([True]), f"{wanted} torch.bool of"),
        (torch.tensor([1, 2]), rf"{wanted} torch.int64 of shape \[2\]\."),
        ([1], rf"{wanted} list\."),
        (torch.tensor([1], device="meta"), "state_indices is on meta, but the tokens are on cpu; move it there"),
        (torch.tensor([7]), "state_indices must be below the N = 7 slots of state, got 7"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            step(state=pool, state_indices=indices)
    first = torch.tensor([0])
    with pytest.raises(ValueError, match=r"^state must be a pool \[N, \.\.\.\] of at least one slot, got \[0,"):
        step(state=pool[:0], state_indices=first)
    with pytest.raises(ValueError, match=r"^state must be a pool \[N, \.\.\.\] of at least one slot, got NoneType"):
        step(state=None, state_indices=first)
    with pytest.raises(ValueError, match=r"^state must have shape \[rows, .* = \[7, "):
        step(state=pool[..., :-1], state_indices=first)
    with pytest.raises(ValueError, match="^each slot of state must be contiguous for backend 'triton'"):
        step(state=pool.mT.contiguous().mT, state_indices=first, backend="triton")
    assert torch.equal(buffer, before)


def at_an_odd_offset(x):
    """The same leaf in a buffer that it does not begin."""
    if x is None:
        return None
    buffer = x.new_empty(x.numel() + 1)
    return buffer[1:].view(x.shape).copy_(x).detach().requires_grad_()


def parameters_of_the_default_start(size: int, modes: str | None = None) -> dict[str, torch.Tensor]:
    """Of two heads, float32; C is an inverse of a Gramian, whose condition number is up to 10^4."""
    config = InterdomainConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, state_size=size, start="recall",
        modes=modes,
    )  # fmt: skip
    recurrence = InterdomainModel(config).layers[0].token_mixer.recurrence
    names = ("log_decay", "input_matrix", "coefficient_matrix")
    return {name: x.detach() for name, x in zip(names, recurrence.parameters_of_operator(), strict=True)}


def ring_by_place(entries: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each bin of a sparse memory in the order of their places, which equal memories may differ in."""
    ordered, order = places.sort(dim=-1, stable=True)
    return entries.gather(-2, order[..., None].expand_as(entries)), ordered
