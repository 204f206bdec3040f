"""Small engines of vLLM in this process, one after the other, and what Transformers' `generate` says to compare with."""

import gc
import os
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

# Before vLLM is imported: an engine in this process, quiet, that asks nobody and leaves the cores to others.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

collect_ignore = []
try:
    import vllm  # noqa: F401
except ImportError:
    MISSING = "vLLM is not installed here: `make test-vllm` prepares an environment of its own."
else:
    MISSING = None

# The sizes of heads that vLLM's attention has on a CPU begin with 32.
SOFTMAX = {"head_dim": 32}
TOP = 3


def pytest_collection_modifyitems(items):
    if MISSING is not None:
        for item in items:
            if item.path.parent == item.config.rootpath / "tests" / "vllm":
                item.add_marker(pytest.mark.skip(reason=MISSING))


class Answer(NamedTuple):
    """Tokens that were written, and of each the log-probabilities of some."""

    tokens: list[int]
    logprobs: list[dict[int, float]]


@pytest.fixture
def make_folder(make_model, tmp_path):
    """`make_folder(name, **changes)`: a small model in float32 and the folder that it is saved in."""

    def make(name: str = "interdomain", **changes):
        model = make_model(name, dtype=torch.float32, **SOFTMAX, **changes | {"state_dtype": "float32"})
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        return model, folder

    return make


def expected(model, prompt: list[int], count: int) -> torch.Tensor:
    """Transformers' greedy tokens `[count]` and log-probabilities `[count, vocabulary]`."""
    found = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences[0, len(prompt) :], torch.stack(found.logits)[:, 0].log_softmax(-1)


def assert_answers(model, prompt: list[int], answer: Answer) -> None:
    """Token for token what Transformers writes, and each log-probability within 1e-4."""
    tokens, logprobs = expected(model, prompt, len(answer.tokens))
    assert answer.tokens == tokens.tolist()
    for found, row in zip(answer.logprobs, logprobs, strict=True):
        assert len(found) >= TOP
        for token, value in found.items():
            assert abs(value - row[token].item()) < 1e-4


class Engine:
    """An engine of vLLM whose steps a test takes itself."""

    def __init__(self, folder, **options):
        from vllm import LLM

        usual = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 25}
        self.llm = LLM(str(folder), skip_tokenizer_init=True, **usual | options)
        self.engine = self.llm.llm_engine
        self.answers: dict[str, Answer] = {}

    @property
    def scheduler(self):
        return self.engine.engine_core.engine_core.scheduler

    def ask(self, name: str, prompt: list[int], count: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=count, temperature=0, logprobs=TOP, detokenize=False, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def step(self) -> None:
        """One forward; what is done is among the answers then."""
        for found in self.engine.step():
            if found.finished:
                output = found.outputs[0]
                rows = [{token: x.logprob for token, x in row.items()} for row in output.logprobs]
                self.answers[found.request_id] = Answer(list(output.token_ids), rows)

    def finish(self) -> dict[str, Answer]:
        while self.engine.has_unfinished_requests():
            self.step()
        return self.answers


@contextmanager
def engine(folder, **options):
    from vllm.distributed import cleanup_dist_env_and_memory

    made = Engine(folder, **options)
    try:
        yield made
    finally:
        made.engine.engine_core.shutdown()
        made.__dict__.clear()
        gc.collect()
        cleanup_dist_env_and_memory()
