"""Serving with vLLM on a CPU: our 125M shape, a Llama of that shape in the same engine, and our own `generate_batch`;
and SmolLM2-135M's shape, as it is and converted (`from-llama --window 64 --sinks 4`).

python -m benchmarks.vllm_cpu                       every case that the result file lacks; goes on where it was stopped
python -m benchmarks.vllm_cpu --minutes 60          as many of these as fit, those that tell the most first
python -m benchmarks.vllm_cpu --only "8 x 2048"     the cases that match this regular expression
python -m benchmarks.vllm_cpu --again --only ours   these again
python -m benchmarks.vllm_cpu --quick               tiny sizes, nothing written

It runs in the environment of `make test-vllm`: .venv/vllm/bin/python. Requests of random tokens arrive together; each
writes `NEW` tokens. An engine stands in this process and has written a few tokens before it is timed.
"""

import argparse
import math
import os
import re
import statistics
import tempfile
import time
from importlib.metadata import version

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from benchmarks import harness
from benchmarks.harness import footnote, markdown
from conversion.carry import Window, interdomain_config

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
MODES = 64  # of the state of a converted layer, the default of `from-llama`
NAME, NEW, SHARED = "vllm_cpu", 32, 7 / 8
KINDS = {
    "ours in vLLM": {},
    "Llama in vLLM": {},
    "ours by generate_batch": {},
    "ours in vLLM, 7/8 shared and kept": {"enable_prefix_caching": True},
    "Llama in vLLM, 7/8 shared and kept": {"enable_prefix_caching": True},
    "SmolLM2 converted in vLLM": {},
    "SmolLM2 in vLLM": {},
}
REQUESTS, LENGTHS = (1, 8, 32), (256, 2048, 4096, 8192)
CASES = [(kind, requests, length) for length in LENGTHS for requests in REQUESTS for kind in KINDS]
# What is measured first: whether it is ahead, from where on, and then one request and many.
TELLING = [(8, 2048), (8, 4096), (1, 4096), (8, 256), (1, 8192), (8, 8192), (1, 256), (1, 2048), (32, 256), (32, 2048)]
# Tokens a second that a case is taken to have before its kind has any: few, so that a budget is kept.
SLOW = 100


def in_order() -> list[tuple[str, int, int]]:
    """The cases, those that tell the most first."""

    def place(case: tuple[str, int, int]) -> int:
        return TELLING.index(case[1:]) if case[1:] in TELLING else len(TELLING)

    return sorted(CASES, key=place)


def expected(record: dict, kind: str, requests: int, length: int) -> float:
    """Seconds that a case will take, by the slowest that its kind was."""
    rates = [
        case[1] * (case[2] + NEW) / record["cases"][named(*case)]["seconds"]
        for case in CASES
        if case[0] == kind and named(*case) in record["cases"]
    ]
    return requests * (length + NEW) / min(rates, default=SLOW)


def named(kind: str, requests: int, length: int) -> str:
    return f"{kind}, {requests} x {length}"


def run(quick: bool, only: str, again: bool, minutes: float) -> dict:
    """Every case is written as soon as it is measured; one that will not end within the minutes is left out."""
    end = time.monotonic() + 60 * minutes
    path = harness.RESULTS / f"{NAME}.json"
    record = {"cases": {}} if quick or not path.exists() else harness.read(NAME)
    cases = [(kind, 2, 40) for kind in KINDS] if quick else in_order()
    wanted = [case for case in cases if re.search(only, named(*case))]
    for case in wanted:
        name = named(*case)
        if name in record["cases"] and not again:
            continue
        if not quick and time.monotonic() + expected(record, *case) > end:
            continue
        record["cases"][name] = measured(*case, quick)
        record["vllm"] = version("vllm-cpu")
        print(name, record["cases"][name], flush=True)
        if not quick:
            harness.write(NAME, record)
    return record


def configuration(kind: str, length: int, quick: bool):
    small = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256}
    if kind.startswith("SmolLM2"):
        llama = LlamaConfig(**SMOLLM2 | (small if quick else {}), max_position_embeddings=length + NEW)
        if "converted" not in kind:
            return llama
        return interdomain_config(llama, range(llama.num_hidden_layers), MODES, Window(64, 4))
    small |= {"feature_dim": 64}
    ours = AutoConfig.from_pretrained("configuration/interdomain-125m", **small if quick else {})
    if kind.startswith("ours"):
        ours.max_position_embeddings = length + NEW
        return ours
    return LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_hidden_layers,
        num_attention_heads=ours.num_attention_heads,
        max_position_embeddings=length + NEW,
    )


def measured(kind: str, requests: int, length: int, quick: bool) -> dict:
    """Seconds until all is written, median seconds until a first token, and the bytes that a request keeps."""
    torch.manual_seed(0)
    config = configuration(kind, length, quick)
    model = AutoModelForCausalLM.from_config(config).eval()
    shared = int(SHARED * length) if "shared" in kind else 0
    begin = torch.randint(config.vocab_size, (shared,)).tolist()
    prompts = [begin + torch.randint(config.vocab_size, (length - shared,)).tolist() for _ in range(requests)]
    found = {"bytes": _bytes(config, length)}
    if kind.endswith("generate_batch"):
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_batch_size": requests}
        model.generate_batch([prompts[0][:16]], max_new_tokens=2, **options)
        started = time.perf_counter()
        model.generate_batch(prompts, max_new_tokens=NEW, **options)
        return found | {"seconds": time.perf_counter() - started}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        return found | _in_vllm(folder, prompts, begin, length, {"enable_prefix_caching": False} | KINDS[kind])


def _in_vllm(folder: str, prompts: list[list[int]], begin: list[int], length: int, options: dict) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    room = {"max_model_len": length + NEW, "max_num_seqs": max(2, len(prompts)), "dtype": "float32"}
    room["enforce_eager"] = True  # ours always is; vLLM would compile the Llama for minutes
    engine = LLM(folder, skip_tokenizer_init=True, **room, **options).llm_engine

    def ask(name: str, prompt: list[int], count: int) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0, detokenize=False, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def finish() -> dict[str, float]:
        first: dict[str, float] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter())
        return first

    try:
        ask("warm", begin + prompts[0][:16] if begin else prompts[0][:16], 2)
        finish()
        started = time.perf_counter()
        for i, prompt in enumerate(prompts):
            ask(f"{i}", prompt, NEW)
        first = finish()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "first_token": statistics.median(first.values()) - started}
    finally:
        engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _bytes(config, length: int) -> int:
    """What is kept of one request in float32 when it has been read."""
    if hasattr(config, "state_sizes"):
        return 4 * sum(config.state_sizes(length).values())
    return 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length


def table(record: dict) -> str:
    rows = []
    for kind, requests, length in CASES:
        found = record["cases"].get(named(kind, requests, length))
        if found is not None:
            tokens = requests * (length + NEW)
            first = f"{found['first_token']:.2f}" if "first_token" in found else ""
            cells = f"{tokens / found['seconds']:,.0f}", first, f"{found['bytes'] / 1e6:,.1f}"
            rows.append([f"{requests} x {length:,}", kind, *cells])
    header = ["requests x tokens", "", "tokens a second, read and written", "seconds to a first token", "MB a request"]
    about = (
        "The 125M shape and a Llama of its sizes (SmolLM2-135M's where it is named), random weights, "
        f"float32, vLLM {record['vllm']}, nothing compiled. "
        f"{NEW} tokens are written to each request, once, on a machine that others used at the same time."
    )
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.vllm_cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="the cases that match this regular expression")
    parser.add_argument("--minutes", type=float, default=math.inf, help="measure what fits (default: all)")
    parser.add_argument("--again", action="store_true", help="measure them although the file has them")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    arguments = parser.parse_args()
    # Read when vLLM is imported: an engine in this process, whose threads the machine places.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    record = run(arguments.quick, arguments.only, arguments.again, arguments.minutes)
    if not arguments.quick:
        from benchmarks import readme

        readme.update()
        print(table(record))


if __name__ == "__main__":
    main()
