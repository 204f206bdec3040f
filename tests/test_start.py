"""How a recurrent layer starts: modes, steps, and the coefficient matrix as the posterior makes it."""

import itertools
import json
import math

import pytest
import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, interdomain_attention
from modeling_interdomain.mixers.interdomain import initialization as module_start
from modeling_interdomain.mixers.interdomain import recurrence as module_recurrence
from modeling_interdomain.mixers.interdomain.configuration import STARTS
from modeling_interdomain.mixers.interdomain.recurrence import InterdomainRecurrence
from modeling_interdomain.mixers.s4d.mixer import S4DRecurrence

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32, "state_size": 8}
LEAD = {
    "product": "hermitian",
    "coefficient_init": "posterior",
    "modes": "uniform",
    "input_matrix_init": "unit_variance",
    "time_step_spacing": "even",
    "time_step_min": 0.02,
}


def config_of(**fields) -> InterdomainConfig:
    """Of a random start, but for `fields`."""
    return InterdomainConfig(**{**SMALL, "bos_token_id": None, "eos_token_id": None, "start": "random", **fields})


def started(kind, config):
    recurrence = kind(config)
    recurrence.start_parameters(config)
    return recurrence


def features(transition: torch.Tensor, beta: torch.Tensor, ages: int) -> torch.Tensor:
    """phi_n(a), complex `[G, M, ages]`."""
    return beta[..., None] * transition[..., None] ** torch.arange(ages)


def modes_of(recurrence) -> tuple[torch.Tensor, torch.Tensor]:
    """lambda and beta, complex `[G, M]` in float64, of what the operator is called with."""
    log_decay, beta, _ = (torch.view_as_complex(x.detach().double()) for x in recurrence.parameters_of_operator())
    return log_decay.exp(), beta


def hermitian_kernel(coefficients: torch.Tensor, phi: torch.Tensor) -> torch.Tensor:
    """`sum_nm conj(phi_n(a)) H_nm phi_m(b)` with `H = C^H C`, complex `[G, ages, ages]`."""
    return phi.conj().mT @ (coefficients.conj().mT @ coefficients) @ phi


def separate_modes(pairs: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Two heads of well separated modes of several decays, with betas of any phase."""
    generator = torch.Generator().manual_seed(0)
    phase = math.pi * (torch.arange(pairs, dtype=torch.float64) + 0.3) / pairs
    decay = 0.05 + 0.1 * torch.rand(2, pairs, generator=generator, dtype=torch.float64)
    beta = torch.randn(2, pairs, generator=generator, dtype=torch.complex128)
    return torch.exp(torch.complex(-decay, phase.expand(2, -1))), beta


def test_the_gramian_is_the_sum_over_ages():
    transition, beta = separate_modes()
    phi = features(transition, beta, 1000)
    torch.testing.assert_close(module_start.gramian(transition, beta), phi.conj() @ phi.mT)
    real = torch.view_as_real(phi.mT.contiguous()).flatten(2)  # [G, ages, 2M]
    torch.testing.assert_close(module_start.real_gramian(transition, beta), real.mT @ real)


def test_the_posterior_makes_the_projector_onto_the_modes():
    """Each head, in float64: Z Z = Z, Z^H = Z, and Z leaves every mode as it is."""
    transition, beta = separate_modes()
    phi = features(transition, beta, 1000)
    kernel = hermitian_kernel(module_start.posterior_coefficients(module_start.gramian(transition, beta), 0.0), phi)
    assert (kernel @ kernel - kernel).abs().max() < 1e-8
    assert (kernel.mH - kernel).abs().max() < 1e-8
    # K(a, b) multiplies conj(phi(a)) and phi(b): conjugated modes are the ones it leaves alone.
    assert (kernel @ phi.conj().mT - phi.conj().mT).abs().max() < 1e-8
    torch.testing.assert_close(kernel.diagonal(dim1=1, dim2=2).sum(-1).real, torch.full((2,), 4.0).double())


def test_the_layer_computes_the_projector_where_frequencies_come_in_pairs():
    """There it is real, so that nothing is lost in the real part: the operator's own kernel, each age a query head."""
    ages = 200
    half, beta = separate_modes(2)
    transition, beta = torch.cat([half, half.conj()], dim=1), torch.cat([beta, beta.conj()], dim=1)
    coefficients = module_start.posterior_coefficients(module_start.gramian(transition, beta), 0.0)
    log_decay, beta, coefficients = (
        torch.view_as_real(x.resolve_conj()) for x in (transition.log(), beta, coefficients)
    )
    ones = torch.eye(ages, dtype=torch.float64).flip(0)  # the key and the value of age a are one in place a
    for g in range(2):
        query = torch.eye(ages, dtype=torch.float64).expand(1, ages, -1, -1)
        token = ones[None, :, None]
        parameters = log_decay[g : g + 1], beta[g : g + 1], coefficients[g : g + 1]
        kernel = interdomain_attention(query, token, token, *parameters, product="hermitian")[0][0, -1]
        phi = features(transition[g], torch.view_as_complex(beta[g]), ages).mT
        assert (kernel @ kernel - kernel).abs().max() < 1e-7  # ages end at 200: what is left of the modes
        assert (kernel - kernel.mT).abs().max() < 1e-8
        assert (kernel @ phi.real - phi.real).abs().max() < 1e-7 and (kernel @ phi.imag - phi.imag).abs().max() < 1e-7


def test_uniform_modes_with_a_slow_decay_are_half_the_projector_of_their_real_functions():
    """2 Re Z comes closer to the projector onto Re phi and Im phi the slower the decay; the latter by quadrature."""
    size, ages, errors = 8, 4000, []
    for step in (0.1, 0.01):
        frequency = module_start.frequencies("uniform", size, torch.tensor([math.log(step)]))[0].double()
        torch.testing.assert_close(step * frequency, math.pi * (torch.arange(size).double() + 0.5) / size)
        transition = torch.exp(step * torch.complex(torch.tensor(-0.5).double(), frequency))[None]
        beta = torch.sqrt(1 - transition.abs() ** 2).to(transition.dtype)
        phi = features(transition, beta, ages)
        gram = module_start.gramian(transition, beta)
        assert (gram - torch.eye(size)).abs().max() < 3 * step * size
        found = 2 * hermitian_kernel(module_start.posterior_coefficients(gram, 0.0), phi)[0].real
        basis = torch.linalg.qr(torch.cat([phi.real, phi.imag], dim=1)[0].mT)[0]
        errors.append(((found - basis @ basis.mT).norm() / found.norm()).item())
    assert errors[1] < errors[0] / 5 and errors[1] < 0.05


def test_noise_is_relative_and_bounds_the_coefficients():
    """H is the conjugate of `(P + noise tr(P)/M I)^-1`, and C upper triangular with a positive diagonal."""
    transition, beta = separate_modes()
    gram = module_start.gramian(transition, beta)
    coefficients = module_start.posterior_coefficients(gram, 0.1)
    mean = gram.diagonal(dim1=1, dim2=2).real.mean(-1)
    expected = torch.linalg.inv(gram + 0.1 * mean[:, None, None] * torch.eye(4)).conj()
    torch.testing.assert_close(coefficients.mH @ coefficients, expected)
    torch.testing.assert_close(coefficients, torch.linalg.cholesky(expected).mH)
    scaled = module_start.posterior_coefficients(gram * 9, 0.1)
    torch.testing.assert_close(scaled, coefficients / 3)


def test_a_diagonal_posterior_sees_each_mode_alone():
    gram = torch.diag_embed(torch.tensor([[4.0, 0.25]], dtype=torch.complex128))
    found = module_start.posterior_diagonal(gram, 0.0)
    torch.testing.assert_close(torch.diag_embed(found), module_start.posterior_coefficients(gram, 0.0))
    recurrence = started(InterdomainRecurrence, config_of(**LEAD, coefficient_matrix="diagonal"))
    # Modes of unit variance need no scaling but that of the noise.
    expected = torch.tensor([1 / math.sqrt(1.001), 0.0]).expand_as(recurrence.C)
    torch.testing.assert_close(recurrence.C.detach(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_even_steps_lie_at_equal_ratios_and_are_not_drawn(groups):
    fields = {"num_attention_heads": 4, "num_key_value_heads": groups, "time_step_spacing": "even"}
    torch.manual_seed(0)
    first = started(InterdomainRecurrence, config_of(**fields, time_step_min=0.02, time_step_max=0.16)).log_dt.exp()
    torch.manual_seed(1)
    second = started(InterdomainRecurrence, config_of(**fields, time_step_min=0.02, time_step_max=0.16)).log_dt.exp()
    expected = {1: [0.02 * 8**0.5], 2: [0.02, 0.16], 4: [0.02, 0.04, 0.08, 0.16]}[groups]
    torch.testing.assert_close(first.detach(), torch.tensor(expected))
    assert torch.equal(first, second)


def test_uniform_phases_do_not_depend_on_the_step():
    recurrence = started(InterdomainRecurrence, config_of(modes="uniform"))
    phase = recurrence.parameters_of_operator()[0][..., 1]
    expected = math.pi * (torch.arange(8) + 0.5) / 8
    torch.testing.assert_close(phase.detach(), expected.expand(2, -1))
    assert recurrence.log_dt[0] != recurrence.log_dt[1]
    lin = started(InterdomainRecurrence, config_of(modes="s4d_lin"))
    torch.testing.assert_close(lin.a_imag.detach(), math.pi * torch.arange(8.0).expand(2, -1))


def test_a_random_start_is_bit_for_bit_what_it_was():
    """The draws of the published layer in their order: steps, then C."""
    config = config_of()
    torch.manual_seed(3)
    recurrence = started(InterdomainRecurrence, config)
    torch.manual_seed(3)
    log_dt = torch.empty(2).uniform_(math.log(1e-3), math.log(1e-1))
    coefficients = torch.empty(2, 8, 8, 2).normal_(std=math.sqrt(0.25**2 / 8 / 2))
    n = torch.arange(8, dtype=torch.float32)
    rate = torch.complex(torch.full((2, 8), -math.log(0.5)).neg().exp().neg().double(), torch.zeros(2, 8).double())
    rate = rate + 1j * (8 / math.pi * (8 / (2 * n + 1) - 1)).double()
    assert torch.equal(recurrence.log_dt, log_dt) and torch.equal(recurrence.C, coefficients)
    assert torch.equal(recurrence.a_imag[0], 8 / math.pi * (8 / (2 * n + 1) - 1))
    assert torch.equal(recurrence.log_a_real, torch.full((2, 8), math.log(0.5)))
    beta = (torch.exp(log_dt.double().exp()[:, None] * rate) - 1) / rate
    torch.testing.assert_close(torch.view_as_complex(recurrence.B.detach()), beta.to(torch.complex64))


@pytest.mark.parametrize("product", ["bilinear", "hermitian", "real"])
@pytest.mark.parametrize("coefficients", ["full", "diagonal"])
@pytest.mark.parametrize("modes", ["s4d_lin", "uniform"])
def test_the_output_starts_as_large_as_asked(product, coefficients, modes):
    """White keys and values of unit size, queries of unit length, many tokens: measured against the formula."""
    torch.manual_seed(0)
    fields = {"modes": modes, "time_step_min": 0.05, "product": product, "coefficient_matrix": coefficients}
    recurrence = started(InterdomainRecurrence, config_of(**fields, output_init_rms=0.3))
    query = torch.nn.functional.normalize(torch.randn(8, 256, 2, 16), dim=-1)
    key, value = torch.randn(8, 256, 2, 16), torch.randn(8, 256, 2, 64)
    with torch.no_grad():
        output, _ = recurrence(query, key, value)
    rms = output[:, 128:].square().mean((0, 1, 3)).sqrt()
    torch.testing.assert_close(rms, torch.full((2,), 0.3), rtol=0.1, atol=0)


def test_the_output_of_s4d_starts_as_large_as_asked():
    """In the mean over the readouts that are drawn."""
    torch.manual_seed(0)
    fields = {"modes": "uniform", "time_step_min": 0.05, "coefficient_init": "posterior", "output_init_rms": 0.3}
    config = config_of(**fields, token_mixers="s4d", num_attention_heads=256, num_key_value_heads=2, head_dim=8)
    recurrence = started(S4DRecurrence, config)
    with torch.no_grad():
        output, _ = recurrence(torch.randn(2, 192, 2, 8), torch.randn(2, 192, 2, 8))
    rms = output[:, 128:].unflatten(2, (2, 128)).square().mean((0, 1, 3, 4)).sqrt()
    torch.testing.assert_close(rms, torch.full((2,), 0.3), rtol=0.1, atol=0)


VARIANTS = {
    "lead": {},
    "diagonal": {"coefficient_matrix": "diagonal"},
    "grouped": {"num_key_value_heads": 1},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_placement": "after"},
    "normalized": {"normalize": True},
    "fourier": {"feature_map": "fourier", "normalize": True, "input_norm": False},
    "single-input": {"state_input": "generic"},
    "s4d": {"token_mixers": "s4d"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("modes", "spacing"), list(itertools.product(["s4d_inv", "s4d_lin", "uniform"], ["random", "even"]))
)
def test_every_start_trains_and_comes_back(tmp_path, name, modes, spacing):
    for start in ("normal", "identity", "posterior"):
        fields = LEAD | VARIANTS[name] | {"modes": modes, "time_step_spacing": spacing, "coefficient_init": start}
        if not fields.get("normalize"):
            fields["output_init_rms"] = 0.05
        torch.manual_seed(0)
        model = InterdomainForCausalLM(config_of(**fields))
        ids = torch.randint(32, (2, 12))
        before = {key: x.clone() for key, x in model.named_parameters()}
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.optim.AdamW(model.parameters(), lr=1e-3).step()
        moved = [key for key, x in model.named_parameters() if "recurrence" in key and not torch.equal(x, before[key])]
        parameters = 6 if name == "s4d" else 5
        assert loss.isfinite() and len(moved) == parameters
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())
        assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == again.config.to_diff_dict()


def test_what_is_sharded_is_not_started_in_part():
    model = InterdomainForCausalLM(InterdomainConfig(**SMALL))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        recurrence, norm = model.model.layers[0].token_mixer.recurrence, model.model.norm
        for module in (recurrence, norm):
            fully_shard(module, mesh=mesh)
        model._init_weights(norm)
        with pytest.raises(NotImplementedError, match="call init_weights before fully_shard, or load a state dict"):
            model._init_weights(recurrence)
    finally:
        dist.destroy_process_group()


def test_a_start_needs_no_memory_on_the_meta_device():
    with torch.device("meta"):
        model = InterdomainForCausalLM(config_of(**LEAD, output_init_rms=0.05))
    assert all(x.is_meta for x in model.parameters())


def test_a_configuration_of_before_starts_as_before(tmp_path):
    config = config_of()
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert {"start", *STARTS["recall"]} <= fields.keys()
    new = {"start", "query_init", "modes", "time_step_spacing", "coefficient_init", "coefficient_init_noise"}
    new |= {"output_init_rms", "product"}
    (tmp_path / "config.json").write_text(json.dumps({key: x for key, x in fields.items() if key not in new}))
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modes": "fourier"}, "modes must be one of s4d_inv, s4d_lin, uniform"),
        ({"time_step_spacing": "drawn"}, "time_step_spacing must be one of random, even"),
        ({"coefficient_init": "zero"}, "coefficient_init must be one of normal, identity, posterior"),
        ({"coefficient_init_noise": 0.0}, "coefficient_init_noise must be at least 1e-10"),
        ({"coefficient_init_noise": math.nan}, "coefficient_init_noise must be at least 1e-10"),
        ({"coefficient_init": "posterior"}, 'set product="hermitian"'),
        ({**LEAD, "coefficient_matrix": "identity"}, 'set coefficient_matrix to "full"'),
        ({"output_init_rms": 0.0}, "output_init_rms must be positive"),
        ({"output_init_rms": math.inf}, "output_init_rms must be positive"),
        ({"output_init_rms": 0.1, "coefficient_matrix": "identity"}, '"identity" has none'),
        ({"output_init_rms": 0.1, "normalize": True}, "no effect with normalize"),
        ({"output_init_rms": 0.1, "use_output_norm": True}, "no effect with use_output_norm"),
        ({"start": "posterior"}, "start must be one of recall, random"),
        ({"start": "recall", "product": "bilinear"}, 'set product="hermitian"'),
        ({"start": "recall", "coefficient_matrix": "identity"}, 'set coefficient_matrix to "full"'),
        ({"query_init": "keys"}, "query_init must be one of independent, induction"),
        ({"query_init": "induction", "conv_kernel": 1}, "shifts keys by a token, which conv_kernel"),
        ({"sparse_query_init": "keys"}, "sparse_query_init must be one of independent, induction"),
        ({"sparse_query_init": "induction", "conv_kernel": 1}, 'set it to "independent"'),
        (
            {"query_init": "induction", "state_input": "generic", "feature_map": "fourier", "feature_dim": 12},
            "another width here",
        ),
    ],
)
def test_a_start_that_cannot_be_is_refused_in_one_sentence(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        config_of(**fields)


def test_the_default_start_remembers():
    """All that `start="recall"` stands for, and a field that is given instead."""
    config = InterdomainConfig(**SMALL)
    assert config.start == "recall" and config.output_init_rms == 0.02
    assert STARTS["recall"].items() <= config.to_dict().items()
    assert InterdomainConfig(**SMALL, modes="s4d_lin").modes == "s4d_lin"
    given = InterdomainConfig(**SMALL, coefficient_init="posterior")  # with the scale that it has
    assert given.output_init_rms is None and InterdomainConfig.from_dict(given.to_dict()).output_init_rms is None
    assert InterdomainConfig(**SMALL, start="recall", normalize=True).output_init_rms is None


@pytest.mark.parametrize(
    "fields",
    [
        {"product": "bilinear"},
        {"product": "real"},
        {"normalize": True},
        {"token_mixers": "softmax"},
        {"coefficient_matrix": "identity"},
        {"token_mixers": "ssd"},
        {"feature_map": "fourier"},
    ],
    ids=str,
)
def test_what_cannot_start_to_recall_starts_at_random(fields):
    config = InterdomainConfig(**SMALL, **fields)
    assert config.start == "random" and config.output_init_rms is None
    assert (STARTS["random"] | fields).items() <= config.to_dict().items()


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_key_value_heads": 1}, {"state_input": "generic"}, {"feature_dim": 12}, {"input_norm": False}],
    ids=str,
)
def test_a_start_that_recalls_reads_what_followed(fields):
    """Of random tokens, each seen once before at most, the one after the earlier occurrence answers."""
    torch.manual_seed(0)
    shape = SMALL | {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 64, "state_size": 32}
    model = InterdomainForCausalLM(InterdomainConfig(**shape, **fields)).eval()
    seen = torch.randperm(64)[:20]
    order = torch.randperm(19)
    ids = torch.cat([seen, seen[order]])[None]
    weights = model(ids, output_attentions=True).attentions[0][0].mean(0)  # [asks, answers]
    answered = weights[20:, :20].argmax(-1)
    assert (answered == order + 1).double().mean() > 0.9
    torch.manual_seed(0)
    model = InterdomainForCausalLM(InterdomainConfig(**shape, **fields, start="random")).eval()
    answered = model(ids, output_attentions=True).attentions[0][0].mean(0)[20:, :20].argmax(-1)
    assert (answered == order + 1).double().mean() < 0.3


def test_queries_start_as_the_keys_of_their_group():
    config = InterdomainConfig(**SMALL | {"num_attention_heads": 4}, num_key_value_heads=2, conv_kernel=3)
    mixer = InterdomainForCausalLM(config).model.layers[0].token_mixer
    queries, keys = mixer.q_proj.weight.unflatten(0, (4, -1)), mixer.k_proj.weight.unflatten(0, (2, -1))
    assert all(torch.equal(queries[head], keys[head // 2]) for head in range(4))
    assert torch.equal(mixer.q_conv.weight, torch.tensor([0.0, 0.0, 1.0]).expand(32, 1, -1))
    assert torch.equal(mixer.k_conv.weight, torch.tensor([0.0, 1.0, 0.1]).expand(16, 1, -1))


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_token_has_a_key_and_small_gradients(packed):
    """Nothing comes before it; the feature map of nothing would have a gradient of 1e12."""
    torch.manual_seed(0)
    ids, norms = torch.randint(32, (2, 16)), {}
    for start in ("random", "recall"):
        torch.manual_seed(0)
        model = InterdomainForCausalLM(config_of(start=start))
        positions = {"position_ids": (torch.arange(16) % 5).expand(2, -1)} if packed else {}
        model(ids, labels=ids, **positions).loss.backward()
        norms[start] = torch.nn.utils.get_total_norm([x.grad for x in model.parameters()]).item()
    assert norms["recall"] < 3 * norms["random"]


def test_a_posterior_of_s4d_layers_needs_no_product():
    assert config_of(token_mixers="s4d", coefficient_init="posterior").product == "bilinear"
    recurrence = started(S4DRecurrence, config_of(token_mixers="s4d", coefficient_init="posterior", modes="uniform"))
    coefficients = torch.view_as_complex(recurrence.C.detach().double())
    # The Gramian of C phi, conjugated: the modes that the readout meets are orthonormal but for the noise.
    mixed = coefficients @ module_start.gramian(*modes_of(recurrence)).conj() @ coefficients.mH
    torch.testing.assert_close(mixed, torch.eye(8).expand(2, -1, -1).to(mixed.dtype), atol=5e-3, rtol=0)


@pytest.mark.parametrize("mixer", ["s4d", "ssd", "selective_scan", "interdomain"])
def test_one_of_a_recurrence_and_its_branch_starts_with_induction(mixer):
    """Of random tokens, each seen once before at most, the branch reads the one after; not where the layer does."""
    torch.manual_seed(0)
    fields = {"hidden_size": 128, "vocab_size": 64, "token_mixers": mixer, "sparse_attention": "full"}
    fields |= {"feed_forwards": "none"} if mixer == "selective_scan" else {}
    model = InterdomainForCausalLM(InterdomainConfig(**SMALL | fields)).eval()
    first = model.model.layers[0]
    seen = torch.randperm(64)[:20]
    order = torch.randperm(19)
    ids = torch.cat([seen, seen[order]])[None]
    tokens = first.input_layernorm(model.model.embed_tokens(ids))
    branch = first.token_mixer.sparse
    inputs = branch.prepare(tokens, torch.zeros(1, 39, branch.groups, branch.width), None, None, None)
    scores = torch.einsum("tsd,usd->tu", inputs.query[0], inputs.key[0])
    right = (scores[20:, :20].argmax(-1) == order + 1).float().mean()
    assert (right > 0.9) == (mixer != "interdomain")
    own = scores[20:, :20].gather(1, order[:, None] + 1).mean().item() / branch.heads
    if mixer != "interdomain":  # queries and keys of unit variance
        assert own == pytest.approx(branch.dim**0.5, rel=0.3)


@pytest.mark.parametrize(
    ("fields", "gate", "query"),
    [
        ({}, 0.02, "induction"),
        ({"output_init_rms": 0.05}, 0.05, "induction"),
        ({"token_mixers": "ssd"}, 1.0, "induction"),
        ({"conv_kernel": 1}, 0.02, "independent"),
        ({"start": "random"}, 1.0, "independent"),
        ({"sparse_gate_init": 0.5, "sparse_query_init": "independent"}, 0.5, "independent"),
    ],
    ids=str,
)
def test_a_branch_starts_as_loud_as_its_recurrence(fields, gate, query):
    config = InterdomainConfig(**SMALL, sparse_attention="hax", **fields)
    again = InterdomainConfig.from_dict(config.to_dict())
    assert all((x.sparse_gate_init, x.sparse_query_init) == (gate, query) for x in (config, again))
    model = InterdomainForCausalLM(config)
    assert model.model.layers[0].token_mixer.sparse.gate.weight.unique().tolist() == pytest.approx([gate])


def test_a_recurrence_that_was_rounded_says_so(monkeypatch):
    """`.to` leaves it in float32; FSDP with mixed precision does not."""
    said = []
    monkeypatch.setattr(module_recurrence.logger, "warning_once", said.append)
    model, ids = InterdomainForCausalLM(InterdomainConfig(**SMALL)).bfloat16(), torch.arange(6)[None]
    model(ids)
    assert not said
    recurrence = model.model.layers[0].token_mixer.recurrence
    for name, x in list(recurrence._parameters.items()):
        if x is not None:
            recurrence._parameters[name] = torch.nn.Parameter(x.detach().bfloat16())
    model(ids)
    assert said and all("rounded to torch.bfloat16" in line for line in said)


def test_a_pipeline_of_processes_is_refused():
    """The library takes layers out of a model that is to run in parts."""
    model = InterdomainForCausalLM(InterdomainConfig(**SMALL))
    assert not model.supports_pp_plan
    model.model.layers[0] = torch.nn.Identity()
    with pytest.raises(NotImplementedError, match="spread them by tensor parallelism"):
        model(torch.arange(6)[None])
