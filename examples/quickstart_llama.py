"""The quickstart with a Llama: what the commands of conversion/ do one by one, and what has come of it in a table.

Called by `examples.quickstart`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from conversion.__main__ import main
from conversion.from_llama import source_folder
from examples.quickstart import make_room, smoothed, text_curve, write_documents
from examples.report import markdown_table
from examples.saved_model import load, replace_text
from examples.text_data import InputError, standard_library_prose
from modeling_interdomain import InterdomainCache

QUESTION = "What is the capital of France?"
WINDOW, SINKS = 64, 4
LENGTHS, TOKENS_A_STEP = "512,1024", 1024
STEPS = 10_000  # the minutes end the teaching
LONG = (512, 32_768)
SECONDS, LEAST = 3.0, 5  # of decoding at each length: so long, and at least so many tokens


def convert_and_teach(options: argparse.Namespace) -> None:
    """Convert the Llama, teach it for the minutes, measure and ask it, and leave a folder that loads anywhere."""
    output: Path = options.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="quickstart-") as place:
        windows, taught = Path(place, ".converted", "windows"), Path(place, output.name)
        text = Path(place, ".converted", "python-documentation.jsonl")
        text.parent.mkdir()
        if not options.data:
            write_documents(standard_library_prose(seed=options.seed), text)
        data = options.data or [str(text)]
        print(f"1. {options.llama}, all layers: windows of {WINDOW} tokens, {SINKS} sinks, and a state of the rest")
        _do("from-llama", options.llama, windows, "--window", WINDOW, "--sinks", SINKS, "--seed", options.seed)
        print(f"\n2. Each layer learns for {options.minutes:g} min what its attention saw beyond the window")
        steps = ["--layers-steps", STEPS, "--whole-steps", 0, "--minutes", options.minutes, "--lengths", LENGTHS]
        shape = ["--tokens-a-step", TOKENS_A_STEP, "--held-out-bytes", 16_000, "--save-steps", STEPS]
        shape += ["--seed", options.seed]
        shape += ["--bf16"] if is_faster_in_bfloat16() else []
        _do("teach", windows, taught, "--teacher", options.llama, "--data", *data, *steps, *shape)
        report = json.loads((taught / "conversion_report.json").read_text())
        print(f"\nThe error of the layers:\n{text_curve(smoothed(report['losses']['layers']))}")
        make_room(output)
        for file in taught.iterdir():
            os.replace(file, output / file.name)
    print("\n3. Beside the Llama")
    llama = AutoModelForCausalLM.from_pretrained(source_folder(options.llama), dtype=torch.float32).eval()
    model, tokenizer = load(output)
    decoding = {"teacher": decode(llama), "layers": decode(model)}
    report["decoding"] = decoding
    replace_text(output / "results.json", json.dumps(report, indent=2) + "\n")
    print(table(report["perplexity"], decoding))
    question = options.prompt or QUESTION
    print(f"\n4. {output} loads as any model of Transformers. Asked: {question}\n{answer(model, tokenizer, question)}")


def _do(name: str, *arguments: object) -> None:
    """A command of `python -m conversion`, whose refusals are ours."""
    if main([name, *map(str, arguments)]):
        raise InputError(f"The quickstart ends here: `python -m conversion {name}` said why.")


def is_faster_in_bfloat16() -> bool:
    """Whether matrices are multiplied sooner so; a processor that is not made for it takes many times as long."""

    def seconds(dtype: torch.dtype) -> float:
        x, found = torch.ones(512, 512, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu"), []
        for _ in range(8):
            started = time.perf_counter()
            (x @ x).sum().item()
            found.append(time.perf_counter() - started)
        return min(found)

    return seconds(torch.bfloat16) < 0.7 * seconds(torch.float32)


@torch.no_grad()
def decode(model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """Bytes of the cache, and tokens a second, after so many tokens; the Llama's are made up, not read."""
    found = {}
    for length in LONG:
        cache = cache_after(model, length)
        size = cache_bytes(cache)
        token = torch.ones(1, 1, dtype=torch.long)
        model(token, past_key_values=cache, use_cache=True)
        started, done = time.perf_counter(), 0
        while done < LEAST or time.perf_counter() - started < SECONDS:
            model(token, past_key_values=cache, use_cache=True)
            done += 1
        found[str(length)] = {"bytes": size, "tokens_per_second": done / (time.perf_counter() - started)}
    return found


def cache_after(model: PreTrainedModel, length: int) -> DynamicCache | InterdomainCache:
    """Keys and values of so many tokens, or a cache whose size hangs on none: after the first 512."""
    if model.config.model_type == "interdomain":
        ids = torch.ones(1, min(length, LONG[0]), dtype=torch.long, device=model.device)
        return model(ids, use_cache=True, logits_to_keep=1).past_key_values
    config, cache = model.config, DynamicCache()
    shape = 1, config.num_key_value_heads, length, config.head_dim or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2)), layer)
    return cache


def cache_bytes(cache: DynamicCache | InterdomainCache) -> int:
    if isinstance(cache, InterdomainCache):
        return cache.state_bytes()
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def table(perplexity: dict[str, dict[str, float]], decoding: dict[str, dict[str, dict[str, float]]]) -> str:
    """Perplexities by the place in the text; memory and speed where they were measured."""
    names = {"teacher": "the Llama", "untaught": "windows, before", "layers": "windows, taught"}
    rows = []
    for name, label in names.items():
        measured = decoding.get(name, decoding["layers"])  # teaching changes no shape
        cells = [f"{x:.1f}" for x in perplexity[name].values()]
        cells += [f"{measured[str(length)]['bytes'] / 1e6:.1f} MB" for length in LONG]
        cells += [f"{measured[str(length)]['tokens_per_second']:.1f}" for length in LONG]
        rows.append([label, *cells])
    places = [f"perplexity {place}" for place in perplexity["teacher"]]
    sizes = [f"cache at {length:,}" for length in LONG] + [f"tokens/s at {length:,}" for length in LONG]
    return markdown_table(["", *places, *sizes], rows)


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, tokens: int = 60) -> str:
    """What the model says to a question, greedily: through the chat template where there is one."""
    if tokenizer.chat_template is None:
        inputs = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
    else:
        messages = [{"role": "user", "content": question}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options)
    written = model.generate(**inputs.to(model.device), max_new_tokens=tokens, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    return tokenizer.decode(written, skip_special_tokens=True).strip()
