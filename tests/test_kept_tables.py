"""What single steps keep of the parameters: never older than the parameters, and never seen from outside."""

import copy
import io
import pickle
import subprocess
import sys

import peft
import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.nn.utils import prune

from modeling_interdomain import InterdomainCache, interdomain_attention
from modeling_interdomain.layers.common import DecodeTables, ParameterCache
from tests.operator_checks import SHAPES, inputs

NAMES = ["interdomain", "rope-after", "diagonal", "s4d", "gated", "delta-rule"]


@torch.no_grad()
def started(model, ids):
    """A cache after a prompt and one step, which has made the tables."""
    cache = InterdomainCache(model.config)
    model(ids[:, :-2], past_key_values=cache)
    model(ids[:, -2:-1], past_key_values=cache)
    return cache


@torch.no_grad()
def step(model, cache, ids):
    return model(ids[:, -1:], past_key_values=copy.deepcopy(cache)).logits


def kept(model) -> int:
    return sum(len(m._tables._kept[1]) for m in model.modules() if isinstance(m, DecodeTables))


def by_optimiser(model, ids):
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(ids, labels=ids).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def by_state_dict(model, ids, **options):
    changed = {name: x * 1.1 for name, x in model.state_dict().items()}
    model.load_state_dict(changed, **options)


@torch.no_grad()
def in_place(model, ids):
    for p in model.parameters():
        p.mul_(1.1)


def by_new_parameters(model, ids):
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(1.1 * p.detach()))


def by_other_data(model, ids):
    for p in model.parameters():
        p.data = 1.1 * p.data


def in_data_and_told(model, ids):
    for p in model.parameters():
        p.data.mul_(1.1)
    model.eval()


CHANGES = {
    "optimiser": by_optimiser,
    "state dict": by_state_dict,
    "assigned state dict": lambda model, ids: by_state_dict(model, ids, assign=True),
    "in place": in_place,
    "in inference mode": torch.inference_mode()(in_place),
    "new parameters": by_new_parameters,
    "other data": by_other_data,
    "in data, then eval()": in_data_and_told,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_parameters_is_seen_by_the_next_step(change, name, make_model, random_ids):
    model, ids = make_model(name), random_ids(2, 7)
    cache = started(model, ids)
    assert kept(model) > 0
    before = step(model, cache, ids)
    change(model, ids)
    found = step(model, cache, ids)
    assert not torch.allclose(found, before)
    assert torch.equal(found, step(copy.deepcopy(model), cache, ids))


def test_a_new_sequence_sees_what_was_written_behind_autograd(make_model, random_ids):
    model, ids = make_model(), random_ids(2, 7)
    started(model, ids)
    for p in model.parameters():
        p.data.mul_(1.1)
    cache = started(model, ids)
    assert torch.equal(step(model, cache, ids), step(copy.deepcopy(model), cache, ids))


@pytest.mark.parametrize("name", ["interdomain", "s4d", "hax", "experts"])
def test_a_cache_that_was_reset_sees_it_with_the_first_token(name, make_model, random_ids, advance):
    model, ids = make_model(name), random_ids(2, 7)
    cache = started(model, ids)
    for p in model.parameters():
        p.data.mul_(1.1)
    cache.reset()
    torch.testing.assert_close(advance(model, cache, ids[:, :1]), copy.deepcopy(model)(ids[:, :1]).logits)


@pytest.mark.parametrize("name", ["interdomain", "s4d", "selective-scan"])
def test_a_record_sees_it_with_a_new_text_and_with_many_tokens(name, make_model, random_ids, advance):
    model, ids = make_model(name), random_ids(2, 20)
    started(model, ids)
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    for piece in (ids[:, :6], ids[:, 6:]):
        for p in model.parameters():
            p.data.mul_(1.1)
        before = copy.deepcopy(cache)
        advance(model, cache, piece)
        cache.crop(-1)
        expected = advance(copy.deepcopy(model), before, piece)[:, -1:]
        torch.testing.assert_close(advance(model, cache, piece[:, -1:]), expected)


@pytest.mark.parametrize("name", NAMES)
def test_another_dtype(name, make_model, random_ids):
    model, ids = make_model(name, dtype=torch.float32), random_ids(2, 7)
    cache = started(model, ids)
    model.double()
    cache.to(dtype=torch.float64)
    assert torch.equal(step(model, cache, ids), step(copy.deepcopy(model), cache, ids))


def test_a_step_is_the_forward_with_and_without_tables(make_model, random_ids, assert_same):
    model, ids = make_model("rope-after"), random_ids(2, 7)
    cache = started(model, ids)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
    assert_same(step(model, cache, ids), expected)
    for module in model.modules():
        if isinstance(module, DecodeTables):
            module._tables.of = lambda parameters: None
    assert_same(step(model, cache, ids), expected)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_do_not_pass_by_what_is_kept(name, length, make_model, random_ids):
    model, ids = make_model(name), random_ids(2, 7)
    cache = started(model, ids)
    plain = copy.deepcopy(model)
    for layer in plain.model.layers:  # a hook keeps convolutions and norms to themselves
        for convolution in layer.token_mixer.children():
            convolution.register_forward_hook(lambda *_: None)
    found, expected = (
        torch.autograd.grad(
            m(ids[:, -length:], past_key_values=copy.deepcopy(cache)).logits.square().sum(), list(m.parameters())
        )
        for m in (model, plain)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_parameters_of_inference_mode_count_no_versions(make_model, random_ids):
    ids = random_ids(2, 7)
    with torch.inference_mode():
        model = copy.deepcopy(make_model())
    cache = started(model, ids)
    assert kept(model) == 0
    before = step(model, cache, ids)
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(1.1)
    found = step(model, cache, ids)
    assert not torch.allclose(found, before)
    torch.testing.assert_close(found, step(make_like(model), cache, ids))


def make_like(model):
    """A copy of ordinary parameters."""
    clone = copy.deepcopy(model)
    for module in clone.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    return clone


def test_tables_made_in_inference_mode_serve_outside(make_model, random_ids):
    model, ids = make_model(), random_ids(2, 7)
    with torch.inference_mode():
        inside = step(model, started(model, ids), ids)
    cache = started(model, ids)
    assert torch.equal(step(model, cache, ids), inside)


def test_parameters_of_a_call(make_model, random_ids):
    model, ids = make_model(), random_ids(2, 7)
    cache = started(model, ids)
    before = step(model, cache, ids)
    others = {name: 1.1 * p.detach() for name, p in model.named_parameters()}
    arguments = {"past_key_values": copy.deepcopy(cache)}
    with torch.no_grad():
        found = torch.func.functional_call(model, others, (ids[:, -1:],), arguments).logits
    assert torch.equal(step(model, cache, ids), before)
    in_place(model, ids)
    torch.testing.assert_close(found, step(model, cache, ids))


@pytest.mark.parametrize("name", ["diagonal", "s4d"])
def test_low_rank_changes_of_a_recurrence(name, make_model, random_ids, assert_same):
    """PEFT adapts these parameters for the length of a call, and merges them behind autograd."""
    targets = ["recurrence.log_a_real", "recurrence.a_imag", "recurrence.B"]
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=["v_proj"], target_parameters=targets
    )
    model, ids = peft.get_peft_model(make_model(name), lora).eval(), random_ids(2, 7)
    for merge in (False, True):
        if merge:
            model.merge_adapter()
        cache = started(model, ids)
        with torch.no_grad():
            assert_same(step(model, cache, ids), model(input_ids=ids).logits[:, -1:])
    model.unmerge_adapter()
    adapted = started(model, ids)
    before = step(model, adapted, ids)
    with model.disable_adapter():
        plain = step(model, adapted, ids)
        assert torch.equal(plain, step(copy.deepcopy(model), adapted, ids))
    assert not torch.allclose(plain, before)
    assert torch.equal(step(model, adapted, ids), before)


def test_offloaded_parameters(make_model, random_ids):
    model, ids = make_model(), random_ids(2, 7)
    cache = started(model, ids)
    expected = step(model, cache, ids)
    offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).is_meta
    for _ in range(2):
        torch.testing.assert_close(step(offloaded, cache, ids), expected)


_SHARDED = """
import copy, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from tests.test_kept_tables import kept, started, step

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = InterdomainForCausalLM(InterdomainConfig(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, state_size=6
)).eval()
plain, ids = copy.deepcopy(model), torch.arange(14).view(2, 7)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimiser, cache, outputs = torch.optim.SGD(model.parameters(), lr=1.0), started(model, ids), []
for _ in range(2):
    model(ids, labels=ids).loss.backward()
    step(model, cache, ids)
    model.reshard()
    optimiser.step()
    found = step(model, cache, ids)
    plain.load_state_dict({name: x.full_tensor() for name, x in model.state_dict().items()})
    torch.testing.assert_close(found, step(plain, cache, ids))
    outputs.append(found)
assert kept(model) == 0
assert not torch.allclose(*outputs, rtol=1e-2, atol=1e-2)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_parameters():
    """A step of the optimiser between two tokens of one sequence; gathered parameters count no versions."""
    done = subprocess.run([sys.executable, "-c", _SHARDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_hooks_and_pruning_are_heeded_by_a_step(make_model, random_ids):
    model, ids = make_model(), random_ids(2, 7)
    mixer = model.model.layers[0].token_mixer
    called = []
    for name in ("q_conv", "k_conv", "k_norm", "v_norm"):
        getattr(mixer, name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    cache = started(model, ids)
    called.clear()
    before = step(model, cache, ids)
    assert sorted(called) == ["k_conv", "k_norm", "q_conv", "v_norm"]
    prune.random_unstructured(mixer.k_conv, "weight", amount=0.5)
    assert not torch.allclose(step(model, cache, ids), before)


def test_a_compiled_step_computes_from_the_parameters(make_model, random_ids):
    model, ids = make_model(num_hidden_layers=1), random_ids(2, 7)
    cache = started(model, ids)
    compiled = torch.compile(lambda ids, cache: model(ids, past_key_values=cache).logits, backend="eager")
    with torch.no_grad():
        compiled(ids[:, -1:], copy.deepcopy(cache))
        in_place(model, ids)
        found = compiled(ids[:, -1:], copy.deepcopy(cache))
    torch.testing.assert_close(found, step(copy.deepcopy(model), cache, ids))


@pytest.mark.parametrize("name", ["interdomain", "s4d"])
def test_tables_are_not_part_of_a_model(name, make_model, random_ids):
    model, ids = make_model(name), random_ids(2, 7)
    fresh, stepped = model.state_dict().keys(), copy.deepcopy(model)
    size = len(pickle.dumps(model))
    cache = started(stepped, ids)
    assert kept(stepped) > 0 and stepped.state_dict().keys() == fresh
    assert len(pickle.dumps(stepped)) == size
    file = io.BytesIO()
    torch.save(stepped, file)
    file.seek(0)
    for other in (copy.deepcopy(stepped), torch.load(file, weights_only=False)):
        assert kept(other) == 0
        assert torch.equal(step(other, cache, ids), step(stepped, cache, ids))


def test_a_value_is_kept_for_one_version_of_its_parameters():
    parameter, calls = nn.Parameter(torch.ones(2)), []
    tables = ParameterCache()

    def value():
        return tables.get("twice", [parameter], lambda kept: calls.append(kept) or 2 * parameter)

    with torch.no_grad():
        assert value() is value() and calls == [True]
        parameter.add_(1)
        assert value().tolist() == [4, 4] and calls == [True, True]
    assert value() is not value() and calls == [True, True, False, False]


@pytest.mark.parametrize(("where", "name"), [(torch.distributed, "is_initialized"), (torch.jit, "is_tracing")])
@torch.no_grad()
def test_nothing_is_kept_where_no_version_tells_of_a_write(monkeypatch, where, name):
    """What gathers parameters in a process group counts none, and a traced graph must compute what it uses."""
    kept, x = ParameterCache(), nn.Parameter(torch.ones(2))
    monkeypatch.setattr(where, name, lambda: True)
    assert kept.get("whether it is kept", (x,), lambda whether: whether) is False and kept.of((x,)) is None
    monkeypatch.undo()
    assert kept.get("whether it is kept", (x,), lambda whether: whether) is True


@torch.no_grad()
def test_nothing_is_kept_of_parameters_that_are_not_there():
    """Of offloaded ones, which come to be other tensors when they are used."""
    assert ParameterCache().of((nn.Parameter(torch.ones(2, device="meta")),)) is None


@pytest.mark.parametrize("name", ["interdomain", "s4d", "selective-scan"])
def test_a_reset_cache_begins_with_new_tables(name, make_model, random_ids, advance, assert_same):
    """Written through `.data`, which counts no version: seen where the next prompt begins, in a used cache, too."""
    model, ids = make_model(name), random_ids(2, 7)
    cache = started(model, ids)
    for p in model.parameters():
        p.data.mul_(1.1)
    cache.reset()
    pieces = [advance(model, cache, piece) for piece in ids.split([5, 1, 1], dim=1)]
    assert_same(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits.detach())


def by_data(model, ids):
    for p in model.parameters():
        p.data.mul_(1.1)


@pytest.mark.parametrize("change", [*CHANGES.values(), by_data], ids=[*CHANGES.keys(), "in data"])
@pytest.mark.parametrize("name", ["interdomain", "diagonal"])
def test_a_prompt_has_the_tables_of_what_the_parameters_hold(change, name, make_model, random_ids):
    model, ids = make_model(name), random_ids(2, 70)
    recurrence = model.model.layers[0].token_mixer.recurrence

    @torch.no_grad()
    def prompt(model):
        return model(ids).logits

    def tables():
        return recurrence._tables._kept[1]["prompt"]["chunk"][1]

    before = prompt(model)
    made = tables()
    assert torch.equal(prompt(model), before) and made is not None and tables() is made
    change(model, ids)
    found = prompt(model)
    assert tables() is not made and not torch.allclose(found, before)
    assert torch.equal(found, prompt(copy.deepcopy(model)))


@torch.no_grad()
def test_what_is_doubted_is_kept_for_its_numbers():
    made, x, y = [], nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    kept = ParameterCache(compares=True)

    def value(name="sum", *tensors):
        return kept.get(name, tensors or (x, y), lambda _: made.append(name) or [len(made)])

    def doubted():
        kept.doubt()
        return value()

    assert value() is value() is doubted() is value() and value() == [1] and value("other") == [2]
    x.data[0] = 2
    assert value() == [1] and doubted() is value() == [3]
    y.data[0] = torch.nan
    assert doubted() == [4] and doubted() == [5]  # no number is equal to it
    y.data[0] = 0
    assert doubted() == [6] and value("sum", x) == [7] and value() == [8]
    for empty in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert not empty._kept[1] and not empty._copies and empty._compares
    kept.forget()
    assert value() == [9]


@torch.no_grad()
def test_a_doubt_without_copies_forgets():
    made, x, kept = [], nn.Parameter(torch.ones(2)), ParameterCache()

    def value():
        return kept.get("sum", (x,), lambda _: made.append(0) or [len(made)])

    assert value() is value() == [1]
    kept.doubt()
    assert value() is value() == [2]


def test_a_new_text_keeps_the_tables_of_the_same_numbers(make_model, random_ids):
    model, ids = make_model(), random_ids(2, 7)
    recurrence = model.model.layers[0].token_mixer.recurrence
    started(model, ids)
    made = recurrence._tables._kept[1]["step"]
    started(model, ids)
    assert recurrence._tables._kept[1]["step"] is made
    recurrence.B.data.mul_(1.1)
    started(model, ids)
    assert recurrence._tables._kept[1]["step"] is not made


def test_gradients_pass_what_is_kept():
    arguments = [torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(3)]
    parameters = [torch.stack([-torch.rand(2, 3), torch.randn(2, 3)], dim=-1), torch.randn(2, 3, 2)]
    kept: dict = {}
    with torch.no_grad():
        expected, _ = interdomain_attention(*arguments, *parameters, kept=kept)
    found, _ = interdomain_attention(*arguments, *parameters, kept=kept)
    assert torch.equal(found, expected) and found.requires_grad


def test_a_prompt_has_its_own_tables_whatever_another_thread_keeps():
    """Which writes right behind it."""

    class Contested(dict):
        def __setitem__(self, name, value):
            super().__setitem__(name, ("another", None))

    arguments = {name: x if x is None else x.detach() for name, x in inputs(SHAPES["odd_length"]).items()}
    with torch.no_grad():
        found, expected = (interdomain_attention(**arguments, kept=kept)[0] for kept in (Contested(), None))
    torch.testing.assert_close(found, expected)


def test_another_parameter_at_the_same_address_is_another():
    kept, first = ParameterCache(), nn.Parameter(torch.zeros(2))
    second = nn.Parameter(first.data)
    assert (second.data_ptr(), second._version) == (first.data_ptr(), first._version)
    with torch.no_grad():
        kept.of([first])["table"] = 1
        assert kept.of([first]) == {"table": 1}
        assert kept.of([second]) == {}


@pytest.mark.parametrize("name", NAMES)
def test_weights_may_be_swapped_for_those_of_a_state_dict(name, make_model, random_ids, monkeypatch):
    """Where PyTorch is told to swap parameters instead of writing into them, after a token, too."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, ids = make_model(name), random_ids(2, 9)
    other = make_model(name, seed=1)
    step(model, started(model, ids), ids)
    assert kept(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(*(step(x, started(x, ids), ids) for x in (model, other)), rtol=0, atol=0)
