"""The picture of throughput that the pages show: drawn from the kept measurements, and nothing in it left out."""

import copy
import json
import re
from pathlib import Path

import pytest

from scripts.benchmarks.servers import plot

ROOT = Path(__file__).parents[2]
BENCH, PICTURE = ROOT / "docs" / "measured_on_two_h200" / "bench.json", ROOT / "docs" / "throughput.svg"


@pytest.fixture
def reports():
    return json.loads(BENCH.read_text(encoding="utf-8"))["reports"]


def test_the_picture_is_drawn_from_the_kept_measurements(reports):
    drawn = plot.read_description(PICTURE.read_text(encoding="utf-8"))
    lines = plot.read_lines(reports, 4096)
    assert drawn == json.loads(plot.describe(lines, 4096))
    assert [line.mode for line in lines] == list(plot.MODES)


def test_the_picture_is_what_the_plot_command_writes(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    committed = PICTURE.read_text(encoding="utf-8")
    version = re.search(r"Matplotlib v([0-9.]+[0-9a-z]*)", committed).group(1)
    written = [tmp_path / "one.svg", tmp_path / "two.svg"]
    assert [plot.main([str(BENCH), "--out", str(path)]) for path in written] == [0, 0]
    assert written[0].read_bytes() == written[1].read_bytes()
    assert plot.read_description(written[0].read_text()) == plot.read_description(committed)
    if matplotlib.__version__ == version:
        assert written[0].read_text(encoding="utf-8") == committed


@pytest.mark.parametrize("context", [4096, 32768, 131072, 262144])
def test_a_line_has_every_case_of_its_server(reports, context):
    for report in reports:
        asked = {
            case["running"]: round(case["tokens_per_s"], 1) for case in report["decode"] if case["context"] == context
        }
        if asked:
            (line,) = plot.read_lines(reports, context, [report["config"]])
            assert dict(line.points) == asked
            assert line.pool_tokens == report["pool"]["tokens"]


def test_only_a_line_whose_pool_holds_no_more_is_said_to_be_full(reports):
    assert [line.full for line in plot.read_lines(reports, 4096)] == [True, False, False]
    assert [line.full for line in plot.read_lines(reports, 32768)] == [True, True, True]
    changed = copy.deepcopy(reports)
    changed[0]["skipped"] = [case | {"concurrency": 100} for case in changed[0]["skipped"]]
    assert plot.read_lines(changed, 4096)[0].full
    changed[0]["decode"] = [case | {"largest": False} for case in changed[0]["decode"]]
    assert not plot.read_lines(changed, 4096)[0].full


@pytest.mark.parametrize("context", [4096, 32768, 131072, 262144])
def test_every_line_is_named_and_no_name_lies_on_another(reports, context, monkeypatch, tmp_path):
    figures = pytest.importorskip("matplotlib.figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = []
    original = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *args, **kwargs: (original(self, *args, **kwargs), made.append(self))
    )
    lines = plot.read_lines(reports, context)
    plot.draw(lines, context, "title", tmp_path / "plot.png")
    (axes,) = made[0].axes
    names = [text for text in axes.texts if text.get_text()]
    assert sorted(name.get_text().split(":")[0] for name in names) == sorted(line.name for line in lines)
    renderer = FigureCanvasAgg(made[0]).get_renderer()
    made[0].draw(renderer)
    boxes = [name.get_window_extent(renderer) for name in names]
    overlapping = [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])]
    assert overlapping == []
    frame = axes.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and box.y0 >= 0 for box in boxes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "1"], "context must be one that was measured, 4096, 32768, 131072, 262144, got 1"),
        (["--config", "tp9"], "config must be one of tp2-dcp1-profile"),
        (["--out", "x.gif"], "out must end in .png or .svg, got 'x.gif'"),
        (["--out", "/nowhere/x.svg"], "--out must be a file that can be written"),
    ],
)
def test_a_mistake_is_one_sentence(words, message, capsys, tmp_path):
    assert plot.main([str(BENCH), "--out", str(tmp_path / "x.svg"), *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
