"""Plots of `plan` and `model`: every line is seen and named where it ends, and contexts read as people say them."""

import argparse
import itertools

import pytest

from nsa_dcp.planning.capacity_cli import add_model_parser, add_plan_parser
from nsa_dcp.planning.plots.plot_lines import Line, merge_lines, short_count, spread


@pytest.fixture
def drawn(monkeypatch, tmp_path, capsys):
    """Run a command with `--plot`; returns the figure that it saved, and its renderer."""
    figures = pytest.importorskip("matplotlib.figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def _drawn(*argv):
        made = []
        original = figures.Figure.savefig
        monkeypatch.setattr(
            figures.Figure, "savefig", lambda self, *args, **more: (original(self, *args, **more), made.append(self))
        )
        parser = argparse.ArgumentParser()
        subparsers = parser.add_subparsers(required=True)
        add_plan_parser(subparsers)
        add_model_parser(subparsers)
        args = parser.parse_args([*argv, "--plot", str(tmp_path / "plot.png")])
        assert args.run(args) == 0, capsys.readouterr().err
        (figure,) = made
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        return figure, renderer

    return _drawn


PLAN = ("plan", "--preset", "glm-5.2", "--gpu-memory-gib", "40")
MODEL = ("model", "--preset", "glm-5.2", "--gpu-memory-gib", "40", "--context", "4096", "32768", "131072")
COMMANDS = [
    PLAN,
    (*PLAN, "--kv-cache-dtype", "bf16"),
    (*PLAN, "--index-keys", "sharded"),
    (*PLAN, "--dcp-size", "8"),
    MODEL,
]
COMMANDS += [(*MODEL, "--batch", "8"), ("model", "--preset", "deepseek-v3.2"), MODEL[:3]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_name_lies_on_another_or_outside_of_the_picture(drawn, command):
    figure, renderer = drawn(*command)
    for axes in figure.axes:
        assert axes.get_legend() is None
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        assert len(boxes) == sum(len(line.get_xdata()) > 0 and line.get_linewidth() > 1 for line in axes.lines)
        assert [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])] == []
        assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_line_hides_another(drawn, command):
    figure, _ = drawn(*command)
    for axes in figure.axes:
        points = [(tuple(line.get_xdata()), tuple(line.get_ydata()), line.get_linestyle()) for line in axes.lines]
        assert len(set(points)) == len(points)


def test_modes_that_fit_alike_are_one_line_with_both_names(drawn):
    figure, _ = drawn(*MODEL)
    names = [text.get_text() for text in figure.axes[0].texts]
    assert "TP-DCP, CP-DCP fits up to" in names and "TP fits up to" in names


def test_contexts_are_written_as_people_say_them(drawn):
    figure, _ = drawn(*MODEL)
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels(which="both") if label.get_text()]
    assert shown == ["4K", "32K", "128K"]
    assert {text.get_text().split(", ")[1] for text in figure.axes[1].texts} == {"4K", "32K", "128K"}


@pytest.mark.parametrize(("tokens", "text"), [(4096, "4K"), (32768, "32K"), (1048576, "1M"), (1000, "1,000")])
def test_counts_are_written_as_people_say_them(tokens, text):
    assert short_count(tokens) == text


def test_lines_that_lie_on_each_other_are_one_with_both_names():
    first, second = (Line(name, ((1, 2), (3, 4)), "red") for name in "ab")
    other = Line("c", ((1, 2), (3, 5)), "blue")
    assert merge_lines([first, other, second, Line("d", (), "red")]) == [
        Line("a, b", ((1, 2), (3, 4)), "red"),
        other,
    ]


@pytest.mark.parametrize("heights", [[], [1.0], [1, 1, 1], [0, 0.1, 9.9, 10], [10, 10, 10, 10], [0, 3, 3.5, 10]])
def test_names_are_spread_and_stay_below_the_top(heights):
    moved = spread(heights, 1.0, 10.0)
    assert len(moved) == len(heights)
    assert all(after - before >= 1.0 - 1e-9 for before, after in itertools.pairwise(moved))
    assert all(height <= 10.0 for height in moved)
