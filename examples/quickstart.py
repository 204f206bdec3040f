"""A real Llama whose memory no longer grows, in minutes: fetched, converted, taught, measured, asked and saved.

Usage:
    python -m examples.quickstart
    python -m examples.quickstart --data my_texts/ --minutes 10 --output runs/mine
    python -m examples.quickstart --from-scratch      # a small model instead, trained from nothing, and what it writes

Where the Llama cannot be reached, this says so and trains from nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import logging

from examples.saved_model import PROMPT, read_config
from examples.text_data import (
    InputError,
    check_folder,
    check_positive,
    check_seed,
    encode,
    exit_code,
    gather_documents,
    num_bytes,
    random_batches,
    split_documents,
    standard_library_prose,
    train_tokenizer,
)
from examples.training import Progress, train
from model_cards.model_card import render

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS, MINUTES = 400, 4.0  # the steps fit two slow cores; on still slower ones the clock ends the training instead
VOCABULARY, BATCH_SIZE, SEQUENCE_LENGTH, LEARNING_RATE = 4096, 8, 256, 3e-3
HELD_OUT_BYTES = 200_000  # measured in seconds, and enough for two digits


def check_options(options: argparse.Namespace) -> None:
    """Refuse at once what would fail, or lose somebody's files, minutes later."""
    check_positive(options, "steps", "minutes", "batch_size", "sequence_length", "learning_rate")
    if not (options.config / "config.json").is_file():
        raise InputError(f"{options.config} has no config.json.")
    check_seed(options.seed)
    check_folder(options.output, "The output ")
    if options.output.is_dir() and any(options.output.iterdir()) and not options.overwrite:
        raise InputError(f"The output folder {options.output} is not empty: choose another, or add --overwrite.")


def load_config(folder: Path, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The shape of the folder's config.json with the tokenizer's vocabulary and special tokens."""
    return read_config(
        folder,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def describe(model: PreTrainedModel) -> str:
    """One line: what the model is and what runs it."""
    config = model.config
    mixers = getattr(config, "token_mixers", None) or config.model_type
    mixers = mixers if isinstance(mixers, str) else " ".join(dict.fromkeys(mixers))
    return (
        f"{model.num_parameters():,} parameters: {config.num_hidden_layers} layers of {mixers}, width"
        f" {config.hidden_size}, vocabulary {config.vocab_size:,}; {model.dtype} on {model.device.type}, backend"
        f" {getattr(config, 'backend', None) or 'eager'}, {torch.get_num_threads()} threads".replace("torch.", "")
    )


def train_with_progress_bar(
    model: PreTrainedModel, tokens: torch.Tensor, options: argparse.Namespace
) -> list[Progress]:
    """Train on the stream of tokens [N] and return every step."""
    batches = random_batches(tokens, options.batch_size, options.sequence_length, options.seed)
    seconds = None if options.minutes is None else 60 * options.minutes
    history = []
    with tqdm(total=options.steps, desc="Training", unit="step", dynamic_ncols=True) as bar:
        run = train(model, batches, steps=options.steps, seconds=seconds, learning_rate=options.learning_rate)
        for progress in run:
            history.append(progress)
            bar.set_postfix_str(f"loss {progress.loss:.3f}, {progress.tokens_per_second:,.0f} tokens/s", refresh=False)
            bar.update()
    return history


def smoothed(losses: Sequence[float], window: int = 20) -> list[float]:
    """Mean of each loss and of up to `window` - 1 before it."""
    return [sum(part) / len(part) for end in range(1, len(losses) + 1) if (part := losses[max(0, end - window) : end])]


def text_curve(losses: Sequence[float], width: int = 64, height: int = 8) -> str:
    """The losses as a little plot of characters, from the first step to the last."""
    columns = [losses[index * len(losses) // width] for index in range(width - 1)] + [losses[-1]]
    top, bottom = max(columns), min(columns)
    scale = (height - 1) / (top - bottom) if top > bottom else 0.0
    rows = [[" "] * width for _ in range(height)]
    for column, loss in enumerate(columns):
        rows[round((top - loss) * scale)][column] = "*"
    labels = [f"{top:.2f}", *[""] * (height - 2), f"{bottom:.2f}"]
    axis = f"{'':>6} +{'-' * width} step {len(losses)}"
    return "\n".join([f"{label:>6} |{''.join(row).rstrip()}" for label, row in zip(labels, rows)] + [axis])


def write_learning_curve(history: Sequence[Progress], folder: Path) -> None:
    """learning_curve.csv with every step, and learning_curve.png with the losses."""
    with (folder / "learning_curve.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Progress._fields)
        writer.writerows(history)
    steps, losses = [progress.step for progress in history], [progress.loss for progress in history]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="0.8", label="each batch")
    axes.plot(steps, smoothed(losses), label="mean of 20")
    axes.set(xlabel="step", ylabel="training loss (nats per token)")
    axes.legend()
    figure.savefig(folder / "learning_curve.png", dpi=150)


def make_room(folder: Path) -> None:
    """A folder without the files of the model that was in it, or of what was measured of it."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "config.json").is_file():
        for file in filter(Path.is_file, list(folder.iterdir())):
            file.unlink()


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_documents(documents: Sequence[str], path: Path) -> None:
    """One JSON object with the field "text" a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document}) + "\n" for document in documents)


def evaluate_in_fresh_process(options: argparse.Namespace) -> dict[str, float]:
    """Load the folder in a new Python, let it write and measure it there: what is on disk is what is measured."""
    folder = options.output.resolve()
    command = [sys.executable, "-m", "examples.evaluate", str(folder), "--data", str(folder / "held_out.jsonl")]
    command += ["--prompt", options.prompt, "--seed", str(options.seed), "--json", str(folder / "results.json")]
    command += ["--sequence-length", str(options.sequence_length)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return json.loads((folder / "results.json").read_text())


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from-scratch", action="store_true", help="train a small model from nothing")
    parser.add_argument("--llama", help="another Llama to convert: a folder, a GGUF file or a name on the Hub")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        help="files or folders (.txt .md .py .jsonl .parquet) or datasets (default: what Python's own library says)",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="folder (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is in the output folder")
    parser.add_argument("--minutes", type=float, help=f"train at most this long (default: {MINUTES:g})")
    parser.add_argument(
        "--prompt", help=f"what is asked (default: about a capital) or, from scratch, continued ({PROMPT!r})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and sampling (default: %(default)s)")
    scratch = parser.add_argument_group("from scratch", "Each of these, too, means --from-scratch.")
    scratch.add_argument("--config", type=Path, help="folder with config.json (default: the small one)")
    scratch.add_argument("--steps", type=int, help=f"train this many steps, however long (default: {STEPS})")
    scratch.add_argument("--vocab-size", type=int, help=f"tokens to learn (default: {VOCABULARY:,})")
    scratch.add_argument("--batch-size", type=int, help=f"sequences a step (default: {BATCH_SIZE})")
    scratch.add_argument("--sequence-length", type=int, help=f"tokens a sequence (default: {SEQUENCE_LENGTH})")
    scratch.add_argument("--learning-rate", type=float, help=f"at its peak (default: {LEARNING_RATE})")
    options = parser.parse_args(arguments)
    defaults = {
        "config": REPOSITORY / "configuration" / "interdomain-small",
        "vocab_size": VOCABULARY,
        "batch_size": BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "learning_rate": LEARNING_RATE,
    }
    given = [name for name in ("steps", *defaults) if getattr(options, name) is not None]
    options.from_scratch = options.from_scratch or bool(given)
    for name in defaults.keys() - given:
        setattr(options, name, defaults[name])
    if options.steps is None and options.minutes is None:
        options.steps, options.minutes = STEPS, MINUTES
    return options


def run(options: argparse.Namespace) -> None:
    check_options(options)
    if not options.from_scratch and run_llama(options):
        return
    options.prompt = options.prompt or PROMPT
    run_from_scratch(options)


def run_llama(options: argparse.Namespace) -> bool:
    """Convert and teach the Llama; False, and a sentence, where nobody named another and it cannot be reached."""
    from conversion.from_llama import source_folder
    from conversion.gguf_files import SMOLLM2
    from examples.quickstart_llama import convert_and_teach

    try:
        source_folder(options.llama or SMOLLM2)
    except InputError as error:
        if options.llama is not None:
            raise
        print(f"{error} So a small model is trained from nothing.", flush=True)
        return False
    options.llama = options.llama or SMOLLM2
    convert_and_teach(options)
    return True


def run_from_scratch(options: argparse.Namespace) -> None:
    """Train a small model from nothing, save it, and let it write in a fresh process."""
    logging.disable_progress_bar()  # one bar, the training's, is enough
    set_seed(options.seed)
    seed = options.seed
    documents = gather_documents(options.data, seed=seed) if options.data else standard_library_prose(seed=seed)
    train_documents, held_out_documents = split_documents(documents, HELD_OUT_BYTES, seed=options.seed)
    tokenizer = train_tokenizer(train_documents, options.vocab_size)
    tokens = encode(tokenizer, train_documents)
    print(
        f"{len(documents):,} documents, {sum(map(num_bytes, documents)):,} bytes, of them"
        f" {sum(map(num_bytes, held_out_documents)):,} held out; {len(tokens):,} tokens to train on"
    )
    model = AutoModelForCausalLM.from_config(load_config(options.config, tokenizer))
    print(describe(model))

    started = time.perf_counter()
    history = train_with_progress_bar(model, tokens, options)
    training_seconds = time.perf_counter() - started
    print(text_curve(smoothed([progress.loss for progress in history])))

    make_room(options.output)
    write_learning_curve(history, options.output)
    write_documents(held_out_documents, options.output / "held_out.jsonl")
    save_checkpoint(model, tokenizer, options.output)
    print(f"Saved {options.output}. A fresh process loads it and writes:\n", flush=True)

    tokens_per_step = options.batch_size * options.sequence_length
    results = evaluate_in_fresh_process(options) | {
        "data": ", ".join(Path(source).name for source in options.data)
        or "the documentation inside Python's standard library",
        "parameters": model.num_parameters(),
        "steps": len(history),
        "tokens_per_step": tokens_per_step,
        "training_seconds": training_seconds,
        "tokens_per_second": len(history) * tokens_per_step / training_seconds,
        "hardware": f"{torch.get_num_threads()} CPU threads",
        "seed": options.seed,
    }
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    render(options.output, options.output.resolve().name, report=results).save(options.output / "README.md")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
