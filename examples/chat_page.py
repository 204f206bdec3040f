"""A page in the browser that shows a model writing, and the memory it does not need.

Prints the address of the page. The page streams the answer to a prompt and counts: tokens read and written, tokens per
second, the bytes of the cache, and those of the keys and values that a softmax model of the same shape would have kept.
A model with a chat template answers the prompt; any other continues it. Nothing is loaded from elsewhere. What a prompt
begins with is not read again: states of earlier prompts and answers are kept in memory, and with `--states` on disk.

Usage:
    pip install gradio
    python -m examples.chat_page runs/quickstart
    python -m examples.chat_page runs/quickstart --states states/
    python -m examples.chat_page runs/quickstart --port 8080 --share yes
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Thread

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList, TextIteratorStreamer

from examples.long_context import cache_bytes, load_interdomain, softmax_bytes
from examples.saved_model import PROMPT, add_folder
from examples.text_data import InputError, encode_beginning, exit_code
from modeling_interdomain import InterdomainCache, StateStore

FONTS = ["system-ui", "sans-serif"]  # of this computer: a theme's own would come from the network
USERS = 8  # whose answers are written at the same time; others wait
STYLE = """
.gradio-container { width: 100%; max-width: 60rem !important; margin: 0 auto !important }
footer { display: none !important }
.html-container { padding: 0 !important }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem }
@media (max-width: 40rem) { .figures { grid-template-columns: repeat(2, 1fr) } }
.figures div { display: flex; flex-direction: column; padding: .75rem 1rem }
.figures div { border: 1px solid var(--border-color-primary); border-radius: .5rem }
.figures b { font-size: 1.5rem; font-variant-numeric: tabular-nums; font-weight: 600 }
.figures span { opacity: .8; font-size: .85rem; margin-bottom: .5rem }
.figures i { height: .4rem; margin-top: auto; border-radius: .2rem; min-width: 2px }
.ours i { background: #2563eb } .theirs i { background: #f59e0b }
"""
# Follow the end of the answer, unless the reader has gone back.
FOLLOW = """() => {
    const text = document.querySelector("#answer textarea");
    if (text.scrollHeight - text.scrollTop - text.clientHeight < 200) text.scrollTop = text.scrollHeight;
}"""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """Token ids `[1, T]`: a turn of a chat where there is a template for it, otherwise text after a boundary."""
    if tokenizer.chat_template is None:
        return encode_beginning(tokenizer, prompt)
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt")["input_ids"]


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, temperature: float
) -> Iterator[tuple[str, str]]:
    """The text so far and its figures, whenever there is more of it; closing the iterator ends the generation.

    What `generate` raises in its thread is raised here.
    """
    ids = encode_prompt(tokenizer, prompt).to(model.device)
    cache, stopped, errors = InterdomainCache(model.config), Event(), []
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=600)
    settings = {"do_sample": temperature > 0, "max_new_tokens": tokens, "pad_token_id": tokenizer.pad_token_id}
    settings["attention_mask"] = torch.ones_like(ids)  # a pad token in the prompt is no hole
    if temperature > 0:
        settings["temperature"] = temperature

    def generate() -> None:
        try:
            stop = StoppingCriteriaList([lambda ids, _: ids.new_full((len(ids),), stopped.is_set(), dtype=torch.bool)])
            model.generate(ids, past_key_values=cache, streamer=streamer, stopping_criteria=stop, **settings)
        except Exception as error:  # whatever it is, the page shows it
            errors.append(error)
            streamer.end()

    thread = Thread(target=generate, daemon=True)
    thread.start()
    text, started, first = "", 0.0, 0
    try:
        for piece in streamer:
            text += piece
            seen = cache.get_seq_length()
            if not started:
                started, first = time.perf_counter(), seen
            speed = (seen - first) / max(time.perf_counter() - started, 1e-9)
            yield text, figures(model, cache, speed)
        thread.join()  # the states are kept that the next prompt may begin with
    finally:
        stopped.set()
    if errors:
        raise errors[0]


def figures(model: PreTrainedModel, cache: InterdomainCache, speed: float) -> str:
    """The four numbers as HTML, the last two with bars of the same scale."""
    tokens = cache.get_seq_length()
    ours, theirs = cache_bytes(cache), softmax_bytes(model.config, tokens, model.dtype)
    longest = max(ours, theirs, 1)
    cells = [
        ("tokens", f"{tokens:,}", "tokens read and written", None),
        ("speed", f"{speed:,.0f}", "tokens a second", None),
        ("ours", in_bytes(ours), "cache of this model", ours / longest),
        ("theirs", in_bytes(theirs), "keys and values of softmax attention", theirs / longest),
    ]
    html = ""
    for name, number, meaning, share in cells:
        bar = "" if share is None else f'<i style="width: {share:.1%}"></i>'
        html += f'<div class="{name}"><b>{number}</b><span>{meaning}</span>{bar}</div>'
    return f'<div class="figures">{html}</div>'


def in_bytes(count: int) -> str:
    """Three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def build_page(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str):
    import gradio

    def reply(prompt: str, tokens: float, temperature: float) -> Iterator[tuple[str, str]]:
        yield from answer(model, tokenizer, prompt, int(tokens), temperature)

    mixers = " and ".join(dict.fromkeys(model.config.mixers_per_layer))
    with gradio.Blocks(title=name, analytics_enabled=False, fill_width=True) as page:
        gradio.Markdown(
            f"# {name}\n{model.num_parameters():,} parameters, {model.config.num_hidden_layers} layers of {mixers}"
        )
        prompt = gradio.Textbox(label="Prompt", lines=2, value=PROMPT, elem_id="prompt")
        with gradio.Row():
            tokens = gradio.Slider(1, 4096, value=256, step=1, label="Tokens to write", elem_id="length")
            temperature = gradio.Slider(0, 1.5, value=0.7, step=0.1, label="Temperature", elem_id="temperature")
        with gradio.Row():
            write = gradio.Button("Write", variant="primary", elem_id="write")
            stop = gradio.Button("Stop", elem_id="stop")
        numbers = gradio.HTML(figures(model, InterdomainCache(model.config), 0.0))
        text = gradio.Textbox(label="Answer", lines=14, max_lines=14, interactive=False, elem_id="answer")
        inputs, outputs = [prompt, tokens, temperature], [text, numbers]
        writing = [trigger(reply, inputs, outputs, show_progress="hidden") for trigger in (write.click, prompt.submit)]
        stop.click(None, cancels=writing)
        text.change(None, js=FOLLOW)
    page.queue(default_concurrency_limit=USERS)
    return page


def launch(page, port: int, share: bool) -> None:
    import gradio

    theme = gradio.themes.Default(primary_hue="blue", font=FONTS, font_mono=["ui-monospace", "monospace"])
    page.launch(
        server_name="127.0.0.1",
        server_port=port,
        share=share,
        theme=theme,
        css=STYLE,
        footer_links=[],
        show_error=True,
    )


def check_options(options: argparse.Namespace) -> None:
    try:
        import gradio  # noqa: F401  the page is made of it
    except ImportError as error:
        raise InputError("The page needs gradio: pip install gradio.") from error
    if not 0 < options.port < 65536:
        raise InputError(f"--port must be between 1 and 65535, not {options.port}.")
    if options.states is not None and Path(options.states).is_file():
        raise InputError(f"{options.states} is a file: name a folder for --states.")
    with socket.socket() as taken:
        if taken.connect_ex(("127.0.0.1", options.port)) == 0:
            raise InputError(f"Port {options.port} is in use: choose another with --port.")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_folder(parser)
    parser.add_argument("--port", type=int, default=7860, help="of this computer (default: %(default)s)")
    parser.add_argument(
        "--share", choices=("yes", "no"), default="no", help="also give the page an address on the internet, by Gradio"
    )
    parser.add_argument("--states", metavar="FOLDER", help="keep what was read here, too, for the next start")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    check_options(options)
    model, tokenizer = load_interdomain(options.folder)
    model.prompt_store = StateStore(options.states)
    launch(build_page(model, tokenizer, Path(options.folder).resolve().name), options.port, options.share == "yes")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
