"""How far answers lie apart: what is counted, and what it tells rounding from wrong selections by."""

import math

import pytest

from scripts.served_checks.ask_crowd import ALL_AT_ONCE, IN_HALVES
from scripts.served_checks.measure_rounding import (
    format_row,
    measure_spread,
    pair_halves,
    pair_reports,
    root_mean_square,
)


def answer(prompt_tokens, *positions, name="a"):
    """Positions: {token: log-probability}; the best is generated. Where one is given, the other is far behind."""
    positions = [position if len(position) > 1 else position | {99: -20.0} for position in positions]
    tokens = [max(position, key=position.get) for position in positions]
    return {
        "name": name,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "logprobs": [position[token] for position, token in zip(positions, tokens)],
        "top": [list(position.items()) for position in positions],
    }


def test_gaps_of_near_ties_are_told_apart_by_what_is_selected():
    near, moved, sure = {1: -0.6, 2: -0.8}, {1: -0.7, 2: -0.75}, {1: -0.001, 2: -8.0}
    spread = measure_spread(
        [
            (answer(2047, near, near, sure), answer(2047, near, moved, sure)),
            (answer(2048, near, near), answer(2048, moved, near)),
        ],
        2048,
    )
    assert spread.tokens == 5 and spread.parted == 0
    # Contexts of 2,047 and 2,048 tokens, then of 2,049 and the long one's second token.
    assert spread.short_ties == pytest.approx([0.0, 0.15, 0.15])
    assert spread.long_ties == pytest.approx([0.0])
    assert spread.moved == pytest.approx([0.0, 0.1, 0.0, 0.1, 0.0])


def test_nothing_after_a_place_where_answers_part_is_counted():
    other = {1: -0.9, 2: -0.5}
    spread = measure_spread([(answer(9, {1: -0.6, 2: -0.8}, {1: -0.1}), answer(9, other, {1: -9.0}))], 2048)
    assert (spread.tokens, spread.parted, spread.moved) == (1, 1, [])
    assert spread.short_ties == pytest.approx([0.6])


def test_what_was_not_asked_of_both_is_refused():
    reports = [{"config": name, "scenes": {"one": [answer(9, {1: -0.5}, name=name)]}} for name in ("x", "y")]
    assert len(pair_reports(reports[0], reports[0])) == 1
    with pytest.raises(ValueError, match="x and y were not asked the same"):
        pair_reports(*reports)


def test_halves_are_compared_with_all_at_once_by_name():
    at_once = [answer(9, {1: -0.5}, name="a"), answer(9, {1: -0.6}, name="b")]
    halves = [answer(9, {1: -0.7}, name="b"), answer(9, {1: -0.5}, name="a")]
    report = {"config": "x", "scenes": {ALL_AT_ONCE: at_once, IN_HALVES: halves}}
    assert sorted(measure_spread(pair_halves(report), 2048).moved) == pytest.approx([0.0, 0.1])
    assert pair_halves({"config": "x", "scenes": {ALL_AT_ONCE: at_once}}) == []


def test_a_row_says_how_many_ties_it_is_from():
    spread = measure_spread([(answer(9, {1: -0.6, 2: -0.8}), answer(9, {1: -0.6, 2: -0.8}))], 2048)
    assert format_row("x, y", spread) == "| x, y | 1 | 0 | 0.0000 | 0.000 (1) | nan (0) |"
    assert root_mean_square([3.0, 4.0]) == pytest.approx(math.sqrt(12.5))
