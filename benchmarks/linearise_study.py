"""A real Llama, SmolLM2-135M-Instruct, whose layers see a window and keep a state of the rest: what it loses, where.

Perplexity by the place in the text on the beginnings of six novels, which no training text holds. The runs that teach
nothing take minutes each; those that teach come last, and take hours of two cores.

    python -m benchmarks.linearise_study --data ../shared/data --runs 10     # those without teaching
    python -m benchmarks.linearise_study --data ../shared/data               # all, going on where it was stopped
    python -m benchmarks.linearise_study --table                             # the table as markdown
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import studies
from benchmarks.harness import RESULTS, footnote, markdown
from conversion.__main__ import main as command
from conversion.from_llama import source_folder
from conversion.gguf_files import SMOLLM2
from conversion.measure import beginnings, between, nats_by_position
from examples.text_data import read_documents

FILE = RESULTS / "linearise_study.json"
FRESH = {"source": SMOLLM2, "texts": 6, "edges": [0, 256, 1024, 2047, 8191, 65535]}
LENGTH = 2048
MODES = 64
WINDOWS = (256, 128, 64, 32)
# Tokens of teaching: of each layer alone, of the whole model, of the whole model on longer texts.
TEACHING = {"layers": 1_000_000, "whole": 1_000_000, "long": 1_000_000}
LENGTHS = {"layers": "512,1024,2048", "long": "2048,4096,8192"}
TOKENS_A_STEP = 8192
# How many texts of a length are measured.
TEXTS = {2048: 6, 8192: 6, 65536: 2}


def kind(window: int | None = None, sinks: int = 4, modes: int = 0, **rest) -> dict:
    """One condition; without a window it is the Llama."""
    shape = {} if window is None else {"sinks": sinks, "modes": modes, "kept": 0, "taught": "no"}
    return {"window": window, **shape, "length": LENGTH} | rest


def plan(runs: list[dict]) -> Iterator[dict]:
    yield kind()
    yield from (kind(window) for window in WINDOWS)
    yield kind(256, sinks=0)
    yield from (kind(window, modes=MODES) for window in WINDOWS)
    yield kind(64, length=8192)
    yield kind(length=8192)
    for kept in (0, 8):  # of 30 layers
        for length in TEXTS:
            for taught in ("layers", "whole", "long"):
                yield kind(64, modes=MODES, kept=kept, taught=taught, length=length)
    for window in (None, 64):
        yield kind(window, length=65536)


class Study:
    """The runs; models are made in `folder` and stay there, results go into the file."""

    def __init__(self, data: Path, folder: Path = Path("runs/linearise_study"), source: str = SMOLLM2):
        self.data, self.folder, self.source = data, folder, source_folder(source)
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)

    def run(self, length: int, **condition) -> dict:
        novels = list(read_documents([str(self.data / "longdocs" / "test.parquet")]))
        rows = beginnings(self.tokenizer, novels, TEXTS[length], length)
        with tempfile.TemporaryDirectory(dir=self._made(), prefix="untaught-") as place:
            model = AutoModelForCausalLM.from_pretrained(self._model(Path(place), **condition), dtype=torch.float32)
        nats = nats_by_position(model.eval(), rows)
        return {"perplexity": between(nats, FRESH["edges"]), "parameters": model.num_parameters()}

    def _made(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def _model(self, place: Path, window: int | None, **condition) -> Path:
        """The folder of a model; one that was taught is made once."""
        if window is None:
            return self.source
        taught = condition.pop("taught")
        if taught == "no":
            return self._converted(place / "model", window, **condition)
        target = self.folder / f"window-{window}-{condition['kept']}-{taught}"
        if not (target / "config.json").is_file():
            converted = self._converted(place / "model", window, **condition)
            self._teach(converted, target, taught)
        return target

    def _converted(self, target: Path, window: int, sinks: int, modes: int, kept: int) -> Path:
        options = ["--window", window, "--sinks", sinks, "--state-size", modes]
        if kept:
            options += ["--layers", f"auto:{kept}", *self._text(), "--sequence-length", 1024]
        _done(["from-llama", self.source, target, *options])
        return target

    def _teach(self, converted: Path, target: Path, until: str) -> None:
        """Stages up to one; what the stages before have made is taken up."""
        stages = list(TEACHING)[: list(TEACHING).index(until) + 1]
        options = [*self._text(), "--tokens-a-step", TOKENS_A_STEP, "--overwrite"]
        for stage in stages:
            options += [f"--{stage}-steps", TEACHING[stage] // TOKENS_A_STEP]
        options += ["--lengths", LENGTHS["layers"], "--long-lengths", LENGTHS["long"]]
        _done(["teach", converted, target, "--teacher", self.source, *options])

    def _text(self) -> list:
        parts = ("corpus/wiki/train-000.parquet", "corpus/books/train-000.parquet")
        return ["--data", *(self.data / part for part in parts)]


def _done(arguments: list) -> None:
    if code := command([str(argument) for argument in arguments]):
        raise SystemExit(code)


def table(record: dict) -> str:
    """A table for each length that was measured."""
    return "\n\n".join([*(_table(record, length) for length in TEXTS if _of(record, length)), footnote(record)])


def _of(record: dict, length: int) -> list[dict]:
    return [run for run in record["runs"] if run["length"] == length]


def _table(record: dict, length: int) -> str:
    runs = _of(record, length)
    parts = list(runs[0]["perplexity"])
    source = next((run["perplexity"]["all"] for run in runs if run["window"] is None), None)
    rows = []
    for run in sorted(runs, key=_order):
        ratio = "" if source is None else f"{run['perplexity']['all'] / source:.2f}"
        rows.append([_label(run), *(f"{run['perplexity'][part]:.1f}" for part in parts), ratio])
    header = [f"{TEXTS[length]} texts of {length:,} tokens", *(f"{part}" for part in parts), "of the Llama's"]
    return markdown(header, rows)


def _order(run: dict) -> tuple:
    if run["window"] is None:
        return (0,)
    return 1, run["taught"] != "no", -run["window"], -run["sinks"], run["kept"], run["modes"], run["taught"]


def _label(run: dict) -> str:
    if run["window"] is None:
        return "everything (the Llama)"
    sinks = f"and the first {run['sinks']}" if run["sinks"] else "alone"
    state = f", state of {run['modes']} modes" if run["modes"] else ""
    kept = f", {run['kept']} layers softmax" if run["kept"] else ""
    taught = "" if run["taught"] == "no" or not run["modes"] else f", taught ({run['taught']})"
    return f"the last {run['window']} tokens {sinks}{state}{kept}{taught or (', untaught' if run['modes'] else '')}"


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    studies.show_or_run(arguments, FILE, FRESH, plan, lambda: Study(arguments.data).run, table)


if __name__ == "__main__":
    main()
