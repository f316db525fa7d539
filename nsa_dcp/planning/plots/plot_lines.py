"""Lines of a plot, named where they end; those that lie on each other are drawn once and bear all their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Of the height of a plot: names at the ends of lines stand no closer.
_NAME_GAP = 0.055


@dataclass(frozen=True)
class Line:
    """A line: what it is called, its points, and how it is drawn.

    `unit`: what follows the name, the same for lines that may be drawn as one, such as "fits up to".
    """

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    style: str = "-"
    unit: str = ""


def short_count(tokens: int) -> str:
    """4,096 as 4K, 1,048,576 as 1M; other numbers in full."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return f"{tokens:,}"


def merge_lines(lines: Sequence[Line]) -> list[Line]:
    """The lines that have points, in order; of those with equal points one, with the names of all."""
    merged: dict[tuple, Line] = {}
    for line in lines:
        if not line.points:
            continue
        key = (line.points, line.unit, line.style)
        first = merged.get(key)
        if first is None:
            merged[key] = line
        else:
            merged[key] = Line(f"{first.name}, {line.name}", line.points, first.colour, line.style, line.unit)
    return list(merged.values())


def draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw lines into matplotlib axes. Their limits must not change after, or names come to lie on each other."""
    merged = merge_lines(lines)
    for line in merged:
        marker = "o" if line.style == "-" else "."
        axes.plot(*zip(*line.points, strict=True), color=line.colour, linestyle=line.style, marker=marker, ms=4)
    axes.spines[["top", "right"]].set_visible(False)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, 0), top)
    ends = sorted(merged, key=lambda line: line.points[-1][1])
    heights = spread([line.points[-1][1] for line in ends], (top - min(bottom, 0)) * _NAME_GAP, top)
    for line, height in zip(ends, heights, strict=True):
        axes.annotate(
            f"{line.name} {line.unit}".strip(),
            (line.points[-1][0], height),
            (7, 0),
            textcoords="offset points",
            color=line.colour,
            va="center",
            fontsize="small",
            annotation_clip=False,
        )


def spread(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Ascending heights, moved so that each stands at least `gap` above the one before; none is raised past `top` as
    long as there is room below."""
    moved: list[float] = []
    for height in heights:
        moved.append(height if not moved else max(height, moved[-1] + gap))
    limit = top
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], limit)
        limit = moved[number] - gap
    return moved
