"""Train a language model on text with the Trainer of Transformers and the optimiser of the paper.

Usage:
    python -m examples.train --config configuration/interdomain-small --data my_texts/ --output_dir runs/mine
    accelerate launch -m examples.train ...          # several processes, FSDP or DeepSpeed as accelerate is configured
    torchrun --nproc_per_node 2 -m examples.train ... --model runs/mine --fsdp_size 2 --save_only_model true    # FSDP2
    torchrun --nproc_per_node 2 -m examples.train ... --sequence_parallel 2       # each holds half of every sequence
    python -m examples.train ... --resume_from_checkpoint true      # goes on exactly where the last checkpoint was

`recipes/language-model.yaml` holds the defaults (another file: `--recipe`); fields of `transformers.TrainingArguments`
are options too, but for those of the optimiser, its schedule and epochs. The length of the run and of the warm-up are
counted in tokens. What is logged besides the loss: tokens per second, the model FLOPs utilisation (MFU) against the
matrix rate that this machine reaches in a large product, and of a model with experts how many of them its tokens use.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import is_accelerate_available

from examples.quickstart import load_config
from examples.saved_model import load_model, load_tokenizer, read_config
from examples.sequence_parallel import SequenceParallelism, SequenceParallelTrainer
from examples.text_data import (
    InputError,
    check_empty_folder,
    check_folder,
    check_not_negative,
    check_positive,
    check_seed,
    encode,
    exit_code,
    gather_documents,
    read_documents,
    split_documents,
    train_tokenizer,
)
from examples.training import (
    ExpertUsage,
    check_finite,
    cosine_with_warmup,
    parameter_groups,
    read_recipe,
    stays_on_cpu,
)
from modeling_interdomain import TokenMixer

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "recipes" / "language-model.yaml"
# What the Trainer would take and this recipe decides itself.
UNUSED = {"lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "num_train_epochs"}
UNUSED |= {"optim", "optim_args", "optim_target_modules"}
# Fields of a configuration in which a run may differ from the checkpoint that it goes on from.
ONLY_HOW = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "backend",
    "chunk_size",
    "dtype",
    "transformers_version",
    "use_cache",
}
# The Trainer, FSDP and DeepSpeed keep the state of an optimizer in files or folders whose names begin so.
OPTIMIZER = ("optimizer", "global_step")
# A file of the output folder keeps the options that decide which numbers follow from a checkpoint.
RECORD = "run.json"
RATES = ("learning_rate", "recurrence_learning_rate", "final_learning_rate", "weight_decay")
OF_RECIPE = ("seed", *RATES, "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "sequence_length")
OF_TEXT = ("streaming", "separate_documents")


@dataclass
class Recipe(TrainingArguments):
    """The Trainer's own arguments, and those of the paper's optimiser."""

    recurrence_learning_rate: float = field(default=1e-3, metadata={"help": "Cap for state space parameters."})
    final_learning_rate: float = field(default=1e-5, metadata={"help": "Where the cosine ends."})
    total_tokens: int = field(default=0, metadata={"help": "Length of the run; max_steps, if given, goes first."})
    warmup_tokens: int = field(default=0, metadata={"help": "Length of the linear warm-up."})
    sequence_length: int = field(default=2048, metadata={"help": "Tokens a sequence."})
    sequence_parallel: int = field(
        default=1, metadata={"help": "Processes that hold a piece of every sequence each, and pass states on."}
    )

    def __post_init__(self):
        super().__post_init__()
        if str(self.resume_from_checkpoint).lower() == "false":  # the option is text, and any text would be a yes
            self.resume_from_checkpoint = None

    def tokens_per_step(self) -> int:
        """Of all processes, accumulated gradients included."""
        groups = self.world_size // self.sequence_parallel
        return self.train_batch_size * self.gradient_accumulation_steps * groups * self.sequence_length

    def num_steps(self) -> int:
        """As many as were asked for, or as the tokens need."""
        return self.max_steps if self.max_steps > 0 else math.ceil(self.total_tokens / self.tokens_per_step())


@dataclass
class Text:
    """What is learned from, and what kind of model."""

    config: str = field(
        default=str(REPOSITORY / "configuration" / "interdomain-small"),
        metadata={"help": "Folder with config.json; not used with --model."},
    )
    model: str | None = field(
        default=None, metadata={"help": "Checkpoint to go on from, with its tokenizer, instead of a new model."}
    )
    fsdp_size: int = field(
        default=1, metadata={"help": "Processes that a --model is sharded over while it is loaded (FSDP2)."}
    )
    data: list[str] = field(
        default_factory=list, metadata={"help": "Files, folders or dataset names; none: Python's standard library."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Folder of a tokenizer; none: one is learned."})
    vocab_size: int = field(default=4096, metadata={"help": "Tokens to learn, without a tokenizer."})
    max_bytes: int = field(default=64_000_000, metadata={"help": "Text read into memory at most, without streaming."})
    held_out_bytes: int = field(default=200_000, metadata={"help": "Text to evaluate on (streaming: none)."})
    streaming: bool = field(default=False, metadata={"help": "Read and tokenize while training, in file order."})
    separate_documents: bool = field(
        default=False, metadata={"help": "No document sees the one before it (cu_seq_lens_q), all in one packed row."}
    )


class Blocks(Dataset):
    """Consecutive blocks of a stream of tokens `[N]`, each of `length` tokens; what is left over is not used."""

    def __init__(self, tokens: torch.Tensor, length: int, purpose: str = "train"):
        if len(tokens) < length:
            raise InputError(
                f"The text to {purpose} on has {len(tokens):,} tokens, fewer than one sequence of {length:,}."
            )
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index * self.length : (index + 1) * self.length]}


class StreamedBlocks(IterableDataset):
    """The same from files that are read as they are needed, over and over."""

    def __init__(self, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int):
        self.sources, self.tokenizer, self.length = list(sources), tokenizer, length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rest = torch.empty(0, dtype=torch.long)
        while True:
            count = 0
            for document in read_documents(self.sources):
                rest = torch.cat([rest, encode(self.tokenizer, [document])[:-1]])
                while len(rest) >= self.length:
                    count += 1
                    yield {"input_ids": rest[: self.length]}
                    rest = rest[self.length :]
            if not count:
                raise InputError(f"The text has fewer tokens than one sequence of {self.length:,}.")


@dataclass
class Collator:
    """Stacks blocks, or lays them into one row of documents, each of which begins with the boundary token."""

    boundary: int
    separate_documents: bool = False

    def __call__(self, blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([block["input_ids"] for block in blocks])
        labels = ids.clone()
        if not self.separate_documents:
            return {"input_ids": ids, "labels": labels}
        labels[:, 0] = -100  # what stands before a block in the row is another block's end
        starts = ids == self.boundary
        starts[:, 0] = True
        begins = starts.flatten().nonzero()[:, 0]
        ends = torch.cat([begins, begins.new_tensor([ids.numel()])])
        positions = torch.arange(ids.numel()) - torch.repeat_interleave(begins, ends.diff())
        row = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: x.reshape(1, -1) for name, x in row.items()} | {"cu_seq_lens_q": ends.int()}


class InterdomainTrainer(SequenceParallelTrainer):
    """The Trainer with the optimiser, the schedule and the log of this recipe."""

    args: Recipe
    matrix_rate: float | None = None
    usage: ExpertUsage | None = None

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            model = self.model if model is None else model
            args = self.args
            groups = parameter_groups(model, args.learning_rate, args.weight_decay, args.recurrence_learning_rate)
            betas, eps = (args.adam_beta1, args.adam_beta2), args.adam_epsilon
            self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = schedule(optimizer, self.args, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], *arguments, **options) -> None:
        """Adds tokens/s since the last log line, the model FLOPs utilisation, and how many experts are in use.

        A loss that is not finite ends the run.
        """
        for name in ("loss", "train_loss", "eval_loss"):
            check_finite(float(logs.get(name, 0.0)), self.state.global_step, name)
        now, step = time.perf_counter(), self.state.global_step
        if "loss" in logs:
            before, first = getattr(self, "_last_log", (None, 0))
            if before is not None and step > first:
                rate = (step - first) * self.args.tokens_per_step() / (now - before)
                logs["tokens_per_second"] = round(rate, 1)
                logs["mfu"] = round(rate * flops_per_token(self.model) / self._matrix_rate(), 4)
            if self.usage is not None:
                logs |= self.usage.read()
            self._last_log = (time.perf_counter(), step)
        super().log(logs, *arguments, **options)

    def _matrix_rate(self) -> float:
        """Operations a second that all processes together reach in a large matrix product; measured once."""
        if self.matrix_rate is None:
            dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
            self.matrix_rate = matrix_rate(self.args.device, dtype) * self.args.world_size
        return self.matrix_rate


def schedule(optimizer: torch.optim.Optimizer, args: Recipe, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up counted in tokens, then a cosine down to `final_learning_rate` for every group."""
    warmup = min(1.0, args.warmup_tokens / args.tokens_per_step() / steps)

    def factor_of(peak: float):
        final = min(1.0, args.final_learning_rate / peak) if peak else 1.0
        return lambda step: cosine_with_warmup(min(1.0, (step + 1) / steps), warmup, final)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [factor_of(group["lr"]) for group in optimizer.param_groups])


def flops_per_token(model: torch.nn.Module) -> float:
    """Operations of forward and backward a token: 6 for each weight of a matrix, embeddings aside (Kaplan et al.).

    What a token mixer and experts add beyond their projections is left out, so the utilisation is understated.
    """
    matrices = {
        id(module.weight): module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)
    }
    return 6.0 * sum(matrices.values())


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 2048, seconds: float = 0.3) -> float:
    """Operations per second of a square matrix product here."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best, started = math.inf, time.perf_counter()
    while time.perf_counter() - started < seconds or best == math.inf:
        begin = time.perf_counter()
        a @ b
        synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[Recipe, Text]:
    """Options over the recipe's lines over the Trainer's defaults."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", type=Path, default=RECIPE)
    chosen, given = first.parse_known_args(arguments)
    recipe = chosen.recipe
    if not recipe.is_file():
        raise InputError(f"The recipe {recipe} does not exist.")
    refused = ", ".join(sorted(UNUSED))
    epilog = f"--recipe FILE: YAML with other defaults of these options (default: {RECIPE}). Refused: {refused}."
    parser = HfArgumentParser((Recipe, Text), description=__doc__.splitlines()[0], epilog=epilog)
    defaults = {"output_dir": "runs/train", "logging_steps": 10, "report_to": "none", "save_total_limit": 2}
    defaults["logging_nan_inf_filter"] = False  # it would write 0 for a loss that is not a number
    defaults["use_cpu"] = stays_on_cpu()
    defaults["dataloader_pin_memory"] = torch.accelerator.is_available()  # elsewhere it only warns
    lines = read_recipe(recipe)
    known = {action.dest for action in parser._actions}
    if unknown := sorted(map(str, lines.keys() - known)):
        raise InputError(f"The recipe {recipe} has unknown fields: {', '.join(unknown)}.")
    options = [option.lstrip("-").partition("=")[0].replace("-", "_") for option in given if option.startswith("--")]
    if unused := sorted(UNUSED.intersection([*lines, *options])):
        raise InputError(
            f"This recipe has its own optimiser, schedule and length, and no use for {', '.join(unused)}: AdamW, "
            "--warmup_tokens, a cosine to --final_learning_rate, and --total_tokens or --max_steps."
        )
    parser.set_defaults(**defaults | lines)
    try:
        args, text, unknown = parser.parse_args_into_dataclasses(given, return_remaining_strings=True)
    except (ValueError, ImportError, OSError) as error:  # what the Trainer's arguments check, import and read
        raise InputError(" ".join(str(error).split())) from error
    if unknown:
        raise InputError(f"Unknown options: {' '.join(unknown)}; --help lists those there are.")
    return args, text


def check_options(args: Recipe, text: Text) -> None:
    """Refuse at once what would fail, or lose somebody's files, minutes later."""
    counts = ("sequence_length", "sequence_parallel", "per_device_train_batch_size", "gradient_accumulation_steps")
    check_positive(args, *counts, "per_device_eval_batch_size")
    check_positive(text, "max_bytes")
    check_not_negative(args, *RATES, "warmup_tokens")
    check_not_negative(text, "held_out_bytes")
    check_seed(args.seed)
    if args.sequence_length < 2:
        raise InputError("--sequence_length must be at least 2, a token and the next, not 1.")
    source = text.model or text.config
    if not (Path(source) / "config.json").is_file():
        raise InputError(f"{source} has no config.json.")
    if text.fsdp_size > 1 and not text.model:
        raise InputError("--fsdp_size needs --model: parameters are sharded while a checkpoint is loaded.")
    if text.fsdp_size > 1 and not args.save_only_model:
        raise InputError("--fsdp_size needs --save_only_model true: the Trainer cannot resume such a run.")
    if text.fsdp_size > 1 and text.fsdp_size != args.world_size:
        raise InputError(f"--fsdp_size {text.fsdp_size} needs as many processes, and there are {args.world_size}.")
    if text.tokenizer is None and text.model is None and text.streaming:
        raise InputError("--streaming needs --tokenizer: one cannot be learned from text that is not read yet.")
    if text.streaming and not text.data:
        raise InputError("--streaming needs --data.")
    if text.streaming and args.dataloader_num_workers > 1:
        raise InputError("--streaming reads the text once: leave --dataloader_num_workers at 0 or 1.")
    if text.streaming and text.separate_documents and args.world_size > 1:
        raise InputError(
            "--streaming with --separate_documents needs one process: documents of two cannot be dealt out."
        )
    if args.sequence_parallel > 1:
        check_sequence_parallel(args, text)
    if args.max_steps <= 0 and args.total_tokens <= 0:
        raise InputError("The run needs an end: --total_tokens or --max_steps.")
    total = args.num_steps() * args.tokens_per_step()
    if args.warmup_tokens >= total:
        raise InputError(
            f"The warm-up of {args.warmup_tokens:,} tokens is no shorter than the run of {total:,}: set "
            "--warmup_tokens, for example to a tenth of them."
        )
    output = Path(args.output_dir)
    if args.resume_from_checkpoint:
        check_folder(output)
    else:
        check_empty_folder(output, "choose another --output_dir, or --resume_from_checkpoint true to go on there")


def check_sequence_parallel(args: Recipe, text: Text) -> None:
    """What cannot be cut into pieces."""
    pieces = args.sequence_parallel
    if not is_accelerate_available("1.12.0"):
        raise InputError("--sequence_parallel needs accelerate 1.12 or newer: pip install -U accelerate.")
    if args.world_size % pieces:
        raise InputError(
            f"--sequence_parallel {pieces} needs a multiple of as many processes, and there are {args.world_size} "
            "(torchrun --nproc_per_node; on CPUs with --use_cpu true)."
        )
    if pieces > args.sequence_length:
        raise InputError(f"--sequence_parallel {pieces} is more than the {args.sequence_length} tokens of a sequence.")
    if text.streaming:
        raise InputError("--sequence_parallel cannot take --streaming: accelerate deals such text out row by row.")
    if args.torch_compile:
        raise InputError("--sequence_parallel cannot take --torch_compile: no graph holds what processes exchange.")


def last_checkpoint(args: Recipe) -> str | None:
    """The checkpoint to go on from, or None for a fresh start."""
    wanted = args.resume_from_checkpoint
    if not wanted:
        return None
    if str(wanted).lower() != "true":
        if not Path(wanted).is_dir():
            raise InputError(f"The checkpoint {wanted} does not exist.")
        found = str(wanted)
    else:
        found = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if found is None:
        raise InputError(f"{args.output_dir} holds no checkpoint to go on from.")
    if not (Path(found) / TRAINER_STATE_NAME).is_file():  # written last
        raise InputError(f"The checkpoint {found} is incomplete: remove it to go on from the one before.")
    if not any(file.name.startswith(OPTIMIZER) for file in Path(found).iterdir()):
        raise InputError(
            f"The checkpoint {found} holds no optimizer, it was saved with --save_only_model true: begin a run of its "
            f"own from it, --model {found}."
        )
    done = json.loads((Path(found) / TRAINER_STATE_NAME).read_text())["global_step"]
    if done >= args.num_steps():
        raise InputError(f"The checkpoint {found} has done {done:,} steps, and the run ends at {args.num_steps():,}.")
    return found


def recorded(args: Recipe, text: Text) -> dict[str, object]:
    """What a run that goes on must have in common with the one that began: other numbers would follow, or none."""
    return {name: getattr(args, name) for name in OF_RECIPE} | {
        "tokens_per_step": args.tokens_per_step(),
        **{name: getattr(text, name) for name in OF_TEXT},
    }


def check_same_run(args: Recipe, text: Text, checkpoint: str | None) -> None:
    """Refuse to go on with other options than the run began with; folders of before have no record of all."""
    if checkpoint is None or not (file := Path(checkpoint).parent / RECORD).is_file():
        return
    kept, ours = json.loads(file.read_text()), recorded(args, text)
    if differ := [name for name in ours if ours[name] != kept.get(name, ours[name])]:
        name = differ[0]
        raise InputError(
            f"{checkpoint} is of a run with {name} {kept[name]}, not {ours[name]}: go on with what it began with, "
            f"or begin a run of its own from it, --model {checkpoint}."
        )


def make_tokenizer(
    args: Recipe, text: Text, documents: Sequence[str], checkpoint: str | None
) -> PreTrainedTokenizerBase:
    """The one of the checkpoint to go on from, the one that was named, or a new one."""
    if checkpoint is not None and (kept := kept_tokenizer(Path(checkpoint))) is not None:
        tokenizer = load_tokenizer(kept)
        if text.tokenizer and load_tokenizer(text.tokenizer).get_vocab() != tokenizer.get_vocab():
            raise InputError(f"{checkpoint} has another tokenizer than {text.tokenizer}: leave --tokenizer out.")
        return tokenizer
    if (folder := text.tokenizer or text.model) is not None:
        tokenizer = load_tokenizer(folder)
        if tokenizer.eos_token_id is None:
            raise InputError(f"The tokenizer {folder} has no eos token to put between documents.")
        return tokenizer
    return train_tokenizer(documents, text.vocab_size)


def kept_tokenizer(checkpoint: Path) -> Path | None:
    """Where an interrupted run keeps its tokenizer: a checkpoint in pieces of several processes holds none."""
    folders = (checkpoint, checkpoint.parent / "tokenizer")
    return next((folder for folder in folders if (folder / "tokenizer_config.json").is_file()), None)


def check_same_model(model: PreTrainedModel, checkpoint: str | None) -> None:
    """Refuse to go on with another model than the run began with."""
    if checkpoint is None or not (Path(checkpoint) / "config.json").is_file():
        return
    ours, kept = (config.to_dict() for config in (model.config, read_config(Path(checkpoint))))
    differ = sorted(name for name in (ours.keys() | kept.keys()) - ONLY_HOW if ours.get(name) != kept.get(name))
    if differ:
        name = "model_type" if "model_type" in differ else differ[0]
        raise InputError(
            f"{checkpoint} is of another model: its {name} is {kept.get(name)}, not {ours.get(name)}; name the "
            "--config or --model that the run began with."
        )


def make_model(text: Text, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A new model of the named shape, or the checkpoint, sharded over the processes if that is wanted."""
    if text.model is None:
        return AutoModelForCausalLM.from_config(load_config(Path(text.config), tokenizer))
    shards = DistributedConfig(fsdp_size=text.fsdp_size) if text.fsdp_size > 1 else None
    model = load_model(text.model, distributed_config=shards)
    if len(tokenizer) > model.config.vocab_size:
        raise InputError(
            f"The tokenizer has {len(tokenizer):,} tokens and {text.model} only {model.config.vocab_size:,}: name the "
            "tokenizer that the checkpoint was trained with."
        )
    return model


def without_state(model: PreTrainedModel) -> str:
    """The names of mixers whose layers pass no state on to another process."""
    mixers = [module for module in model.modules() if isinstance(module, TokenMixer)]
    kinds = [name for name, mixer in zip(model.config.mixers_per_layer, mixers, strict=True) if not mixer.passes_state]
    return ", ".join(f'"{kind}"' for kind in dict.fromkeys(kinds))


def begin_folder(args: Recipe, text: Text, learned: PreTrainedTokenizerBase | None) -> None:
    """Write what a checkpoint may need to go on, once nothing is wrong with what was asked for."""
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with (output / RECORD).open("w" if args.resume_from_checkpoint else "x") as file:
            file.write(json.dumps(recorded(args, text), indent=2) + "\n")
    except FileExistsError as error:
        raise InputError(f"Another run has begun in {output} meanwhile: choose another --output_dir.") from error
    if learned is not None:
        learned.save_pretrained(output / "tokenizer")


def run(args: Recipe, text: Text) -> dict[str, float]:
    """Train, evaluate, save model and tokenizer; what was measured."""
    check_options(args, text)
    checkpoint = last_checkpoint(args)
    check_same_run(args, text, checkpoint)
    documents, held_out = [], []
    if not text.streaming:
        documents, held_out = split_documents(
            gather_documents(text.data, text.max_bytes, seed=args.seed), text.held_out_bytes, seed=args.seed
        )
    tokenizer = make_tokenizer(args, text, documents, checkpoint)
    length = args.sequence_length
    train_data: Dataset
    if text.streaming:
        train_data = StreamedBlocks(text.data, tokenizer, length)
    else:
        train_data = Blocks(encode(tokenizer, documents), length)
    eval_data = Blocks(encode(tokenizer, held_out), length, "evaluate") if held_out else None
    args.max_steps = args.num_steps()
    if args.sequence_parallel > 1:
        args.parallelism_config = SequenceParallelism.over(args.world_size, args.sequence_parallel)
    if text.streaming and text.separate_documents:
        args.accelerator_config.dispatch_batches = False  # it would cut a row of documents like a batch of rows
    if eval_data is None:
        args.eval_strategy = "no"
    set_seed(args.seed)
    model = make_model(text, tokenizer)
    check_same_model(model, checkpoint)
    if args.sequence_parallel > 1 and (names := without_state(model)):
        raise InputError(f"--sequence_parallel needs layers that pass a state on, and the model has {names}.")
    if args.process_index == 0:
        begin_folder(args, text, None if checkpoint or text.tokenizer or text.model else tokenizer)
    trainer = InterdomainTrainer(
        model=model,
        args=args,
        train_dataset=train_data,
        eval_dataset=eval_data,
        processing_class=tokenizer,
        data_collator=Collator(tokenizer.eos_token_id, text.separate_documents),
    )
    trainer.usage = ExpertUsage(model)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:  # autocast alone: this policy would round the recurrences, too
        plugin.mixed_precision_policy = None
    trainer.train(resume_from_checkpoint=checkpoint)
    results = {"steps": trainer.state.global_step, "tokens": trainer.state.global_step * args.tokens_per_step()}
    if eval_data is not None:
        results |= trainer.evaluate()
        results["perplexity"] = math.exp(min(results["eval_loss"], 700.0))
    trainer.save_model()
    if trainer.is_world_process_zero():
        (Path(args.output_dir) / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        rest = ", ".join(f"{name} {value:.4g}" for name, value in results.items() if name != "tokens")
        print(f"{results['tokens']:,} tokens; {rest}")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return exit_code(lambda: run(*parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
