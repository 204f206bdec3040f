"""State files: what was read in one process goes on in another; nothing else than that is ever loaded."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicSlidingWindowLayer

from modeling_interdomain import InterdomainCache, InterdomainStaticCache
from modeling_interdomain.model_cache import file as cache_file
from modeling_interdomain.model_cache.file import StateFileError, read_state_file, write_state_file
from modeling_interdomain.model_cache.fingerprint import model_fingerprint, tokenizer_fingerprint, tokens_fingerprint
from tests.test_hybrid_mixer import registered as local_layers  # noqa: F401  a fixture
from tests.test_serving import word_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
WRITTEN = 8

# argv: a folder with `model` and `read.safetensors`, and what to do. Every run is a process of its own.
ELSEWHERE = """
import sys, time
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
import modeling_interdomain
from modeling_interdomain import InterdomainCache

folder = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder / "model")
ids, new = load_file(folder / "tokens.safetensors").values()

if sys.argv[2] == "load":
    cache = InterdomainCache.load(folder / "state.safetensors", model, tokens=ids)
    mask = torch.ones(len(ids), ids.shape[1] + new.shape[1], dtype=torch.long)
    settings = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 8}
    found = model.generate(new, attention_mask=mask, past_key_values=cache, **settings)
    save_file({"ids": found.sequences, "logits": torch.stack(found.logits)}, folder / "found.safetensors")
else:
    cache = InterdomainCache.load(folder / "state.safetensors", model)
    print("saving", flush=True)
    while True:
        cache.save(folder / "state.safetensors", tokens=ids)
"""


def elsewhere(folder: Path, what: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", ELSEWHERE, str(folder), what]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def read(random_ids, advance):
    """`read(model, make_cache, ids)`: a cache after these ids."""

    def make(model, ids, make_cache=InterdomainCache):
        cache = make_cache(model.config)
        advance(model, cache, ids[:, :-1])
        advance(model, cache, ids[:, -1:])
        return cache

    return make


@pytest.fixture
def saved(make_model, random_ids, read, tmp_path):
    """A model, the tokens it has read and the file of that."""
    model, ids = make_model("interdomain-softmax"), random_ids(2, 9)
    read(model, ids).save(tmp_path / "state.safetensors", tokens=ids, tokenizer=word_tokenizer())
    return model, ids, tmp_path / "state.safetensors"


def one_sentence(error) -> str:
    (line,) = str(error.value).splitlines()
    return line


# ------------------------------------------------------------------------------------------ there and back


KINDS = ["interdomain-softmax", "s4d-rope", "mamba2", "selective-scan", "hax", "softmax", "local", "windowed", "window"]
KINDS += ["forget-gates", "delta-rule"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kinds", ["dynamic-dynamic", "dynamic-static", "static-dynamic"])
def test_every_kind_of_layer_and_cache(name, kinds, make_model, random_ids, read, advance, contents, tmp_path):
    """Bit for bit, and what one kind of cache has saved, the other loads."""
    model = make_model(token_mixers=["local", "softmax"]) if name == "local" else make_model(name)
    ids, path = random_ids(3, 9), tmp_path / "state.safetensors"
    saves, loads = ({"dynamic": None, "static": {"max_cache_len": 32}}[kind] for kind in kinds.split("-"))
    make = InterdomainCache if saves is None else lambda config: InterdomainStaticCache(config, **saves)
    cache = read(model, ids, make)
    before = contents(cache)
    cache.save(path, tokens=ids)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    found = (InterdomainCache if loads is None else InterdomainStaticCache).load(path, model, tokens=ids, **loads or {})
    assert int(found.get_seq_length()) == 9
    if saves == loads:
        torch.testing.assert_close(contents(found), before, rtol=0, atol=0)
    for length in (1, 3, 1):
        new = random_ids(3, length, seed=length)
        expected, logits = (advance(model, x, new) for x in (cache, found))
        # A static cache attends to empty places, too, which another order of sums may round.
        torch.testing.assert_close(logits, expected, rtol=0, atol=0 if saves == loads else 1e-12)


def test_state_dtype_and_bfloat16(make_model, random_ids, read, advance, tmp_path):
    model = make_model("interdomain-softmax", dtype=torch.bfloat16, state_dtype="float32")
    cache = read(model, random_ids(2, 9)).to(dtype=torch.float64)
    cache.save(tmp_path / "state.safetensors")
    found = InterdomainCache.load(tmp_path / "state.safetensors", model)
    assert found.layers[0].state.dtype == torch.float64 == found.layers[1].keys.dtype
    cache, found = (x.to(dtype=torch.bfloat16) for x in (cache, found))
    assert advance(model, cache, random_ids(2, 3)).equal(advance(model, found, random_ids(2, 3)))


def test_generation_in_another_process_goes_on_bit_for_bit(make_model, random_ids, read, tmp_path):
    ids = random_ids(2, 40)
    make_model("interdomain-softmax").save_pretrained(tmp_path / "model")
    save_file({"a": ids[:, :35].clone(), "b": ids[:, 35:].clone()}, tmp_path / "tokens.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    cache = read(model, ids[:, :35])
    cache.save(tmp_path / "state.safetensors", tokens=ids[:, :35])
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, past_key_values=cache, **settings)
    process = elsewhere(tmp_path, "load")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]
    found = load_file(tmp_path / "found.safetensors")
    assert found["logits"].equal(torch.stack(expected.logits))
    assert found["ids"].equal(expected.sequences[:, 35:])
    assert model.generate(ids, **settings).sequences.equal(expected.sequences), "as if it had read the text at once"


def test_killed_while_saving(make_model, random_ids, read, tmp_path):
    """A file is always there, whole; what a killed process leaves beside it does no harm."""
    model, ids = make_model(), random_ids(2, 9)
    model.save_pretrained(tmp_path / "model")
    save_file({"a": ids, "b": ids.clone()}, tmp_path / "tokens.safetensors")
    model = type(model).from_pretrained(tmp_path / "model")
    read(model, ids).save(tmp_path / "state.safetensors")
    process = elsewhere(tmp_path, "save for ever")
    try:
        assert process.stdout.readline() == "saving\n", process.stderr.read()[-3000:]
        deadline = time.monotonic() + 0.7
        while time.monotonic() < deadline:  # a reader never meets half a file
            assert InterdomainCache.load(tmp_path / "state.safetensors", model).get_seq_length() == 9
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    assert InterdomainCache.load(tmp_path / "state.safetensors", model, tokens=ids).get_seq_length() == 9


def test_a_full_disk_loses_no_file(saved, read, random_ids, full_disk):
    model, _, path = saved
    before = path.read_bytes()
    with full_disk(len(before) // 2), pytest.raises(OSError, match="state.safetensors could not be written") as error:
        read(model, random_ids(2, 12)).save(path)
    one_sentence(error)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_loaded_cache_takes_back_what_it_has_read_since(saved, random_ids, advance, contents):
    model, _, path = saved
    cache, expected = (InterdomainCache.load(path, model) for _ in range(2))
    cache.activate_past_recording()
    advance(model, cache, random_ids(2, 3))
    cache.crop(-3)
    torch.testing.assert_close(contents(cache), contents(expected), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="can take back the last 0 tokens, got 1"):
        cache.crop(-1)


@pytest.mark.parametrize("name", ["interdomain", "hax"])
def test_a_cache_that_took_all_back_holds_another_text(name, make_model, random_ids, read, advance, contents):
    model, ids = make_model(name), random_ids(2, 8)
    other = read(model, ids[:, :5])
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    advance(model, cache, random_ids(2, 3, seed=1))
    cache.crop(-3)
    cache.restore(other.named_tensors(), 5, model)
    for token in ids[:, 5:].split(1, dim=1):
        advance(model, cache, token)
    cache.crop(-2)
    advance(model, other, ids[:, 5:6])
    torch.testing.assert_close(contents(cache), contents(other))


def test_assisted_decoding_and_beams_go_on_from_a_file(saved, random_ids):
    model, ids, path = saved
    new = torch.cat([ids[:1], ids[:1]], dim=1)
    for mode in ({"prompt_lookup_num_tokens": 3}, {"num_beams": 3}):
        cache = InterdomainCache.load(path, model)
        cache.batch_select_indices(torch.tensor([0] * mode.get("num_beams", 1)))
        settings = {"max_new_tokens": WRITTEN, "do_sample": False, **mode}
        assert model.generate(new, past_key_values=cache, **settings).equal(model.generate(new, **settings))


def test_notes_and_the_other_readers_of_the_format(saved, read):
    model, ids, path = saved
    read(model, ids).save(path, notes={"title": "Ulysses", "page": "7"})
    assert InterdomainCache.load(path, model).notes == {"title": "Ulysses", "page": "7"}
    with safe_open(path, framework="pt") as file:  # nothing but safetensors
        assert file.metadata()["tokens"] == "9" and {"0.states.0.state", "1.keys"} < set(file.keys())


def test_size_does_not_depend_on_the_text(make_model, random_ids, read, tmp_path):
    model, sizes = make_model(), set()
    for length in (1 + 2**k for k in (2, 5, 8)):
        cache = read(model, random_ids(1, length))
        cache.save(tmp_path / "state.safetensors")
        sizes.add((tmp_path / "state.safetensors").stat().st_size // 100)
        assert (tmp_path / "state.safetensors").stat().st_size < cache.state_bytes() + 2000
    assert len(sizes) == 1


# ------------------------------------------------------------------------------------------ fingerprints


def test_what_a_model_fingerprint_covers(make_model):
    model = make_model(num_hidden_layers=1, dtype=torch.float32)
    first = model_fingerprint(model)
    assert first == model_fingerprint(model.model) == model_fingerprint(copy.deepcopy(model))
    with torch.no_grad():
        model.lm_head.weight += 1
    config = model.config
    config.backend, config.use_cache, config.tie_word_embeddings = "recurrent", False, not config.tie_word_embeddings
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 40, 41, 42
    config.chunk_size, config.max_rollback, config.aux_loss_coef = config.chunk_size + 1, config.max_rollback + 1, 0.5
    config.attention_dropout, config.initializer_range = 0.25, 0.5
    assert model_fingerprint(model) == first, "a state depends on none of these"
    seen = {first}
    for name, parameter in model.model.named_parameters():
        with torch.no_grad():
            parameter.view(-1)[0] += 0.5
        seen.add(model_fingerprint(model))
        assert len(seen) > 1, name
    assert len(seen) == 1 + len(list(model.model.parameters()))
    model.config.product = "bilinear"
    assert model_fingerprint(model) not in seen
    assert model_fingerprint(model.bfloat16()) not in seen


def test_weights_are_read_once(make_model, monkeypatch):
    model = make_model()
    first = model_fingerprint(model)
    monkeypatch.setattr("modeling_interdomain.model_cache.fingerprint._hash", lambda _: pytest.fail("read again"))
    assert model_fingerprint(model) == first
    monkeypatch.undo()


WRITES = {
    "signs": lambda x: x.mul_(-1),
    "order": lambda x: x.copy_(x.flip(-1)),
    "pairs": lambda x: x.copy_(x.roll(2, -1)),  # of float32, one word of the checksum
    "one number": lambda x: x.view(-1)[-1:].add_(1e-2),
    "all": lambda x: x.normal_(),
}


@torch.no_grad()
@pytest.mark.parametrize("how", WRITES)
def test_weights_that_are_written_without_a_version_are_read_again(make_model, how):
    model = make_model("experts", dtype=torch.float32, vocab_size=2000)
    model.model.register_buffer("odd", torch.arange(1.0, 8.0).bfloat16()[1:])  # neither whole words, nor at one
    seen, written = [model_fingerprint(model)], 0
    for x in (*model.model.parameters(), *model.model.buffers()):
        before, data = x.clone(), x.data
        WRITES[how](data)
        written += not data.equal(before)
        seen.append(model_fingerprint(model))
        data.copy_(before)
        assert model_fingerprint(model) == seen[0]
    assert len(set(seen)) == 1 + written > 30


def test_adapters_that_are_switched_off_make_another_model(make_model):
    model = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    on = model_fingerprint(model)
    with model.disable_adapter():
        assert model_fingerprint(model) != on
    assert model_fingerprint(model) == on


def test_how_much_adapters_add_and_which_act_make_another_model(make_model):
    settings = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(make_model(), settings, adapter_name="one")
    model.add_adapter("two", settings)
    seen = {model_fingerprint(model)}
    model.set_adapter("two")
    seen.add(model_fingerprint(model))
    model.model.model.layers[0].token_mixer.q_proj.scaling["two"] *= 2
    seen.add(model_fingerprint(model))
    assert len(seen) == 3


def test_tokens_of_other_rows_are_another_text():
    ids = torch.arange(12)
    assert tokens_fingerprint(ids.view(2, 6)) != tokens_fingerprint(ids.view(3, 4))
    assert tokens_fingerprint(ids.view(2, 6)) == tokens_fingerprint(ids.view(2, 6).int())


def test_what_a_tokenizer_fingerprint_covers(tmp_path):
    tokenizer = word_tokenizer()
    first = tokenizer_fingerprint(tokenizer)
    tokenizer(["w5", "w6 w7"], padding=True, truncation=True, max_length=2)
    tokenizer.chat_template = "another"
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(tokenizer) == first == tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path))
    tokenizer.eos_token = "w5"  # is in the vocabulary, and has another meaning now
    assert tokenizer_fingerprint(tokenizer) != first
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["w1000"])
    assert tokenizer_fingerprint(tokenizer) != first


# ------------------------------------------------------------------------------------------ refusals


def test_files_of_something_else_are_refused(saved, make_model, random_ids, tmp_path):
    model, ids, path = saved
    load = InterdomainCache.load
    cases = [
        ("state of another model .*load it with the one it was saved with", (path, make_model(seed=1)), {}),
        ("state of another model", (path, make_model("interdomain")), {}),
        ("state of another text", (path, model), {"tokens": random_ids(2, 9, seed=1)}),
        ("state of another tokenizer", (path, model), {"tokenizer": _larger(word_tokenizer())}),
        ("belongs to an Interdomain model, got Linear", (path, torch.nn.Linear(2, 2)), {}),
    ]
    for message, arguments, options in cases:
        with pytest.raises(ValueError, match=message) as error:
            load(*arguments, **options)
        one_sentence(error)
    assert load(path, model, tokens=ids, tokenizer=word_tokenizer()).get_seq_length() == 9
    with pytest.raises(ValueError, match="holds 9 tokens, and max_cache_len=8 leaves room for fewer"):
        InterdomainStaticCache.load(path, model, max_cache_len=8)
    assert InterdomainStaticCache.load(path, model, max_cache_len=9).get_seq_length() == 9
    with pytest.raises(FileNotFoundError, match="There is no state file .*nothing"):
        load(tmp_path / "nothing", model)
    with pytest.raises(FileNotFoundError, match="There is no state file"):
        load(tmp_path, model)


def _larger(tokenizer):
    tokenizer.add_tokens(["w1000"])
    return tokenizer


def test_a_file_that_does_not_say_what_is_asked(saved, read):
    model, ids, path = saved
    read(model, ids).save(path)
    for name, asked in (("text", {"tokens": ids}), ("tokenizer", {"tokenizer": word_tokenizer()})):
        with pytest.raises(StateFileError, match=f"does not say of which {name} it is"):
            InterdomainCache.load(path, model, **asked)


def test_torn_and_altered_files_are_refused(saved, tmp_path):
    """Wherever a file is cut, and whatever bit of it is turned."""
    model, _, path = saved
    whole, spoilt = path.read_bytes(), tmp_path / "spoilt.safetensors"
    header = 8 + int.from_bytes(whole[:8], "little")
    cuts = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1]
    generator = torch.Generator().manual_seed(0)
    places = [*range(0, header, 7), *torch.randint(header, len(whole), (60,), generator=generator).tolist()]
    turned = [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in places]
    for content in [*(whole[:cut] for cut in cuts), *turned, whole + b"\0"]:
        spoilt.write_bytes(content)
        with pytest.raises(StateFileError, match="spoilt.safetensors (is|was) ") as error:
            InterdomainCache.load(spoilt, model)
        one_sentence(error)


@pytest.mark.parametrize("removed", [True, False])
def test_a_file_that_goes_while_it_is_read(saved, tmp_path, monkeypatch, removed):
    """What maps a file into memory opens it again, by its name, and says in its own way that it cannot."""
    path = tmp_path / "gone.safetensors"
    path.write_bytes(saved[2].read_bytes())

    def cannot_map(name, framework):
        if removed:
            name.unlink()
        raise RuntimeError(f"unable to open file <{name}> in read-only mode")

    monkeypatch.setattr(cache_file, "safe_open", cannot_map)
    kind, message = (
        (FileNotFoundError, "was removed while it was read") if removed else (StateFileError, "cannot be read")
    )
    with pytest.raises(kind, match=message) as error:
        read_state_file(path)
    one_sentence(error)
    # The store keeps a file that may be good.
    assert removed or isinstance(error.value.__cause__, OSError)


@pytest.mark.parametrize("times", [1, 3])
def test_a_file_that_is_replaced_while_it_is_read(tmp_path, monkeypatch, times):
    """The header of one file and the tensors of the next are no altered file: what is there is read again."""
    path, following, opened = tmp_path / "state.safetensors", [], []
    for k in range(times + 1):
        following.append(tmp_path / f"next-{k}")
        write_state_file(following[k], {"x": torch.full((5,), float(k))}, {"k": str(k)}, durable=False)
    following.pop(0).replace(path)

    class OpenedTwice:
        """Metadata of the file that was there first, tensors of the one that is there now, as of a memory map."""

        def __init__(self, name, framework):
            self.before = safe_open(name, framework)
            if following:
                following.pop(0).replace(path)
            self.now = safe_open(name, framework)
            self.metadata, self.keys, self.get_tensor = self.before.metadata, self.now.keys, self.now.get_tensor
            opened.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(cache_file, "safe_open", OpenedTwice)
    tensors, about = read_state_file(path)
    assert about["k"] == str(times) and tensors["x"].equal(torch.full((5,), float(times)))
    assert len(opened) == times + 1


def test_other_files_and_newer_ones_are_refused(saved, make_model, tmp_path):
    model, _, path = saved
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(StateFileError, match="is not a state file"):
        InterdomainCache.load(tmp_path / "model" / "model.safetensors", model)
    tensors, about = read_state_file(path)
    save_file(tensors, path, metadata={**about, "version": "9"})
    with pytest.raises(StateFileError, match="of version 9, and this library reads version 1: update"):
        InterdomainCache.load(path, model)


def test_what_cannot_be_saved(saved, read, tmp_path):
    model, ids, path = saved
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\] = \[2, 9\], .* got \[2, 8\]"):
        read(model, ids).save(path, tokens=ids[:, 1:])
    with pytest.raises(ValueError, match="has read nothing"):
        InterdomainCache(model.config).save(path, model)
    with pytest.raises(ValueError, match=r"tokens must have shape .* got list"):
        read(model, ids).save(path, tokens=ids.tolist())
    with pytest.raises(TypeError, match="notes must be strings by name, got 3"):
        read(model, ids).save(path, notes={"page": 3})
    with pytest.raises(OSError, match="could not be written"):
        read(model, ids).save(tmp_path / "no folder" / "state.safetensors")
    copied = pickle.loads(pickle.dumps(read(model, ids)))
    with pytest.raises(ValueError, match="does not know whose state this is: give the model"):
        copied.save(path)
    assert path.read_bytes() == before
    copied.save(path, model)
    assert read_state_file(path)[1]["tokens"] == "9"


def test_a_state_is_saved_of_the_weights_that_have_read_it(saved, make_model, read, random_ids, advance, tmp_path):
    """Not of others, nor of the same after a step of an optimizer, another adapter or a learned state; a text that
    begins anew is of the new ones."""
    model, ids, path = saved
    before, cache = path.read_bytes(), read(model, ids)
    for other in (make_model("interdomain-softmax", seed=1), make_model("interdomain")):
        with pytest.raises(ValueError, match="Another model has read what this cache holds: save it with that one"):
            cache.save(path, other)
    cache.save(tmp_path / "twin.safetensors", copy.deepcopy(model))
    model = copy.deepcopy(model)
    caches = [InterdomainCache(model.config) for _ in range(2)]
    caches[1].activate_past_recording()
    caches[1].allow_rollback(ids.shape[1])
    for held in caches:
        advance(model, held, ids)
    cached = InterdomainCache.load(path, model)
    with torch.no_grad():
        model.model.layers[0].token_mixer.o_proj.weight.add_(0.1)
    for changed in (*caches, cached):
        with pytest.raises(ValueError, match=r"Weights or adapters of the model were written .* read the text again"):
            changed.save(path)
    assert path.read_bytes() == before
    caches[0].reset()
    caches[1].crop(-ids.shape[1])
    for again in caches:
        advance(model, again, ids)
        again.save(tmp_path / "again.safetensors")
        assert InterdomainCache.load(tmp_path / "again.safetensors", model).get_seq_length() == ids.shape[1]
    adapted = get_peft_model(model, LoraConfig(target_modules=["o_proj"], init_lora_weights=False)).eval()
    cache = read(adapted, ids)
    with adapted.disable_adapter(), pytest.raises(ValueError, match="Weights or adapters of the model were written"):
        cache.save(path)
    cache.save(tmp_path / "adapted.safetensors", adapted)
    model.add_learned_state()
    with pytest.raises(ValueError, match="Weights or adapters of the model were written"):
        cache.save(path)
    assert path.read_bytes() == before
    cache.save(tmp_path / "told.safetensors", adapted)
    assert InterdomainCache.load(tmp_path / "told.safetensors", adapted).get_seq_length() == ids.shape[1]


def test_a_layer_of_the_library_that_keeps_more_is_refused(saved, read):
    model, ids, path = saved
    cache = read(model, ids)
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    layer.update(cache.layers[1].keys, cache.layers[1].values)
    cache.layers[1] = layer
    with pytest.raises(ValueError, match="Layer 1 of this cache is a DynamicSlidingWindowLayer, which cannot be saved"):
        cache.save(path)


def test_meta_weights_have_no_fingerprint(make_model):
    with pytest.raises(ValueError, match="needs all its weights in this process, and .* is not loaded"):
        model_fingerprint(make_model().to("meta"))


def test_views_are_saved_as_what_they_show(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    write_state_file(tmp_path / "x", {"row": x[1], "column": x[:, 1], "one": x[0, 0].expand(5), "no": x[:0]}, {})
    tensors, _ = read_state_file(tmp_path / "x")
    assert tensors["row"].tolist() == [4, 5, 6, 7] and tensors["column"].tolist() == [1, 5, 9]
    assert tensors["one"].tolist() == [0] * 5 and tensors["no"].shape == (0, 4)
