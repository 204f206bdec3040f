"""One side of `models_before`: a small model of whatever `modeling_interdomain` stands in the path, and a clock.

It reads names of work from its input, does it, and answers with seconds. It imports nothing of the benchmarks, so that
the path can hold the package of an earlier commit.
"""

import sys
import time
from collections.abc import Callable

import torch

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

MIXERS: dict[str, dict] = {
    "Interdomain": {},
    "Interdomain, rotary": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_placement": "after",
    },
    "s4d": {"token_mixers": "s4d"},
    "ssd": {"token_mixers": "ssd"},
    "selective_scan": {"token_mixers": "selective_scan"},
    "softmax": {"token_mixers": "softmax"},
}
WORK = ("prefill", "decode", "training")
SHAPE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 4096}
QUICK = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
PREFILL, TRAINING, STEPS = 1024, 512, 20  # tokens of a call, and decode steps


def make_work(mixer: str, quick: bool) -> dict[str, Callable[[], object]]:
    """What a model is asked to do, by name; the weights and tokens are those of every side."""
    torch.manual_seed(0)
    model = InterdomainForCausalLM(InterdomainConfig(**(QUICK if quick else SHAPE), **MIXERS[mixer])).eval()
    ids = torch.randint(model.config.vocab_size, (1, PREFILL // 16 if quick else PREFILL))
    with torch.no_grad():
        cache = model(ids[:, : ids.shape[1] // 2], use_cache=True).past_key_values

    @torch.no_grad()
    def prefill():
        model.eval()(ids, use_cache=True)

    @torch.no_grad()
    def decode():
        model.eval()
        for _ in range(STEPS):
            model(ids[:, :1], past_key_values=cache, use_cache=True)

    def training():
        part = ids[:, :TRAINING]
        model.train()(part, labels=part).loss.backward()
        model.zero_grad()

    return dict(zip(WORK, (prefill, decode, training)))


def main() -> None:
    threads, *quick, mixer = sys.argv[1:]
    torch.set_num_threads(int(threads))
    work = make_work(mixer, bool(quick))
    for line in sys.stdin:
        begin = time.perf_counter()
        work[line.strip()]()
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()
