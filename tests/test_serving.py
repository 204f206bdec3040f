"""Serving with the library's own tools: `transformers serve` and `chat`, pipelines and streamers."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx2 as httpx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TextIteratorStreamer, pipeline

from tests.conftest import PAD, VOCABULARY

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
WORDS = ["<unk>", "user", "assistant", "<pad>", *(f"w{i}" for i in range(4, VOCABULARY))]
PROMPTS = ["w5", "w9 w40 w7", "w12 w33 w4 w4 w20 w6", "w30 w31", "w47 w46 w45 w44 w43", "w8 w9 w8 w9"]
TOKENS = 12


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a word, so that any output of a random model is text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", chat_template=TEMPLATE, padding_side="left"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory, make_model):
    """Saved models with their tokenizer: all layers recurrent, and a hybrid."""
    folders = {}
    for name in ("interdomain", "interdomain-softmax"):
        folders[name] = str(tmp_path_factory.mktemp(name))
        make_model(name).save_pretrained(folders[name])
        word_tokenizer().save_pretrained(folders[name])
    _write_whole_code(*folders.values())
    return folders


def _write_whole_code(*folders: str) -> None:
    """What a server asks for beyond `generate`, as examples/serving.md says."""
    subprocess.run([sys.executable, "-m", "modeling_interdomain.saving.whole", *folders], check=True, timeout=120)


@pytest.fixture(scope="module")
def alone(make_model):
    """`alone(name, prompt)`: the answer of a model in this process, greedy."""

    def answer(name: str, prompt: str) -> str:
        tokenizer = word_tokenizer()
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = make_model(name).generate(**inputs, max_new_tokens=TOKENS, pad_token_id=PAD)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def command(*arguments: str, **environment: str) -> dict:
    """What runs the installed `transformers` as a user does, without the package on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    environment |= {"COLUMNS": "200", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    return {"args": [str(Path(sys.executable).with_name("transformers")), *arguments], "env": environment}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serve(folder: Path, *arguments: str):
    """The real server in a process of its own; gives its address and its log file."""
    pytest.importorskip("openai", reason="needs transformers[serving]")
    pytest.importorskip("uvicorn", reason="needs transformers[serving]")
    port = free_port()
    address, log = f"http://127.0.0.1:{port}", folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            **command("serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        deadline = time.monotonic() + 120
        while not answers(address):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield address, log
    finally:
        process.terminate()
        process.wait(timeout=30)


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.ConnectError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("server"), "--trust-remote-code") as (address, _):
        yield address


def ask(address: str, model: str, prompt: str, stream: bool = False) -> list[str]:
    """The pieces of an answer, in the order in which the stock client receives them."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
    request = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    response = client.chat.completions.create(**request, max_tokens=TOKENS, stream=stream)
    if not stream:
        return [response.choices[0].message.content]
    return [piece for chunk in response if (piece := chunk.choices[0].delta.content)]


# The server.


@pytest.mark.parametrize("name", ["interdomain-softmax", pytest.param("interdomain", marks=pytest.mark.slow)])
def test_users_at_once_get_what_each_gets_alone(server, folders, alone, name):
    expected = [alone(name, prompt) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    with ThreadPoolExecutor(len(PROMPTS)) as users:
        replies = users.map(lambda i: ask(server, folders[name], PROMPTS[i], stream=i % 2 == 0), range(len(PROMPTS)))
    assert ["".join(pieces).strip() for pieces in replies] == expected


def test_an_answer_is_streamed_token_by_token(server, folders, alone):
    pieces = ask(server, folders["interdomain"], PROMPTS[1], stream=True)
    assert len(pieces) == TOKENS
    assert "".join(pieces).strip() == alone("interdomain", PROMPTS[1])


def test_chat_in_a_terminal(server, folders, alone, tmp_path):
    arguments = ["chat", folders["interdomain"], server, "do_sample=False", f"max_new_tokens={TOKENS}", "--user", "me"]
    # Offline, the client of huggingface_hub in this program refuses every address, even one of this computer.
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    # After an answer of the longest length the program asks whether to go on.
    typed = f"{PROMPTS[2]}\nn\n!exit\n"
    run = subprocess.run(
        **command(*arguments, **online), input=typed, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert alone("interdomain", PROMPTS[2]) in " ".join(run.stdout.split())


@pytest.mark.slow
def test_continuous_batching(folders, alone, tmp_path):
    """Users are answered together, and what one asks wrongly is told to that one alone."""
    name = "interdomain-softmax"
    arguments = [folders[name], "--trust-remote-code", "--continuous-batching", "--cb-max-batch-tokens", "4"]
    with serve(tmp_path, *arguments) as (address, log), ThreadPoolExecutor(len(PROMPTS)) as users:
        asked = [users.submit(ask, address, folders[name], x, stream=i % 2 == 0) for i, x in enumerate(PROMPTS)]
        empty = {"model": folders[name], "prompt": "", "stream": True}
        refusal = httpx.post(f"{address}/v1/completions", json=empty, timeout=60).text
        replies = ["".join(reply.result()).strip() for reply in asked]
        assert replies == [alone(name, prompt) for prompt in PROMPTS]
        assert "has no tokens; give it at least one" in refusal
        assert answers(address)
    assert log.read_text().count("CB: True") == len(PROMPTS) + 1


@pytest.mark.slow
def test_continuous_batching_falls_back_and_says_so(make_model, tmp_path):
    """Where a model asks for beams the server answers in turn."""
    model, folder = make_model(), str(tmp_path / "beams")
    model.generation_config.num_beams = 2
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    _write_whole_code(folder)
    with serve(tmp_path, folder, "--trust-remote-code", "--continuous-batching") as (address, log):
        assert len("".join(ask(address, folder, PROMPTS[0])).split()) == TOKENS
    assert log.read_text().count("InterdomainForCausalLM does not support continuous batching.") == 1


@pytest.mark.slow
def test_without_trust_the_server_says_what_is_missing(folders, tmp_path):
    pytest.importorskip("uvicorn", reason="needs transformers[serving]")
    run = subprocess.run(
        **command("serve", folders["interdomain"]), capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert run.returncode != 0
    assert "trust_remote_code=True" in run.stderr


# Pipelines and streamers.


@pytest.fixture(scope="module", params=["interdomain", "interdomain-softmax"])
def generate(request, make_model):
    model = make_model(request.param)
    return pipeline("text-generation", model=model, tokenizer=word_tokenizer(), device="cpu")


def test_pipeline_batches_give_what_each_prompt_gives_alone(generate):
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "return_full_text": False}
    each = [generate(prompt, **settings)[0]["generated_text"] for prompt in PROMPTS]
    together = [answer[0]["generated_text"] for answer in generate(PROMPTS, batch_size=3, **settings)]
    assert together == each
    assert len(set(each)) == len(PROMPTS)


def test_pipeline_answers_a_chat(generate, alone):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]]
    conversations = generate(chats, batch_size=3, max_new_tokens=TOKENS, do_sample=False)
    name = "interdomain" if "softmax" not in generate.model.config.mixers_per_layer else "interdomain-softmax"
    for chat, conversation in zip(chats, conversations, strict=True):
        *asked, answer = conversation[0]["generated_text"]
        assert asked == chat and answer["role"] == "assistant"
        assert answer["content"].strip() == alone(name, chat[0]["content"])


def test_streamer_gives_the_text_while_it_is_written(folders, make_model):
    model, tokenizer = make_model(), AutoTokenizer.from_pretrained(folders["interdomain"])
    inputs = tokenizer(PROMPTS[1], return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, max_new_tokens=TOKENS)[0, inputs["input_ids"].shape[1] :]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs, "max_new_tokens": TOKENS, "streamer": streamer})
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert len(pieces) > TOKENS // 2
    assert "".join(pieces).strip() == tokenizer.decode(expected)


# A model says what it cannot do.


def test_saved_folder_names_the_class_the_server_asks_for(folders):
    from transformers import AutoConfig

    auto_map = AutoConfig.from_pretrained(folders["interdomain"], trust_remote_code=True).auto_map
    assert auto_map["AutoModelForDecision"] == auto_map["AutoModelForCausalLM"]
    assert torch.float64 == AutoConfig.from_pretrained(folders["interdomain"], trust_remote_code=True).dtype
