"""docs/: the pictures show what the package computes, and the code of the page does what the page says."""

import re

import pytest
import torch

from benchmarks.harness import read
from docs import draw
from tests.pages import REPOSITORY, links

PAGE = REPOSITORY / "docs" / "how-it-works.md"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return draw.draw(tmp_path_factory.mktemp("pictures"))


def test_the_script_draws_every_picture_that_is_shown(drawn):
    names = {file.name for file in drawn}
    assert names == {file.name for file in draw.PICTURES.iterdir()}
    shown = {target.name for page in (PAGE, REPOSITORY / "README.md") for target, _ in links(page)}
    assert names <= shown
    assert all(file.read_text().startswith("<?xml") and file.stat().st_size > 10_000 for file in drawn)


def test_the_same_numbers_give_the_same_picture(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "DRAWN", {"kernels": draw.kernels})
    (again,) = draw.draw(tmp_path)
    assert again.read_bytes() == next(file for file in drawn if file.name == again.name).read_bytes()


@pytest.mark.parametrize("start", ["random", "recall"])
def test_the_kernel_is_that_of_the_parameters(start):
    """The formula of the page, and what it says of the two starts."""
    (log_decay, beta, coefficients), product = draw.parameters(start)
    log_decay, beta, coefficients = (torch.view_as_complex(x)[0] for x in (log_decay, beta, coefficients))
    phi = beta * torch.exp(log_decay * torch.arange(draw.AGES)[:, None])
    torch.testing.assert_close(draw.responses(start), phi)
    weights = phi @ coefficients.mT
    other = weights.conj() if product == "hermitian" else weights
    expected = (other @ weights.mT).real
    found = draw.kernel(start)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    held = 2 * draw.MODES
    inside = found[:held, :held]
    noise = (inside.square().sum(1) - inside.diagonal().square()).sqrt()
    sees = inside.diagonal().abs() > noise
    assert sees[: held - 2].all() if start == "recall" else sees.sum() < 5


def test_the_pictures_show_these_numbers():
    left, middle, right = draw.overview().axes
    shown = torch.as_tensor(middle.images[0].get_array())
    torch.testing.assert_close(shown, draw.kernel("recall") / draw.kernel("recall").abs().max())
    for one, start in zip(draw.kernels().axes, ("random", "recall"), strict=True):
        wanted = draw.kernel(start)
        torch.testing.assert_close(torch.as_tensor(one.images[0].get_array()), wanted / wanted.abs().max())
    for line, mode in zip(left.lines, draw.SHOWN, strict=True):
        wanted = draw.responses("recall")[:, mode].real
        torch.testing.assert_close(torch.as_tensor(line.get_ydata()), wanted / wanted.abs().max())
    softmax, ours = (list(line.get_ydata()) for line in right.lines)
    assert len(set(ours)) == 1 and softmax[-1] == 512 * softmax[0]
    position = read("decode_cpu")["positions"][0]
    assert 4 * ours[0] == position["bytes"], "as the benchmark has measured"
    assert 4 * softmax[draw.CONTEXTS.index(position["position"])] == position["softmax_bytes"]


def test_the_code_of_the_page_does_what_it_says():
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert "assert_close(found, torch.stack(outputs)" in code
    torch.manual_seed(0)
    exec(code, {})
