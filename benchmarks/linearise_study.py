"""A real Llama, SmolLM2-135M-Instruct, whose layers see a window and keep a state of the rest: what it loses, where.

Perplexity by the place in the text on the beginnings of six novels, which no training text holds. The runs that teach
nothing take minutes each; those that teach take an hour of a core for each condition. A stage of teaching that was
stopped or killed goes on when the same command is given again, and begins with what the stage before has made.

    python -m benchmarks.linearise_study --data ../shared/data --runs 10     # those without teaching
    python -m benchmarks.linearise_study --data ../shared/data               # all, going on where it was stopped
    python -m benchmarks.linearise_study --data ../shared/data --so-far      # measure teaching that was stopped
    python -m benchmarks.linearise_study --table                             # the table as markdown
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks import readme, studies
from benchmarks.harness import RESULTS, footnote, machine, markdown
from benchmarks.linear_window import with_linear_attention
from benchmarks.linearise_asked import MEASURES, Asking, tables
from conversion.__main__ import main as command
from conversion.carry import POINTS_A_MODE
from conversion.from_llama import source_folder
from conversion.gguf_files import SMOLLM2
from conversion.measure import beginnings, between, nats_by_position
from conversion.reading import read_config
from conversion.writing import working_folder
from examples.text_data import read_documents

FILE = RESULTS / "linearise_study.json"
FRESH = {"source": SMOLLM2, "texts": 6, "edges": [0, 256, 1024, 2047, 8191, 65535]}
LENGTH = 2048
MODES = 64
LINEAR = "linear"  # in place of the modes: linear attention whose state is as large
WINDOWS = (256, 128, 64, 32)


class Teaching(NamedTuple):
    """A stage of teaching: of each layer alone, of the whole model, of the whole model on longer texts."""

    tokens: int
    tokens_a_step: int
    lengths: str  # of the texts, in tokens
    options: tuple = ()  # more of `conversion teach`


HOW = ("--bf16", "--max-bytes", 16_000_000, "--save-steps", 10)
TEACHING = {
    "layers": Teaching(81_920, 2048, "1024,2048", HOW),
    "whole": Teaching(614_400, 1024, "256,1024", HOW),  # 7 GB for as many
    "long": Teaching(204_800, 2048, "2048", HOW),
}
SO_FAR = " so far"
MEMORY = {"share": "counted", "write_gate": True}  # as `from-llama` makes it
HELD_OUT_BYTES = 16_000  # of the training texts, to measure stages on
# How many texts of a length are measured.
TEXTS = {2048: 6, 8192: 6, 65536: 2}


def kind(window: int | None = None, sinks: int = 4, modes: int | str = 0, **rest) -> dict:
    """One condition; without a window it is the Llama."""
    shape = {} if window is None else {"sinks": sinks, "modes": modes, "kept": 0, "taught": "no"}
    shape |= MEMORY if modes else {}
    shape |= {"points": POINTS_A_MODE * modes} if modes and modes != LINEAR else {}
    return {"window": window, **shape, "length": LENGTH} | rest


def plan(runs: list[dict]) -> Iterator[dict]:
    yield kind()
    yield from (kind(window) for window in WINDOWS)
    yield kind(256, sinks=0)
    yield from (kind(window, modes=MODES) for window in WINDOWS)
    layers, whole, longer = (kind(64, modes=MODES, taught=stage) for stage in TEACHING)
    yield from (layers, whole)
    beside = [kind(), kind(64), whole]
    yield from (one | {"measure": "commonsense"} for one in beside)
    lengths = list(TEXTS)[1:]
    yield from (one | {"length": length} for length in lengths for one in beside[1:])
    yield kind(64, modes=LINEAR, taught="layers")
    yield from (one | {"measure": name} for name in MEASURES[1:] for one in beside)
    yield kind(64, taught="whole")  # what the weights of the Llama learn without a memory
    yield kind(64, modes=LINEAR, taught="whole")
    yield from (kind(64, modes=MODES, kept=8, taught=stage) for stage in ("layers", "whole"))  # of 30 layers
    yield longer
    yield from (one | {"length": length} for length in lengths for one in (kind(), longer))


class Study:
    """The runs; models are made in `folder` and stay there, results go into the file."""

    teaching = TEACHING

    def __init__(self, data: Path, folder: Path = Path("runs/linearise_study"), source: str = SMOLLM2):
        self.data, self.folder, self.source = data, folder, source_folder(source)
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        self.asking = Asking(data, 150, 50, 20, (50, 100, 200, 400, 800, 1600), 8)

    def run(self, length: int, measure: str = "perplexity", **condition) -> dict:
        model, tokens = self._model(**condition)
        return self._found(measure, model, length) | ({} if tokens is None else {"tokens": tokens})

    def _found(self, measure: str, model: PreTrainedModel, length: int) -> dict:
        if measure != "perplexity":
            return self.asking.measure(measure, model, self.tokenizer)
        return self._measured(model, length)

    def _measured(self, model: PreTrainedModel, length: int) -> dict:
        novels = list(read_documents([str(self.data / "longdocs" / "test.parquet")]))
        rows = beginnings(self.tokenizer, novels, TEXTS[length], length)
        nats = nats_by_position(model, rows)
        return {"perplexity": between(nats, FRESH["edges"]), "parameters": model.num_parameters()}

    def _model(self, window: int | None, taught: str = "no", **shape) -> tuple[PreTrainedModel, int | None]:
        """A model, and the tokens that it was taught on."""
        if window is None:
            return _load(self.source), None
        if taught != "no":
            return _load(self._taught(taught, window, **shape)), self._tokens(taught, window, **shape)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="untaught-") as place:
            return _load(self._converted(Path(place, "model"), window, **shape)), None

    def _place(self, taught: str, window: int, kept: int, modes: int | str, **_) -> Path:
        return self.folder / f"window-{window}-kept-{kept}-modes-{modes}-{taught}"

    def _converted(self, target: Path, window: int, sinks: int, modes: int | str, kept: int, **_) -> Path:
        if modes == LINEAR:
            with tempfile.TemporaryDirectory(dir=self.folder, prefix="untaught-") as place:
                windows = self._converted(Path(place, "model"), window, sinks, MODES, kept)
                with_linear_attention(self.source, windows, Path(place, "linear"))
                os.replace(Path(place, "linear"), target)
            return target
        options = ["--window", window, "--sinks", sinks, "--state-size", modes]
        if kept:
            options += ["--layers", f"auto:{kept}", *self._text(), "--sequence-length", 1024]
            options += ["--max-bytes", 1_000_000]  # a few thousand tokens are measured on
        _done(["from-llama", self.source, target, *options])
        return target

    def _is_made(self, stage: str, window: int, **shape) -> bool:
        """Whether there is a folder after a stage; one whose windows have another memory ends the program."""
        folder = self._place(stage, window, **shape)
        if not (folder / "config.json").is_file():
            return False
        config, memory = read_config(folder), [name for name in (*MEMORY, "points") if name in shape]
        if any(getattr(config, f"window_{name}") != shape[name] for name in memory):
            raise SystemExit(f"{folder} has another memory: take it away.")
        return True

    def _taught(self, stage: str, window: int, **shape) -> Path:
        """The folder of a model after a stage, made once, from what the stage before has made."""
        target = self._place(stage, window, **shape)
        if self._is_made(stage, window, **shape):
            return target
        before = stage_before(stage, shape["modes"])
        if before is None:
            source = self._place("untaught", window, **shape)
            if not self._is_made("untaught", window, **shape):
                self._converted(source, window, **shape)
        else:
            source = self._taught(before, window, **shape)
        tokens, a_step, lengths, more = self.teaching[stage]
        options = [f"--{stage}-steps", tokens // a_step, *self._text()]
        options += [x for other in TEACHING if other != stage for x in (f"--{other}-steps", 0)]
        options += ["--lengths", lengths, "--long-lengths", lengths, "--tokens-a-step", a_step, *more]
        _done(["teach", source, target, "--teacher", self.source, *options])
        return target

    def _tokens(self, stage: str | None, window: int, **shape) -> int:
        """Those of a stage that has ended and of the stages before it."""
        if stage is None:
            return 0
        report = json.loads((self._place(stage, window, **shape) / "conversion_report.json").read_text())
        own = report["steps"][stage] * report["tokens_per_step"]
        return own + self._tokens(stage_before(stage, shape["modes"]), window, **shape)

    def so_far(self, length: int, window: int, taught: str, **shape) -> dict | None:
        """The measures of a stage that was stopped; None where none was."""
        file = working_folder(self._place(taught, window, **shape)) / "training.pt"
        if not file.is_file():
            return None
        state = torch.load(file, weights_only=True)
        before = stage_before(taught, shape["modes"])
        if not self._is_made(before or "untaught", window, **shape):
            return None
        model = _load(self._place(before or "untaught", window, **shape))
        model.load_state_dict(state["model"], strict=False)
        tokens = self._tokens(before, window, **shape) + state["step"] * self.teaching[taught].tokens_a_step
        return self._measured(model, length) | {"tokens": tokens}

    def _text(self) -> list:
        parts = ("corpus/wiki/train-000.parquet", "corpus/books/train-000.parquet")
        return ["--data", *(self.data / part for part in parts), "--held-out-bytes", HELD_OUT_BYTES]


def _load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def stage_before(stage: str, modes: int | str) -> str | None:
    """The stage whose folder a stage begins with; windows without a memory have nothing to learn layer by layer."""
    stages = list(TEACHING) if modes else list(TEACHING)[1:]
    place = stages.index(stage)
    return stages[place - 1] if place else None


def _done(arguments: list) -> None:
    if code := command([str(argument) for argument in arguments]):
        raise SystemExit(code)


def measure_so_far(record: dict, study: Study) -> None:
    """Put into a record what stages that were stopped have reached, in place of what was said of them before."""
    record["runs"] = [run for run in record["runs"] if not run.get("taught", "no").endswith(SO_FAR)]
    for item in plan(record["runs"]):
        if item.get("taught", "no") == "no" or item["length"] != LENGTH or "measure" in item:
            continue
        if (found := study.so_far(**item)) is not None:
            record["runs"].append(item | {"taught": item["taught"] + SO_FAR} | found)


def table(record: dict) -> str:
    """A table for each length that was measured, and of what was asked."""
    lengths = [_table(record, length) for length in TEXTS if _of(record, length)]
    return "\n\n".join([*lengths, *tables(named(record["runs"])), footnote(record)])


def _of(record: dict, length: int) -> list[dict]:
    """The runs of a length; of stages that were stopped those that have not ended since."""
    runs = [run for run in record["runs"] if run["length"] == length and "perplexity" in run]
    return [run for run in runs if not _has_ended(run, runs)]


def _has_ended(run: dict, runs: list[dict]) -> bool:
    taught = run.get("taught", "no")
    told = {name: run[name] for name in kind(0, modes=1) if name in run} | {"taught": taught.removesuffix(SO_FAR)}
    return taught.endswith(SO_FAR) and studies.holds(runs, told)


def _table(record: dict, length: int) -> str:
    runs = _of(record, length)
    parts = list(runs[0]["perplexity"])
    source = next((run["perplexity"]["all"] for run in runs if run["window"] is None), None)
    rows = []
    for name, run in named(runs):
        ratio = "" if source is None else f"{run['perplexity']['all'] / source:.2f}"
        rows.append([name, *(f"{run['perplexity'][part]:.1f}" for part in parts), ratio])
    header = [f"{TEXTS[length]} texts of {length:,} tokens", *(f"{part}" for part in parts), "of the Llama's"]
    return markdown(header, rows)


def named(runs: list[dict]) -> list[tuple[str, dict]]:
    """Runs in the order of a table, each with the name of its condition."""
    return [(label(run), run) for run in sorted(runs, key=order)]


def order(run: dict) -> tuple:
    if run["window"] is None:
        return (0,)
    return (
        1,
        run["taught"] != "no",
        -run["window"],
        -run["sinks"],
        run["kept"],
        str(run["modes"]),
        run.get("write_gate", False),
        run.get("points", 0),
        run.get("tokens", 0),
    )


def label(run: dict) -> str:
    if run["window"] is None:
        return "everything (the Llama)"
    sinks = f"and the first {run['sinks']}" if run["sinks"] else "alone"
    state = f", state of {run['modes']} modes" if run["modes"] else ""
    state += ", read as a sum" if run["modes"] and "points" not in run else ""
    state = ", linear attention of equal state" if run["modes"] == LINEAR else state
    state += ", written alike" if run["modes"] and "write_gate" not in run else ""
    kept = f", {run['kept']} layers softmax" if run["kept"] else ""
    taught = ", untaught" if run["modes"] else ""
    if run["taught"] != "no":
        taught = f", taught ({run['taught']}, {run['tokens']:,} tokens)"
    return f"the last {run['window']} tokens {sinks}{state}{kept}{taught}"


def main() -> None:
    parser = studies.parser(__doc__, "../shared/data")
    parser.add_argument(
        "--so-far", action="store_true", help="measure what stages that were stopped have reached, and stop"
    )
    arguments = parser.parse_args()
    if not arguments.so_far:
        studies.show_or_run(arguments, FILE, FRESH, plan, lambda: Study(arguments.data).run, table)
        return
    record = studies.load(FILE, FRESH)
    measure_so_far(record, Study(arguments.data))
    record["machine"] = machine() | {"command": "python -m benchmarks.linearise_study"}
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    readme.update()


if __name__ == "__main__":
    main()
