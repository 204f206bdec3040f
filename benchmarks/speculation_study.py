"""Does guessing ahead pay on real text? Prompt lookup and the model's own first layers, beside plain decoding.

Two models alike but for their token mixers are trained so that the layers before EXIT can already guess the next token
(a loss on what they would say, as in LayerSkip, arXiv 2404.16710), then write on from held-out text: one token a
forward, with guesses looked up in the text so far (`prompt_lookup_num_tokens`), and with guesses of the first layers
(`assistant_early_exit`), as many as pay, of the library's twenty or of DRAFTED. Greedy text of a small model repeats
itself and is easily looked up: so it is sampled too. A guess of the first layers costs the less of a whole forward the
more layers there are: so there are two depths.

    python -m benchmarks.speculation_study --data ../shared/data     # trains what is missing, measures all in turns
    python -m benchmarks.speculation_study --table                   # the table as markdown
"""

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks import condition_study, readme, studies
from benchmarks.harness import RESULTS, footnote, markdown, summary, verify_model, write
from examples.text_data import random_batches
from examples.training import clip_gradients, cosine_with_warmup, parameter_groups
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "speculation_study.json"
MODELS = Path("runs/speculation_study")
SHAPE = condition_study.SHAPE | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
DEPTHS = (8, 16)  # layers
EXIT, EXIT_WEIGHT = 2, 0.3
# Tokens looked up at once: MKL multiplies up to three rows by a float32 matrix in the time of one, six in twice that.
CANDIDATES = (2, 5, 10)
DRAFTED = 4
TRAINING = {"steps": 400, "batch_size": 8, "sequence_length": 256, "learning_rate": 3e-3}
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


def fresh(name: str, depth: int) -> InterdomainForCausalLM:
    torch.manual_seed(0)
    return InterdomainForCausalLM(InterdomainConfig(**SHAPE | {"num_hidden_layers": depth} | CONDITIONS[name]))


def trained(
    model: InterdomainForCausalLM, batches: Iterator[torch.Tensor], training: dict = TRAINING
) -> tuple[InterdomainForCausalLM, dict]:
    """A model that has learned to guess early, and its last losses."""
    optimizer = torch.optim.AdamW(parameter_groups(model, training["learning_rate"]), betas=(0.9, 0.95))
    peaks = [group["lr"] for group in optimizer.param_groups]
    last = []
    for step, windows in zip(range(1, training["steps"] + 1), batches):
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * cosine_with_warmup(step / training["steps"])
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


def load_or_train(name: str, depth: int, data: dict) -> tuple[InterdomainForCausalLM, dict]:
    """From `runs/` where an earlier call has left it."""
    file, model = MODELS / f"{name}-{depth}.pt", fresh(name, depth)
    if file.exists():
        held = torch.load(file)
        model.load_state_dict(held["weights"])
        return model.eval(), held["found"]
    batches = random_batches(data["train"], TRAINING["batch_size"], TRAINING["sequence_length"], 0)
    model, found = trained(model, batches)
    MODELS.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": model.state_dict(), "found": found}, file)
    return model, found


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
    for depth, choice, way in itertools.product(DEPTHS, CHOICES, WAYS):
        cells = [str(depth), choice, way]
        for model in CONDITIONS:
            found, plain = (_row(record, depth, model, choice, x) for x in (way, "plain"))
            speed = NEW_TOKENS / found["seconds"]["median"]
            ratio = plain["seconds"]["median"] / found["seconds"]["median"]
            cells += [f"{speed:.0f}", f"{ratio:.2f}x", f"{found['tokens_per_forward']:.2f}"]
        rows.append(cells)
    header = ["layers", "", "guesses"]
    for model in CONDITIONS:
        header += [f"{model}, tokens/s", "against plain", "tokens a forward"]
    trained = "; ".join(
        f"{name} with {depth} layers {found['loss']:.2f}, its first {EXIT} {found['early_loss']:.2f}"
        for depth, losses in record["training_losses"].items()
        for name, found in losses.items()
    )
    about = (
        f"Layers of width {SHAPE['hidden_size']} after {TRAINING['steps']} steps (nats a token: {trained}); {PROMPTS} "
        f"held-out texts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones; a number is how many tokens are guessed at "
        f"once, of first layers at most; medians."
    )
    return f"{markdown(header, rows)}\n\n{about} {footnote(record)}"


def _row(record: dict, depth: int, model: str, choice: str, way: str) -> dict:
    wanted = {"layers": depth, "model": model, "choice": choice, "way": way}
    return next(row for row in record["rows"] if wanted.items() <= row.items())


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    if arguments.table:
        print(table(studies.load(FILE, {})))
        return
    torch.set_num_threads(arguments.threads)
    data = condition_study.prepare(arguments.data)
    made = {depth: {name: load_or_train(name, depth, data) for name in CONDITIONS} for depth in DEPTHS}
    if arguments.runs is not None:  # training alone
        return
    rows, losses = [], {}
    for depth, of_depth in made.items():
        models = {name: model for name, (model, _) in of_depth.items()}
        for model in models.values():
            verify_model(model)
        rows += [{"layers": depth} | row for row in measure(models, prompts(data))]
        losses[str(depth)] = {name: found for name, (_, found) in of_depth.items()}
    write(FILE.stem, {"training_losses": losses, "rows": rows})
    readme.update()


if __name__ == "__main__":
    main()
