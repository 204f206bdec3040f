"""Fine-tune a saved model on text with LoRA (PEFT), and merge what was learned into a checkpoint of its own.

Usage:
    python -m examples.finetune_lora runs/quickstart --data my_texts/ --output runs/adapter --merge runs/merged
    python -m examples.finetune_lora runs/quickstart --adapter runs/adapter --data more/ --output runs/further
    python -m examples.finetune_lora runs/quickstart --adapter runs/adapter --steps 0 --merge runs/merged

The perplexity on held-out text of the same data is printed before and after. The adapter is an ordinary PEFT adapter:
`PeftModel.from_pretrained(model, "runs/adapter")` loads it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

from examples.saved_model import add_folder, load, one_line
from examples.text_data import (
    InputError,
    check_empty_folder,
    check_not_negative,
    check_positive,
    check_seed,
    encode,
    exit_code,
    gather_documents,
    split_documents,
)
from examples.train import Blocks, Collator
from examples.training import stays_on_cpu

RANK = 8


def check_options(options: argparse.Namespace) -> None:
    """Refuse at once what would fail, or lose somebody's files, minutes later."""
    check_positive(options, "rank", "batch_size", "sequence_length", "learning_rate")
    check_not_negative(options, "steps")
    if options.adapter is None and not options.steps:
        raise InputError("--steps 0 trains nothing: it needs --adapter.")
    if options.adapter is not None and (options.rank or options.targets):
        raise InputError("--rank and --targets are for a new adapter: the one that --adapter names has its own.")
    if (Path(options.base) / "adapter_config.json").is_file():
        raise InputError(f"{options.base} is an adapter: name the model it was made for, and this with --adapter.")
    if options.adapter is not None:
        check_adapter(options.adapter)
    check_seed(options.seed)
    if options.merge is not None and options.merge.resolve() == options.output.resolve():
        raise InputError(f"The adapter and the merged model cannot both be saved in {options.output}.")
    for folder in filter(None, (options.output, options.merge)):
        check_empty_folder(folder)


def check_adapter(folder: Path) -> None:
    """All its files are there; PEFT would look for a missing one on the Hub."""
    if not (folder / "adapter_config.json").is_file():
        raise InputError(f"{folder} is not a folder with a saved adapter.")
    if not any((folder / name).is_file() for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        raise InputError(f"The adapter {folder} has no weights: {SAFETENSORS_WEIGHTS_NAME} is missing.")


def load_base(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to adapt and its tokenizer."""
    model, tokenizer = load(folder)
    if tokenizer.eos_token_id is None:
        raise InputError(f"The tokenizer in {folder} has no eos token to put between documents.")
    return model, tokenizer


def new_adapter(model: PreTrainedModel, rank: int | None, targets: Sequence[str] | None) -> PeftModel:
    """LoRA for the named modules, by default the projections of the token mixers; it changes nothing yet."""
    rank = rank or RANK
    modules = "all-linear" if "all-linear" in (targets or ()) else targets
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if unknown := set(targets or ()) - known - {"all-linear"}:
        raise InputError(f"The model has no modules named {', '.join(sorted(unknown))}.")
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=modules)
    try:
        return get_peft_model(model, config)
    except ValueError as error:  # a norm, for example, has no matrix to adapt
        raise InputError(f"LoRA cannot adapt these modules: {one_line(error)}") from error


def saved_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The adapter of a folder, to be trained on."""
    try:
        config, weights = PeftConfig.from_pretrained(folder), load_peft_weights(folder, device="cpu")
    except Exception as error:  # whatever a damaged file leads to
        raise InputError(f"The adapter {folder} cannot be read: {one_line(error)}") from error
    if config.peft_type != "LORA":
        raise InputError(f"{folder} is a {config.peft_type.value} adapter, not one of LoRA.")
    config.inference_mode = False
    misfit = InputError(f"The adapter {folder} was made for a model of another shape than {model.name_or_path}.")
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:  # none of the modules it adapts is there
        raise misfit from error
    wanted = get_peft_model_state_dict(adapted)
    if {name: x.shape for name, x in weights.items()} != {name: x.shape for name, x in wanted.items()}:
        raise misfit
    set_peft_model_state_dict(adapted, weights)
    return adapted


def make_trainer(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], options: argparse.Namespace
) -> Trainer:
    """The stock Trainer, which writes nothing by itself."""
    training_documents, held_out_documents = split_documents(documents, seed=options.seed)
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 20,
        logging_steps=10,
        save_strategy="no",
        dataloader_pin_memory=torch.accelerator.is_available(),  # elsewhere it only warns
        use_cpu=stays_on_cpu(),
        report_to="none",
        label_names=["labels"],
        seed=options.seed,
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=Blocks(encode(tokenizer, training_documents), options.sequence_length),
        eval_dataset=Blocks(encode(tokenizer, held_out_documents), options.sequence_length, "evaluate"),
        data_collator=Collator(tokenizer.eos_token_id),
    )


def perplexity(trainer: Trainer) -> float:
    """Of the held-out text, token by token."""
    return math.exp(min(trainer.evaluate()["eval_loss"], 700.0))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_folder(parser, "base")
    parser.add_argument("--data", nargs="+", default=[], help="files, folders or datasets; none: Python's own source")
    parser.add_argument("--output", type=Path, default=Path("runs/adapter"), help="folder (default: %(default)s)")
    parser.add_argument("--adapter", type=Path, help="go on from this adapter instead of a new one")
    parser.add_argument("--merge", type=Path, help="also save the model with the adapter merged into it here")
    parser.add_argument("--rank", type=int, help=f"of a new adapter (default: {RANK})")
    parser.add_argument("--targets", nargs="+", help="modules to adapt, or all-linear (default: q, k, v and o_proj)")
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="at its peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, float]:
    """Train and save the adapter, and the merged model if that is wanted; the perplexity before and after."""
    check_options(options)
    model, tokenizer = load_base(options.base)
    documents = gather_documents(options.data, seed=options.seed)
    set_seed(options.seed)
    if options.adapter is None:
        adapted = new_adapter(model, options.rank, options.targets)
    else:
        adapted = saved_adapter(model, options.adapter)
    trainer = make_trainer(adapted, tokenizer, documents, options)
    results = {"trained_parameters": adapted.num_parameters(only_trainable=True), "steps": options.steps}
    results["perplexity_before"] = perplexity(trainer)
    if options.steps:
        trainer.train()
    results["perplexity_after"] = perplexity(trainer)
    adapted.save_pretrained(options.output)
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(
        f"{results['trained_parameters']:,} trained parameters; perplexity {results['perplexity_before']:.4g} before, "
        f"{results['perplexity_after']:.4g} after {options.steps:,} steps; adapter in {options.output}"
    )
    if options.merge is not None:
        adapted.merge_and_unload().save_pretrained(options.merge)
        tokenizer.save_pretrained(options.merge)
        print(f"Merged model in {options.merge}")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
