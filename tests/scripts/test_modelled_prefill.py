"""The table of modelled prefill layers: every chunk that fits the model, marked as modelled, and the way of "auto"."""

import json

import pytest

from scripts.benchmarks.prefill_chunk import modelled


def test_every_chunk_that_fits_has_a_row_and_says_that_it_is_modelled(capsys, tmp_path):
    path = tmp_path / "modelled.json"
    modelled.main(["--dcp-sizes", "8", "--chunks", "256", "32768", "--prefixes", "0", "1040384", "--json", str(path)])
    text = capsys.readouterr().out
    assert "MODELLED" in text and "by rows was never timed" in text
    records = json.loads(path.read_text())
    # 32,768 tokens after 1,040,384 would be more than the model's 1,048,576.
    assert [(record["chunk"], record["prefix"]) for record in records] == [(256, 0), (256, 1040384), (32768, 0)]
    assert [record["auto"] for record in records] == ["rows", "queries", "rows"]
    assert len(text.splitlines()) == 3 + len(records)


def test_the_way_of_auto_moves_less_by_weighed_bytes():
    dims = modelled.preset_dims("glm-5.2")
    for record in modelled.predict_all(dims, [2, 4, 8], [256, 8192], [0, 131072, 524288]):
        moved = record["received_bytes"]
        if record["auto"] == "rows":
            assert moved["tp_dcp_rows"] < moved["tp_dcp"]
        else:
            assert 1.25 * moved["tp_dcp_rows"] > moved["tp_dcp"]


@pytest.mark.parametrize("words", [["--dcp-sizes", "3"], ["--chunks", "0"], ["--prefixes", "-5"]])
def test_what_cannot_be_predicted_is_one_sentence(words):
    with pytest.raises(SystemExit, match=r"^benchmarks\.prefill_chunk\.modelled: "):
        modelled.main(words)
