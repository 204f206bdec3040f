"""A real checkpoint, converted and served to a client of OpenAI's interface: answers are those of Transformers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion.__main__ import main
from conversion.from_llama import SMOLLM2, source_folder
from examples.text_data import InputError
from tests.vllm.engines import TOLERANCE

TEXTS = [
    "The capital of France is",
    "Once upon a time",
    # Longer than the window and the sinks, so that it is read from the state, too.
    "To make a good soup one takes an onion, two carrots, some celery and a little oil. " * 12 + "Then one",
    "def fibonacci(n):",
]
NEW = 24


@pytest.mark.slow
def test_a_converted_smollm2_answers_clients(tmp_path):
    from benchmarks.vllm_cpu import Server

    try:
        source = source_folder(SMOLLM2)
    except InputError as error:
        pytest.skip(str(error))
    folder = tmp_path / "converted"
    assert main(["from-llama", str(source), str(folder), "--window", "64", "--dtype", "float32"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with Server(folder, "--max-model-len", "1024") as server:
        openai = pytest.importorskip("openai", reason="vLLM brings the client.")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")

        def ask(text: str):
            options = {"temperature": 0, "max_tokens": NEW, "logprobs": 1}
            return client.completions.create(model=str(folder), prompt=text, **options).choices[0]

        with ThreadPoolExecutor(len(TEXTS)) as together:
            answers = list(together.map(ask, TEXTS))
        question = [{"role": "user", "content": "What is the capital of France?"}]
        said = client.chat.completions.create(model=str(folder), messages=question, temperature=0, max_tokens=12)
    assert "The capital of France is Paris." in said.choices[0].message.content
    for text, answer in zip(TEXTS, answers, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        found = model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        tokens = found.sequences[0, inputs["input_ids"].shape[1] :]
        assert answer.text == tokenizer.decode(tokens, skip_special_tokens=True)
        wanted = torch.stack(found.logits)[:, 0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.logprobs.token_logprobs), wanted, atol=TOLERANCE, rtol=0)
