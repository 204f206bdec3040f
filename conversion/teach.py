"""Teach a converted Llama: each memory what its layer's attention sees, then the whole what the Llama predicts."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from conversion.carry import memories, window_report, windows
from conversion.distill import (
    EVERYTHING,
    Groups,
    Loss,
    Progress,
    Stage,
    distillation_loss,
    finetuning_loss,
    in_bfloat16,
    train_stages,
)
from conversion.from_llama import read_tokenizer, source_folder
from conversion.gguf_files import SMOLLM2
from conversion.measure import between, nats_by_position, octaves
from conversion.reading import read_config
from conversion.shares import attended, start_share
from conversion.writing import (
    DTYPES,
    add_folders,
    check_space,
    check_target,
    finish,
    open_working_folder,
)
from examples.quickstart import smoothed
from examples.report import markdown_table, write_report
from examples.saved_model import load_model
from examples.text_data import (
    InputError,
    check_positive,
    check_seed,
    encode,
    gather_documents,
    random_batches,
    split_documents,
)
from model_cards.model_card import render
from modeling_interdomain import InterdomainConfig
from modeling_interdomain.parameter_groups import RECURRENCE_PARAMETERS

# Parts of the names of what a window with a memory has and a Llama has not; in PEFT's adapters there is "lora_".
MEMORY = ("share_proj", "q_map", "k_map", "v_map", "memory_gate", "write_", "point_weight", "recurrence")
ADAPTER = ("lora_",)
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STAGES = ("layers", "whole", "long")
CONVERTED = ("source", "layers", "window", "cost_of_layers")  # what a report of `from-llama` says of itself
RECURRENCE_RATE = 1e-3  # at most: a step too large makes the state forget or explode
SHARE = -2.0  # the logit of the share with which a memory starts when teaching begins: with less it learns slower


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser, "folder that `from-llama` wrote, or an earlier target")
    parser.add_argument("--teacher", required=True, help="the Llama: folder, GGUF file, or its name on the Hub")
    parser.add_argument("--data", nargs="+", required=True, help="files or folders with text, to learn and measure on")
    parser.add_argument("--layers-steps", type=int, default=500, help="each layer alone (default: %(default)s)")
    parser.add_argument("--whole-steps", type=int, default=200, help="the predictions (default: %(default)s)")
    parser.add_argument("--long-steps", type=int, default=0, help="of longer texts (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="end each stage then at the latest, and its schedule with it")
    parser.add_argument("--lengths", type=lengths, default="512,1024,2048", help="tokens a text (default: %(default)s)")
    parser.add_argument("--long-lengths", type=lengths, default="2048,4096", help="in the last stage (%(default)s)")
    parser.add_argument("--tokens-a-step", type=int, default=4096, help="at least one text (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="of the memory (default: %(default)s)")
    parser.add_argument(
        "--whole-learning-rate", type=float, default=1e-4, help="of the Llama's weights (default: %(default)s)"
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="adapters of the Llama's weights instead of these")
    parser.add_argument(
        "--bf16", action="store_true", help="products of matrices in bfloat16, where the processor is made for it"
    )
    parser.add_argument("--max-bytes", type=int, default=64_000_000, help="text to read (default: %(default)s)")
    parser.add_argument("--held-out-bytes", type=int, default=40_000, help="to measure on (default: %(default)s)")
    parser.add_argument("--save-steps", type=int, default=50, help="between saved states (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches (default: %(default)s)")


def lengths(text: str) -> list[int]:
    """ "512,1024" as numbers."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 2:
        raise argparse.ArgumentTypeError(f'must be lengths of texts such as "512,1024", not "{text}"')
    return found


def check_options(options: argparse.Namespace) -> None:
    check_positive(options, "tokens_a_step", "learning_rate", "whole_learning_rate", "lora", "max_bytes", "save_steps")
    check_positive(options, "held_out_bytes", "minutes")
    check_seed(options.seed)
    if min(_steps(options).values()) < 0 or not any(_steps(options).values()):
        raise InputError("There is nothing to teach: steps must not be negative, and one stage must have some.")


def _steps(options: argparse.Namespace) -> dict[str, int]:
    return {stage: getattr(options, f"{stage}_steps") for stage in STAGES}


def read_source(options: argparse.Namespace) -> tuple[Path, InterdomainConfig, Path]:
    """The converted folder, its configuration, and the folder of a teacher of the same shape."""
    source = source_folder(options.source)
    config = read_config(source)
    if not isinstance(config, InterdomainConfig) or not windows(config):
        raise InputError(
            f"{options.source} has no window layers to teach: `python -m conversion from-llama` makes such a folder."
        )
    if options.layers_steps and not memories(config):
        raise InputError(f"The windows of {options.source} have no memory to teach alone: add --layers-steps 0.")
    folder = source_folder(options.teacher)
    teacher = read_config(folder)
    if isinstance(teacher, InterdomainConfig):
        raise InputError(f"{options.teacher} cannot teach {options.source}: name the Llama that was converted.")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(teacher, name, None) != getattr(config, name):
            raise InputError(
                f"{options.teacher} cannot teach {options.source}: its {name} is {getattr(teacher, name, None)}, not "
                f"{getattr(config, name)}."
            )
    return source, config, folder


def run(options: argparse.Namespace) -> None:
    check_options(options)
    check_target(options)
    source, config, folder = read_source(options)
    if longest(options) > config.max_position_embeddings:
        raise InputError(
            f"--lengths and --long-lengths name {longest(options):,} tokens, more than the "
            f"{config.max_position_embeddings:,} that {options.teacher} was made for."
        )
    tokenizer = read_tokenizer(source, config.vocab_size)
    texts = read_texts(tokenizer, options)
    model = load_model(source, dtype=torch.float32)
    dtype = DTYPES[options.dtype] if options.dtype else config.dtype or torch.float32
    check_space(options.target, 4 * 4 * model.num_parameters())  # itself, two moments, and the state of before
    print(describe(config, texts, options))
    if options.dry_run:
        return

    working = open_working_folder(options)
    set_seed(options.seed)
    progress = Progress(working / "training.pt", options.save_steps)
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = teach(model, teacher, texts, options, progress)
    print(table(progress.perplexity))
    report = report_of(source, config, options, progress)
    beside = [source, folder]
    finish(model.to("cpu", dtype), beside, options.target, report, lambda x: write_beside(x, report, options))


class Texts(NamedTuple):
    """What is learned from and what is measured on, each as one stream of tokens."""

    tokens: torch.Tensor
    held_out: torch.Tensor


def read_texts(tokenizer, options: argparse.Namespace) -> Texts:
    """All of the text, before anything is written: a wrong name or too little of it costs nothing."""
    documents = gather_documents(options.data, options.max_bytes, options.seed)
    documents, held_out = split_documents(documents, options.held_out_bytes, seed=options.seed)
    tokens = encode(tokenizer, documents)
    for stage, steps in _steps(options).items():
        if steps:
            random_batches(tokens, 1, max(lengths_of(stage, options)))  # raises where there are too few
    return Texts(tokens, encode(tokenizer, held_out))


def lengths_of(stage: str, options: argparse.Namespace) -> list[int]:
    return options.long_lengths if stage == "long" else options.lengths


def longest(options: argparse.Namespace) -> int:
    """Tokens of the longest text that is learned from."""
    return max(length for stage, steps in _steps(options).items() if steps for length in lengths_of(stage, options))


def describe(config: InterdomainConfig, texts: Texts, options: argparse.Namespace) -> str:
    """What will be done, in a few lines."""
    what = "LoRA" if options.lora else "all weights"
    stages = {"layers": "each memory", "whole": f"the predictions, {what}", "long": f"longer texts, {what}"}
    lines = [
        f"{steps:,} steps of {stages[stage]}: texts of {', '.join(map(str, lengths_of(stage, options)))} tokens"
        for stage, steps in _steps(options).items()
        if steps
    ]
    return "\n".join(
        [
            f"{options.source}, taught by {options.teacher} -> {options.target}",
            f"{len(memories(config))} of {config.num_hidden_layers} layers have a memory; {len(texts.tokens):,} tokens",
            *lines,
        ]
    )


def mixed_batches(tokens: torch.Tensor, options: argparse.Namespace, stage: str) -> Iterator[torch.Tensor]:
    """Endless batches of about so many tokens each, `[B, T + 1]`, of which every length has as many."""
    seed = options.seed + STAGES.index(stage)
    batches = [
        random_batches(tokens, max(1, options.tokens_a_step // length), length, seed + 1000 * number)
        for number, length in enumerate(lengths_of(stage, options))
    ]
    while True:
        for each in batches:
            yield next(each)


def teach(
    model: PreTrainedModel, teacher: PreTrainedModel, texts: Texts, options: argparse.Namespace, progress: Progress
) -> PreTrainedModel:
    """Train the stages as asked, measured before and after each; the model, without adapters."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher, model = teacher.to(device).eval(), model.to(device).eval()
    teacher.requires_grad_(False)
    rows = held_out_rows(texts.held_out, options)

    def measure(measured: Any = model) -> dict[str, float]:
        return between(nats_by_position(measured, rows), octaves(rows.shape[1] - 1))

    progress.measured("teacher", lambda: measure(teacher))
    progress.measured("untaught", measure)
    stages = make_stages(model, teacher, options)
    if progress.state["stage"] is None:
        start_memories(model, next(mixed_batches(texts.tokens, options, "layers")).to(device))
    train_stages(
        model,
        stages,
        lambda number: mixed_batches(texts.tokens, options, stages[number].name),
        progress,
        measure,
    )
    return without_adapters(model)


def make_stages(model: PreTrainedModel, teacher: PreTrainedModel, options: argparse.Namespace) -> list[Stage]:
    """Those that have steps."""

    def loss_of_layers() -> Loss:
        return distillation_loss(teacher, model, memories(model.config), MEMORY)

    def loss_of_predictions() -> Loss:
        if options.lora:
            add_adapters(model, options.lora)
        return finetuning_loss(teacher, model, 1.0, MEMORY + ADAPTER if options.lora else EVERYTHING)

    makers = {"layers": loss_of_layers, "whole": loss_of_predictions, "long": loss_of_predictions}

    def loss_of(stage: str) -> Loss:
        return in_bfloat16(makers[stage]()) if options.bf16 else makers[stage]()

    seconds = None if options.minutes is None else 60 * options.minutes
    return [
        Stage(name, partial(loss_of, name), steps, 0.0, partial(groups_of, model, options, name), seconds)
        for name, steps in _steps(options).items()
        if steps
    ]


def groups_of(model: PreTrainedModel, options: argparse.Namespace, stage: str) -> Groups:
    """The memory learns fast, its recurrence no faster than is safe, the Llama's own weights slowly; adapters between.

    After the first stage the memory, too, learns a third as fast.
    """
    rate = options.learning_rate if stage == "layers" else options.learning_rate / 3
    rest = 10 * options.whole_learning_rate if options.lora else options.whole_learning_rate
    rates = {"memory": rate, "recurrence": min(rate, RECURRENCE_RATE), "llama": rest}
    groups: dict[str, list[torch.nn.Parameter]] = {name: [] for name in rates}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if any(part in name for part in MEMORY):
            is_recurrence = name.rpartition(".")[2] in RECURRENCE_PARAMETERS
            groups["recurrence" if is_recurrence else "memory"].append(parameter)
        else:
            groups["llama"].append(parameter)
    return [{"name": n, "params": p, "lr": rates[n], "weight_decay": 0.0} for n, p in groups.items() if p]


@torch.no_grad()
def start_memories(model: PreTrainedModel, batch: torch.Tensor) -> None:
    """Let what a memory answers begin as large as what the softmax of its head answers to a batch, with a share of 12%.

    Converted, it is small and has a share of 2%, so that it changes little; what has learned is left as it is.
    """
    for layer, found in attended(model, memories(model.config), batch[:1, :-1]).items():
        mixer = model.model.layers[layer].token_mixer
        gate = mixer.memory_gate
        if (gate == gate.flatten()[0]).all():
            gate.copy_(found.size[:, None].expand_as(gate))
            start_share(mixer, found, SHARE)


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """PEFT's adapters inside the model, of which none is added twice."""
    from peft import LoraConfig, inject_adapter_in_model

    if not any("lora_" in name for name, _ in model.named_parameters()):
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ADAPTED, init_lora_weights=True)
        inject_adapter_in_model(config, model)


def without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """The model with what adapters have learned in its own weights."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    return model


def held_out_rows(tokens: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """Held-out text in rows as long as the longest that is learned from, `[N, T + 1]`; fewer tokens are one row."""
    length = min(longest(options) + 1, len(tokens))
    return tokens[: len(tokens) // length * length].view(-1, length)


def table(perplexity: dict[str, dict[str, float]]) -> str:
    """A row for each time the model was measured, perplexities by the place in the text."""
    names = {"teacher": "the Llama", "untaught": "before", "layers": "each layer taught", "whole": "the whole taught"}
    names["long"] = "taught on longer texts"
    source = perplexity["teacher"]["all"]
    rows = [
        [names[name], *(f"{x:.2f}" for x in found.values()), f"{found['all'] / source:.3f}"]
        for name, found in perplexity.items()
    ]
    return markdown_table(["perplexity of tokens", *perplexity["teacher"], "of the Llama's"], rows)


def report_of(source: Path, config: InterdomainConfig, options: argparse.Namespace, progress: Progress) -> dict:
    """What was done and measured."""
    before = source / "conversion_report.json"
    origin = json.loads(before.read_text()) if before.is_file() else {}
    steps = _steps(options)
    return {
        "source": options.source,
        "teacher": name_of(options.teacher),
        "conversion": origin.get("conversion", {name: origin[name] for name in CONVERTED if name in origin}),
        "window": window_report(config) | {"layers": windows(config)},
        "steps": {stage: len(progress.losses.get(stage, [])) for stage in steps},
        "tokens_per_step": options.tokens_a_step,
        "learning_rate": options.learning_rate,
        "whole_learning_rate": options.whole_learning_rate,
        "seconds": {stage: round(taken, 1) for stage, taken in progress.seconds.items()},
        "lengths": {stage: lengths_of(stage, options) for stage in STAGES if steps[stage]},
        "lora": options.lora,
        "bf16": options.bf16,
        "data": ", ".join(Path(x).name for x in options.data),
        "perplexity": progress.perplexity,
        "losses": progress.losses,
    }


def name_of(source: str) -> str:
    """Of a folder or file its own name, which says nothing of this computer; of a model of the Hub all of it."""
    return Path(source).resolve().name if Path(source).exists() else source


def write_beside(folder: Path, report: dict, options: argparse.Namespace) -> None:
    """The curve, the perplexities by position and the card, beside the weights."""
    with (folder / "teaching.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", "step", "loss"])
        for stage, losses in report["losses"].items():
            writer.writerows([stage, step, loss] for step, loss in enumerate(losses, start=1))
    plot_losses(report["losses"], folder / "teaching.png")
    curves = {
        name: {float(part.partition("-")[2]): x for part, x in found.items() if part != "all"}
        for name, found in report["perplexity"].items()
    }
    write_report("perplexity_by_position", curves, folder, "tokens read, up to", "perplexity")
    card(folder, report, options).save(folder / "README.md")


def plot_losses(losses: dict[str, list[float]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(losses) + 1, 3.5), layout="constrained")
    for axes, (stage, values) in zip(figure.subplots(1, len(losses), squeeze=False)[0], losses.items()):
        axes.plot(values, color="0.8")
        axes.plot(smoothed(values))
        axes.set(title=stage, xlabel="step", ylabel="error over variance" if stage == "layers" else "nats a token")
    figure.savefig(file, dpi=120)


def card(folder: Path, report: dict, options: argparse.Namespace) -> ModelCard:
    """The card of any model here, with what was converted, how it was taught and what was measured."""
    found = render(folder, options.target.name)
    window, teacher = report["window"], report["teacher"]
    taught = "; ".join(
        f"{steps:,} steps ({stage}) on texts of {', '.join(map(str, report['lengths'][stage]))} tokens"
        for stage, steps in report["steps"].items()
        if steps
    )
    rest = f"a state of {window['modes']} modes a head" if window["modes"] else "nothing"
    said = (
        f"Converted from {teacher}: {len(window['layers'])} of its layers see the last {window['tokens']:,} tokens and "
        f"the first {window['sinks']} as before, and keep {rest} of the others.\n\n"
        f"- Data: {report['data']}\n- Teaching: {taught}; about {report['tokens_per_step']:,} tokens a step\n"
        f"- {'LoRA of rank ' + str(report['lora']) if report['lora'] else 'All weights'} in stages after the first\n"
    )
    found.text = found.text.replace(
        "It continues text; it was\nnot taught to follow instructions or to hold a conversation.",
        f"It answers as {teacher} does,\nas far as windows and states go.",
    )
    undocumented = "Not documented by whoever published this model."
    found.text = found.text.replace(undocumented, said).replace("No results were given.", table(report["perplexity"]))
    if teacher == SMOLLM2:
        return found
    found.data.license = "other"
    found.text = found.text.replace(
        "The code and this model are under the licence in the file LICENSE.",
        f"The code is under Apache-2.0, the weights are under the licence of {teacher}.",
    )
    return found
