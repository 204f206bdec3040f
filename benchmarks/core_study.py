"""How strong is the recurrence? Interdomain and its gates beside what others would choose, in language and in recall.

Every model has as many parameters as Interdomain without gates, by the width of its feed-forward layers, and every
fixed state as many numbers. Language is asked at three sizes, each with the texts and the optimiser of the study it is
named after; three learning rates with the first seed, more where the best lies at an end, and the other seed:

- 1.4M, `condition_study`, whose runs of Interdomain and S4D-only are read from there;
- 3M, `larger_study`: bfloat16 products (autocast), 8M tokens, or, which two cores train in an evening, the first 2M;
- 12M: 20M tokens of a vocabulary of 8,192, at half the rate that was best at 1.4M, as the two closest have it best at
  3M on 2M tokens, with both seeds; or 60M tokens, drawn from 2.4 times the text.

Recall is that of `recall_study` (`mqar`), and two tasks beside it, with both seeds at every rate, for seeds differ more
there; as in that study, more than 128 tokens begin with shorter:

- overwritten: every key is written twice, among the others, and the last value is right;
- copying: tokens stand at any places among empty ones, and are to be repeated in their order (selective copying,
  arXiv 2312.00752).

Longer settings are asked in recall, of what has learned half of the one before. `delta_rules` computes Kimi Delta
Attention everywhere and Gated DeltaNet on a GPU (`peers.quickened`); runs of the latter before those of 60M tokens are
by Transformers' own rule.

Runs that differ in rate and seed alone are trained side by side (`side_by_side`), by several processes at once: on a
GPU two, of which one compiles while the other trains. More would share its time, and end all at the last. A run of
language on a CPU that is stopped goes on where it was, from `runs/`. What a GPU has done again of a CPU's runs was put
into the result file by hand, as "again", and as "cut" what a CPU has done again since shares of the delta rule are cut.

    python -m benchmarks.core_study --data ../shared/data    # all runs that results/core_study.json does not hold yet
    python -m benchmarks.core_study --data ../shared/data --device cuda --processes 2 --minutes 7
    python -m benchmarks.core_study --table                  # the tables as markdown
"""

import functools
import itertools
import lzma
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from benchmarks import condition_study, gpu, larger_study, peers, recall_study, studies
from benchmarks.harness import RESULTS, footnote, machine, markdown
from benchmarks.side_by_side import SideBySide, run_steps
from examples.recall import Pairs
from examples.text_data import encode, gather_documents, mean_nll, num_bytes, random_batches, train_tokenizer
from examples.training import next_token_loss, with_layer_loss
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "core_study.json"
SOURCES = ("core_study", "condition_study")
MAMBA2 = recall_study.MAMBA2 | {"ssd_conv_bias": True, "ssd_norm": "after_gate", "use_output_gate": True}
PLAIN = {"token_mixers": "interdomain", "start": "recall"}
GATES = PLAIN | {"gates": "forget"}
DELTA = GATES | {"delta_rule": True}
# Heads half as wide with half as many modes: a state of as many numbers holds four times as many.
SMALL_HEADS = {"head_dim": 16, "state_size": 16}
MANY = DELTA | SMALL_HEADS
# The two that are asked first and most: our many heads and the better start of Gated DeltaNet.
CLOSEST = MANY_HEADS, SPREAD = "Interdomain, gates and delta rule, many heads", "Gated DeltaNet, steps as Mamba-2's"
GATES_MANY = "Interdomain, gates, many heads"
TWICE = "Interdomain, gates and delta rule, twice the heads"
OUTPUT_GATE = "Interdomain, gates and delta rule, many heads, output gate"
KIMI = "Kimi Delta Attention"
NARROW = "Interdomain, gates, narrow heads"


class Condition(NamedTuple):
    """Fields of a configuration, how many times as many heads, the factor of the first outputs of its mixers, and how
    many heads ask one state."""

    fields: dict
    heads: int = 1
    first_output: float = 1.0
    shared: int = 1


CONDITIONS = {
    "Interdomain": Condition(PLAIN),
    "Interdomain, gates": Condition(GATES),
    GATES_MANY: Condition(GATES | SMALL_HEADS, heads=4),
    "Interdomain, gates and delta rule": Condition(DELTA),
    MANY_HEADS: Condition(MANY, heads=4),
    "Gated DeltaNet": Condition(peers.GATED_DELTANET),
    SPREAD: Condition(peers.GATED_DELTANET_SPREAD),
    KIMI: Condition(peers.KIMI_DELTA),
    # Its norm makes outputs of size 1, where Interdomain and S4D-only start with small ones, as `start` "recall" makes
    # them: without the factor its layers hide the embeddings, and it learns slowly.
    "Mamba-2": Condition(MAMBA2, first_output=0.02),
    "S4D-only": Condition({"token_mixers": "s4d", "start": "recall"}),
    "softmax, convolution": Condition(peers.SOFTMAX_CONVOLUTION),
    # SiLU of a linear map of the input, times what the heads answer: the gate of Gated DeltaNet, without its norm.
    OUTPUT_GATE: Condition(MANY | {"use_output_gate": True}, heads=4),
    # Half as wide, with all modes: between the usual heads and many, and a memory as long as that of the usual.
    TWICE: Condition(DELTA | {"head_dim": 16}, heads=2),
    "Interdomain, warp": Condition(PLAIN | {"gates": "warp"}),
    # Keys and values half as wide of twice as many tokens, and four heads that ask for them.
    NARROW: Condition(GATES | {"head_dim": 16, "state_size": 64}, heads=4, shared=4),
}
# What `condition_study` has run of them, with as many parameters and the same texts.
KNOWN = {"Interdomain": "interdomain-norope, recall", "S4D-only": "s4d, recall"}
REFERENCE = "Interdomain"


class Size(NamedTuple):
    """Models of a size, and how they are trained."""

    shape: dict
    training: dict


LANGUAGE, FEWER, LARGER, LARGE = "language", "language, 3M on 2M tokens", "language, 3M", "language, 12M"
MORE = "language, 12M on 60M tokens"
WORDS = {LANGUAGE: "1.4M", FEWER: "3M on 2M tokens", LARGER: "3M", LARGE: "12M", MORE: "12M on 60M tokens"}
LARGER_TRAINING = {name: x for name, x in larger_study.TRAINING.items() if name != "compiled"}
LARGE_SHAPE = condition_study.SHAPE | {
    "vocab_size": 8192,
    "hidden_size": 320,
    "num_hidden_layers": 6,
    "num_attention_heads": 10,
}
LARGE_TRAINING = {"steps": 2441, "batch_size": 16, "sequence_length": 512, "autocast": "bfloat16"}
SIZES = {
    LANGUAGE: Size(condition_study.SHAPE, condition_study.TRAINING),
    FEWER: Size(larger_study.SHAPE, LARGER_TRAINING | {"steps": 1000}),
    LARGER: Size(larger_study.SHAPE, LARGER_TRAINING),
    LARGE: Size(LARGE_SHAPE, LARGE_TRAINING),
    MORE: Size(LARGE_SHAPE, LARGE_TRAINING | {"steps": 7324}),
}
# At the largest size; that which takes longest first.
LARGE_CONDITIONS = (*CLOSEST, OUTPUT_GATE, TWICE, GATES_MANY, "softmax, convolution", "Interdomain, gates", REFERENCE)
MORE_CONDITIONS = (SPREAD, "softmax, convolution", "Interdomain, gates", GATES_MANY, REFERENCE, NARROW)
TEXTS = {"wiki": "Wikipedia", "books": "books", "wikitext-2": "WikiText-2"}  # held out
# Of ../shared/data/corpus and, beyond it, corpus_extra, 20 MB of text each, of which windows are drawn.
SHARDS = {LARGE: {"wiki": 3, "books": 2}, MORE: {"wiki": 7, "books": 5}}
CACHES = {LARGE: Path("runs/core_study/large.pt"), MORE: Path("runs/core_study/more.pt")}
UNDER_WAY = Path("runs/core_study/under_way")  # what a CPU has trained so far of runs that take hours
FIRST = ("Interdomain", "Interdomain, gates", "Interdomain, gates and delta rule", *CLOSEST)
REST = ("Gated DeltaNet", KIMI, "Mamba-2", "S4D-only", "softmax, convolution")
MOST_ASKED = (*FIRST, GATES_MANY, OUTPUT_GATE)  # with more seeds at 1.4M, and in recall
FORMS = (*MOST_ASKED, TWICE)  # at 3M
IN_RECALL = (*MOST_ASKED, *REST)
MORE_SEEDS = (2, 3, 4, 5)  # of those at 1.4M, to tell what lies within a percent

RECALL = ("recall", "overwritten", "copying")
SETTINGS = ((8, 64), (16, 128), (32, 256), (64, 512))  # pairs or copied tokens, and tokens
# Of maps of recall's narrow layers where no `start` makes them: of 0.02, 0.05 and 0.1, that with which Gated DeltaNet
# (steps as Mamba-2's) learned most in trials. Mamba-2 learns with those of `recall_study`, and without its gate and the
# norm behind it, and so it is asked; what it learned as it is in language, with the larger maps, is kept as "gated".
RECALL_RANGE = 0.05
ASKED_AS = CONDITIONS | {"Mamba-2": Condition(recall_study.MAMBA2 | {"initializer_range": 0.02})}
FEW = 8  # windows of a text that are measured in more ways than one
AT_ONCE = 32_768  # tokens read in a forward on a GPU where nothing is learned


def fields_of(condition: str, shape: dict, conditions: dict[str, Condition] = CONDITIONS) -> dict:
    """A configuration of a condition with the parameters of Interdomain, as near as whole widths come."""
    own = conditions[condition]
    heads = own.heads * shape["num_attention_heads"]
    fields = shape | {"num_attention_heads": heads} | own.fields
    if own.shared > 1:
        fields["num_key_value_heads"] = heads // own.shared
    wanted = peers.count(shape | CONDITIONS[REFERENCE].fields)
    return fields | {"intermediate_size": peers.equal_width(fields, wanted)}


def recall_fields(condition: str) -> dict:
    """A configuration of a condition in the recall tasks; without a `start` or a range of its own with larger maps."""
    tokens = {"bos_token_id": None, "eos_token_id": None}
    fields = fields_of(condition, recall_study.SHAPE | {"state_size": recall_study.STATE_SIZE} | tokens, ASKED_AS)
    return fields if "start" in fields else {"initializer_range": RECALL_RANGE} | fields


def language_item(
    condition: str, learning_rate: float = condition_study.LEARNING_RATES[0], seed: int = 0, task: str = LANGUAGE
) -> dict:
    """What tells a run of the language study from the others."""
    return {"task": task, "condition": condition, "learning_rate": learning_rate, "seed": seed}


def recall_item(
    condition: str,
    task: str = RECALL[0],
    setting: tuple[int, int] = SETTINGS[0],
    learning_rate: float = recall_study.LEARNING_RATES[0],
    seed: int = 0,
) -> dict:
    """What tells a run of a recall task from the others."""
    return language_item(condition, learning_rate, seed, task) | {"pairs": setting[0], "length": setting[1]}


def kind(item: dict) -> tuple:
    """What runs must have in common to be trained side by side."""
    return tuple(item.get(name) for name in ("task", "condition", "pairs", "length"))


def plan(runs: list[dict], shorter: list[dict]) -> Iterator[dict]:
    """Language at 1.4M, at 3M on 2M tokens, the closest two first, and our forms on 8M, recall, the others on 8M, 12M,
    and longer recall.

    `shorter` are the runs of `condition_study`.
    """
    small = [row for row in runs if row["task"] == LANGUAGE] + known_runs(shorter)
    best = {name: condition_study.best_rate(small, name) for name in CONDITIONS}
    yield from language_plan(runs, LANGUAGE, [name for name in CONDITIONS if name not in KNOWN])
    for names in (CLOSEST, FIRST[:3], REST, FORMS[len(FIRST) :]):
        yield from language_plan(runs, FEWER, names)
    yield from language_plan(runs, LARGER, FORMS)
    for name in MOST_ASKED:
        if best[name] is not None:
            yield from (language_item(name, best[name], seed) for seed in MORE_SEEDS)
    yield from recall_plan(runs, SETTINGS[:1])
    for name in REST:
        if best[name] is not None:
            yield from (language_item(name, best[name], seed, LARGER) for seed in condition_study.SEEDS)
    yield from large_plan(best)
    yield from large_plan(best, MORE, MORE_CONDITIONS)
    yield from recall_plan(runs, SETTINGS[1:])
    yield from language_plan(runs, LARGER, REST)


def language_plan(runs: list[dict], task: str, names: list[str] | tuple[str, ...]) -> Iterator[dict]:
    """All rates with the first seed, more where the best lies at an end, then the other seeds at the best."""
    found = [row for row in runs if row["task"] == task]
    for name, rate in itertools.product(names, condition_study.LEARNING_RATES):
        yield language_item(name, rate, task=task)
    for name in names:
        if (rate := condition_study.rate_beyond(condition_study.tried_rates(found, name))) is not None:
            yield language_item(name, rate, task=task)
    for name in names:
        if (rate := condition_study.best_rate(found, name)) is not None:
            yield from (language_item(name, rate, seed, task) for seed in condition_study.SEEDS)


def large_plan(
    best: dict[str, float | None], task: str = LARGE, names: tuple[str, ...] = LARGE_CONDITIONS
) -> Iterator[dict]:
    """Each condition at half the rate that was best at 1.4M, then all with the other seed."""
    rates = {name: rate / 2 for name in names if (rate := best[name]) is not None}
    for seed in condition_study.SEEDS:
        yield from (language_item(name, rate, seed, task) for name, rate in rates.items())


def recall_plan(runs: list[dict], settings: tuple[tuple[int, int], ...]) -> Iterator[dict]:
    """All seeds, on which recall hangs, at all rates; longer settings, where asked, at the best rate of the one
    before."""
    for setting, task, name in itertools.product(settings, RECALL, IN_RECALL):
        if not is_asked(runs, name, task, setting):
            continue
        if setting == SETTINGS[0]:
            tried = recall_rates(runs, name, task, setting)
            beyond = recall_rate_beyond(runs, name, task)
            rates = tuple(dict.fromkeys((*recall_study.LEARNING_RATES, *tried, beyond)))
        else:
            rates = (best_recall_rate(runs, name, task, SETTINGS[SETTINGS.index(setting) - 1]),)
        for rate, seed in itertools.product(rates, condition_study.SEEDS):
            if rate is not None:
                yield recall_item(name, task, setting, rate, seed)


def is_asked(runs: list[dict], name: str, task: str, setting: tuple[int, int]) -> bool:
    """Longer settings are asked in recall, of what has learned half of the one before with some seed."""
    if setting == SETTINGS[0]:
        return True
    best = next(iter(recall_rates(runs, name, task, SETTINGS[SETTINGS.index(setting) - 1]).values()), [])
    return task == RECALL[0] and any(row["accuracy"] >= 0.5 for row in best)


def best_recall_rate(runs: list[dict], name: str, task: str, setting: tuple[int, int] = SETTINGS[0]) -> float | None:
    """That with the fewest errors, once the shortest length has worse ones on both sides of it, or has been learned."""
    tried = recall_rates(runs, name, task, setting)
    whole = set(recall_study.LEARNING_RATES) <= set(tried) and recall_rate_beyond(runs, name, task) is None
    return next(iter(tried), None) if whole or setting != SETTINGS[0] else None


def recall_rate_beyond(runs: list[dict], name: str, task: str) -> float | None:
    """The next rate at the shortest setting, where the best lies at an end and has not learned all."""
    tried = {rate: recall_errors(rows) for rate, rows in sorted(recall_rates(runs, name, task, SETTINGS[0]).items())}
    learned = any(errors <= 1 - recall_study.SOLVED for errors, _ in tried.values())
    return None if learned else recall_study.rate_beyond(tried)


def recall_rates(runs: list[dict], name: str, task: str, setting: tuple[int, int]) -> dict[float, list[dict]]:
    """The runs of all seeds by learning rate, the rate with the fewest errors first."""
    wanted = recall_item(name, task, setting)
    del wanted["seed"], wanted["learning_rate"]
    found = sorted((row for row in runs if wanted.items() <= row.items()), key=lambda row: row["seed"])
    rates = {row["learning_rate"]: [] for row in found}
    for row in found:
        rates[row["learning_rate"]].append(row)
    return dict(sorted(rates.items(), key=lambda pair: recall_errors(pair[1])))


def recall_errors(rows: list[dict]) -> tuple[float, float]:
    """The share of wrong answers, and nats, in the mean of the seeds."""
    return 1 - statistics.mean(row["accuracy"] for row in rows), statistics.mean(row["loss"] for row in rows)


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


def answers_loss(
    model: InterdomainForCausalLM, ids: torch.Tensor, right: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """That of `examples.recall.Answers`, of all places with weights, so that no shape depends on what is asked."""
    output = model(input_ids=ids, use_cache=False)
    nats = F.cross_entropy(output.logits.float().flatten(0, 1), right.flatten(), reduction="none")
    return with_layer_loss(nats @ weights.flatten(), output)


def asked_tensors(batch: Pairs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a model reads, what is right after each token, and how much each place counts."""
    asked = batch.asked[:, 1:]
    right = batch.ids if batch.labels is None else batch.labels
    return batch.ids[:, :-1], right[:, 1:], asked / asked.sum(1, keepdim=True).clamp(min=1) / len(asked)


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


def joined(batches: Iterator[Pairs]) -> Pairs:
    """The held-out sequences of a recall task."""
    drawn = [batch for _, batch in zip(range(recall_study.TRAINING["held_out_batches"]), batches)]
    return Pairs(*(None if x[0] is None else torch.cat(x) for x in zip(*drawn)))


def training_batches(task: str, pairs: int, length: int, seed: int) -> Iterator[Pairs]:
    """Those of a setting; of more than 128 tokens after some of each shorter one, as in `recall_study`."""
    shorter = (setting for setting in SETTINGS if setting[1] < length) if length > SETTINGS[1][1] else ()
    first = (itertools.islice(make_batches(task, *setting, seed), recall_study.SHORT_STEPS) for setting in shorter)
    return itertools.chain(*first, make_batches(task, pairs, length, seed))


def make_batches(task: str, pairs: int, length: int, seed: int) -> Iterator[Pairs]:
    if task == "recall":
        return recall_study.make_batches(pairs, length, False, seed)
    draw = {"overwritten": overwritten_batch, "copying": copying_batch}[task]
    generator = torch.Generator().manual_seed(seed)
    return (draw(pairs, length, generator) for _ in itertools.count())


def overwritten_batch(pairs: int, length: int, generator: torch.Generator) -> Pairs:
    """Every key and a value, twice, in any order; then each key once, of which the last value is asked; 0 in gaps."""
    rows, half = recall_study.TRAINING["batch_size"], recall_study.SHAPE["vocab_size"] // 2
    order = torch.rand(rows, 2 * pairs, generator=generator).argsort(dim=1)
    keys = 1 + torch.rand(rows, half - 1, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(half, 2 * half, (rows, 2 * pairs), generator=generator)
    last = torch.maximum(*order.argsort(dim=1).view(rows, 2, pairs).unbind(1))  # place of the later of both writes
    ids = torch.zeros(rows, length, dtype=torch.long)
    ids[:, 0 : 4 * pairs : 2], ids[:, 1 : 4 * pairs : 2] = keys.repeat(1, 2).gather(1, order), values
    slots = torch.rand(rows, (length - 4 * pairs) // 2, generator=generator).argsort(dim=1)[:, :pairs]
    places = 4 * pairs + 2 * slots
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values.gather(1, last))
    return Pairs(ids, torch.zeros_like(ids, dtype=torch.bool).scatter_(1, places + 1, True))


def copying_batch(count: int, length: int, generator: torch.Generator) -> Pairs:
    """`count` tokens at any places among empty ones, then a sign and `count` empty places, where they are asked."""
    rows, vocabulary = recall_study.TRAINING["batch_size"], recall_study.SHAPE["vocab_size"]
    told = length - count - 1
    places = torch.rand(rows, told, generator=generator).argsort(dim=1)[:, :count].sort(dim=1).values
    tokens = torch.randint(2, vocabulary, (rows, count), generator=generator)
    ids = torch.zeros(rows, length, dtype=torch.long).scatter_(1, places, tokens)
    ids[:, told] = 1
    labels = ids.clone()
    labels[:, told + 1 :] = tokens
    asked = torch.zeros_like(ids, dtype=torch.bool)
    asked[:, told + 1 :] = True
    return Pairs(ids, asked, labels)


def language_rows(records: dict[str, dict], task: str = LANGUAGE) -> dict[str, list[dict]]:
    """The runs of a size by condition, at 1.4M with what `condition_study` has run of them."""
    runs = [row for row in records["core_study"]["runs"] if row["task"] == task]
    if task == LANGUAGE:
        runs += known_runs(records["condition_study"]["runs"])
    return {name: [row for row in runs if row["condition"] == name] for name in CONDITIONS}


def known_runs(runs: list[dict]) -> list[dict]:
    """What `condition_study` has run of the conditions here."""
    names = {there: name for name, there in KNOWN.items()}
    return [row | {"condition": names[row["condition"]]} for row in runs if row["condition"] in names]


def best_language(records: dict[str, dict], task: str) -> dict[str, list[dict]]:
    """All seeds of each condition at its best rate so far, where there are any."""
    found = {name: condition_study.best_runs(rows, name) for name, rows in language_rows(records, task).items()}
    return {name: sorted(rows, key=lambda row: row["seed"]) for name, rows in found.items() if rows}


def table(records: dict[str, dict]) -> str:
    """Language by size, where in a text it differs, right answers by task and setting, and what has not been run."""
    record = records["core_study"]
    missing: dict[str, list[str]] = {}
    tables = [language_table(records, task, missing) for task in WORDS]
    tables += [text_table(records, task) for task in list(SIZES)[1:]] + [age_table(records, task) for task in SHARDS]
    tables.append(recall_table(record["runs"], missing))
    machines = sorted({row["machine"] for row in record["runs"]})
    tokens = {task: math.prod(list(size.training.values())[:3]) for task, size in SIZES.items()}
    tables.append(
        f"Language: {', '.join(f'{n:,}' for n in tokens.values())} tokens a run, those of 12M at half the "
        "best rate of 1.4M; losses in nats a token, the mean over held-out Wikipedia, books and WikiText-2. Seen in "
        "the context: a token that stood after the same token before, in the second half of a window. Right answers: "
        "one number a seed at the rate with the most; -: not asked, for the setting before was not learned or not run. "
        f"Runs on {'; '.join(machines)}. {footnote(record)}"
    )
    if missing:
        named = (f"{what} ({'all' if len(x) == len(IN_RECALL) else '; '.join(x)})" for what, x in missing.items())
        tables.append(f"Not run: {', '.join(named)}.")
    return "\n\n".join(filter(None, [*tables, *sentences(records)]))


def language_table(records: dict[str, dict], task: str, missing: dict[str, list[str]]) -> str:
    """Loss by rate and seed; `missing` is told what has not been run."""
    rows = []
    asked = {
        LANGUAGE: tuple(CONDITIONS),
        FEWER: (*FORMS, *REST),
        LARGER: (*FORMS, *REST),
        LARGE: LARGE_CONDITIONS,
        MORE: MORE_CONDITIONS,
    }[task]
    for name, found in language_rows(records, task).items():
        best = best_language(records, task).get(name, [])
        if not best:
            if name in asked:
                missing.setdefault(task, []).append(name)
            continue
        losses = [condition_study.score(row) for row in best]
        tried = condition_study.tried_rates(found, name)
        known = "" if task in SHARDS or condition_study.best_rate(found, name) else ", not bracketed"
        if known or len(losses) < len(condition_study.SEEDS):
            missing.setdefault(f"{task}, rates" if known else f"{task}, a second seed", []).append(name)
        rows.append(
            [
                name,
                f"{best[0]['parameters']:,}",
                f"{best[0]['state']:,}",
                ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in tried.items()),
                f"{best[0]['learning_rate']:g}{known}",
                ", ".join(f"{loss:.3f}" for loss in losses),
                f"{math.exp(statistics.mean(losses)):.1f}",
            ]
        )
    header = [
        task,
        "parameters",
        "state, numbers",
        "loss by rate, first seed",
        "best rate",
        "loss by seed",
        "perplexity",
    ]
    return markdown(header, rows) if rows else ""


def text_table(records: dict[str, dict], task: str) -> str:
    """Nats in training and by text, by place, on what the context has shown and on the rest, and perplexity beyond the
    training length.
    """
    length = SIZES[task].training["sequence_length"]
    starts = [low for low in larger_study.PLACES if low < length]
    rows = []
    for name, found in best_language(records, task).items():
        nats = [("validation", text) for text in TEXTS]
        nats += [("places", str(low)) for low in starts] + [("repeats", kind) for kind in ("repeated", "other")]
        cells = [f"{statistics.mean(row['train_loss'] for row in found):.3f}"]
        cells += [f"{statistics.mean(row[what][which] for row in found):.3f}" for what, which in nats]
        far = [statistics.mean(row["lengths"][str(factor)] for row in found) for factor in condition_study.LENGTHS]
        rows.append([name, *cells, *(f"{math.exp(x):.1f}" for x in far)])
    header = [f"{task}: nats", "at the end of training", *TEXTS.values()]
    header += [*(f"from token {low}" for low in starts), "seen in the context", "others"]
    header += [f"perplexity of long documents at {factor:g}x" for factor in condition_study.LENGTHS]
    return markdown(header, rows) if rows else ""


def age_table(records: dict[str, dict], task: str) -> str:
    """Nats on what the context has shown, by how long ago, of the seeds that have been asked for it."""
    ages = [str(low) for low in larger_study.AGES if low < SIZES[task].training["sequence_length"]]
    rows = []
    for name, found in best_language(records, task).items():
        if asked := [row for row in found if "ages" in row]:
            seeds = ", ".join(str(row["seed"]) for row in asked)
            rows.append([name, seeds, *(f"{statistics.mean(row['ages'][low] for row in asked):.3f}" for low in ages)])
    header = [f"{task}: nats on what the context has shown, by tokens since", "seeds", *(f"from {low}" for low in ages)]
    return markdown(header, rows) if rows else ""


def recall_table(runs: list[dict], missing: dict[str, list[str]]) -> str:
    """Right answers by seed at the best rate of each task and setting; `missing` is told what has not been run."""
    rows = []
    asked = [(RECALL[0], setting) for setting in SETTINGS] + [(task, SETTINGS[0]) for task in RECALL[1:]]
    for name in IN_RECALL:
        found = [recall_rates(runs, name, *one) for one in asked]
        cells = []
        for one, rates in zip(asked, found):
            if not rates and one[1] == SETTINGS[0]:
                missing.setdefault(one[0], []).append(name)
            rate, best = next(iter(rates.items()), (None, []))
            if len(best) == 1:
                missing.setdefault(f"{one[0]}, {one[1][0]} in {one[1][1]}, a second seed", []).append(name)
            right = ", ".join(f"{row['accuracy']:.1%}" for row in best)
            cells.append(f"{right} ({rate:g})" if best else "not run" if is_asked(runs, name, *one) else "-")
        if any(found):
            size = next(iter(next(filter(None, found)).values()))[0]["state_bytes"]
            rows.append([name, f"{size:,}", *cells])
    header = [f"{task}: {n} in {length} tokens" for task, (n, length) in asked]
    return markdown(["right answers", "bytes of state", *header], rows) if rows else ""


def losses(records: dict[str, dict], task: str) -> dict[str, dict[int, float]]:
    """By seed, of each condition at its best rate, that with the lowest mean first."""
    rows = best_language(records, task)
    loss = {name: {row["seed"]: condition_study.score(row) for row in found} for name, found in rows.items()}
    return dict(sorted(loss.items(), key=lambda pair: statistics.mean(pair[1].values())))


def best_form(loss: dict[str, dict[int, float]]) -> str | None:
    """Of Interdomain."""
    return next((name for name in loss if name.startswith("Interdomain")), None)


def behind(loss: dict[str, dict[int, float]], name: str, others: Iterable[str]) -> dict[str, float]:
    """By which share the perplexity of a condition is above that of others, over the seeds that both have."""
    own = loss[name]
    nats = {other: [own[seed] - loss[other][seed] for seed in own.keys() & loss[other].keys()] for other in others}
    return {other: math.expm1(statistics.mean(found)) for other, found in nats.items() if found}


def sentences(records: dict[str, dict]) -> list[str]:
    """Where the best form of Interdomain stands beside all others, as far as they have been run."""
    found = []
    for task, size in WORDS.items():
        loss = losses(records, task)
        if (best := best_form(loss)) is None:
            continue
        lags = behind(loss, best, [name for name in loss if not name.startswith("Interdomain")])
        if lags:
            beside = ", ".join(f"{_percent(lag)} that of {name}" for name, lag in lags.items())
            found.append(f"At {size} the best form is {best}: its perplexity is {beside}.")
    pairs, length = SETTINGS[0]
    for task in RECALL:
        right = right_answers(records["core_study"]["runs"], task, SETTINGS[0])
        if len(right) > 1:
            order = ", ".join(f"{name} {share:.0%}" for name, share in right.items())
            found.append(f"{task.capitalize()}, {pairs} in {length} tokens, mean of the seeds: {order}.")
    return found


def right_answers(runs: list[dict], task: str, setting: tuple[int, int]) -> dict[str, float]:
    """The mean over the seeds of each condition at its best rate, the most first."""
    rates = {name: recall_rates(runs, name, task, setting) for name in CONDITIONS}
    best = {name: next(iter(found.values())) for name, found in rates.items() if found}
    share = {name: statistics.mean(row["accuracy"] for row in rows) for name, rows in best.items()}
    return dict(sorted(share.items(), key=lambda pair: -pair[1]))


def short_sentence(records: dict[str, dict]) -> str:
    """Interdomain beside the start of Gated DeltaNet that is closest, by size; for the README."""
    found, plain = [], []
    for task, size in WORDS.items():
        loss = losses(records, task)
        peers = [name for name in loss if name.startswith("Gated DeltaNet")]
        if (best := best_form(loss)) and (lags := behind(loss, best, peers)):
            lag = max(lags.values())
            found.append(f"{size} {lag:+.1%}" + " (behind)" * (lag > 0))
        if REFERENCE in loss and (lags := behind(loss, REFERENCE, peers)):
            plain.append(max(lags.values()))
    ours = f"Interdomain's best form of each size {', '.join(found)}"
    without = f"; without gates, as above, {min(plain):+.1%} to {max(plain):+.1%}" if plain else ""
    return f"Perplexity against Gated DeltaNet's, [as much state](benchmarks/results/core_study.md): {ours}{without}."


def _percent(share: float) -> str:
    return f"{abs(share):.1%} {'below' if share < 0 else 'above'}"


def main() -> None:
    parser = studies.parser(__doc__, "../shared/data", pool=True)
    parser.add_argument("--only", nargs="+", choices=(*SIZES, *RECALL), help="tasks to run (default: all)")
    parser.add_argument(
        "--backend",
        nargs="+",
        metavar=("BACKEND", "CONDITION"),
        help="of the operators of these conditions, or of all (default: chosen by itself)",
    )
    arguments = parser.parse_args()
    fresh = {"training": condition_study.TRAINING, "shape": condition_study.SHAPE}
    make = functools.partial(make_run, arguments.data, arguments.device, arguments.backend)

    shorter = studies.load(condition_study.FILE, {"runs": []})

    def chosen(runs: list[dict]) -> Iterator[dict]:
        return (
            item for item in plan(runs, shorter["runs"]) if arguments.only is None or item["task"] in arguments.only
        )

    def show(record: dict) -> str:
        return table({"core_study": record, "condition_study": shorter})

    studies.show_or_run(arguments, FILE, fresh, chosen, make, show, pooled=(kind, large_at_once))


def large_at_once(item: dict) -> int | None:
    """A run of the largest size fills a GPU: two at a time."""
    return 2 if item["task"] in SHARDS else None


if __name__ == "__main__":
    main()
