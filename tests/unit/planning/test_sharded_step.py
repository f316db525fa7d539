"""The step model with sharded index keys."""

from dataclasses import replace

import pytest

from tests.unit.planning.test_step_model import SETUP, step


def test_sharded_index_keys_gain_where_few_rows_have_long_contexts_and_cost_where_they_are_short():
    """At 16 rows of 1M a rank scores an eighth; at 4K agreeing costs more than one key less of eight to score gains."""
    sharded = replace(SETUP, index_keys="sharded")
    far, near = (16, 1 << 20), (64, 4096)
    assert step("tp_dcp", *far, setup=sharded)["total"] < step("tp_dcp", *far)["total"]
    assert step("tp_dcp", *near, setup=sharded)["total"] > step("tp_dcp", *near)["total"]
    assert step("tp", *near, setup=sharded) == step("tp", *near)
    # 16 rows' candidates, 8 bytes each, of which seven eighths come from others; and 8 bytes a row back.
    terms = step("tp_dcp", 16, 4096, setup=sharded)
    assert terms["agree_threshold"] > 21 * 20 and terms["gather_selection"] == 0


def test_an_unknown_choice_of_index_keys_is_refused():
    with pytest.raises(ValueError, match="index_keys must be one of replicated, sharded, got 'split'"):
        step("tp_dcp", setup=replace(SETUP, index_keys="split"))
