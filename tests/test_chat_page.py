"""The page of examples/chat_page.py as a user meets it: started by its command, used in a browser.

`python -m tests.test_chat_page runs/quickstart` takes examples/chat_page.png again, of the model in that folder.
"""

import copy
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from examples import chat_page, text_data
from examples.long_context import softmax_bytes
from modeling_interdomain import InterdomainCache
from tests.test_examples import some_documents
from tests.test_serving import TEMPLATE, free_port

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURE, PICTURE_SIZE = REPOSITORY / "examples" / "chat_page.png", (1000, 900)
ANSWER, FIGURES = "#answer textarea", ".figures b"
GREEDY = 0  # the temperature


@pytest.fixture(scope="module")
def tokenizer():
    return text_data.train_tokenizer(some_documents(), vocab_size=300)


@pytest.fixture(scope="module")
def folder(make_model, tokenizer, tmp_path_factory):
    """A random model in float64, all layers recurrent, that never ends a text by itself."""
    path = tmp_path_factory.mktemp("models") / "recurrent"
    make_model("interdomain", vocab_size=300).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def page_of(folder: Path):
    """The example in a process of its own; gives the process and its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.chat_page", str(folder), "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=REPOSITORY,
        text=True,
    )
    try:
        wait(lambda: answers(port) or process.poll() is not None, seconds=120)
        assert process.poll() is None, process.stdout.read()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def headless_browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def wait(condition, seconds: float = 60):
    """What the condition gives once it holds."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(0.05)
    return result


class Tab:
    """A tab of the browser with the page in it; its methods go to that tab first."""

    def __init__(self, driver, address: str):
        self.driver = driver
        driver.switch_to.new_window("tab")
        self.handle = driver.current_window_handle
        driver.get(address)
        wait(lambda: self.all("#write"))

    def all(self, selector: str) -> list:
        self.driver.switch_to.window(self.handle)
        return self.driver.find_elements("css selector", selector)

    def set(self, selector: str, value) -> None:
        from selenium.webdriver.common.keys import Keys

        (field,) = self.all(selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(str(value), Keys.TAB)

    def fill(self, prompt: str, length: int, temperature: float = 1.0) -> None:
        self.set("#prompt textarea", prompt)
        self.set("#length input[type=number]", length)
        self.set("#temperature input[type=number]", temperature)

    def press(self, button: str) -> None:
        self.all(button)[0].click()

    def write(self, *settings) -> None:
        self.fill(*settings)
        self.press("#write")

    def text(self) -> str:
        return self.all(ANSWER)[0].get_property("value")

    def figures(self) -> list[str]:
        """Tokens, tokens a second, our cache, keys and values."""
        return [figure.text for figure in self.all(FIGURES)]

    def tokens(self) -> int:
        return int(self.figures()[0].replace(",", ""))


@pytest.fixture(scope="module")
def page(folder):
    """`(process, address)` of one page for all tests."""
    pytest.importorskip("gradio", reason="needs gradio")
    with page_of(folder) as page:
        yield page


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("selenium", reason="needs selenium")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver")
    with headless_browser() as driver:
        yield driver


@pytest.fixture
def open_tab(page, browser):
    """`open_tab()`: one more tab with the page, closed after the test."""
    first = browser.window_handles[0]
    yield lambda: Tab(browser, page[1])
    for handle in browser.window_handles:
        if handle != first:
            browser.switch_to.window(handle)
            browser.close()
    browser.switch_to.window(first)


def alone(model, tokenizer, prompt: str, tokens: int) -> str:
    """What the model writes in this process, greedily."""
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt)["input_ids"]]])
    written = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def cpu_seconds(process: subprocess.Popen) -> float:
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


# In the browser.


@pytest.mark.slow
def test_answer_and_figures_grow_while_it_is_written(open_tab, browser, model, tokenizer):
    tab, prompt, length = open_tab(), "alpha 3 ", 800
    assert tab.figures() == ["0", "0", "0 B", "0 B"] and tab.text() == ""
    tab.write(prompt, length)
    first = wait(tab.text)
    after_first = tab.figures()
    longer = wait(lambda: len(text := tab.text()) > len(first) and text)
    assert longer.startswith(first)
    total = 1 + len(tokenizer(prompt)["input_ids"]) + length - 1  # the last token is written, but not read again
    assert 0 < int(after_first[0].replace(",", "")) < total
    wait(lambda: tab.tokens() == total)
    _, speed, ours, theirs = tab.figures()
    assert float(speed.replace(",", "")) > 0
    assert ours == after_first[2] == chat_page.in_bytes(state_bytes(model))
    assert theirs == chat_page.in_bytes(softmax_bytes(model.config, total, torch.float64)) != after_first[3]
    assert len(tab.text()) > len(longer)
    hidden = "const text = document.querySelector('#answer textarea'); return text.scrollHeight - text.clientHeight"
    assert browser.execute_script(hidden) > 0
    wait(lambda: browser.execute_script(f"{hidden} - text.scrollTop") < 5)  # the end is in view


def state_bytes(model) -> int:
    cache = InterdomainCache(model.config)
    model(torch.tensor([[5]]), past_key_values=cache)
    return cache.state_bytes()


def test_stop_ends_the_work_and_the_next_answer_starts_anew(open_tab, page, model, tokenizer):
    tab, process = open_tab(), page[0]
    tab.write("beta ", 4096)
    wait(lambda: tab.tokens() > 50)
    tab.press("#stop")
    time.sleep(1)
    stopped, before = tab.tokens(), cpu_seconds(process)
    time.sleep(1)
    assert tab.tokens() == stopped < 4000
    assert cpu_seconds(process) - before < 0.3
    tab.write("beta ", 20, GREEDY)
    expected = alone(model, tokenizer, "beta ", 20)
    wait(lambda: tab.text() == expected)


def test_a_closed_tab_ends_the_work(open_tab, page, browser):
    tab, process = open_tab(), page[0]
    tab.write("beta ", 4096)
    wait(lambda: tab.tokens() > 50)
    browser.close()
    browser.switch_to.window(browser.window_handles[0])

    def idle() -> bool:
        before = cpu_seconds(process)
        time.sleep(0.5)
        return cpu_seconds(process) - before < 0.15

    wait(idle, seconds=10)


def test_two_tabs_write_at_once_what_each_writes_alone(open_tab, model, tokenizer):
    prompts, length = ["alpha 1 beta", "zeta 2 delta"], 400
    expected = [alone(model, tokenizer, prompt, length) for prompt in prompts]
    assert expected[0] != expected[1]
    tabs = [open_tab(), open_tab()]
    for tab, prompt in zip(tabs, prompts):
        tab.fill(prompt, length, GREEDY)
    for tab in tabs:
        tab.press("#write")
    assert wait(lambda: all(0 < tab.tokens() < length for tab in tabs))
    for tab, text in zip(tabs, expected):
        wait(lambda tab=tab, text=text: tab.text() == text)


def test_nothing_comes_from_elsewhere(open_tab, browser):
    tab = open_tab()
    tab.write("gamma ", 5)
    wait(tab.text)
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    named = browser.execute_script(
        "return [...document.querySelectorAll('script, link, img, iframe')].map(x => x.src || x.href).filter(Boolean)"
    )
    assert len(loaded) > 10
    assert {urlsplit(address).hostname for address in loaded + named} == {"127.0.0.1"}
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe


# Without a browser.


def test_pieces_end_in_the_whole_answer(model, tokenizer):
    texts = [text for text, _ in chat_page.answer(model, tokenizer, "delta 4 ", 60, temperature=0)]
    assert len(texts) > 3 and all(later.startswith(text) for text, later in zip(texts, texts[1:]))
    assert texts[-1] == alone(model, tokenizer, "delta 4 ", 60)


def test_a_prompt_may_hold_the_pad_token(model, tokenizer):
    """It is a token as others are, not a hole."""
    prompt = f"delta{tokenizer.pad_token} 4 "
    ids = chat_page.encode_prompt(tokenizer, prompt)
    assert tokenizer.pad_token_id in ids
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    *_, (text, _) = chat_page.answer(model, tokenizer, prompt, 30, temperature=0)
    assert text == tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def test_what_was_read_is_not_read_again(model, tokenizer, monkeypatch, tmp_path):
    """The next prompt holds the one before and its answer; a new start finds their states in the folder."""
    model = copy.deepcopy(model)
    monkeypatch.setattr(chat_page, "load_interdomain", lambda folder: (model, tokenizer))
    monkeypatch.setattr(chat_page, "launch", lambda *arguments: None)
    monkeypatch.setattr(chat_page, "build_page", lambda *arguments: None)
    prompt, plain = "delta 4\n", copy.deepcopy(model)
    for start in range(2):
        arguments = ["folder", "--port", str(free_port()), "--states", str(tmp_path / "states")]
        chat_page.run(chat_page.parse_arguments(arguments))
        store, total = model.prompt_store, 1 + len(tokenizer(prompt)["input_ids"])
        *_, (text, figures) = chat_page.answer(model, tokenizer, prompt, 30, temperature=0)
        assert text == alone(plain, tokenizer, prompt, 30)
        assert f"<b>{total + 29}</b>" in figures, "what was reused is counted, too"
        assert store.tokens_read + store.tokens_reused == total and bool(store.tokens_reused) == bool(start)
        prompt += "beta 5\n"


def test_an_error_while_writing_reaches_the_page(model, tokenizer, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(model), "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(chat_page.answer(model, tokenizer, "delta", 5, temperature=1))


def test_prompt_is_a_turn_where_there_is_a_template(tokenizer):
    (plain,) = chat_page.encode_prompt(tokenizer, "alpha")
    assert tokenizer.decode(plain) == tokenizer.bos_token + "alpha"
    talker = copy.deepcopy(tokenizer)
    talker.chat_template = TEMPLATE
    (turn,) = chat_page.encode_prompt(talker, "alpha")
    assert talker.decode(turn) == "user alpha assistant "


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (999_600, "1 MB"), (37_748_736, "37.7 MB")]
)
def test_sizes_have_three_digits(count, text):
    assert chat_page.in_bytes(count) == text


# Mistakes.


def refusal(capsys, *arguments: str) -> str:
    """The one line on standard error with which the example ends."""
    assert chat_page.main(arguments) == 2
    output, error = capsys.readouterr()
    assert error.count("\n") == 1 and error.endswith(".\n") and "Traceback" not in output
    return error


def test_port_in_use(capsys, folder):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"Port {port} is in use" in refusal(capsys, str(folder), "--port", port)


def test_states_in_a_file(capsys, folder, tmp_path):
    (tmp_path / "file").touch()
    arguments = str(folder), "--port", str(free_port()), "--states", str(tmp_path / "file")
    assert "file is a file: name a folder for --states" in refusal(capsys, *arguments)


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_port_out_of_range(capsys, folder, port):
    assert "--port must be between 1 and 65535" in refusal(capsys, str(folder), "--port", port)


def test_folder_without_a_model(capsys, tmp_path):
    assert "is not a folder with a saved model" in refusal(capsys, str(tmp_path), "--port", str(free_port()))


def test_folder_of_another_architecture(capsys, tokenizer, tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()
    assert "'llama', not an Interdomain model" in refusal(capsys, str(tmp_path), "--port", str(free_port()))


def test_without_gradio(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "pip install gradio" in refusal(capsys, str(folder))


# The picture.


def take_picture(folder: Path) -> None:
    """Write PICTURE: the page after an answer."""
    with page_of(folder) as (_, address), headless_browser() as driver:
        tab = Tab(driver, address)
        width, height = PICTURE_SIZE
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        tab.write("def read_", 1000, 0.7)
        wait(lambda: tab.tokens() > 999)
        driver.execute_script("document.activeElement.blur()")
        time.sleep(1)  # until the last piece is drawn
        driver.save_screenshot(str(PICTURE))


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]))
