"""Fewer modes: what they are chosen and refit by is what the layers compute, and the command says what it did."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion import fewer_modes
from conversion import reduce as conversion_reduce
from conversion.__main__ import main
from conversion.fewer_modes import kernel_error, kernel_of, nearest_coefficients, reduced_parameters
from conversion.reduce import reduce_model, reduced_config
from examples import text_data
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, InterdomainModel
from modeling_interdomain.ops.diagonal.mixing import mixing_matrix
from tests.test_examples import some_documents

FORMS = [(x, y) for x in ("bilinear", "hermitian", "real") for y in ("full", "diagonal", "identity")]
FORMS = {"-".join(form): dict(zip(("product", "coefficient_matrix"), form)) for form in FORMS}
FORMS |= {f"s4d-{x}": {"token_mixers": "s4d", "coefficient_matrix": x} for x in ("full", "diagonal", "identity")}
FORMS |= {"s4d-shared": {"token_mixers": "s4d", "num_key_value_heads": 2}, "grouped": {"num_key_value_heads": 2}}
# Of each kind of fit one is fast.
VARIED = ("bilinear-full", "hermitian-full", "real-identity", "s4d-full")
VARIED += tuple(
    pytest.param(name, marks=pytest.mark.slow) for name in ("bilinear-diagonal", "real-full", "s4d-diagonal")
)
DROPPED, REFIT, CHOSEN = {"greedy": False, "refit": False}, {"greedy": False, "move": False}, {"move": False}


@pytest.fixture
def make(make_model, monkeypatch):
    """`make(form, **changes)`: a model of one layer whose modes remember about ten tokens; fits are short."""
    monkeypatch.setattr(fewer_modes, "STEPS", 20)

    def build(name, **changes):
        model = make_model(dtype=torch.float32, **{"num_hidden_layers": 1} | FORMS[name] | changes)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for recurrence in recurrences(model):
                recurrence.log_dt.uniform_(-2, -1, generator=generator)
                recurrence.a_imag.uniform_(-8, 8, generator=generator)
        return model

    return build


def recurrences(model):
    return [layer.token_mixer.recurrence for layer in model.model.layers if hasattr(layer.token_mixer, "recurrence")]


def reduce(model, size, **how):
    return reduce_model(model, reduced_config(model.config, size), torch.float32, **how)


def errors(model, reduced):
    pairs = zip(recurrences(model), recurrences(reduced), strict=True)
    return torch.stack([kernel_error(kernel_of(before), kernel_of(after)) for before, after in pairs])


def dense(recurrence, length=400):
    """K `[G, length, length]` of the ages of keys and values from the definition, or `[G, P, length]` of a readout."""
    log_decay, beta, C = (None if x is None else x.double() for x in recurrence.parameters_of_operator())
    groups, size = beta.shape[:2]
    if C is None:
        C = torch.view_as_real(torch.ones(groups, size, dtype=torch.complex128))
    C = torch.view_as_complex(C.contiguous())
    C = torch.diag_embed(C) if C.ndim == 2 else C
    ages = torch.arange(length, dtype=torch.float64)[:, None]
    phi = torch.view_as_complex(beta)[:, None] * torch.exp(ages * torch.view_as_complex(log_decay)[:, None])
    read = phi @ C.mT
    if recurrence.degree == 1:
        readout = recurrence.readout.double().view(groups, -1, size)
        return 2 * (readout.to(C.dtype) @ read.mT).real
    if recurrence.product == "real":
        return 4 * read.real @ read.real.mT
    return ((read.conj() if recurrence.product == "hermitian" else read) @ read.mT).real


@pytest.mark.parametrize("form", FORMS)
def test_modes_that_carry_nothing_go_without_a_trace(form, make, random_ids):
    model = make(form, state_size=5)
    with torch.no_grad():
        for recurrence in recurrences(model):
            C = recurrence.B if recurrence.C is None else recurrence.C
            for group in range(len(C)):  # other ones in every group; of the product "real" as many rows, too
                C[group, [group, (group + 2) % 5]] = 0
                C[group, ..., [group, (group + 2) % 5], :] = 0
    reduced = reduce(model, 3)
    assert errors(model, reduced).max() < 1e-3  # the root of what float32 rounds
    ids = random_ids(2, 30)
    with torch.no_grad():
        expected = model(ids).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(reduced(ids).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", VARIED)
def test_the_error_is_that_of_the_kernels_and_falls_with_every_freedom(form, make):
    model = make(form, state_size=8)
    found = []
    for how in (DROPPED, REFIT, CHOSEN, {}):
        reduced = reduce(model, 4, **how)
        found.append(errors(model, reduced))
        for before, after, error in zip(recurrences(model), recurrences(reduced), found[-1], strict=True):
            expected, changed = dense(before), dense(before) - dense(after)
            relative = changed.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
            torch.testing.assert_close(error, relative, rtol=1e-3, atol=1e-4)
    dropped, refit, chosen, moved = (x.norm().item() for x in found)
    assert refit < 0.9 * dropped and chosen < 0.9 * dropped and moved < 0.95 * chosen


@pytest.mark.parametrize("form", ["bilinear-full", "s4d-full"])
def test_the_mode_that_goes_is_the_one_whose_projection_loses_least(form, make):
    kernel = kernel_of(recurrences(make(form, state_size=5))[0])
    functions = kernel.gram.new_tensor(range(10)).long().view(5, 2)

    def left(group, modes):
        """The squared norm of the projection onto the span of these modes."""
        places = functions[modes].flatten()
        gram, weights = kernel.gram[group], kernel.weights[group]
        onto = gram[:, places] @ torch.linalg.solve(gram[places][:, places], gram[places])
        return torch.trace(weights @ onto @ (weights.mT if kernel.linear else weights @ onto))

    chosen = fewer_modes.greedy_modes(kernel, 4)
    for group, modes in enumerate(chosen.tolist()):
        others = [[mode for mode in range(5) if mode != gone] for gone in range(5)]
        assert modes == max(others, key=lambda kept: left(group, kept))


@pytest.mark.parametrize("product", ["bilinear", "hermitian", "real"])
def test_a_form_is_found_again_in_its_matrix(product):
    C = torch.randn(3, 4, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = mixing_matrix(C, product, 3, 4, C)
    found = torch.view_as_real(nearest_coefficients(weights, product))
    torch.testing.assert_close(mixing_matrix(found, product, 3, 4, C), weights)


def test_a_reduced_model_computes_its_dense_kernel(make, random_ids, monkeypatch):
    reduced = reduce(make("bilinear-full"), 3)
    ids = random_ids(2, 20)

    def attend(recurrence):
        def forward(query, key, value, **arguments):
            kernel = dense(recurrence, 20).float()
            age = torch.arange(20)[:, None] - torch.arange(20)
            seen = (age >= 0).float()
            by_ages = kernel[:, age.clamp(min=0)[:, :, None], age.clamp(min=0)[:, None, :]]  # [G, T, keys, values]
            by_ages = by_ages * seen[:, :, None] * seen[:, None, :]
            scores = torch.einsum("bthr,bihr->bhti", query, key)
            return torch.einsum("bhti,htij,bjhd->bthd", scores, by_ages, value), None

        return forward

    with torch.no_grad():
        found = reduced(ids, use_cache=False).logits
        for recurrence in recurrences(reduced):
            monkeypatch.setattr(recurrence, "forward", attend(recurrence))
        torch.testing.assert_close(found, reduced(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def tokenizer():
    return text_data.train_tokenizer(some_documents(), vocab_size=300)


@pytest.fixture
def source(make, tokenizer, tmp_path):
    """A saved model of M = 6 with a tokenizer, its text beside it."""
    make("bilinear-full", vocab_size=300, num_hidden_layers=2, token_mixers=["interdomain", "s4d"]).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("".join(some_documents(40)))
    return tmp_path / "model"


def run(source, *options, size=3):
    target = source.parent / "small"
    return main(["reduce", str(source), str(target), "--state-size", str(size), *map(str, options)])


def test_what_is_reported_is_what_was_saved(source, capsys):
    text = source.parent / "text.txt"
    assert run(source, "--text", text, "--sequence-length", 64) == 0
    folder = source.parent / "small"
    report = json.loads((folder / "conversion_report.json").read_text())
    assert report["source"] == source.name, "not where it lay on this machine"
    models = [AutoModelForCausalLM.from_pretrained(place).eval() for place in (source, folder)]
    assert models[1].config.state_size == 3 and type(models[1]) is InterdomainForCausalLM
    tokens = text_data.encode(AutoTokenizer.from_pretrained(folder), [text.read_text()])
    losses = [text_data.mean_nll(model, tokens, 64) for model in models]
    assert list(report["loss"].values()) == pytest.approx(losses, rel=1e-6) and losses[0] != losses[1]
    assert set(report["kernel_error"]) == {"0", "1"} and all(0 < x < 1 for x in report["kernel_error"].values())
    said = capsys.readouterr().out
    assert f"loss {losses[0]:.4f} -> {losses[1]:.4f} nats a token" in said
    assert f"layer 1   s4d           kernel error {report['kernel_error']['1']:.1%}" in said
    unchanged = {name: x for name, x in models[0].state_dict().items() if ".recurrence." not in name}
    assert all(torch.equal(models[1].state_dict()[name], x) for name, x in unchanged.items())
    ids = models[1].generate(torch.tensor([[5, 6]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    with torch.no_grad():
        assert torch.equal(models[1](ids).logits[:, 1:-1].argmax(-1), ids[:, 2:])


def test_other_dtypes_and_a_dry_run(source, capsys):
    assert run(source, "--dtype", "bfloat16", "--dry-run") == 0
    assert not (source.parent / "small").exists() and "6 modes a layer -> 3; bfloat16" in capsys.readouterr().out
    assert run(source, "--dtype", "bfloat16") == 0
    model = AutoModelForCausalLM.from_pretrained(source.parent / "small")
    assert model.dtype == torch.bfloat16 and recurrences(model)[0].C.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"size": 6}, "must be below the 6 modes of the source, not 6"),
        ({}, {"size": 0}, "--state-size must be positive, not 0"),
        ({}, {"text": "missing.txt"}, "missing.txt does not exist"),
        (
            {},
            {"text": "text.txt", "remove": "tokenizer.json"},
            "that can be loaded, which --text needs",
        ),
        ({"token_mixers": "ssd", "ssd_state_size": 4}, {}, "The source has ssd layers alone"),
        ({"token_mixers": ["selective_scan", "softmax"]}, {}, "The source has selective_scan and softmax layers alone"),
        ({"normalize": True, "product": "real"}, {}, "normalize=True divides by a readout"),
        ({"learned_state": True}, {}, "The source has a learned state, which belongs to its modes"),
        ({"token_mixers": ["interdomain", "window"]}, {}, "The source has windows whose memories have as many modes"),
        (
            {"token_mixers": "s4d", "num_key_value_heads": 2, "coefficient_matrix": "diagonal"},
            {},
            "Heads of s4d layers that share a group",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(make_model, source, capsys, changes, options, message):
    if changes:
        make_model(dtype=torch.float32, **changes).save_pretrained(source)
    if "remove" in options:
        for file in source.glob("token*"):
            file.unlink()
    capsys.readouterr()
    arguments = ["--text", source.parent / options["text"]] if "text" in options else []
    assert run(source, *arguments, size=options.get("size", 3)) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not list(source.parent.glob("small*"))


def test_only_our_language_models_have_a_loss(make_model, source, capsys):
    make_model(dtype=torch.float32, model_class=InterdomainModel).save_pretrained(source)
    assert run(source, "--text", source.parent / "text.txt") == 2
    assert "the source is none: leave it out" in capsys.readouterr().err
    assert run(source) == 0 and InterdomainModel.from_pretrained(source.parent / "small").config.state_size == 3


def test_parameters_fit_the_smaller_recurrence(make):
    recurrence = recurrences(make("bilinear-full"))[0]
    found = reduced_parameters(recurrence, 2)
    assert {name: x.shape for name, x in found.items()} == {
        name: torch.Size(2 if n == 6 else n for n in x.shape) for name, x in recurrence.named_parameters()
    }
    assert all(x.dtype == torch.float32 for x in found.values())


def test_heads_that_share_a_group_of_full_coefficients_can_be_refit():
    fewer_modes.check_reducible(InterdomainConfig(token_mixers="s4d", num_key_value_heads=2))


def test_the_error_of_a_layer_is_that_of_all_its_groups(monkeypatch):
    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = InterdomainForCausalLM(InterdomainConfig(**shape, num_attention_heads=4, state_size=4))
    monkeypatch.setattr(conversion_reduce, "kernel_error", lambda before, after: torch.tensor([3.0, 4.0]))
    assert conversion_reduce.kernel_errors(model, model) == {0: pytest.approx(12.5**0.5)}


def test_groups_of_interdomain_heads_can_be_refit_mode_by_mode():
    config = InterdomainConfig(num_attention_heads=4, num_key_value_heads=2, coefficient_matrix="diagonal")
    fewer_modes.check_reducible(config)


def test_what_a_projection_leaves_its_modes_could_not_say(make):
    kernel = kernel_of(recurrences(make("s4d-full", state_size=5))[0])
    modes = torch.tensor([[0, 2, 3]]).expand(len(kernel.beta), -1)
    places = fewer_modes._functions(modes)[0]
    said = fewer_modes._projected(kernel, modes) @ kernel.gram[:, places][:, :, places]
    torch.testing.assert_close(said, kernel.weights @ kernel.gram[:, :, places], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["s4d-diagonal", "s4d-identity"])
def test_heads_that_say_nothing_say_nothing_with_fewer_modes(form, make):
    model = make(form, state_size=5)
    with torch.no_grad():
        recurrences(model)[0].readout.zero_()
    (reduced,) = recurrences(reduce(model, 3))
    assert not kernel_of(reduced).weights.any() and all(x.isfinite().all() for x in reduced.parameters())


def test_a_fit_begins_from_the_better_start_of_every_group(make, monkeypatch):
    model = make("hermitian-full")
    dropped = errors(model, reduce(model, 3, refit=False))
    monkeypatch.setattr(fewer_modes, "_descend", lambda variables, error: None)
    found = errors(model, reduce(model, 3, move=False))
    assert (found <= dropped + 1e-6).all() and (found < 0.9 * dropped).any()
