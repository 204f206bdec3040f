"""How a recurrent layer starts: its modes, its steps, and the coefficient matrix that makes it remember.

Seen from token t the layer gives `sum_ij (xi(q_t) . k~_i) v~_j K(t - i, t - j)`, where with the hermitian product

    K(a, b) = Re sum_nm conj(phi_n(a)) H_nm phi_m(b),    phi_n(a) = beta_n lambda_n^a,    H = C^H C

depends on the ages a of a key and b of a value. Recall wants K(a, b) = 1 for a = b and 0 otherwise. The closest that M
modes come to that is the orthogonal projector onto their span: H is the conjugate of the inverse of their Gramian P, in
the language of the paper the weights K_uu^-1 of the posterior mean given the interdomain features. The projector is
complex, and its real part is what the layer uses: of modes whose conjugates are orthogonal to them (frequencies that
spread evenly from 0 to Nyquist, nearly) it is half the projector onto the 2M real functions Re phi_n and Im phi_n.
"""

import math

import torch

from ...ops.diagonal.mixing import mixing_matrix


def frequencies(modes: str, size: int, log_step: torch.Tensor) -> torch.Tensor:
    """Im A `[G, M]` of the modes.

    Args:
        modes: "s4d_inv" (M / pi (M / (2n + 1) - 1)) or "s4d_lin" (pi n), both of "On the Parameterization and
            Initialization of Diagonal State Space Models" (arXiv 2206.11893), or "uniform": phases
            Delta Im A = pi (n + 1/2) / M a token, whatever the step.
        size: number of modes M.
        log_step: log Delta `[G]`.
    """
    n = torch.arange(size, dtype=torch.float32, device=log_step.device)
    if modes == "uniform":
        return (math.pi * (n.double() + 0.5) / size / log_step.double().exp()[:, None]).float()
    found = size / math.pi * (size / (2 * n + 1) - 1) if modes == "s4d_inv" else math.pi * n
    return found.expand(log_step.shape[0], -1)


def even_log_steps(groups: int, smallest: float, largest: float, device: torch.device) -> torch.Tensor:
    """log Delta `[G]`, evenly from the smallest step to the largest; of one group the middle."""
    low, high = math.log(smallest), math.log(largest)
    if groups == 1:
        return torch.tensor([(low + high) / 2], device=device)
    return torch.linspace(low, high, groups, dtype=torch.float64, device=device).float()


def gramian(transition: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """`P_nm = sum_a conj(phi_n(a)) phi_m(a)` over all ages, complex `[G, M, M]`, of lambda and beta `[G, M]`."""
    return _inner(transition.conj(), beta.conj(), transition, beta)


def real_gramian(
    transition: torch.Tensor,
    beta: torch.Tensor,
    other_transition: torch.Tensor | None = None,
    other_beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """The Gramian `[G, 2M, 2M]` of the 2M real functions Re phi_0, Im phi_0, Re phi_1, ... over all ages; with other
    modes `[G, N]` their products with those, `[G, 2M, 2N]`."""
    others = (transition, beta) if other_transition is None else (other_transition, other_beta)
    hermitian = _inner(transition.conj(), beta.conj(), *others)
    bilinear = _inner(transition, beta, *others)
    real = torch.stack([hermitian.real + bilinear.real, hermitian.imag + bilinear.imag], dim=-1)
    imag = torch.stack([bilinear.imag - hermitian.imag, hermitian.real - bilinear.real], dim=-1)
    return torch.stack([real, imag], dim=2).flatten(3, 4).flatten(1, 2) / 2


def _inner(transition, beta, other_transition, other_beta) -> torch.Tensor:
    """`sum_a beta_n lambda_n^a beta'_m lambda'_m^a`, `[G, M, N]`."""
    decays = 1 - transition[..., :, None] * other_transition[..., None, :]
    return beta[..., :, None] * other_beta[..., None, :] / decays


def posterior_coefficients(gram: torch.Tensor, noise: float) -> torch.Tensor:
    """`C = L^H` `[G, M, M]` with `L L^H` the conjugate of `(P + noise tr(P)/M I)^-1` and L its Cholesky factor.

    The inverse is never formed: with the regularised Gramian `U U^H`, U upper triangular, C is the conjugate of `U^-1`.

    Args:
        gram: the Gramian P, complex `[G, M, M]`, in float64.
        noise: what is added to the diagonal, relative to its mean; 0 needs modes that float64 can tell apart.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1).real
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    regularised = gram + noise * diagonal.mean(-1)[:, None, None] * identity
    # Unchecked, because where starting is switched off (a checkpoint follows) the parameters are anything.
    upper = torch.linalg.cholesky_ex(regularised.flip(-2, -1))[0].flip(-2, -1)
    return torch.linalg.solve_triangular(upper, identity.expand_as(upper), upper=True).conj()


def posterior_diagonal(gram: torch.Tensor, noise: float) -> torch.Tensor:
    """`posterior_coefficients` for a diagonal C `[G, M]`, which sees each mode alone, as if modes were orthogonal."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1).real
    return (diagonal + noise * diagonal.mean(-1, keepdim=True)).rsqrt().to(gram.dtype)


def output_rms(coefficients: torch.Tensor, product: str, gram: torch.Tensor) -> torch.Tensor:
    """Root mean square `[G]` of the output after many tokens: the Frobenius norm of K.

    That is what queries of unit length meet where keys and values are white with numbers of unit size.

    Args:
        coefficients: C, complex `[G, M, M]`.
        product: as in `interdomain_attention`.
        gram: of `real_gramian`.
    """
    kernel = mixing_matrix(
        torch.view_as_real(coefficients), product, coefficients.shape[0], coefficients.shape[1], gram
    )
    return (kernel * (gram @ kernel @ gram)).sum((-2, -1)).sqrt()
