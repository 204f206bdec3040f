"""The prompt store: what was read is not read again, what is written stays the same."""

import contextlib
import copy
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch.nn.modules.module import register_module_forward_hook

from modeling_interdomain import InterdomainCache, InterdomainModel, InterdomainStaticCache, StateStore
from modeling_interdomain.generation import prompt_store as cache_store
from modeling_interdomain.generation.prompt_store import store_of
from modeling_interdomain.model_cache import file as cache_file
from tests.conftest import PAD
from tests.test_serving import TOKENS, folders, serve, word_tokenizer  # noqa: F401  a fixture

REPOSITORY = Path(__file__).resolve().parents[1]
SETTINGS = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture
def conversation(random_ids, assert_same):
    """`conversation(model, store, turns)`: the model answers so many messages of different lengths with a store.

    Every answer is compared with that of the whole text read anew; gives the tokens that each turn had to read.
    """

    def run(model, store, turns=4, **settings) -> list[int]:
        ids, costs = random_ids(1, 40), []
        for turn in range(turns):
            # Given, or a pad among the ids that a model with random weights writes would be taken for one.
            settings["attention_mask"] = torch.ones_like(ids)
            model.prompt_store = None
            expected = model.generate(ids, **SETTINGS, **settings)
            model.prompt_store = store
            before = store.tokens_read
            found = model.generate(ids, **SETTINGS, **settings)
            costs.append(store.tokens_read - before)
            assert_same(torch.stack(found.logits), torch.stack(expected.logits))
            assert found.sequences.equal(expected.sequences)
            ids = torch.cat([found.sequences, random_ids(1, 3 + turn, seed=turn)], dim=1)
        return costs

    return run


def prompts_of(model, store, *prompts, **settings):
    """What is written after prompts of one row each, with the store."""
    model.prompt_store = store
    return [model.generate(ids, **{**SETTINGS, "return_dict_in_generate": False, **settings}) for ids in prompts]


# ------------------------------------------------------------------------------------------ what it saves


def test_a_turn_costs_its_new_tokens(each_mixer, conversation):
    """The message, and the last token of the answer before it, which no forward has read yet."""
    assert conversation(each_mixer, StateStore()) == [40, 4, 5, 6]


@pytest.mark.parametrize("mode", [{"cache_implementation": "static"}, {"prefill_chunk_size": 2}], ids=str)
def test_other_caches_and_prefills(make_model, conversation, mode):
    assert conversation(make_model("interdomain-softmax"), StateStore(block=8), **mode) == [40, 4, 5, 6]


def test_sampling_draws_the_same(make_model, random_ids):
    model, store, answers = make_model(), StateStore(), []
    ids = random_ids(1, 30)
    prompts_of(model, store, ids[:, :20])
    for used in (None, store):
        torch.manual_seed(0)
        answers += prompts_of(model, used, ids, do_sample=True, max_new_tokens=20)
    assert answers[0].equal(answers[1]) and store.tokens_reused == 20


def test_a_beginning_that_prompts_share_is_kept_when_it_is_met_again(make_model, random_ids):
    model, store = make_model("interdomain-softmax"), StateStore(block=8)
    system, questions = random_ids(1, 35), random_ids(5, 4, seed=1)
    prompts = [torch.cat([system, question[None]], dim=1) for question in questions]
    costs, read = [], 0
    for ids in prompts:
        (found,) = prompts_of(model, store, ids)
        costs.append(store.tokens_read - read)
        read = store.tokens_read
        assert found.equal(*prompts_of(model, None, ids))
    assert costs == [39, 39, 7, 7, 7], "32 of the 35 are whole blocks"
    # The whole prompt again: its own state is of no use, since the last token must be read for what follows it.
    prompts_of(model, store, prompts[0])
    assert store.tokens_read - read == 7


def test_the_longest_known_beginning_is_taken(make_model, random_ids):
    model, store, ids = make_model(), StateStore(), random_ids(1, 50)
    prompts_of(model, store, ids[:, :10], ids[:, :30], ids[:, :20])
    other = torch.cat([ids[:, :25], random_ids(1, 9, seed=3)], dim=1)
    reused = store.tokens_reused
    prompts_of(model, store, other)
    assert store.tokens_reused - reused == 20


def test_a_cache_of_the_users_own_is_filled(make_model, random_ids):
    model, store, ids = make_model(), StateStore(), random_ids(1, 30)
    prompts_of(model, store, ids[:, :20])
    for cache in (InterdomainCache(model.config), InterdomainStaticCache(model.config, max_cache_len=64)):
        prompts_of(model, store, ids, past_key_values=cache)
        assert int(cache.get_seq_length()) == 35
    assert store.tokens_reused == 40


def test_what_is_kept_does_not_change(make_model, random_ids):
    """States are read from a store while a cache that came from it writes in place."""
    model, store, ids = make_model(), StateStore(), random_ids(1, 30)
    prompts_of(model, store, ids[:, :20])
    _, kept = store.longest(store_of(model)[1], ids[0].tolist()[:21])
    before = {name: x.clone() for name, x in kept.items()}
    prompts_of(model, store, ids, ids, ids)
    for name, x in kept.items():
        assert x.equal(before[name])


# ------------------------------------------------------------------------------------------ what it leaves alone


def test_what_a_store_does_not_take_part_in(make_model, random_ids, left_padded):
    model, store, ids = make_model("interdomain-softmax"), StateStore(), random_ids(1, 30)
    prompts_of(model, store, ids[:, :20])
    count = store.tokens_read, store.tokens_reused
    plain = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    positions = torch.arange(1, 31)[None]
    cache = InterdomainCache(model.config)
    cases = [
        {"input_ids": ids.repeat(2, 1)},
        left_padded([30, 20]),
        left_padded([25], width=30),
        {"input_ids": ids.index_fill(1, torch.tensor([3]), PAD)},  # generate() makes a mask of it, and so it is a pad
        {"input_ids": ids, "num_beams": 3},
        {"input_ids": ids, "num_return_sequences": 2, "num_beams": 2},
        {"input_ids": ids, "prompt_lookup_num_tokens": 3},
        {"input_ids": ids, "use_cache": False},
        {"input_ids": ids, "position_ids": positions},
        {"inputs_embeds": model.get_input_embeddings()(ids)},
        {"input_ids": ids, "output_hidden_states": True, "return_dict_in_generate": True},
    ]
    for case in cases:
        found = []
        for used in (store, None):
            model.prompt_store = used
            found.append(model.generate(**plain, **case))
        sequences = [getattr(x, "sequences", x) for x in found]
        assert sequences[0].equal(sequences[1]), case
        assert (store.tokens_read, store.tokens_reused) == count, case
    assert found[0].hidden_states[0][0].shape == (1, 30, model.config.hidden_size)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
    prompts_of(model, store, ids, past_key_values=cache)
    model.train()
    prompts_of(model, store, ids)
    assert (store.tokens_read, store.tokens_reused) == count


def test_an_assistant_reads_for_itself(make_model, random_ids):
    model, assistant, store = make_model(), make_model(num_hidden_layers=1), StateStore()
    ids = random_ids(1, 30)
    (expected,) = prompts_of(model, None, ids)
    assistant.prompt_store = store
    prompts_of(assistant, store, ids[:, :20])
    count = store.tokens_reused
    assert expected.equal(*prompts_of(model, store, ids, assistant_model=assistant))
    assert store.tokens_reused == count


def test_models_and_adapters_are_told_apart(make_model, random_ids):
    store, ids = StateStore(), random_ids(1, 30)
    first, second = make_model(), make_model(seed=1)
    expected = prompts_of(second, None, ids)
    prompts_of(first, store, ids[:, :20])
    assert expected[0].equal(*prompts_of(second, store, ids)) and store.tokens_reused == 0
    adapted = get_peft_model(first, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    prompts_of(first, store, ids)
    assert store.tokens_reused == 0
    with torch.no_grad():
        first.model.norm.weight += 1
    prompts_of(first, store, ids)
    assert store.tokens_reused == 0
    adapted.generate(ids[:, :25], max_new_tokens=2)
    adapted.generate(ids, max_new_tokens=2)
    assert store.tokens_reused == 25


@contextlib.contextmanager
def _hooked(register, *arguments):
    handle = register(*arguments)
    yield
    handle.remove()


def _steer(module, inputs, output):
    """Of a module that gives one tensor."""
    return output + 1 if isinstance(output, torch.Tensor) else None


@contextlib.contextmanager
def _replaced(owner, name, value):
    own, before = name in vars(owner) or name == "__class__", getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before) if own else delattr(owner, name)


@contextlib.contextmanager
def _written(model):
    weights = [x.detach().clone() for x in model.model.parameters()]
    for x in model.model.parameters():
        x.data.mul_(1.1)
    yield
    for x, weight in zip(model.model.parameters(), weights, strict=True):
        x.data.copy_(weight)


@contextlib.contextmanager
def _attention(model, name):
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    yield
    model.set_attn_implementation(before)


@contextlib.contextmanager
def _precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    yield
    torch.set_float32_matmul_precision(before)


def _first(model):
    return model.model.layers[0].input_layernorm


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


ALTERED = {
    "hook": lambda model: _hooked(_first(model).register_forward_hook, _steer),
    "hook of inputs": lambda model: _hooked(_first(model).register_forward_pre_hook, lambda _, x: (2 * x[0],)),
    "hook of all": lambda model: _hooked(register_module_forward_hook, _steer),
    "forward": lambda model: _replaced(_first(model), "forward", lambda x: 2 * x),
    "forward of the model": lambda model: _replaced(
        model, "forward", lambda input_ids, **kwargs: type(model).forward(model, input_ids % 40 + 4, **kwargs)
    ),
    "forward of a class": lambda model: _replaced(type(_first(model)), "forward", Doubled.forward),
    "class": lambda model: _replaced(_first(model), "__class__", Doubled),
    "autocast": lambda model: torch.autocast("cpu", dtype=torch.bfloat16),
    "attention": lambda model: _attention(model, "eager"),
    "precision": lambda model: _precision("medium"),
    "weights": _written,
}


@pytest.mark.parametrize("batched", [False, True], ids=["generate", "generate_batch"])
@pytest.mark.parametrize("what", ALTERED)
def test_what_something_else_has_made_is_not_served(make_model, what, batched, random_ids):
    """Neither what was read while it was on when it is off, nor the other way round."""
    model, ids = make_model("interdomain-softmax", dtype=torch.float32, state_dtype="float32"), random_ids(1, 30)
    states = []

    def write(store, ids, altered) -> list[int]:
        model.prompt_store = store
        with ALTERED[what](model) if altered else contextlib.nullcontext():
            if batched:
                (found,) = model.generate_batch(ids.tolist(), max_new_tokens=6, do_sample=False).values()
                return found.generated_tokens
            return model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()

    for first in (False, True):
        store, expected = StateStore(), write(None, ids, not first)
        write(store, ids[:, :20], first)
        assert write(store, ids, not first) == expected and store.tokens_reused == 0
        states.append(store)
    write(states[0], ids, False)
    assert states[0].tokens_reused >= 20, "what was read before is known again"


@pytest.mark.parametrize("batched", [False, True], ids=["generate", "generate_batch"])
@pytest.mark.parametrize("what", ["hook", "weights"])
def test_what_is_altered_while_a_text_is_written_is_not_kept(make_model, what, batched, random_ids, monkeypatch):
    model, ids, forward = make_model(), random_ids(1, 20), InterdomainModel.forward
    model.prompt_store, stack, steps = StateStore(), contextlib.ExitStack(), []

    @functools.wraps(forward)
    def counted(self, *args, **kwargs):
        steps.append(kwargs)
        if len(steps) == 3:
            stack.enter_context(ALTERED[what](model))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(InterdomainModel, "forward", counted)
    with stack:
        if batched:
            model.generate_batch(ids.tolist(), max_new_tokens=6, do_sample=False)
        else:
            model.generate(ids, max_new_tokens=6, do_sample=False)
    # In a batch the state after the prompt was kept before.
    assert [beginning.tokens for _, beginning in model.prompt_store._states] == ([20] if batched else [])


def test_tables_of_other_weights_are_not_used_on_from_a_state(each_mixer, random_ids, assert_same):
    """Weights are written and written back where no version is counted, and a few tokens are left to read."""
    store, ids = StateStore(), random_ids(1, 30)
    (expected,) = prompts_of(each_mixer, None, ids, return_dict_in_generate=True)
    prompts_of(each_mixer, store, ids[:, :28])
    with _written(each_mixer):
        prompts_of(each_mixer, None, ids)
    (found,) = prompts_of(each_mixer, store, ids, return_dict_in_generate=True)
    assert store.tokens_reused == 28
    assert_same(torch.stack(found.logits), torch.stack(expected.logits))


def test_what_libraries_do_without_changing_numbers_is_no_obstacle(make_model, random_ids):
    model, store, ids = make_model("interdomain-softmax"), StateStore(), random_ids(1, 30)
    model(ids, output_hidden_states=True, output_attentions=True)  # leaves hooks behind
    model = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert "forward" in vars(_first(model)) or "forward" in vars(model)
    assert any(layer._forward_hooks for layer in model.model.layers)
    prompts_of(model, store, ids[:, :20], ids)
    assert store.tokens_reused == 20
    add_hook_to_module(_first(model), ModelHook(), append=True)
    ModelHookThatAdds = type("Adds", (ModelHook,), {"post_forward": lambda self, module, output: output + 1})
    add_hook_to_module(_first(model), ModelHookThatAdds(), append=True)
    prompts_of(model, store, ids)
    assert store.tokens_reused == 20


def test_a_generation_that_is_broken_off_keeps_its_prompt(make_model, random_ids):
    class Impatient:
        def put(self, tokens):
            if tokens.numel() == 1:
                raise InterruptedError

        def end(self):
            raise AssertionError

    model, store, ids = make_model(), StateStore(), random_ids(1, 30)
    with pytest.raises(InterruptedError):
        prompts_of(model, store, ids[:, :20], streamer=Impatient())
    prompts_of(model, store, ids)
    assert store.tokens_reused == 20


# ------------------------------------------------------------------------------------------ budgets


def states_of(number: int, numbers: int = 100) -> list:
    """Token ids and a state, for `put`."""
    return [([n] * 5, {"x": torch.full((numbers,), float(n))}) for n in range(number)]


def known(store, number: int) -> list[int]:
    return [n for n in range(number) if store.longest("model", [n] * 6) is not None]


def test_the_least_recently_used_leave_memory_first():
    store = StateStore(memory_bytes=3 * 400)
    for ids, tensors in states_of(3):
        store.put("model", ids, tensors)
    assert known(store, 1) == [0]  # used again
    store.put("model", [7] * 5, {"x": torch.zeros(100)})
    assert known(store, 8) == [0, 2, 7]
    store.put("model", [9] * 5, {"x": torch.zeros(400)})
    assert known(store, 10) == [0, 2, 7], "one that is larger than the memory is not kept, and nothing leaves for it"


def test_the_disk_holds_what_memory_does_not(tmp_path, caplog):
    store = StateStore(tmp_path, memory_bytes=0)
    for ids, tensors in states_of(4):
        store.put("model", ids, tensors)
    size = next((tmp_path / "model").iterdir()).stat().st_size
    assert known(store, 4) == [0, 1, 2, 3] == known(StateStore(tmp_path), 4)
    now = time.time()
    for n, age in enumerate([10, 30, 20, 40]):
        (path,) = [path for path in (tmp_path / "model").iterdir() if path.name == store._path("model", _key(n)).name]
        os.utime(path, (now - age, now - age))
    smaller = StateStore(tmp_path, disk_bytes=3 * size)
    assert known(smaller, 2) == [0, 1]  # used again
    smaller.put("model", [7] * 5, {"x": torch.zeros(100)})
    assert known(StateStore(tmp_path), 8) == [0, 1, 7]
    with caplog.at_level("WARNING"):
        for n in (8, 9):
            smaller.put("model", [n] * 5, {"x": torch.zeros(1000)})
    assert known(StateStore(tmp_path), 10) == [0, 1, 7], "one that is larger than all room drives nothing out"
    assert known(smaller, 10) == [0, 1, 7, 8, 9], "memory has room"
    without_memory = StateStore(tmp_path, memory_bytes=100, disk_bytes=3 * size)
    with caplog.at_level("WARNING"):
        for n in (8, 9):
            without_memory.put("model", [n] * 5, {"x": torch.zeros(1000)})
    said = "The prompt store does not keep a state larger than memory_bytes = 100 and disk_bytes = "
    assert [line for line in caplog.messages if said in line] == caplog.messages and len(caplog.messages) == 1
    assert known(without_memory, 10) == [0, 1, 7]


def _key(n: int):
    from modeling_interdomain.generation.prompt_store import _beginnings

    return _beginnings([n] * 5, [5])[0]


def test_a_model_whose_weights_nobody_can_read_goes_without(make_model, random_ids):
    model, ids = make_model(), random_ids(1, 20)
    expected = model.generate(ids, **SETTINGS)
    model.prompt_store = StateStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_store, "reading_fingerprint", _unreadable)
        assert model.generate(ids, **SETTINGS).sequences.equal(expected.sequences)
    assert model.prompt_store.tokens_read == 0


def _unreadable(model):
    raise ValueError("not loaded")


def test_files_that_vanish_or_are_damaged_are_not_known(tmp_path):
    store = StateStore(tmp_path, memory_bytes=0)
    for ids, tensors in states_of(3):
        store.put("model", ids, tensors)
    paths = [store._path("model", _key(n)) for n in range(3)]
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-3])
    assert known(store, 3) == [2] and not paths[1].exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_file, "VERSION", "0")  # what this library has written is newer now
        assert known(store, 3) == [] and paths[2].exists()
    abandoned, busy = (paths[2].with_name(f".{name}.saving") for name in "ab")
    for path, age in ((abandoned, 7200), (busy, 10)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    store.put("model", [9] * 5, {"x": torch.zeros(1)})
    assert not abandoned.exists() and busy.exists()


def test_a_full_disk_stops_no_generation(make_model, random_ids, full_disk, tmp_path, caplog):
    model, store, ids = make_model(), StateStore(tmp_path / "states"), random_ids(1, 30)
    expected = prompts_of(model, None, ids)
    with full_disk(100):
        prompts_of(model, store, ids[:, :20])
        assert expected[0].equal(*prompts_of(model, store, ids))
    assert store.tokens_reused == 20 and not list((tmp_path / "states").glob("*/*"))
    (tmp_path / "file").write_text("no folder")
    assert expected[0].equal(*prompts_of(model, StateStore(tmp_path / "file"), ids))


def test_arguments_are_checked():
    for name, value in (("memory_bytes", -1), ("disk_bytes", -1), ("block", 0)):
        with pytest.raises(ValueError, match=f"{name} of a StateStore must be at least"):
            StateStore(**{name: value})


def test_copies_begin_empty(make_model, random_ids, tmp_path):
    model, store = make_model(), StateStore(tmp_path, block=16)
    prompts_of(model, store, random_ids(1, 20))
    for twin in (copy.deepcopy(model).prompt_store, pickle.loads(pickle.dumps(store))):
        assert (twin.folder, twin.block, len(twin._states)) == (tmp_path, 16, 0)


# ------------------------------------------------------------------------------------------ threads and processes


def test_threads_share_a_store(make_model, random_ids, tmp_path):
    model, texts = make_model(), [random_ids(1, 20 + n, seed=n % 3) for n in range(12)]
    expected = prompts_of(model, None, *texts)
    model.prompt_store = StateStore(tmp_path, memory_bytes=30_000, disk_bytes=60_000, block=4)
    found, settings = {}, {"max_new_tokens": 6, "do_sample": False}

    def answer(n):
        for _ in range(3):
            found[n] = model.generate(texts[n], **settings)

    threads = [threading.Thread(target=answer, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[n].equal(expected[n]) for n in range(12))
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= 60_000


ELSEWHERE = """
import sys, torch
from modeling_interdomain import StateStore

store, process, rounds = StateStore(sys.argv[1], memory_bytes=0, disk_bytes=40_000), int(sys.argv[2]), 0
print("ready", flush=True)
while True:
    for n in range(20):
        found = store.longest("model", [n] * 6)
        assert found is None or found[1]["x"].eq(n).all(), "a state of other tokens"
        store.put("model", [n] * 5, {"x": torch.full((1000,), float(n))})
    rounds += 1
    if rounds == 4 and process:
        break
"""


def test_processes_share_a_folder_and_may_be_killed(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    killed, *others = (subprocess.Popen([*command, str(n)], env=environment, **pipes) for n in range(3))
    try:
        assert killed.stdout.readline() == "ready\n"
        time.sleep(0.3)
        os.kill(killed.pid, signal.SIGKILL)
        for process in others:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in (killed, *others):
            process.kill()
            process.communicate()
    for n in known(StateStore(tmp_path), 20):
        assert StateStore(tmp_path).longest("model", [n] * 6)[1]["x"].eq(n).all()


# ------------------------------------------------------------------------------------------ serving


def test_the_environment_gives_a_model_its_store(make_model, monkeypatch, tmp_path):
    assert make_model().prompt_store is None
    monkeypatch.setenv("INTERDOMAIN_PROMPT_STORE", "memory")
    assert make_model().prompt_store.folder is None
    monkeypatch.setenv("INTERDOMAIN_PROMPT_STORE", str(tmp_path))
    assert make_model().prompt_store.folder == tmp_path


def test_the_stock_server_reuses_a_conversation(folders, make_model, monkeypatch, tmp_path):  # noqa: F811
    """`transformers serve` with the code of the folder: answers as without a store, the longest state is used."""
    name, states, tokenizer = "interdomain-softmax", tmp_path / "states", word_tokenizer()
    model, messages = make_model(name), []
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": PAD}
    files: dict[int, float] = {}
    monkeypatch.setenv("INTERDOMAIN_PROMPT_STORE", str(states))
    with serve(tmp_path, "--trust-remote-code") as (address, _):
        for turn in range(2):
            messages.append({"role": "user", "content": " ".join(f"w{4 + (9 * i + turn) % 44}" for i in range(30))})
            inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            length = inputs["input_ids"].shape[1]
            expected = tokenizer.decode(model.generate(**inputs, **settings)[0, length:], skip_special_tokens=True)
            found = converse(address, folders[name], messages)
            assert found.split() == expected.split()
            assert len(found.split()) == TOKENS, "none of them special, which the next prompt would not hold"
            messages.append({"role": "assistant", "content": found})
            before, files = files, {int(x.name.partition("-")[0]): x.stat().st_mtime for x in states.glob("*/*")}
            assert sorted(files.keys() - before.keys()) == [length, length + TOKENS - 1], "after prompt and answer"
    assert files[32] == before[32] and files[43] > before[43]


def converse(address: str, model: str, messages: list[dict[str, str]]) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
    response = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=TOKENS)
    return response.choices[0].message.content


@pytest.mark.parametrize("place", ["memory", Path("states")], ids=str)
def test_the_name_of_a_store_is_no_store(make_model, random_ids, place):
    model = make_model("interdomain")
    model.prompt_store = place
    with pytest.raises(ValueError, match="prompt_store must be a StateStore, got .*: set it to StateStore"):
        model.generate(random_ids(1, 5), max_new_tokens=2)
