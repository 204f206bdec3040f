"""How a run of `core_study` is trained and measured, and the texts of the largest size.

Runs that differ in rate and seed alone are trained side by side (`side_by_side`), by several processes at once: on a
GPU two, of which one compiles while the other trains. More would share its time, and end all at the last. A run of
language on a CPU that is stopped goes on where it was, from `runs/`.

`delta_rules` computes Kimi Delta Attention everywhere and Gated DeltaNet on a GPU (`peers.quickened`); runs of the
latter before those of 60M tokens are by Transformers' own rule.
"""

import functools
import lzma
import math
import statistics
from pathlib import Path

import torch

from benchmarks import condition_study, gpu, larger_study, peers, recall_study, studies
from benchmarks.core_conditions import (
    ASKED_AS,
    CONDITIONS,
    FEWER,
    LANGUAGE,
    LARGE,
    LARGE_SHAPE,
    LARGER,
    MORE,
    SHARDS,
    SIZES,
    fields_of,
    recall_fields,
)
from benchmarks.core_tasks import answers_loss, asked_tensors, joined, make_batches, training_batches
from benchmarks.harness import machine
from benchmarks.side_by_side import SideBySide, run_steps
from examples.recall import Pairs
from examples.text_data import encode, gather_documents, mean_nll, num_bytes, random_batches, train_tokenizer
from examples.training import next_token_loss
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

CACHES = {LARGE: Path("runs/core_study/large.pt"), MORE: Path("runs/core_study/more.pt")}
UNDER_WAY = Path("runs/core_study/under_way")  # what a CPU has trained so far of runs that take hours
FEW = 8  # windows of a text that are measured in more ways than one
AT_ONCE = 32_768  # tokens read in a forward on a GPU where nothing is learned


def prepare_large(data: Path, task: str = LARGE) -> dict:
    """The tokens of the largest size, as `condition_study.prepare` has them; kept in `runs/`."""
    cache = CACHES[task]
    if cache.exists():
        return torch.load(cache)
    tokenizer = train_tokenizer(condition_study.training_documents(data), LARGE_SHAPE["vocab_size"])
    texts = {
        folder.name: gather_documents([str(folder / "validation.parquet")], max_bytes=400_000)
        for folder in condition_study.corpora_of(data)
    }
    with lzma.open(data / "wikitext-2" / "wiki.test.raw.xz", "rt", encoding="utf-8") as file:
        texts["wikitext-2"] = [file.read(400_000)]
    long = gather_documents([str(data / "longdocs" / "test.parquet")], max_bytes=2_000_000)
    files = [shard(data, name, i) for name, n in SHARDS[task].items() for i in range(n)]
    parts = [
        encode(tokenizer, gather_documents([str(file)], max_bytes=21_000_000))[i > 0 :] for i, file in enumerate(files)
    ]
    prepared = {
        "train": torch.cat(parts).int(),
        "validation": {name: encode(tokenizer, text) for name, text in texts.items()},
        "bytes": {name: sum(map(num_bytes, text)) for name, text in texts.items()},
        "long": encode(tokenizer, long),
    }
    cache.parent.mkdir(exist_ok=True, parents=True)
    torch.save(prepared, cache)
    return prepared


def shard(data: Path, name: str, number: int) -> Path:
    """A file of training text, of `corpus` or of `corpus_extra`, which goes on from it."""
    files = [data / corpus / name / f"train-{number:03}.parquet" for corpus in ("corpus", "corpus_extra")]
    return next((file for file in files if file.exists()), files[0])


@functools.cache
def texts_of(task: str, data: Path) -> dict:
    """The tokens of a language task."""
    own = {LANGUAGE: condition_study.prepare, FEWER: larger_study.prepare, LARGER: larger_study.prepare}
    return own.get(task, functools.partial(prepare_large, task=task))(data)


def kind(item: dict) -> tuple:
    """What runs must have in common to be trained side by side."""
    return tuple(item.get(name) for name in ("task", "condition", "pairs", "length"))


def large_at_once(item: dict) -> int | None:
    """A run of the largest size fills a GPU: two at a time."""
    return 2 if item["task"] in SHARDS else None


def make_run(data: Path, device: str = "cpu", backend: list[str] | None = None):
    """What makes the rows of runs of a kind, in full precision where nothing else is said, by one thread."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if device == "cuda":
        gpu.device(quick=False)  # kernels choose a configuration in a fifth of the time
    return functools.partial(run_job, data=data, device=device, backend=backend)


def run_job(
    job: list[dict], data: Path | dict, device: str = "cpu", backend: list[str] | None = None, **options
) -> list[dict]:
    """Train and measure runs of a kind side by side; `data` are the texts, or the folder of them.

    `backend` is one of the operators, and the conditions that take it, all where none is named.
    """
    task = job[0]["task"]
    chosen, *names = backend or [None]
    backend = None if names and job[0]["condition"] not in names else chosen
    fleet = make_fleet(job, device, backend)
    with peers.quickened(fleet.on_gpu):
        if task in SIZES:
            texts = texts_of(task, data) if isinstance(data, Path) else data
            rows = run_language(fleet, job, texts, **options)
        else:
            rows = run_recall(fleet, job, **options)
    about = {"machine": machine_of(device)} | ({"backend": backend} if backend else {})
    if not fleet.graph and fleet.on_gpu:
        about["steps"] = "one by one"
    return [about | row for row in rows]


def machine_of(device: str) -> str:
    """What a run was trained on."""
    there = torch.cuda.get_device_name() if device == "cuda" else machine()["cpu"]
    return f"{there}, torch {torch.__version__}"


def make_fleet(job: list[dict], device: str = "cpu", backend: str | None = None, graph: bool = True) -> SideBySide:
    """The models of runs of a kind as they begin: made on the CPU, so that a seed gives the same on any device."""
    task, condition = job[0]["task"], job[0]["condition"]
    language = task in SIZES
    fields = fields_of(condition, SIZES[task].shape) if language else recall_fields(condition)
    if backend is not None:
        fields["backend"] = backend
    models = []
    for item in job:
        torch.manual_seed(item["seed"])
        model = InterdomainForCausalLM(InterdomainConfig(**fields))
        start_smaller(model, (CONDITIONS if language else ASKED_AS)[condition].first_output)
        models.append(model.to(device))
    autocast = SIZES[task].training.get("autocast") if language else None
    return SideBySide(
        models,
        [item["learning_rate"] for item in job],
        next_token_loss if language else answers_loss,
        getattr(torch, autocast) if autocast else None,
        graph,
    )


@torch.no_grad()
def start_smaller(model: InterdomainForCausalLM, factor: float) -> None:
    """Let what the token mixers add to the embeddings start at `factor` of what it is."""
    for layer in model.model.layers:
        layer.token_mixer.o_proj.weight.mul_(factor)


def run_language(fleet: SideBySide, job: list[dict], texts: dict, training: dict | None = None) -> list[dict]:
    """Nats a token on held-out texts, by place, on repeated tokens and beyond the training length."""
    training = training or SIZES[job[0]["task"]].training
    length = training["sequence_length"]
    streams = {
        item["seed"]: random_batches(texts["train"], training["batch_size"], length, item["seed"]) for item in job
    }

    def batches():
        while True:
            drawn = {seed: (next(stream).long(),) for seed, stream in streams.items()}
            yield [drawn[item["seed"]] for item in job]

    same = studies.checksum([job, training, fleet.models[0].config.to_dict()])
    kept = None if fleet.on_gpu else UNDER_WAY / f"{same:08x}.pt"
    losses, failures = run_steps(fleet, batches(), training["steps"], kept=kept)
    rows = []
    at_once = AT_ONCE if fleet.on_gpu else 2048
    for k, (model, failure) in enumerate(zip(fleet.models, failures)):
        row = {"parameters": model.num_parameters()}
        if failure is not None:
            rows.append(row | {"failed": failure})
            continue
        row["train_loss"] = losses[-50:, k].mean().item()
        row |= condition_study.measure(model, texts, length, at_once)
        row["ways"] = ways(model, texts, length, fleet.autocast)
        rows.append(row | larger_study.by_token(model, texts["validation"], length, at_once))
    return rows


def ways(model: InterdomainForCausalLM, texts: dict, length: int, autocast: torch.dtype | None) -> dict[str, float]:
    """Mean nats of a few windows as all is "measured", as all was "trained", with `autocast`, and of Interdomain by
    operators of PyTorch alone, "chunk": a kernel that is wrong, or one in training, shows in what differs.
    """
    parts = [tokens[: FEW * length + 1] for tokens in texts["validation"].values()]

    def nats(dtype: torch.dtype | None = None) -> float:
        with torch.autocast(model.device.type, dtype, enabled=dtype is not None):
            return statistics.mean(mean_nll(model, part, length, FEW) for part in parts)

    found, backend = {"measured": nats(), "trained": nats(autocast)}, model.config.backend
    if set(model.config.mixers_per_layer) == {"interdomain"}:
        model.config.backend = "chunk"
        found["chunk"] = nats()
        model.config.backend = backend
    return found


def run_recall(fleet: SideBySide, job: list[dict], steps: int | None = None) -> list[dict]:
    """Right answers to new sequences, on the way and at the end; a run ends once two looks in a row find it SOLVED."""
    task, pairs, length = (job[0][name] for name in ("task", "pairs", "length"))
    steps = steps or recall_study.TRAINING["steps"][str(pairs)]
    streams = {item["seed"]: training_batches(task, pairs, length, item["seed"]) for item in job}
    held_out = {seed: joined(make_batches(task, pairs, length, seed + 1000)) for seed in streams}
    few = {seed: Pairs(*(None if x is None else x[: len(x) // 2] for x in batch)) for seed, batch in held_out.items()}
    curves: list[dict[str, float]] = [{} for _ in job]
    found: list[dict | None] = [None] * len(job)

    def batches():
        while True:
            drawn = {seed: asked_tensors(next(stream)) for seed, stream in streams.items()}
            yield [drawn[item["seed"]] for item in job]

    def measure(k: int) -> dict:
        accuracy, loss = recall_study.evaluate(fleet.models[k], [held_out[job[k]["seed"]]])
        return {"accuracy": accuracy, "loss": loss, "curve": curves[k], "failed": None}

    def look(step: int) -> bool:
        if step % recall_study.EVERY:
            return False
        fleet.counted()
        for k, curve in enumerate(curves):
            if found[k] is None:
                curve[str(step)] = recall_study.evaluate(fleet.models[k], [few[job[k]["seed"]]])[0]
                if len(curve) > 1 and min(list(curve.values())[-2:]) >= recall_study.SOLVED:
                    found[k] = measure(k)
        return None not in found

    _, failures = run_steps(fleet, batches(), steps, look)
    for k, failure in enumerate(failures):
        if found[k] is None:
            row = {"accuracy": 0.0, "loss": math.inf, "curve": curves[k], "failed": failure}
            found[k] = row if failure else measure(k)
    sizes = fleet.models[0].config.state_sizes(length)
    about = {"parameters": fleet.models[0].num_parameters(), "state_bytes": 4 * sum(sizes.values())}
    return [row | about for row in found if row is not None]
