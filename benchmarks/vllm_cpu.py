"""Serving with vLLM on a CPU, as its own `vllm bench serve` measures it: our 125M shape, a Llama of that shape in the
same engine, and our own `generate_batch`; and SmolLM2-135M's shape, as it is and converted (`from-llama --window 64`).

python -m benchmarks.vllm_cpu                       every case that the result file lacks; goes on where it was stopped
python -m benchmarks.vllm_cpu --minutes 60          as many of these as fit, those that tell the most first
python -m benchmarks.vllm_cpu --only "8 x 2048"     the cases that match this regular expression
python -m benchmarks.vllm_cpu --again --only ours   these again
python -m benchmarks.vllm_cpu --quick               tiny sizes, nothing written

It runs in the environment of `make test-vllm`: .venv/vllm/bin/python. Requests of random tokens arrive together; each
writes `NEW` tokens. A server of each kind is a process of its own, with `OMP_NUM_THREADS` threads; it stays to the end
and has answered a few short requests before it is timed.
"""

import argparse
import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks import harness
from benchmarks.harness import SMOLLM2_SHAPE, footnote, markdown
from conversion.carry import Window, interdomain_config
from vllm_interdomain.memory import KEPT, LARGEST_BLOCK, keep_freed_memory

MODES = 64  # of the state of a converted layer, the default of `from-llama`
NAME, NEW, SHARED = "vllm_cpu", 32, 7 / 8
# With GiB of vLLM's cache: what 8 requests of 8k tokens need, or 32 of which 7/8 are shared.
KINDS = {
    "ours in vLLM": 5,
    "Llama in vLLM": 5,
    "ours by generate_batch": None,
    "ours in vLLM, 7/8 shared and kept": 3,
    "Llama in vLLM, 7/8 shared and kept": 3,
    "SmolLM2 converted in vLLM": 5,
    "SmolLM2 in vLLM": 5,
}
REQUESTS, LENGTHS = (1, 8, 32), (256, 2048, 4096, 8192)
# Tokens between the kept states of beginnings: where a pass ends, if vLLM is told to. A Llama's blocks are kept anyway.
APART = 256
CASES = [
    (kind, requests, length)
    for length in LENGTHS
    for requests in REQUESTS
    for kind in KINDS
    if requests > 1 or "shared" not in kind  # with nobody
]
# What is measured first: whether it is ahead, from where on, and then one request and many.
TELLING = [(8, 2048), (8, 4096), (1, 4096), (8, 256), (1, 8192), (1, 256), (1, 2048), (32, 256), (8, 8192), (32, 2048)]
# Tokens a second that a case is taken to have before its kind has any: few, so that a budget is kept.
SLOW = 100
MOST_SERVERS = 3  # of 5 GiB for a cache and up to 3 beside it


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
    known = {"cases": {}} if again else record  # what other hours were like says nothing of this one
    with contextlib.ExitStack() as stack:
        servers = Servers(quick, stack)
        for case in wanted:
            name = named(*case)
            if name in known["cases"]:
                continue
            if not quick and time.monotonic() + expected(known, *case) > end:
                continue
            known["cases"][name] = record["cases"][name] = measured(*case, quick, servers)
            record["vllm"] = version("vllm-cpu")
            print(name, record["cases"][name], flush=True)
            if not quick:
                harness.write(NAME, record)
    return record


def longest(quick: bool) -> int:
    """The tokens that a model has room for, some more than are sent and written."""
    return (40 if quick else max(LENGTHS)) + 2 * NEW


def configuration(kind: str, quick: bool):
    small = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256}
    if kind.startswith("SmolLM2"):
        llama = LlamaConfig(**SMOLLM2_SHAPE | (small if quick else {}), max_position_embeddings=longest(quick))
        if "converted" not in kind:
            return llama
        return interdomain_config(llama, range(llama.num_hidden_layers), MODES, Window(64, 4))
    small |= {"feature_dim": 64}
    ours = AutoConfig.from_pretrained("configuration/interdomain-125m", **small if quick else {})
    if kind.startswith("ours"):
        ours.max_position_embeddings = longest(quick)
        return ours
    return LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_hidden_layers,
        num_attention_heads=ours.num_attention_heads,
        max_position_embeddings=longest(quick),
    )


def made(kind: str, quick: bool):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configuration(kind, quick)).eval()


def measured(kind: str, requests: int, length: int, quick: bool, servers: "Servers") -> dict:
    """Seconds until all is written, median seconds until a first token, and the bytes that a request keeps."""
    found = {"bytes": _bytes(configuration(kind, quick), length)}
    if not kind.endswith("generate_batch"):
        return found | bench(servers.of(kind), requests, length, "shared" in kind)
    model = made(kind, quick)
    prompts = torch.randint(model.config.vocab_size, (requests, length)).tolist()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_batch_size": requests}
    model.generate_batch([prompts[0][:16]], max_new_tokens=2, **options)
    started = time.perf_counter()
    model.generate_batch(prompts, max_new_tokens=NEW, **options)
    return found | {"seconds": time.perf_counter() - started}


class Servers:
    """vLLM's servers, one a kind, each started when it is asked for; the stack ends them, and who waited longest ends
    where another one would be too many for a computer's memory."""

    def __init__(self, quick: bool, stack: contextlib.ExitStack):
        self.quick, self.stack = quick, stack
        self.running: dict[str, Server] = {}

    def of(self, kind: str) -> "Server":
        if kind not in self.running:
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            if len(self.running) == MOST_SERVERS:
                self.running.pop(next(iter(self.running))).end()
            model = made(kind, self.quick)
            model.save_pretrained(folder)
            words(model.config.vocab_size).save_pretrained(folder)
            caching = "--enable-prefix-caching" if "shared" in kind else "--no-enable-prefix-caching"
            # Nothing of ours is compiled; vLLM would compile the Llama for minutes.
            options = ["--enforce-eager", caching, "--max-num-seqs", f"{max(REQUESTS)}"]
            options += ["--max-model-len", f"{longest(self.quick)}"]
            if "shared" in kind and kind.startswith("ours"):
                options += ["--max-num-batched-tokens", f"{APART}", "--prefix-cache-retention-interval", f"{APART}"]
            server = Server(folder, *options, space=1 if self.quick else KINDS[kind])
            self.running[kind] = self.stack.enter_context(server)
            bench(server, 2, 16, False)
        self.running[kind] = self.running.pop(kind)  # the last that was asked
        return self.running[kind]


class Server:
    """A process of vLLM's OpenAI server with the model and the tokenizer of a folder, in float32; a context.

    Args:
        options: of its command line.
        space: GiB of the cache.

    Attributes:
        port: of 127.0.0.1.
        log: the file with all that it says.
    """

    def __init__(self, folder: Path, *options: str, space: int = 1):
        self.folder, self.log = folder, folder / "server.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", f"{self.port}", *options]
        with self.log.open("w") as log:
            changes = {"VLLM_CPU_KVCACHE_SPACE": f"{space}", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | changes)

    def __enter__(self) -> "Server":
        end = time.monotonic() + 600
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):  # as long as nobody answers
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return self
            time.sleep(0.5)
        self.end()
        raise SystemExit(f"The server did not start: {self.log.read_text()[-3000:]}")

    def __exit__(self, *_) -> None:
        self.end()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def bench(server: Server, requests: int, length: int, shared: bool) -> dict:
    """What `vllm bench serve` says of requests that arrive together; shared beginnings are those of a request that it
    has sent before."""
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    common = int(SHARED * length) if shared else 0
    options = {
        "model": server.folder,
        "port": server.port,
        "dataset-name": "random",
        "num-prompts": requests,
        "random-prefix-len": common,
        "random-input-len": length - common,
        "random-output-len": NEW,
        "seed": length,
        "temperature": 0,
        "num-warmups": int(shared),
    }
    given = [part for name, value in options.items() for part in (f"--{name}", f"{value}")]
    with server.log.open("a") as log, contextlib.redirect_stdout(log):
        found = main(parser.parse_args([*given, "--ignore-eos", "--disable-tqdm"]))
    tokens = found["completed"], found["total_input_tokens"], found["total_output_tokens"]
    if tokens != (requests, requests * length, requests * NEW):
        why = next(filter(None, found.get("errors", ())), "")
        raise SystemExit(f"{requests} requests of {length} tokens were wanted, found {tokens}. {why}")
    return {"seconds": found["duration"], "first_token": float(found["median_ttft_ms"]) / 1000}


def words(size: int) -> PreTrainedTokenizerFast:
    """A word for each token, so that a prompt has as many tokens as its benchmark says.

    By the longest token vLLM judges how long a text may be: one is longer than any other and its space. None has a
    space of its own, at which a text of it would be two words.
    """
    first = "<anything-else>"
    model = models.WordLevel({first if i == 0 else f"w{i}": i for i in range(size)}, unk_token=first)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


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
        f"float32, vLLM {record['vllm']}, nothing compiled, each process keeps the memory that it frees. "
        f"{NEW} tokens are written to each request, measured once by `vllm bench serve`, or beside it `generate_batch`."
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
    # Read when vLLM is imported: the machine places its threads.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    keep_freed_memory()  # as the plugin does, and so all others as well
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": f"{LARGEST_BLOCK}", "MALLOC_TRIM_THRESHOLD_": f"{KEPT}"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as an interruption does, so that servers end, too
    record = run(arguments.quick, arguments.only, arguments.again, arguments.minutes)
    if not arguments.quick:
        from benchmarks import readme

        readme.update()
        print(table(record))


if __name__ == "__main__":
    main()
