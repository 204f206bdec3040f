"""Does guessing ahead pay on real text? Prompt lookup and the model's own first layers, beside plain decoding.

Two models alike but for their token mixers are trained so that the layers before EXIT can already guess the next token
(a loss on what they would say, as in LayerSkip, arXiv 2404.16710), then write on from held-out text: one token a
forward, with guesses looked up in the text so far (`prompt_lookup_num_tokens`), and with guesses of the first layers
(`assistant_early_exit`), as many as pay, of the library's twenty or of DRAFTED. Greedy text of a small model repeats
itself and is easily looked up: so it is sampled too. A guess of the first layers costs the less of a whole forward the
more layers there are, and to check it costs the less the more a layer computes beside what calling it takes: so there
are two depths and two widths.

    python -m benchmarks.speculation_study --data ../shared/data     # trains and measures the sizes that are missing
    python -m benchmarks.speculation_study --data ../shared/data --train   # trains them alone, beside other work
    python -m benchmarks.speculation_study --table                   # the table as markdown
"""

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from benchmarks import condition_study, studies
from benchmarks.harness import RESULTS, footnote, machine, markdown, summary, verify_model
from examples.first_layers import EarlyExitForCausalLM
from examples.text_data import random_batches
from examples.training import clip_gradients, cosine_with_warmup, parameter_groups
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "speculation_study.json"
MODELS = Path("runs/speculation_study")
SHAPE = condition_study.SHAPE | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
EXIT, EXIT_WEIGHT = 2, 0.3
# Tokens looked up at once: MKL multiplies up to three rows by a float32 matrix in the time of one, six in twice that.
CANDIDATES = (2, 5, 10)
DRAFTED = 4
TRAINING = {"steps": 400, "batch_size": 8, "sequence_length": 256}


class Size(NamedTuple):
    """A shape, and how it is trained."""

    layers: int
    width: int
    learning_rate: float
    autocast: bool  # to bfloat16, in training alone

    @property
    def shape(self) -> dict:
        heads = {128: 4, 512: 8}[self.width]
        return {"num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": heads}


SIZES = (Size(8, 128, 3e-3, False), Size(16, 128, 3e-3, False), Size(12, 512, 1e-3, True))
CONDITIONS = {
    "interdomain": {"token_mixers": "interdomain"},
    "softmax": {"token_mixers": "softmax", "rope_parameters": condition_study.ROPE},
}
WAYS = {
    "plain": {},
    **{f"prompt lookup, {n}": {"prompt_lookup_num_tokens": n} for n in CANDIDATES},
    "first layers": {"assistant_early_exit": EXIT},
    f"first layers, {DRAFTED}": {"assistant_early_exit": EXIT},
}
# What the library reads from the model's own generation config alone: how many guesses, and how sure each has to be.
ASSISTANT = {f"first layers, {DRAFTED}": {"num_assistant_tokens": DRAFTED, "assistant_confidence_threshold": 0.0}}
CHOICES = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 6, 256, 64


def losses(model, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats a token of the whole model, and of its first EXIT layers."""
    output = model.model(windows[:, :-1], output_hidden_states=True, use_cache=False)
    targets = windows[:, 1:].flatten()
    early = model.lm_head(model.model.norm(output.hidden_states[EXIT]))
    return tuple(F.cross_entropy(x.flatten(0, 1), targets) for x in (model.lm_head(output.last_hidden_state), early))


def fresh(name: str, size: Size) -> InterdomainForCausalLM:
    torch.manual_seed(0)
    return EarlyExitForCausalLM(InterdomainConfig(**SHAPE | size.shape | CONDITIONS[name]))


def trained(
    model: InterdomainForCausalLM, batches: Iterator[torch.Tensor], size: Size, steps: int
) -> tuple[InterdomainForCausalLM, dict]:
    """A model that has learned to guess early, and its last losses."""
    optimizer = torch.optim.AdamW(parameter_groups(model, size.learning_rate), betas=(0.9, 0.95))
    peaks = [group["lr"] for group in optimizer.param_groups]
    last = []
    for step, windows in zip(range(1, steps + 1), batches):
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * cosine_with_warmup(step / steps)
        with torch.autocast("cpu", torch.bfloat16, enabled=size.autocast):
            whole, early = losses(model, windows)
        optimizer.zero_grad()
        (whole + EXIT_WEIGHT * early).backward()
        clip_gradients(optimizer, 1.0)
        optimizer.step()
        last.append((whole.item(), early.item()))
    whole, early = (statistics.mean(x) for x in zip(*last[-20:]))
    if not math.isfinite(whole):
        raise SystemExit(f"Training failed: loss {whole}.")
    return model.eval(), {"loss": whole, "early_loss": early}


def load_or_train(name: str, size: Size, data: dict) -> tuple[InterdomainForCausalLM, dict]:
    """From `runs/` where an earlier call has left it."""
    file, model = MODELS / f"{name}-{size.layers}-{size.width}.pt", fresh(name, size)
    if file.exists():
        held = torch.load(file)
        model.load_state_dict(held["weights"])
        return model.eval(), held["found"]
    batches = random_batches(data["train"], TRAINING["batch_size"], TRAINING["sequence_length"], 0)
    model, found = trained(model, batches, size, TRAINING["steps"])
    MODELS.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": model.state_dict(), "found": found}, file)
    return model, found


def plan(runs: list[dict]) -> Iterator[dict]:
    yield from ({"layers": size.layers, "width": size.width} for size in SIZES)


def load_models(layers: int, width: int, data: dict) -> dict[str, tuple[InterdomainForCausalLM, dict]]:
    """Both models of a size, trained where that is still to do, and their losses."""
    size = next(size for size in SIZES if (size.layers, size.width) == (layers, width))
    return {name: load_or_train(name, size, data) for name in CONDITIONS}


def run_size(layers: int, width: int, data: dict) -> dict:
    """Measure all ways with both models of a size."""
    made = load_models(layers, width, data)
    models = {name: model for name, (model, _) in made.items()}
    for model in models.values():
        verify_model(model)
    found = {name: losses for name, (_, losses) in made.items()}
    return {"losses": found, "ways": measure(models, prompts(data)), "machine": machine()}


def prompts(data: dict) -> list[torch.Tensor]:
    """The beginnings of the held-out texts and what lies further on in them, in turns."""
    texts = list(data["validation"].values())
    starts = [(texts[i % len(texts)], 2 * PROMPT_TOKENS * (i // len(texts))) for i in range(PROMPTS)]
    return [text[start : start + PROMPT_TOKENS][None] for text, start in starts]


def measure(models: dict[str, InterdomainForCausalLM], texts: list[torch.Tensor], rounds: int = 2) -> list[dict]:
    """Tokens a second, and tokens a forward of the whole model, of every model and way; they take turns."""
    usual = {name: copy.deepcopy(model.generation_config) for name, model in models.items()}
    ways = [(model, choice, way) for model in models for choice in CHOICES for way in WAYS]
    seconds: dict[tuple, list[float]] = {key: [] for key in ways}
    forwards: dict[tuple, list[int]] = {key: [] for key in ways}
    greedy: dict[tuple, torch.Tensor] = {}
    for turn in range(rounds + 1):  # the first warms up
        for number, ids in enumerate(texts):
            for key in ways:
                model, choice, way = key
                torch.manual_seed(turn)
                models[model].generation_config = copy.deepcopy(usual[model])
                models[model].generation_config.update(**ASSISTANT.get(way, {}))
                count = _count_forwards(models[model])
                started = time.perf_counter()
                found = models[model].generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **CHOICES[choice], **WAYS[way]
                )
                taken = time.perf_counter() - started
                if choice == "greedy" and not greedy.setdefault((model, number), found).equal(found):
                    raise SystemExit(f"Guessing ({way}) changes what {model} writes: no speed is shown.")
                if turn:
                    seconds[key].append(taken)
                    forwards[key].append(count())
    return [
        dict(zip(("model", "choice", "way"), key))
        | {"seconds": summary(seconds[key]), "tokens_per_forward": NEW_TOKENS * len(seconds[key]) / sum(forwards[key])}
        for key in ways
    ]


def _count_forwards(model) -> Callable[[], int]:
    """Forwards of the last layer from now on, until it is asked: the first layers alone do not come that far."""
    calls = []
    handle = model.model.layers[-1].register_forward_hook(lambda *_: calls.append(1))

    def count() -> int:
        handle.remove()
        return len(calls)

    return count


def table(record: dict) -> str:
    """Each way beside plain decoding."""
    rows = []
    for run, choice, way in itertools.product(record["runs"], CHOICES, WAYS):
        cells = [f"{run['layers']} of {run['width']}", choice, way]
        for model in CONDITIONS:
            found, plain = (_row(run, model, choice, x) for x in (way, "plain"))
            speed = NEW_TOKENS / found["seconds"]["median"]
            ratio = plain["seconds"]["median"] / found["seconds"]["median"]
            cells += [f"{speed:.0f}", f"{ratio:.2f}x", f"{found['tokens_per_forward']:.2f}"]
        rows.append(cells)
    header = ["layers", "", "guesses"]
    for model in CONDITIONS:
        header += [f"{model}, tokens/s", "against plain", "tokens a forward"]
    about = (
        f"Models after {TRAINING['steps']} steps; {PROMPTS} held-out texts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new "
        "ones; a number is how many tokens are guessed at once, of first layers at most; medians."
    )
    return "\n\n".join([markdown(header, rows), about, *map(_about_run, record["runs"])])


def _about_run(run: dict) -> str:
    nats = "; ".join(
        f"{name} {found['loss']:.2f}, its first {EXIT} {found['early_loss']:.2f}"
        for name, found in run["losses"].items()
    )
    return f"{run['layers']} layers of width {run['width']}, nats a token: {nats}. {footnote(run)}"


def _row(run: dict, model: str, choice: str, way: str) -> dict:
    wanted = {"model": model, "choice": choice, "way": way}
    return next(row for row in run["ways"] if wanted.items() <= row.items())


def main() -> None:
    parser = studies.parser(__doc__, "../shared/data")
    parser.add_argument("--train", action="store_true", help="train what runs/ does not hold yet and stop")
    arguments = parser.parse_args()
    if arguments.train:
        torch.set_num_threads(arguments.threads)
        data, held = condition_study.prepare(arguments.data), studies.load(FILE, {})["runs"]
        for item in plan(held):
            if not studies.holds(held, item):
                load_models(**item, data=data)
        return

    def make_run() -> Callable[..., dict]:
        data = condition_study.prepare(arguments.data)
        return lambda **item: run_size(**item, data=data)

    studies.show_or_run(arguments, FILE, {}, plan, make_run, table)


if __name__ == "__main__":
    main()
