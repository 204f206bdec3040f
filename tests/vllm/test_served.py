"""Answers of vLLM's engine are those of Transformers' `generate`: greedy tokens, and log-probabilities within 1e-4."""

import ctypes
import gc
import random
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import EXPERTS, ROPE
from tests.vllm.engines import TOLERANCE, TOP, assert_answers, engine

# Every mixer, hybrids of them, and the variants that compute something else.
MODELS = {
    "interdomain": {},
    "interdomain-softmax": {},
    "softmax": {},
    "s4d": {},
    "s4d-grouped": {},
    "ssd": {},
    "mamba2": {},
    "selective-scan": {},
    "experts": {},
    "grouped": {},
    "rope-before": {},
    "fourier": {},
    "gated": {},
    "no-convolution": {},
    "linear-readout": {},
    "forget-gates": {},
    "delta-rule": {},
    "window": {},
    "window-alone": {},
    "all-mixers": {
        "num_hidden_layers": 6,
        "token_mixers": ["interdomain", "ssd", "window", "softmax", "selective_scan", "s4d"],
        "rope_parameters": ROPE,
        "ssd_state_size": 6,
        "attention_window": 9,
        "attention_sinks": 2,
        "tie_word_embeddings": True,
        "residual_in_fp32": True,
    },
    # Pages of different sizes without attention, whose pages would be made as large.
    "all-recurrent": {
        "num_hidden_layers": 3,
        "token_mixers": ["interdomain", "ssd", "selective_scan"],
        "ssd_state_size": 6,
    },
}
HYBRID = "all-mixers"
# Of the hybrids that two processes can share: "selective_scan" has one head.
HEADS = {
    "num_hidden_layers": 5,
    "token_mixers": ["interdomain", "softmax", "s4d", "window", "ssd"],
    "feed_forwards": ["mlp", "cdmoe", "mlp", "mlp", "none"],
    "attention_window": 6,
    "attention_bias": True,
    "num_key_value_heads": 2,
    "feature_map": "fourier",
    "rope_parameters": ROPE,
    "ssd_state_size": 6,
    "ssd_groups": 2,
    "use_output_gate": True,
    **EXPERTS,
}


@pytest.fixture
def made(make_folder):
    """`made(name of MODELS)`: a model and its folder."""
    return lambda name: make_folder("interdomain" if name.startswith("all-") else name, **MODELS[name])


def texts(random_ids, *lengths: int) -> dict[str, list[int]]:
    return {f"text {i}": random_ids(1, length, seed=i)[0].tolist() for i, length in enumerate(lengths)}


def assert_all(model, asked: dict[str, list[int]], answers) -> None:
    assert answers.keys() == asked.keys()
    for name, answer in answers.items():
        assert_answers(model, asked[name], answer)


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_generate(made, random_ids, name):
    """One request, and then four, of which one has a single token, in pages that have been used."""
    model, folder = made(name)
    asked = texts(random_ids, 23, 1, 40, 2, 9)
    with engine(folder) as served:
        served.ask("text 0", asked["text 0"], 6)
        served.finish()
        for text in list(asked)[1:]:
            served.ask(text, asked[text], 6)
        assert_all(model, asked, served.finish())


def test_feed_forwards_take_some_tokens_at_a_time(made, random_ids, monkeypatch):
    """A long batch in pieces, of which the last is shorter."""
    from vllm_interdomain import model as served_model

    monkeypatch.setattr(served_model, "NUMBERS_AT_ONCE", 48 * 7)
    model, folder = made("interdomain")
    asked = texts(random_ids, 23, 40)
    with engine(folder) as served:
        at_once = served.engine.apply_model(lambda model: [layer.mlp.at_once for layer in model.model.layers])
        assert at_once == [[7, 7]]
        for text, prompt in asked.items():
            served.ask(text, prompt, 4)
        assert_all(model, asked, served.finish())


def test_freed_memory_is_kept():
    """That of a tensor as large as the hidden layer of a batch, in a process whose heap nothing else has cut up."""
    program = """
import torch
from vllm_interdomain.memory import keep_freed_memory

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

keep_freed_memory()
x = torch.ones(1 << 22)
before = resident()
del x
print(before - resident())
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0 and int(told.stdout) < 1024, told  # KiB, of 16,384


MIXED = [3, 31, 17, 1, 64, 5, 22, 48, 2, 33, 9, 27, 80, 12, 6, 41]


@pytest.mark.parametrize("name", ["interdomain", "ssd", "window", HYBRID])
@pytest.mark.parametrize("chunk", [None, 16], ids=["whole", "chunks of 16"])
def test_requests_that_arrive_at_different_times(made, random_ids, name, chunk):
    """Prompts are read beside tokens that are written, whole or 16 tokens a forward."""
    model, folder = made(name)
    asked = texts(random_ids, *MIXED)
    options = {} if chunk is None else {"max_num_batched_tokens": chunk, "enable_prefix_caching": False}
    with engine(folder, **options) as served:
        for i, (text, prompt) in enumerate(asked.items()):
            served.ask(text, prompt, 4 + i % 5)
            if i % 3:
                served.step()
        answers = served.finish()
        assert chunk is None or served.steps >= sum(MIXED) / chunk
        assert_all(model, asked, answers)


@pytest.mark.parametrize("prefix", [False, True], ids=["no prefix", "prefix"])
def test_preempted_requests(made, random_ids, prefix):
    """A cache so small that requests are put off, and read again from their beginning."""
    model, folder = made(HYBRID)
    asked = texts(random_ids, *MIXED)
    with engine(folder, num_gpu_blocks_override=20, block_size=32, enable_prefix_caching=prefix) as served:
        preempted, preempt = [], served.scheduler._preempt_request
        served.scheduler._preempt_request = lambda request, *rest, **options: (
            preempted.append(request.request_id),
            preempt(request, *rest, **options),
        )[1]
        for text, prompt in asked.items():
            served.ask(text, prompt, 40)
        answers = served.finish()
        assert preempted
        assert_all(model, asked, answers)


@pytest.mark.parametrize("name", ["interdomain", "selective-scan", HYBRID])
def test_shared_beginnings_are_read_once(made, random_ids, name):
    """Prefix caching keeps states at the ends of blocks: "align" in vLLM's words."""
    model, folder = made(name)
    shared = random_ids(1, 150, seed=99)[0].tolist()
    asked = {text: shared + end for text, end in texts(random_ids, 3, 31, 7, 20).items()}
    asked["a part"] = shared[:100]
    with engine(folder, block_size=32, enable_prefix_caching=True) as served:
        for text, prompt in asked.items():
            served.ask(text, prompt, 5)
            served.finish()
        again = {f"{text} again": prompt for text, prompt in asked.items()}
        for text, prompt in again.items():
            served.ask(text, prompt, 40)
        assert_all(model, asked | again, served.finish())
        read_before = served.cached
        assert [read_before[text] for text in ("text 0", "text 1", "text 1 again")] == [0, 128, 160]


def test_beginnings_stay_where_passes_have_ended(made, random_ids):
    """As examples/vllm.md says: of prompts that go on differently for longer than a block."""
    model, folder = made("interdomain")
    shared = random_ids(1, 70, seed=99)[0].tolist()
    asked = {text: shared + end for text, end in texts(random_ids, 100, 90).items()}
    options = {"max_num_batched_tokens": 32, "prefix_cache_retention_interval": 32}
    with engine(folder, block_size=32, enable_prefix_caching=True, **options) as served:
        for text, prompt in asked.items():
            served.ask(text, prompt, 5)
            served.finish()
        assert_all(model, asked, served.answers)
        assert list(served.cached.values()) == [0, 64]


@pytest.mark.parametrize("name", ["s4d", HYBRID])
def test_aborted_requests_leave_nothing(made, random_ids, name):
    model, folder = made(name)
    asked = texts(random_ids, *MIXED)
    with engine(folder, max_num_seqs=4) as served:
        for text, prompt in asked.items():
            served.ask(text, prompt, 8)
        for i, text in enumerate(list(asked)):
            if i % 3 == 1:
                served.engine.abort_request([text])
                del asked[text]
            served.step()
        assert_all(model, asked, served.finish())


@pytest.mark.parametrize(
    "name", ["heads", pytest.param("grouped", marks=pytest.mark.slow), pytest.param("mamba2", marks=pytest.mark.slow)]
)
def test_heads_over_two_processes(made, make_folder, random_ids, name):
    """Two processes hold half of the heads and states each, and meet in the sums of projections."""
    model, folder = make_folder("interdomain", **HEADS) if name == "heads" else made(name)
    asked = texts(random_ids, *MIXED[:6])
    with engine(folder, tensor_parallel_size=2) as served:
        for text, prompt in asked.items():
            served.ask(text, prompt, 6)
            served.step()
        assert_all(model, asked, served.finish())


@pytest.mark.parametrize("name, beside", [("interdomain", 2), ("window", 1)])
def test_states_stay_in_float32(make_folder, random_ids, name, beside):
    """In a model of bfloat16 what is kept beside them (inputs of convolutions, windows, sinks) is as it makes it."""
    model, folder = make_folder(name, model_dtype=torch.bfloat16)
    wide = type(model).from_pretrained(folder, dtype=torch.float32)
    asked = texts(random_ids, 33, 9)
    with engine(folder, dtype="bfloat16") as served:
        for text, prompt in asked.items():
            served.ask(text, prompt, 4)
        answers = served.finish()
        kept = served.engine.apply_model(lambda model: [x.dtype for x in model.model.layers[1].token_mixer.kv_cache])
        assert kept == [[torch.float32, *[torch.bfloat16] * beside]]
    errors = {"vLLM": [], "Transformers": []}  # beside the same weights in float32
    for text, prompt in asked.items():
        ids = torch.tensor([prompt + answers[text].tokens[:-1]])
        rounded, exact = (of(ids).logits[0, len(prompt) - 1 :].float().log_softmax(-1) for of in (model, wide))
        for found, mine, row in zip(answers[text].logprobs, rounded, exact, strict=True):
            errors["vLLM"] += [abs(value - row[token].item()) for token, value in found.items()]
            errors["Transformers"] += [abs(mine[token] - row[token]).item() for token in found]
    assert statistics.mean(errors["vLLM"]) < 2 * statistics.mean(errors["Transformers"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, count, settled",
    # Each text in a window is products of its own, of which there are more sizes.
    [(HYBRID, 1000, 500), ("window", 2000, 1500)],
    ids=[HYBRID, "window"],
)
@pytest.mark.parametrize("prefix", [False, True], ids=["no prefix", "prefix"])
def test_a_thousand_requests_in_random_order(made, random_ids, name, count, settled, prefix):
    """Each answer is the one that its text has alone, a fifth is aborted, and memory and pages stay as they are.

    After so many requests: by then the library's products have met the sizes that they keep code for.
    """
    model, folder = made(name)
    asked = texts(random_ids, *(1 + 7 * i % 90 for i in range(40)))
    asked |= {f"{text} on": asked["text 39"] + prompt for text, prompt in list(asked.items())[:10]}
    draw, longest, left = random.Random(0), 12, {}
    with engine(folder, num_gpu_blocks_override=60, block_size=32, enable_prefix_caching=prefix) as served:
        pool = served.scheduler.kv_cache_manager.block_pool
        free, held = pool.get_num_free_blocks(), (0, 0)
        for text, prompt in asked.items():
            served.ask(text, prompt, longest)
        alone = dict(served.finish())
        assert_all(model, asked, alone)
        for i in range(count):
            text = draw.choice(list(asked))
            left[f"{i}"] = text
            served.ask(f"{i}", asked[text], draw.randint(1, longest))
            if draw.random() < 0.2:
                aborted = draw.choice([name for name in left if name not in served.answers])
                served.engine.abort_request([aborted])
                del left[aborted]
            while len(left) - len(served.answers) + len(asked) > 24:
                served.step()
            if i == settled:
                held = resident(), tensors()
        served.finish()
        for name, text in left.items():
            answer = served.answers[name]
            assert answer.tokens == alone[text].tokens[: len(answer.tokens)]
            for found, wanted in zip(answer.logprobs, alone[text].logprobs):
                assert all(abs(found[token] - wanted[token]) < 2 * TOLERANCE for token in found.keys() & wanted.keys())
        assert pool.get_num_free_blocks() == free
        served.answers.clear()
        assert tensors() <= held[1] and resident() - held[0] < 20e6


def tensors() -> int:
    """How many there are now."""
    gc.collect()
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def resident() -> int:
    """Bytes of memory of this process now, without those that the allocator only keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_prompts_of_embeddings(make_folder, random_ids):
    from vllm import SamplingParams

    model, folder = make_folder()
    prompt = random_ids(1, 23, seed=1)[0].tolist()
    sampling = SamplingParams(max_tokens=5, temperature=0, logprobs=TOP, detokenize=False, ignore_eos=True)
    embedded = model.get_input_embeddings()(torch.tensor(prompt)).detach()
    with engine(folder, enable_prompt_embeds=True) as served:
        served.engine.add_request("text", {"prompt_embeds": embedded}, sampling)
        assert_answers(model, prompt, served.finish()["text"])


def test_a_model_on_a_cpu_keeps_freed_memory(make_folder, monkeypatch):
    from vllm_interdomain import model as served_model

    called = []
    monkeypatch.setattr(served_model, "keep_freed_memory", lambda: called.append(True))
    with engine(make_folder()[1]):
        assert called


def test_the_next_page_begins_at_a_multiple_of_four_bytes():
    from vllm_interdomain.pages import page_size

    assert page_size(((2, 3), (1, 5)), torch.bfloat16) == 36


@pytest.mark.parametrize("name", ["interdomain", "mamba2", "window", "selective-scan", "delta-rule"])
def test_nothing_is_read_of_a_page_before_its_sequence_has_begun(make_folder, random_ids, name):
    """Whatever it held before: of another layer's kind, numbers that are none."""
    model, folder = make_folder(name)
    asked = {f"text {i}": random_ids(1, length, seed=i)[0].tolist() for i, length in enumerate((23, 1, 40))}

    def spoil(model):
        mixers = [layer.token_mixer for layer in model.model.layers]
        for pool in (x for mixer in mixers for x in getattr(mixer, "kv_cache", ()) if isinstance(x, torch.Tensor)):
            pool.fill_(float("nan"))

    with engine(folder) as served:
        served.engine.apply_model(spoil)
        for text, prompt in asked.items():
            served.ask(text, prompt, 4)
        for text, answer in served.finish().items():
            assert_answers(model, asked[text], answer)
