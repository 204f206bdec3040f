"""The pictures of how-it-works.md and of the README, drawn from what the package computes.

Usage:
    python -m docs.draw     # writes docs/pictures/*.svg
"""

from __future__ import annotations

import functools
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle
from transformers import AutoConfig, set_seed

from modeling_interdomain import InterdomainConfig, InterdomainModel, interdomain_attention

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
MODES, AGES = 16, 48  # of the pictures of a start: its kernel holds the last 2 M tokens
SHOWN = (0, 2, 5)  # modes whose oscillations are drawn
CONTEXTS = tuple(2**n for n in range(7, 17))
KEYS, VALUES, STATE, READ, PLAIN = "#4c72b0", "#dd8452", "#55a868", "#8172b3", "#e9e9ee"


# ---------------------------------------------------------------------------------------------- what is drawn


@functools.cache
def parameters(start: str) -> tuple[tuple[torch.Tensor, ...], str]:
    """`log_decay`, `input_matrix` and `coefficient_matrix` of one head as a new model has them, in float64, and the
    product that reads them."""
    set_seed(0)
    shape = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = InterdomainConfig(**shape, state_size=MODES, start=start)
    recurrence = InterdomainModel(config).layers[0].token_mixer.recurrence
    found = recurrence.parameters_of_operator()
    return tuple(x.detach().double() for x in found), config.product


def responses(start: str, ages: int = AGES) -> torch.Tensor:
    """What one token has left in each mode after so many more tokens, `beta lambda^age`: complex `[ages, M]`.

    A key of 1 is followed by zeros; the state of every length is that of the operator.
    """
    (log_decay, beta, coefficients), product = parameters(start)
    impulse = torch.zeros(1, ages, 1, 1, dtype=torch.float64)
    impulse[:, 0] = 1
    states = []
    for length in range(1, ages + 1):
        key = impulse[:, :length]
        _, state = interdomain_attention(
            key, key, key, log_decay, beta, coefficients, product=product, output_final_state=True
        )
        states.append(torch.complex(state[0, 0, 0, :, 0], state[0, 0, 1, :, 0]))
    return torch.stack(states)


def kernel(start: str, ages: int = AGES) -> torch.Tensor:
    """K(a, b) `[ages, ages]`: how much of the value of age b answers a query for the key of age a.

    The operator reads one text in which the key and the value of each token are a direction of its own.
    """
    own, product = parameters(start)
    directions = torch.eye(ages, dtype=torch.float64)
    tokens = directions.flip(0)[None, :, None]  # the last token has age 0
    query = directions[:, None, None].expand(-1, ages, 1, -1)
    keys = tokens.expand(ages, -1, -1, -1)
    output, _ = interdomain_attention(query, keys, keys, *own, product=product)
    return output[:, -1, 0]


def kept(name: str) -> list[int]:
    """The numbers that a decoder keeps of one text, for each length of `CONTEXTS`."""
    config = AutoConfig.from_pretrained(ROOT / "configuration" / name)
    return [sum(config.state_sizes(length).values()) for length in CONTEXTS]


# ---------------------------------------------------------------------------------------------- how


def draw_responses(axes: Axes, start: str) -> None:
    found = responses(start).real.numpy()
    for mode in SHOWN:
        axes.plot(found[:, mode] / abs(found[:, mode]).max(), label=f"mode {mode + 1}", linewidth=1.4)
    axes.set(xlabel="age of the token", ylabel="what is left of it", xlim=(0, AGES - 1))
    axes.legend(frameon=False, fontsize=8)


def draw_kernel(axes: Axes, start: str) -> None:
    found = kernel(start).numpy()
    axes.imshow(found / abs(found).max(), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
    axes.set(xlabel="age of the value, b", ylabel="age of the key, a")


def draw_kept(axes: Axes) -> None:
    for name, label, color in (
        ("softmax-125m", "softmax: keys and values", VALUES),
        ("interdomain-125m", "Interdomain: state", STATE),
    ):
        axes.loglog(CONTEXTS, kept(name), label=label, color=color, linewidth=2)
    axes.set(xlabel="tokens read", ylabel="numbers kept")
    axes.legend(frameon=False, fontsize=8)


def overview() -> Figure:
    figure, (left, middle, right) = panels(3, 10.5, 3.2)
    left.set_title("A token leaves a damped oscillation\nin each mode of the state ...", fontsize=10)
    draw_responses(left, "recall")
    middle.set_title("... a query finds the values that\nstand at its key ...", fontsize=10)
    draw_kernel(middle, "recall")
    right.set_title("... and the memory does not grow\n(the 125M model)", fontsize=10)
    draw_kept(right)
    return figure


def state() -> Figure:
    figure, (left, right) = panels(2, 8, 3)
    draw_responses(left, "recall")
    draw_kept(right)
    return figure


def kernels() -> Figure:
    figure, axes = panels(2, 7.5, 3.6)
    for one, start, title in zip(axes, ("random", "recall"), ("random start", "recall start"), strict=True):
        one.set_title(f"{title}, M = {MODES}", fontsize=10)
        draw_kernel(one, start)
    return figure


def layer() -> Figure:
    """One head, from the input of the layer to its output."""
    figure, axes = sketch(10.5, 4.3)
    box(axes, 0.1, 1.8, 0.8, 0.8, "$x_t$")
    rows = (("q_proj", "conv", "feature map ξ", READ), ("k_proj", "conv", "ξ, norm + bias", KEYS))
    for y, (projection, conv, mapped, color) in zip((3.4, 1.85), rows, strict=True):
        box(axes, 1.5, y, 1.0, 0.7, projection, color)
        box(axes, 2.8, y, 0.8, 0.7, conv, color)
        box(axes, 3.9, y, 1.45, 0.7, mapped, color)
        for start, end in (((0.9, 2.2), (1.5, y + 0.35)), ((2.5, y + 0.35), (2.8, y + 0.35))):
            arrow(axes, start, end)
        arrow(axes, (3.6, y + 0.35), (3.9, y + 0.35))
    box(axes, 1.5, 0.3, 1.0, 0.7, "v_proj", VALUES)
    box(axes, 3.9, 0.3, 1.45, 0.7, "norm + bias", VALUES)
    arrow(axes, (0.9, 2.2), (1.5, 0.65))
    arrow(axes, (2.5, 0.65), (3.9, 0.65))
    axes.add_patch(Rectangle((6.1, 0.3), 0.8, 2.6, facecolor=KEYS, alpha=0.35, edgecolor="black"))
    axes.add_patch(Rectangle((6.9, 0.3), 0.8, 2.6, facecolor=VALUES, alpha=0.35, edgecolor="black"))
    for y in torch.linspace(0.3, 2.9, 9)[1:-1].tolist():
        axes.plot([6.1, 7.7], [y, y], color="black", linewidth=0.4)
    axes.text(6.5, 1.6, "$X^k$", ha="center", va="center", fontsize=12)
    axes.text(7.3, 1.6, "$X^v$", ha="center", va="center", fontsize=12)
    axes.text(6.5, 0.08, "R", ha="center", va="center", fontsize=9)
    axes.text(7.3, 0.08, "D", ha="center", va="center", fontsize=9)
    axes.text(5.95, 1.25, "M", ha="center", va="center", fontsize=9)
    axes.text(6.9, 3.05, "state, complex:  × λ,  + β (k, v)", ha="center", va="bottom", fontsize=9)
    arrow(axes, (5.35, 2.2), (6.1, 2.0))
    arrow(axes, (5.35, 0.65), (6.9, 0.75))
    box(axes, 8.3, 1.25, 1.2, 0.7, "× C", STATE)
    arrow(axes, (7.7, 1.6), (8.3, 1.6))
    box(axes, 8.3, 3.4, 1.2, 0.7, "$o_t$", READ)
    axes.plot([5.35, 8.3], [3.75, 3.75], color="black", linewidth=1)
    arrow(axes, (8.2, 3.75), (8.3, 3.75))
    arrow(axes, (8.9, 1.95), (8.9, 3.4))
    axes.text(9.0, 2.65, "U, Γ", ha="left", va="center", fontsize=10)
    box(axes, 9.9, 3.4, 0.9, 0.7, "o_proj")
    arrow(axes, (9.5, 3.75), (9.9, 3.75))
    axes.set(xlim=(0, 11), ylim=(-0.1, 4.3))
    return figure


def two_passes() -> Figure:
    """A text in chunks: from which parts a query gathers what it reads, and that it does so twice."""
    figure, axes = sketch(10.5, 3.6)
    for row, (text, color) in enumerate((("pass 2, values", VALUES), ("pass 1, keys", KEYS))):
        y = 0.55 + 1.65 * row
        axes.text(0.0, y + 0.35, text, ha="left", va="center", fontsize=10)
        for chunk in range(4):
            x = 1.9 + 1.75 * chunk
            axes.add_patch(Rectangle((x, y), 1.4, 0.7, facecolor=color, alpha=0.35, edgecolor="black"))
            if chunk < 3:
                axes.add_patch(Rectangle((x + 1.46, y + 0.15), 0.23, 0.4, facecolor=STATE, edgecolor="black"))
                arrow(axes, (x + 1.4, y - 0.12), (x + 1.75, y - 0.12))
        x = 1.9 + 1.75 * 3
        axes.add_patch(Polygon([(x, y), (x, y + 0.7), (x + 1.4, y)], facecolor=color, edgecolor="black"))
    axes.text(3.47, 3.1, "state after a chunk", ha="center", va="bottom", fontsize=9, color=STATE)
    axes.text(7.85, 3.1, "inside the chunk: scores × powers of λ", ha="center", va="bottom", fontsize=9)
    box(axes, 9.3, 2.25, 1.3, 0.6, "$y_t$: M numbers", KEYS)
    box(axes, 9.3, 1.4, 1.3, 0.6, "mix: $W$", STATE)
    box(axes, 9.3, 0.6, 1.3, 0.6, "$o_t$: D numbers", VALUES)
    arrow(axes, (8.55, 2.55), (9.3, 2.55))
    arrow(axes, (9.95, 2.25), (9.95, 2.0))
    arrow(axes, (9.3, 1.7), (8.2, 1.3))
    axes.text(8.45, 1.62, "$p_t$", fontsize=9)
    arrow(axes, (8.55, 0.9), (9.3, 0.9))
    axes.set(xlim=(-0.1, 10.8), ylim=(0.2, 3.5))
    return figure


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, count))


def sketch(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str = PLAIN) -> None:
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor=color)
    shape.set_alpha(0.35 if color != PLAIN else 1)
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color="black", linewidth=1))


DRAWN = {"overview": overview, "layer": layer, "state": state, "two-passes": two_passes, "kernels": kernels}


def draw(folder: Path = PICTURES) -> list[Path]:
    """Write every picture; the same numbers give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, make in DRAWN.items():
        with matplotlib.rc_context({"svg.hashsalt": name, "font.family": "DejaVu Sans"}):
            file = folder / f"{name}.svg"
            make().savefig(file, facecolor="white", metadata={"Date": None})
        files.append(file)
    return files


if __name__ == "__main__":
    for path in draw():
        print(path.relative_to(ROOT))
