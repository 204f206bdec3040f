"""Heads over two processes: outputs, gradients, caches and files are those of one process, in float64."""

import os
from multiprocessing import set_forkserver_preload

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers.distributed.configuration_utils import DistributedConfig

from modeling_interdomain import InterdomainCache, InterdomainForCausalLM, configuration_interdomain
from modeling_interdomain.mixers.interdomain import mixer as interdomain
from modeling_interdomain.parallel.tensor import HEADS
from tests.conftest import MIXERS, PAD, ROPE, VARIANTS, VOCABULARY

LENGTH = 23
# All that has heads, in one model of two groups.
PARTS = {
    "num_hidden_layers": 4,
    "token_mixers": ["interdomain", "softmax", "s4d", "ssd"],
    "num_key_value_heads": 2,
    "rope_parameters": ROPE,
    "rope_placement": "after",
    "feature_dim": 6,
    "use_output_gate": True,
    "use_output_norm": True,
    "learned_state": True,
    "dynamic_mask": "position",
    "ssd_groups": 2,
    "ssd_state_size": 6,
    "ssd_conv_kernel": 4,
    "ssd_conv_bias": True,
    "ssd_bias": True,
    "ssd_norm": "after_gate",
}
# Models whose heads two processes cannot share out, and what the reason says.
WHOLE = {
    "one-group": "num_key_value_heads = 1",
    "fourier-shifted": "num_key_value_heads = 1",
    "ssd": "ssd_groups = 1",
    "selective-scan": "one head",
    "cheems": "ssd_groups = 1",
    "inner-function": "all heads at once",
    "value-mask": "of the values of all",
    "hax": "sparse branch",
}
FAST = ["parts", "one-group"]
SLOW = ["normalized", "single-input", "fourier", "s4d-grouped", "mamba2", "selective-scan", "window"]


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(PAD + 1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if kind == "packed":
        return {"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 2, 9, LENGTH])}
    mask = torch.ones_like(ids)
    if kind == "padded":
        mask[0, :9] = 0
    return {"input_ids": torch.where(mask.bool(), ids, PAD), "attention_mask": mask}


def whole(x: torch.Tensor) -> torch.Tensor:
    """Of a gradient, in all processes the same."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def trained(model, kind: str):
    """Logits, and the gradients of a loss in which each of a real token has a part."""
    batch = batch_of(kind)
    weights = torch.randn(*batch["input_ids"].shape, VOCABULARY, generator=torch.Generator().manual_seed(2)).double()
    if "attention_mask" in batch:
        weights = weights * batch["attention_mask"][..., None]
    model.zero_grad()
    logits = weights * model(**batch, use_cache=False).logits
    logits.sum().backward()
    return logits.detach(), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def decoded(model):
    """Logits of a prefill of padded rows and of two steps, and the cache after them."""
    batch, cache = batch_of("padded"), InterdomainCache(model.config)
    mask, logits = batch["attention_mask"], []
    for start, stop in ((0, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
        step = {"input_ids": batch["input_ids"][:, start:stop], "attention_mask": mask[:, :stop]}
        logits.append(model(**step, past_key_values=cache).logits)
    return torch.cat(logits, 1), cache.named_tensors(), cache.state_bytes()


def written(model) -> dict[str, list]:
    """What is written by the ways that move rows of a cache, take tokens of it back, or ask for fixed addresses."""
    batch, repeated = batch_of("padded"), torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7]])
    found = {"beams": model.generate(**batch, max_new_tokens=6, num_beams=3, do_sample=False)}
    found["guesses"] = model.generate(repeated, max_new_tokens=9, prompt_lookup_num_tokens=3, do_sample=False)
    found["static"] = model.generate(**batch, max_new_tokens=6, cache_implementation="static", do_sample=False)
    prompts = [repeated[0, :length].tolist() for length in (5, 8, 3)]
    texts = model.generate_batch(prompts, max_batch_size=2, max_new_tokens=4, do_sample=False).values()
    return {name: x.tolist() for name, x in found.items()} | {"batch": [text.generated_tokens for text in texts]}


def outcome(model) -> dict:
    """All that one process and two are to have in common."""
    found = {kind: trained(model, kind) for kind in ("rows", "padded", "packed")}
    return found | {"decoded": decoded(model), "written": written(model)}


def adapted(folder: str, processes: int):
    """With an adapter on every projection: what it makes and learns, what is written, and its file saved again."""
    model = PeftModel.from_pretrained(load(f"{folder}/parts", processes), f"{folder}/adapter", is_trainable=True)
    found = trained(model, "padded")
    text = model.generate(**batch_of("padded"), max_new_tokens=4, do_sample=False)
    model.save_pretrained(f"{folder}/adapter-of-{processes}")
    return *found, text


def raised(call) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def work(rank: int, folder: str, names: list[str]) -> None:
    """One of two processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name in names:
        model = load(f"{folder}/{name}")
        model.save_pretrained(f"{folder}/{name}-again")
        found[name] = outcome(model)
    if "parts" in names:
        found |= beside(folder)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def load(folder, processes: int = 2, tp_plan=None, **arguments):
    """A model in float64, of which each process has a part."""
    distributed = DistributedConfig(tp_size=processes, tp_plan=tp_plan)
    return InterdomainForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=distributed, **arguments
    )


@torch.no_grad()
def beside(folder: str) -> dict:
    """What processes have parts of, and what they refuse."""
    model, ids = load(f"{folder}/parts"), batch_of("rows")["input_ids"]
    own, foreign = InterdomainCache(model.config), InterdomainCache(model.config)
    model(ids, past_key_values=own)
    load(f"{folder}/parts", 1)(ids, past_key_values=foreign)
    divided = {f"model.layers.*.token_mixer{part}": HEADS for part in ("", ".recurrence")}
    refused = {
        "learned state": lambda: load(f"{folder}/maps").add_learned_state(),
        "file": lambda: own.save(f"{folder}/state"),
        "foreign cache": lambda: model(ids[:, :1], past_key_values=foreign),
        "one group": lambda: load(f"{folder}/one-group", tp_plan=divided),
    }
    found = {name: raised(call) for name, call in refused.items()}
    model = load(f"{folder}/maps", attn_implementation="eager")
    maps = model(ids, output_attentions=True).attentions
    with torch.enable_grad():
        learned = adapted(folder, 2)
    return {"maps": maps, "refused": found, "fused": fused_reads(model, ids), "adapted": learned}


def fused_reads(model, ids) -> int:
    """How many tokens were read in few calls, which look at weights without calling their modules."""
    read, reads, cache = interdomain.token_inputs, [], InterdomainCache(model.config)

    def counted(*arguments):
        reads.append(read(*arguments))
        return reads[-1]

    model(ids, past_key_values=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interdomain, "token_inputs", counted)
        model(ids[:, :1], past_key_values=cache)
    return len(reads)


@pytest.fixture(scope="module")
def in_processes(make_model, tmp_path_factory):
    """`in_processes(names)`: the folder of these models, and what each of two processes found of them."""
    known = {}

    def start(names: list[str]):
        if names[0] not in known:
            folder = tmp_path_factory.mktemp("processes")
            make_model("softmax-interdomain").save_pretrained(folder / "maps")
            for name in names:
                model = make_model("interdomain", **PARTS) if name == "parts" else make_model(name)
                model.save_pretrained(folder / name)
            if "parts" in names:
                lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
                get_peft_model(load(folder / "parts", 1), lora).save_pretrained(folder / "adapter")
            # No test of ours: the server stays, and the suite of Transformers has a package `tests` of its own.
            set_forkserver_preload(["peft", "modeling_interdomain"])
            mp.start_processes(work, (str(folder), names), nprocs=2, start_method="forkserver")
            known[names[0]] = folder, [torch.load(folder / str(rank), weights_only=False) for rank in range(2)]
        return known[names[0]]

    return start


def assert_close(actual, expected):
    scale = expected.abs().max().clamp(min=1)
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", FAST + [pytest.param(name, marks=pytest.mark.slow) for name in SLOW])
def test_two_processes_are_as_one(name, in_processes):
    folder, found = in_processes(FAST if name in FAST else SLOW)
    model, parts = load(folder / name, 1), 1 if name in WHOLE else 2
    expected = outcome(model)
    for rank, actual in enumerate(x[name] for x in found):
        assert actual["written"] == expected["written"]
        for kind in ("rows", "padded", "packed"):
            (logits, grads), (wanted, of_one) = actual[kind], expected[kind]
            assert_close(logits, wanted)
            assert grads.keys() == of_one.keys()
            for parameter, grad in of_one.items():
                assert_close(grads[parameter], grad)
        (logits, kept, size), (wanted, of_one, size_of_one) = actual["decoded"], expected["decoded"]
        assert_close(logits, wanted)
        counts = [x for x in of_one.values() if x.ndim > 1 and x.shape[1] == 1]  # of tokens: all have them
        assert size * parts == size_of_one + (parts - 1) * sum(x.nbytes for x in counts)
        for tensor, x in of_one.items():
            divided = x.ndim > 1 and x.shape[1] > 1
            assert_close(kept[tensor], x.chunk(parts, dim=1)[rank % parts] if divided else x)
    model.save_pretrained(folder / "one")
    for file in ("model.safetensors", "config.json"):
        assert (folder / f"{name}-again" / file).read_bytes() == (folder / "one" / file).read_bytes()


def test_each_process_has_its_heads(in_processes):
    folder, found = in_processes(FAST)
    model = load(folder / "maps", 1, attn_implementation="eager")
    with torch.no_grad():
        expected = model(batch_of("rows")["input_ids"], output_attentions=True).attentions
    for layer, wanted in enumerate(expected):
        assert_close(torch.cat([x["maps"][layer] for x in found], dim=1), wanted)
    assert [x["fused"] for x in found] == [1, 1]


def test_adapters_of_divided_projections(in_processes):
    """PEFT's LoRA, also on what is divided along its inputs: o_proj and down_proj."""
    folder, found = in_processes(FAST)
    expected = adapted(str(folder), 1)
    targets = {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[1] for name in expected[1]}
    assert {"q_proj", "o_proj", "down_proj"} <= targets
    for logits, grads, text in (x["adapted"] for x in found):
        assert_close(logits, expected[0])
        assert grads.keys() == expected[1].keys()
        for name, grad in expected[1].items():
            assert_close(grads[name], grad)
        assert text.equal(expected[2])
    saved = [load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "adapter-of-2")]
    assert saved[0].keys() == saved[1].keys() and all(saved[1][name].equal(x) for name, x in saved[0].items())


def test_what_parts_of_a_model_refuse(in_processes):
    _, found = in_processes(FAST)
    refused = found[0]["refused"]
    assert refused == found[1]["refused"]
    assert "save it with save_pretrained" in refused["learned state"]
    assert "sharded" in refused["file"] and "belongs to another model" in refused["foreign cache"]
    assert "tp_size = 2 does not divide the heads of" in refused["one group"]


def test_where_heads_stay_whole_the_plan_says_why(make_config, monkeypatch):
    said = []
    monkeypatch.setattr(configuration_interdomain.logger, "warning_once", said.append)
    for name in (*MIXERS, *VARIANTS):
        config, before = make_config(name), len(said)
        for processes in (1, 2):
            config.distributed_config = DistributedConfig(tp_size=processes)
            plan = config.base_model_tp_plan
            assert plan["layers.*.mlp.up_proj"] == "colwise"
        divided = plan.get("layers.*.token_mixer.o_proj") == "rowwise"
        assert divided == (name not in WHOLE) == ("colwise_gather_output" not in plan.values())
        assert len(said) == before + (not divided) and (divided or WHOLE[name] in said[-1])
    config = make_config("interdomain")
    config.distributed_config = DistributedConfig(tp_size=3)
    assert "layers.*.token_mixer.recurrence" not in config.base_model_tp_plan
    assert "num_key_value_heads = 4" in said[-1] and "tp_size = 3" in said[-1]
