"""Small engines of vLLM in this process, one after the other, and Transformers' `generate` to compare with."""

import gc
from contextlib import contextmanager
from typing import NamedTuple

import torch

# Log-probabilities of a token that are compared, beside its own.
TOP = 3
TOLERANCE = 1e-4


class Answer(NamedTuple):
    """Tokens that were written, and of each the log-probabilities of some."""

    tokens: list[int]
    logprobs: list[dict[int, float]]


def assert_answers(model, prompt: list[int], answer: Answer) -> None:
    """Token for token what Transformers writes, and each log-probability within 1e-4."""
    found = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=len(answer.tokens),
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert answer.tokens == found.sequences[0, len(prompt) :].tolist()
    for logprobs, row in zip(answer.logprobs, torch.stack(found.logits)[:, 0].log_softmax(-1), strict=True):
        assert len(logprobs) >= TOP
        assert all(abs(value - row[token].item()) < TOLERANCE for token, value in logprobs.items())


class Engine:
    """An engine of vLLM whose steps a test takes itself."""

    def __init__(self, folder, **options):
        from vllm import LLM

        usual = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 25}
        self.engine = LLM(str(folder), skip_tokenizer_init=True, **usual | options).llm_engine
        self.answers: dict[str, Answer] = {}
        self.cached: dict[str, int] = {}
        self.steps = 0

    @property
    def scheduler(self):
        return self.engine.engine_core.engine_core.scheduler

    def ask(self, name: str, prompt: list[int], count: int, **options) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=count, temperature=0, logprobs=TOP, detokenize=False, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling, **options)

    def step(self) -> None:
        """One forward; what is done is among the answers then."""
        self.steps += 1
        for found in self.engine.step():
            if found.finished:
                output = found.outputs[0]
                rows = [{token: x.logprob for token, x in row.items()} for row in output.logprobs]
                self.answers[found.request_id] = Answer(list(output.token_ids), rows)
                self.cached[found.request_id] = found.num_cached_tokens

    def finish(self) -> dict[str, Answer]:
        while self.engine.has_unfinished_requests():
            self.step()
        return self.answers


def start(folder, **options):
    """All that happens before an engine is made."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "skip_tokenizer_init": True} | options
    return EngineArgs(str(folder), **options).create_engine_config()


@contextmanager
def engine(folder, **options):
    from vllm.distributed import cleanup_dist_env_and_memory

    made = Engine(folder, **options)
    try:
        yield made
    finally:
        made.engine.engine_core.shutdown()
        vars(made).clear()
        gc.collect()
        cleanup_dist_env_and_memory()
