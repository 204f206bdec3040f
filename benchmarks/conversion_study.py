"""What a converted Llama recovers: all layers replaced, distilled and fine-tuned for minutes, against where it began.

A tiny Llama learns Wikipedia here, `python -m conversion from-llama` replaces all of its attention, and the perplexity
is taken after every stage. Two controls say what the figures are worth: the Llama with its attention silenced, which is
all that there is to lose, and the Llama trained on for as many steps, which is what the extra steps alone would gain.

    python -m benchmarks.conversion_study --data ../shared/data     # a quarter of an hour on one core
    python -m benchmarks.conversion_study --table                   # the table as markdown
"""

import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import readme, studies
from benchmarks.harness import RESULTS, footnote, machine, markdown, read
from conversion.__main__ import main as convert
from conversion.distill import perplexity
from examples.quickstart import save_checkpoint
from examples.text_data import encode, gather_documents, random_batches, split_documents, train_tokenizer
from examples.training import train
from modeling_interdomain import InterdomainCache, InterdomainForCausalLM

FILE = RESULTS / "conversion_study.json"
RUNS = Path("runs/conversion_study")
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
TRAINING = {"source_steps": 500, "distill_steps": 100, "finetune_steps": 100, "batch_size": 8, "sequence_length": 256}
RATES = {"source": 3e-3, "conversion": 1e-3}
STATE_SIZE, MAX_BYTES, HELD_OUT_BYTES = 32, 8_000_000, 100_000
LENGTHS = (256, 2048, 8192)


def documents(data: Path) -> tuple[list[str], list[str]]:
    """The text that the conversion, too, learns from, and the text that both are measured on."""
    found = gather_documents([str(data / "corpus" / "wiki" / "train-000.parquet")], MAX_BYTES)
    return split_documents(found, HELD_OUT_BYTES)


def make_source(folder: Path, data: Path, training: dict = TRAINING) -> None:
    """Train the Llama and its tokenizer, and save both."""
    torch.manual_seed(0)
    text, _ = documents(data)
    tokenizer = train_tokenizer(text, SHAPE["vocab_size"])
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **ends, pad_token_id=tokenizer.pad_token_id))
    batches = random_batches(encode(tokenizer, text), training["batch_size"], training["sequence_length"])
    _train(model, batches, training["source_steps"], RATES["source"])
    save_checkpoint(model, tokenizer, folder)


def _train(model, batches, steps: int, learning_rate: float) -> None:
    for progress in train(model, batches, steps=steps, learning_rate=learning_rate):
        if progress.step % 50 == 0:
            print(f"step {progress.step}: loss {progress.loss:.3f}", flush=True)
    model.eval()


def convert_source(source: Path, target: Path, data: Path, training: dict = TRAINING) -> dict:
    """The perplexities of the command line's report, and its seconds."""
    started = time.perf_counter()
    arguments = [str(source), str(target), "--overwrite", "--window", "0", "--state-size", str(STATE_SIZE)]
    arguments += ["--data", str(data / "corpus" / "wiki" / "train-000.parquet"), "--max-bytes", str(MAX_BYTES)]
    arguments += ["--held-out-bytes", str(HELD_OUT_BYTES), "--learning-rate", str(RATES["conversion"])]
    for name in ("distill_steps", "finetune_steps", "batch_size", "sequence_length"):
        arguments += [f"--{name.replace('_', '-')}", str(training[name])]
    if code := convert(["from-llama", *arguments]):
        raise SystemExit(code)
    report = json.loads((target / "conversion_report.json").read_text())
    return report | {"seconds": time.perf_counter() - started}


def controls(source: Path, data: Path, training: dict = TRAINING) -> dict[str, float]:
    """Perplexities of the Llama without attention, and trained on as long as the converted model."""
    text, held_out = documents(data)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = LlamaForCausalLM.from_pretrained(source).eval()
    silent = [layer.self_attn.o_proj.register_forward_hook(lambda *_: torch.zeros(())) for layer in model.model.layers]
    found = {"without attention": perplexity(model, tokenizer, held_out, training["sequence_length"])}
    for hook in silent:
        hook.remove()
    batches = random_batches(encode(tokenizer, text), training["batch_size"], training["sequence_length"], seed=1)
    steps = training["distill_steps"] + training["finetune_steps"]
    _train(model, batches, steps, RATES["conversion"])
    return found | {"source, trained on": perplexity(model, tokenizer, held_out, training["sequence_length"])}


@torch.no_grad()
def cache_bytes(model, lengths: tuple[int, ...] = LENGTHS) -> dict[str, int]:
    """The bytes that a decoder holds after so many tokens, counted in its cache."""
    found = {}
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        if isinstance(cache, InterdomainCache):
            found[str(length)] = cache.state_bytes()
        else:
            found[str(length)] = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)
    return found


def run(data: Path, folder: Path = RUNS, training: dict = TRAINING) -> dict:
    """The whole study; a source that is there already is used again."""
    source, target = folder / "llama", folder / "interdomain"
    if not (source / "config.json").is_file():
        make_source(source, data, training)
    converted = convert_source(source, target, data, training)
    models = {
        "llama": AutoModelForCausalLM.from_pretrained(source).eval(),
        "interdomain": InterdomainForCausalLM.from_pretrained(target).eval(),
    }
    return {
        "training": training,
        "parameters": converted["parameters"],
        "conversion_seconds": converted["seconds"],
        "perplexity": converted["perplexity"] | controls(source, data, training),
        "cache_bytes": {name: cache_bytes(model) for name, model in models.items()},
    }


def table(record: dict) -> str:
    found, training = record["perplexity"], record["training"]
    labels = {
        "source": "the Llama",
        "without attention": "its attention silenced",
        "converted": "all layers Interdomain, before training",
        "distilled": f"after {training['distill_steps']} steps of the mixers alone",
        "fine-tuned": f"after {training['finetune_steps']} steps of the whole model",
        "source, trained on": "the Llama, trained on for as many steps",
    }
    rows = [
        [label, f"{found[name]:.1f}", f"{found[name] / found['source'] - 1:+.1%}"] for name, label in labels.items()
    ]
    lengths = list(record["cache_bytes"]["llama"])
    memory = "; ".join(
        f"{name}: " + ", ".join(f"{record['cache_bytes'][name][length]:,}" for length in lengths)
        for name in ("interdomain", "llama")
    )
    about = (
        f"{record['parameters']['carried']:,} parameters carried over, {record['parameters']['new']:,} new; one seed; "
        f"Wikipedia, windows of {training['sequence_length']} tokens; the conversion took "
        f"{record['conversion_seconds'] / 60:.1f} minutes. Bytes of the decoder's cache after "
        f"{', '.join(f'{int(length):,}' for length in lengths)} tokens: {memory}."
    )
    return f"{markdown(['', 'perplexity', 'against the Llama'], rows)}\n\n{about} {footnote(record)}"


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    if arguments.table:
        print(table(read("conversion_study")))
        return
    torch.set_num_threads(arguments.threads)
    record = run(arguments.data)
    record["machine"] = {**machine(), "command": "python -m benchmarks.conversion_study"}
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    readme.update()
    print(table(record))


if __name__ == "__main__":
    main()
