"""Convert a Llama-style checkpoint: all weights carried over, some or all layers given an Interdomain mixer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed

from conversion.carry import (
    Window,
    carried_weights,
    check_weights,
    convert,
    interdomain_config,
    kept_layers,
    new_names,
    parse_layers,
    window_report,
)
from conversion.choose import conversion_costs, costliest, measured_rows
from conversion.distill import Progress, Stage, distillation_loss, finetuning_loss, perplexity, train_stages
from conversion.from_training import expected_weights
from conversion.gguf_files import SMOLLM2, gguf_file, smollm2_of_package, unpack
from conversion.reading import read_config, read_weights, tensor_bytes, weight_files
from conversion.writing import (
    add_folders,
    check_space,
    check_target,
    finish,
    gigabytes,
    in_dtype,
    open_working_folder,
    saved_dtype,
)
from examples.text_data import (
    InputError,
    check_positive,
    check_seed,
    encode,
    gather_documents,
    random_batches,
    split_documents,
)

POSITIVE = ("batch_size", "sequence_length", "learning_rate", "max_bytes", "held_out_bytes", "save_steps")
# Not the other formats in which many repositories hold the same weights again.
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
DISTILLED, FINETUNED = "distilled", "fine-tuned"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser, "folder or GGUF file of the Llama, or its name on the Hub")
    parser.add_argument(
        "--layers",
        default="all",
        help='all, none, every-other, a list such as "0,2,4-7", or with a window auto:N, all but the N whose '
        "conversion costs most on the text of --data (default: %(default)s)",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=64,
        metavar="W",
        help="the last tokens that a layer sees as before, beside its state of the others; with 0 the layers become "
        '"interdomain" layers, which answer nothing before they are trained (default: %(default)s)',
    )
    parser.add_argument(
        "--sinks", type=int, default=4, help="first tokens that a window sees, too (default: %(default)s)"
    )
    parser.add_argument(
        "--state-size", type=int, default=64, help="basis functions, M; of a window 0, none (default: %(default)s)"
    )
    parser.add_argument("--data", nargs="+", default=[], help="files or folders with text, to train and measure on")
    parser.add_argument(
        "--distill-steps", type=int, default=0, help="with --window 0: steps of the new mixers alone (default: 0)"
    )
    parser.add_argument(
        "--finetune-steps", type=int, default=0, help="with --window 0: steps of the whole model (default: 0)"
    )
    parser.add_argument(
        "--kl-weight",
        type=float,
        default=0.5,
        help="share of the teacher's predictions in the loss of the whole model (default: %(default)s)",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="at its peak (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--max-bytes", type=int, default=16_000_000, help="text to read (default: %(default)s)")
    parser.add_argument("--held-out-bytes", type=int, default=100_000, help="to measure on (default: %(default)s)")
    parser.add_argument("--save-steps", type=int, default=100, help="between saved states (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")


def check_options(options: argparse.Namespace) -> None:
    if options.state_size or not options.window:
        check_positive(options, "state_size")
    check_positive(options, *POSITIVE)
    if min(options.distill_steps, options.finetune_steps) < 0 or not 0 <= options.kl_weight <= 1:
        raise InputError("--distill-steps and --finetune-steps must not be negative, --kl-weight lies in 0 to 1.")
    if options.distill_steps + options.finetune_steps and not options.data:
        raise InputError("--distill-steps and --finetune-steps need text to learn from: add --data.")
    check_seed(options.seed)
    check_window(options)


def check_window(options: argparse.Namespace) -> None:
    """What goes with a window, and what without."""
    if min(options.window, options.sinks) < 0:
        raise InputError("--window and --sinks must not be negative.")
    if not options.window:
        if options.layers.startswith("auto"):
            raise InputError(f"--layers {options.layers} measures what windows cost: leave --window 0 away.")
        return
    if options.distill_steps + options.finetune_steps:
        raise InputError(
            "A window starts as the Llama: convert it without steps, then `python -m conversion teach` it. Steps train "
            "the layers of --window 0."
        )
    if options.layers.startswith("auto") and not options.data:
        raise InputError(f"--layers {options.layers} measures on a text: add --data.")


def source_folder(source: str) -> Path:
    """The local folder, that of a GGUF file, or the downloaded one of a name on the Hub; of one model a package's."""
    if (packed := gguf_file(Path(source))) is not None:
        return unpack(packed)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=HUB_FILES))
    except Exception as error:  # the many ways in which a name is unknown or a network absent
        if source != SMOLLM2:
            message = f"{source} is neither a folder nor a model of the Hub that could be downloaded."
            raise InputError(message) from error
    try:
        return smollm2_of_package()
    except InputError as error:
        raise InputError(f"{source} could not be downloaded from the Hub, nor had as a package: {error}") from error


def read_tokenizer(folder: Path, vocab_size: int, option: str = "--data") -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens the model knows, and that can end a document; `option` is what asks for it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the many ways in which one of its files is damaged or missing
        raise InputError(f"{folder} has no tokenizer that can be loaded, which {option} needs.") from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"The tokenizer in {folder} has no eos token to put between documents.")
    if len(tokenizer) > vocab_size:
        raise InputError(f"The tokenizer in {folder} has {len(tokenizer):,} tokens, the model {vocab_size:,}.")
    return tokenizer


def describe(config, sizes: dict[str, int], options: argparse.Namespace, dtype: torch.dtype) -> str:
    """What will be done, in a few lines."""
    kind = "window" if options.window else "interdomain"
    converted = [i for i, name in enumerate(config.mixers_per_layer) if name == kind]
    kept = [i for i, name in enumerate(config.mixers_per_layer) if name == "softmax"]
    seen = ""
    if options.window:
        memory = f"a state of {config.state_size} modes" if config.window_memory else "nothing of the others"
        seen = f"window layers see the last {options.window:,} tokens and the first {options.sinks}, and {memory}\n"
    steps = f"{options.distill_steps:,} steps of the new mixers, {options.finetune_steps:,} of the whole model"
    return (
        f"{options.source} -> {options.target}\n"
        f"{kind} layers: {_numbers(converted)}; softmax layers: {_numbers(kept)}\n{seen}"
        f"{sizes['carried']:,} parameters carried over, {sizes['new']:,} new; {str(dtype).removeprefix('torch.')}, "
        f"{gigabytes(sizes['bytes'])}\n"
        f"training: {steps}"
    )


def _numbers(layers: list[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def sizes_of(config, dtype: torch.dtype) -> dict[str, int]:
    """Parameters carried and new, and the bytes of the saved weights."""
    expected = in_dtype(expected_weights(config), dtype)
    new = sum(expected[name].numel() for name in new_names(config))
    total = sum(x.numel() for x in expected.values())
    return {"carried": total - new, "new": new, "bytes": tensor_bytes(list(expected.values()))}


def run(options: argparse.Namespace) -> None:
    check_options(options)
    check_target(options)
    folder = source_folder(options.source)
    source = read_config(folder)
    layers = parse_layers(options.layers, source.num_hidden_layers)
    if options.distill_steps and not layers:
        raise InputError("--distill-steps has nothing to teach: --layers names no layers.")
    window = Window(options.window, options.sinks) if options.window else None
    config = interdomain_config(source, layers, options.state_size, window)
    weights = carried_weights(read_weights(weight_files(folder)), source)
    check_weights(config, weights, folder)
    dtype = saved_dtype(options, weights)
    tokenizer = read_tokenizer(folder, config.vocab_size) if options.data else None
    if options.data and options.sequence_length > config.max_position_embeddings:
        raise InputError(
            f"--sequence-length {options.sequence_length:,} is longer than the {config.max_position_embeddings:,} "
            "tokens that the source was made for."
        )
    texts = read_texts(tokenizer, options) if tokenizer is not None else None
    costs: list[float] = []
    if kept := kept_layers(options.layers, source.num_hidden_layers):
        interdomain_config(source, layers[kept:], options.state_size, window)  # raises where none can be kept
        costs = conversion_costs(config, weights, measured_rows(texts.tokens, window.size, options.sequence_length))
        layers = sorted(set(layers) - set(costliest(costs, kept)))
        config = interdomain_config(source, layers, options.state_size, window)
    sizes = sizes_of(config, dtype)
    # While it trains: weights, two moments of the optimiser and the state of before, all in float32.
    states = 2 * 3 * 4 * (sizes["carried"] + sizes["new"]) if options.distill_steps + options.finetune_steps else 0
    check_space(options.target, sizes["bytes"] + states)
    print(describe(config, sizes, options, dtype))
    if options.dry_run:
        return

    working = open_working_folder(options)
    set_seed(options.seed)
    perplexities: dict[str, float] = {}
    if texts is None:
        model = convert(config, weights, dtype)
    else:
        model = convert(config, weights, torch.float32)
        perplexities = teach(model, folder, tokenizer, texts, layers, options, working / "training.pt")
        model = model.to("cpu", dtype)
        print(table(perplexities))
    report = {
        "source": options.source,
        "layers": layers,
        "parameters": sizes,
        "distill_steps": options.distill_steps,
        "finetune_steps": options.finetune_steps,
        "perplexity": perplexities,
    }
    if window is not None:
        report["window"] = window_report(config)
    if costs:
        report["cost_of_layers"] = costs
    finish(model, [folder], options.target, report)


class Texts(NamedTuple):
    """What is learned from, as one stream of tokens, and the documents that are measured on."""

    tokens: torch.Tensor
    held_out: list[str]


def read_texts(tokenizer, options: argparse.Namespace) -> Texts:
    """All of the text, before anything is written: a wrong name or too little of it costs nothing."""
    documents = gather_documents(options.data, options.max_bytes, options.seed)
    documents, held_out = split_documents(documents, options.held_out_bytes, seed=options.seed)
    tokens = encode(tokenizer, documents)
    random_batches(tokens, options.batch_size, options.sequence_length)  # raises where there are too few
    return Texts(tokens, held_out)


def teach(model, folder: Path, tokenizer, texts: Texts, layers: list[int], options, file: Path) -> dict:
    """Train the model on the text as asked and measure it before and after; the perplexities."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    teacher.requires_grad_(False)
    model.to(device)
    progress = Progress(file, options.save_steps)

    def measure(measured=model) -> float:
        return perplexity(measured, tokenizer, texts.held_out, options.sequence_length)

    progress.measured("source", lambda: measure(teacher))
    progress.measured("converted", measure)
    rate = options.learning_rate
    stages = [
        Stage(DISTILLED, lambda: distillation_loss(teacher, model, layers), options.distill_steps, rate),
        Stage(FINETUNED, lambda: finetuning_loss(teacher, model, options.kl_weight), options.finetune_steps, rate),
    ]
    train_stages(
        model,
        [stage for stage in stages if stage.steps],
        lambda stage: random_batches(texts.tokens, options.batch_size, options.sequence_length, options.seed + stage),
        progress,
        measure,
    )
    return progress.perplexity


def table(perplexities: dict[str, float]) -> str:
    """One line for each time the model was measured."""
    source = perplexities["source"]
    rows = [f"{name:<12}{value:>12,.2f}{value / source:>12.2f}x" for name, value in perplexities.items()]
    return "\n".join([f"{'':<12}{'perplexity':>12}{'of source':>13}", *rows])
