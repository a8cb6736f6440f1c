"""Draws docs/pictures/architecture.png: what a token sees, and how states are passed on. Run it from anywhere."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

W, BLOCKS, START = 4, 4, 3  # a document begins with block START
TOKEN, STATE, INK, FAINT = "#1f5fa8", "#d1662b", "#222222", "#8a8a8a"


def draw_window(axes: Axes) -> None:
    """The attention matrix of a segment: its tiles, and the keys that each query sees."""
    query, key = np.mgrid[0 : BLOCKS * W, -W : BLOCKS * W]
    first = np.where(query >= START * W, START * W, -W)
    seen = (key >= query - W) & (key < query) & (key >= first)
    in_tile = (key // W == query // W) | (key // W == query // W - 1)
    axes.imshow(np.where(seen, 2, in_tile), cmap=ListedColormap(["white", "#e9eff6", TOKEN]), origin="upper")
    for block in range(BLOCKS):
        axes.add_patch(
            Rectangle((block * W - 0.5, block * W - 0.5), 2 * W, W, fill=False, edgecolor=INK, linewidth=1.2)
        )
    axes.axvline(W - 0.5, color=FAINT, linestyle=":", linewidth=1)
    labels = ["cache", *(f"block {block + 1}" for block in range(BLOCKS))]
    axes.set_xticks([(i + 0.5) * W - 0.5 for i in range(BLOCKS + 1)], labels)
    axes.set_yticks([(i + 0.5) * W - 0.5 for i in range(BLOCKS)], labels[1:])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("keys: the tokens that are seen")
    axes.set_ylabel("queries")
    axes.set_title("A tile is W queries by 2W keys;\nevery token sees the W before it", fontsize=11)


def draw_recurrence(axes: Axes) -> None:
    """The states of a recurrent layer, above the blocks that they read and that read them."""

    def box(x: float, y: float, text: str, colour: str, width: float = 0.86) -> None:
        style = "round,pad=0,rounding_size=0.06"
        axes.add_patch(
            FancyBboxPatch((x - width / 2, y - 0.17), width, 0.34, style, facecolor=colour, edgecolor="none")
        )
        axes.text(x, y, text, ha="center", va="center", color="white", fontsize=8.5)

    def arrow(begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.5})

    tokens, states = 0.0, 1.15
    for i in range(BLOCKS):
        begins = i == START
        x = 1.6 * i + (0.8 if i >= START else 0.0)
        box(x, tokens, f"block {i + 1}", TOKEN)
        box(x - 0.8, states, "initial states" if begins else "states", STATE, 1.06)
        # The tokens of a block read the states from before it; the states then read the tokens.
        arrow((x - 0.65, states - 0.2), (x - 0.2, tokens + 0.2), STATE)
        if i + 1 != START:
            arrow((x + 0.2, tokens + 0.2), (x + 0.65, states - 0.2), TOKEN)
            arrow((x - 0.25, states), (x + 0.25, states), STATE)
        if not begins:
            arrow((x - 1.15, tokens), (x - 0.45, tokens), TOKEN)
    end = 1.6 * BLOCKS
    box(end, states, "states", STATE, 1.06)
    arrow((end + 0.55, states), (end + 1.0, states), STATE)
    arrow((end - 0.35, tokens), (end + 1.0, tokens), TOKEN)
    boundary = 1.6 * START - 0.95
    axes.plot([boundary, boundary], [-0.3, 1.45], color=FAINT, linestyle=":", linewidth=1.5)
    axes.text(boundary, -0.4, "a document begins:\nnothing is remembered across", fontsize=9, va="top", ha="center")
    axes.text(-1.25, -0.4, "from the segment before:\nkeys and values of a window, and states", fontsize=9, va="top")
    axes.text(end + 1.0, -0.4, "to the next\nsegment", fontsize=9, va="top", ha="right")
    axes.set(xlim=(-1.45, end + 1.1), ylim=(-0.95, 1.6))
    axes.set_axis_off()
    axes.set_title(
        "A recurrent layer: tokens read the states,\nand gated states read the tokens, block by block", fontsize=11
    )


def main() -> None:
    figure = Figure(figsize=(12, 4.4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.75))
    draw_window(left)
    draw_recurrence(right)
    figure.savefig(Path(__file__).with_name("architecture.png"))


if __name__ == "__main__":
    main()
