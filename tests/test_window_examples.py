"""A Llama that was converted to windows with a memory, in the programs of examples/: a novel read once, asked often."""

import copy

import pytest
import torch

from conversion.__main__ import main as convert
from examples import chat_page, long_context, states, text_data
from modeling_interdomain import StateStore
from tests.test_conversion import save_llama
from tests.test_examples import some_documents
from tests.test_long_context import columns, continuation
from tests.test_serving import TEMPLATE

NOVEL = "".join(some_documents(count=14, lines=20))
QUESTIONS = ("Who is alpha 3? ", "And beta? ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with windows of 8 tokens and 2 sinks, and a tokenizer that has a chat template."""
    place = tmp_path_factory.mktemp("converted")
    save_llama(place / "llama", num_key_value_heads=2)
    tokenizer = text_data.train_tokenizer(some_documents(), vocab_size=300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place / "llama")
    options = ["--window", "8", "--sinks", "2", "--state-size", "6"]
    assert convert(["from-llama", str(place / "llama"), str(place / "windows"), *options]) == 0
    return place / "windows"


def test_a_novel_is_read_once_and_asked_often(folder, tmp_path, capsys):
    (tmp_path / "novel.txt").write_text(NOVEL)
    state = ["--state", str(tmp_path / "novel.safetensors")]
    assert long_context.main([str(folder), str(tmp_path / "novel.txt"), *state, "--tokens", "0"]) == 0
    table = columns(capsys.readouterr().out)
    assert table[0][0] == 1024 and len(table) > 1 and len({row[3] for row in table}) == 1  # it does not grow
    model, tokenizer = long_context.load_interdomain(str(folder))
    before = (tmp_path / "novel.safetensors").read_bytes()
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(NOVEL, add_special_tokens=False)["input_ids"]]])
    for question in QUESTIONS:
        assert long_context.main([str(folder), *state, "--ask", question, "--tokens", "8"]) == 0
        asked, said = capsys.readouterr().out.removesuffix("\n").split("\n", 2)[1:]
        assert asked == question and said
        assert continuation(model.double(), tokenizer, ids, f"user {question} assistant ").startswith(said)
    assert (tmp_path / "novel.safetensors").read_bytes() == before


def test_the_page_answers_and_reads_what_is_new_alone(folder):
    """A turn of a chat; then the novel, and questions that begin with it, which cost their own tokens."""
    model, tokenizer = long_context.load_interdomain(str(folder))
    model.generation_config.max_length = None
    plain, model.prompt_store = copy.deepcopy(model), StateStore()
    read = []
    for prompt in (QUESTIONS[0], NOVEL, *(NOVEL + question for question in QUESTIONS)):
        ids, before = chat_page.encode_prompt(tokenizer, prompt), model.prompt_store.tokens_read
        *_, (text, figures) = chat_page.answer(model, tokenizer, prompt, 5, temperature=0)
        written = plain.generate(ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids))
        assert text == tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert f"<b>{ids.shape[1] + 4:,}</b>" in figures
        read.append(model.prompt_store.tokens_read - before)
        tokenizer.chat_template = None
    assert read[1] > 1024 and max(read[2:]) < 30


def test_questions_of_a_chat_share_the_novel_before_them(folder):
    """The second finds where it parts from the first; from there on each costs its question."""
    model, tokenizer = long_context.load_interdomain(str(folder))
    model.generation_config.max_length = None
    model.prompt_store, read = StateStore(), []
    for question in (*QUESTIONS, "And gamma 2? ", "Which line is last?"):
        before = model.prompt_store.tokens_read
        list(chat_page.answer(model, tokenizer, NOVEL + question, 2, temperature=0))
        read.append(model.prompt_store.tokens_read - before)
    assert min(read[:2]) > 1024 and max(read[2:]) < model.prompt_store.block + 40


def test_what_states_make_possible_is_shown_or_refused_in_a_sentence(folder, capsys):
    assert states.main([str(folder), "--tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert "Several prompts at once:" in said and "with prompt lookup" in said
    assert said.count("Layer 0 (window) does not hold one linear state with a decay that is the same for all") == 2
    assert "No layer of this model has a map of which token answered." in said
