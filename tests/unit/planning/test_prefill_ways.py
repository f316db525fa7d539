"""What a prefill chunk moves by either way, against numbers counted by hand, and the choice that all ranks share."""

import dataclasses
import random

import pytest

from nsa_dcp.choices import PREFILL_WAYS
from nsa_dcp.planning.prefill_ways import LayerSizes, PrefillRule

# Heads of the whole model, layers, layers that select; packed rows, bfloat16 values, 2,048 tokens selected.
GLM, DEEPSEEK = (64, 78, 21), (128, 61, 61)


def sizes_of(model, dcp_size, **changes):
    heads, layers, selecting = model
    sizes = LayerSizes(
        dcp_size=dcp_size,
        heads=heads // dcp_size,
        row_bytes=656,
        topk=2048,
        layers=layers,
        selecting_layers=selecting,
    )
    return dataclasses.replace(sizes, **changes)


def by_bytes(model, dcp_size, **changes):
    """The rule without its weights: bare bytes."""
    return PrefillRule(sizes_of(model, dcp_size), **{"least_rows": 1, "page_weight": (1, 1), **changes})


def never():
    raise AssertionError("pages must not be counted where their bounds decide")


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "dcp_size", "rows", "queries", "partials", "selections"),
    [
        (GLM, 8, 8192, 528_482_304, 471_597_056, 58_720_256),
        (GLM, 2, 64, 2_359_296, 2_105_344, 262_144),
        # Whole shares: three rows over two ranks are two rows each on the wire.
        (GLM, 2, 3, 3 * 32 * 1152, 3 * 32 * 1028, 2 * 8192),
        (DEEPSEEK, 4, 1024, 3 * 1024 * 32 * 1152, 3 * 1024 * 32 * 1028, 3 * 256 * 8192),
    ],
)
def test_by_queries_each_rank_receives_every_row(model, dcp_size, rows, queries, partials, selections):
    received = sizes_of(model, dcp_size).received_by_queries(rows)
    assert received == {"queries": queries, "partials": partials, "selections": selections}


@pytest.mark.parametrize(
    ("comm_backend", "value_bytes", "partial"),
    [
        ("a2a", 2, 2 * 512 + 4),
        ("a2a", 4, 4 * 512 + 4),
        ("a2a", 8, 8 * 512 + 8),
        # Log-sum-exps of four ranks, and sums in float32 (float64).
        ("ag_rs", 2, 4 * 4 + 4 * 512),
        ("ag_rs", 8, 4 * 8 + 8 * 512),
    ],
)
def test_partial_results_are_as_large_as_the_merge_has_them(comm_backend, value_bytes, partial):
    sizes = sizes_of(GLM, 4, comm_backend=comm_backend, value_bytes=value_bytes)
    received = sizes.received_by_queries(10)
    assert received["partials"] == 3 * 10 * 16 * partial
    assert received["queries"] == 3 * 10 * 16 * 576 * value_bytes


def test_selections_that_every_rank_makes_itself_do_not_travel():
    assert sizes_of(GLM, 4, selections_travel=False).received_by_queries(100)["selections"] == 0


@pytest.mark.parametrize(
    ("dcp_size", "rows", "pages", "megabytes"),
    [(8, 8192, 16, 129.5), (8, 8192, 80, 148.3), (2, 2048, 272, 82.7), (4, 64, 33, 5.8)],
)
def test_by_rows_a_rank_receives_its_rows_the_pages_and_its_heads(dcp_size, rows, pages, megabytes):
    received = sizes_of(GLM, dcp_size).received_by_rows(rows, rows // dcp_size, pages)
    heads = 64 // dcp_size
    assert received == {
        "queries": (dcp_size - 1) * (rows // dcp_size) * heads * 1152,
        "pages": (dcp_size - 1) * pages * 64 * 656,
        "results": (rows - rows // dcp_size) * heads * 1024,
    }
    assert round(sum(received.values()) / 1e6, 1) == megabytes


def test_a_rank_without_a_row_receives_results_and_pages_alone():
    received = sizes_of(GLM, 8).received_by_rows(rows=5, own_rows=0, pages=3)
    assert received == {"queries": 0, "pages": 7 * 3 * 64 * 656, "results": 5 * 8 * 1024}


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 300])
def test_the_rank_with_most_rows_receives_most(rows):
    """The choice is made for it."""
    for dcp_size in (2, 3, 4, 8):
        sizes = sizes_of((24, 1, 1), dcp_size)
        shares = [len(range(rank, rows, dcp_size)) for rank in range(dcp_size)]
        totals = [sum(sizes.received_by_rows(rows, own, 5).values()) for own in shares]
        assert max(totals) == totals[0]


def test_a_group_of_one_receives_nothing_and_goes_by_queries():
    rule = by_bytes(GLM, 1)
    assert not any(rule.sizes.received_by_queries(4096).values())
    assert not any(rule.sizes.received_by_rows(4096, 4096, 64).values())
    assert not rule.goes_by_rows([4096], [4096], never)


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "dcp_size", "least"),
    [
        (GLM, 2, (2, 76, 302, 1205, 4815, 9630)),
        (GLM, 4, (2, 52, 203, 811, 3238, 6476)),
        (GLM, 8, (3, 47, 176, 698, 2783, 5564)),
        (DEEPSEEK, 2, (1, 37, 147, 584, 2336, 4670)),
        (DEEPSEEK, 4, (2, 26, 100, 397, 1587, 3172)),
        (DEEPSEEK, 8, (2, 23, 87, 343, 1367, 2734)),
    ],
)
def test_bare_bytes_cross_where_they_were_counted_to_cross(model, dcp_size, least):
    """The row before goes by queries, that one and the next hundred by rows. Counted with fractions of a mean layer."""
    rule = by_bytes(model, dcp_size)
    for prefix, rows in zip((0, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20), least):
        ways = [rule.goes_by_rows([count], [prefix + count], never) for count in range(max(1, rows - 1), rows + 100)]
        assert ways == [False] * (rows > 1) + [True] * 100, f"prefix {prefix}"


@pytest.mark.parametrize("dcp_size", [2, 4, 8])
def test_a_byte_of_a_page_counts_five_quarters(dcp_size):
    """The rule of whole numbers, beside fractions of a mean layer."""
    rule = PrefillRule(sizes_of(GLM, dcp_size))
    heads = 64 // dcp_size
    generator = random.Random(dcp_size)
    seen = set()
    for _ in range(2000):
        rows, pages = generator.randint(256, 20_000), generator.randint(1, 4000)
        own = -(-rows // dcp_size)
        by_queries = (dcp_size - 1) * (rows * heads * 2180 + 21 / 78 * own * 8192)
        by_rows = (dcp_size - 1) * (own * heads * 1152 + 1.25 * pages * 41984) + (rows - own) * heads * 1024
        seen.add(rule.moves_less(rows, pages))
        assert rule.moves_less(rows, pages) == (by_rows < by_queries), (rows, pages)
    assert seen == {True, False}


def test_equal_bytes_go_by_queries():
    """A page of a whole number of bytes a row is made as large as what 64 rows save, and a byte a row less."""
    sizes = LayerSizes(dcp_size=2, heads=1, row_bytes=0, topk=0, layers=1, selecting_layers=1)
    rule = PrefillRule(sizes, least_rows=1, page_weight=(1, 1))
    gap = sum(sizes.received_by_queries(64).values()) - sum(sizes.received_by_rows(64, 32, 0).values())
    assert gap % 64 == 0
    even = dataclasses.replace(rule, sizes=dataclasses.replace(sizes, row_bytes=gap // 64))
    less = dataclasses.replace(rule, sizes=dataclasses.replace(sizes, row_bytes=gap // 64 - 1))
    assert not even.moves_less(64, 1)
    assert less.moves_less(64, 1)


def test_short_chunks_go_by_queries_whatever_they_would_move():
    rule = PrefillRule(sizes_of(GLM, 8))
    assert not rule.goes_by_rows([255], [255], never)
    assert rule.goes_by_rows([256], [256], never)
    assert rule.goes_by_rows([100, 100, 56], [100, 100, 56], never)


def test_several_requests_count_by_the_sum_of_their_contexts():
    """Counted in megabytes a layer for GLM at dcp 8, 8,192 rows: 1,016 by queries."""
    rule = by_bytes(GLM, 8)
    for lens, contexts, by_rows in [
        ([8192], [40960], True),  # 148
        ([128] * 64, [4096 + 128] * 64, True),  # 294
        ([32] * 256, [1024 + 32] * 256, True),  # 350
        ([7000, 1192], [7000, 524288 + 1192], True),  # 431
        ([8129] + [1] * 63, [40960] + [8193] * 63, True),  # 463
        ([128] * 64, [32768 + 128] * 64, False),  # 1,347
        ([8129] + [1] * 63, [40960] + [32769] * 63, False),  # 1,352
    ]:
        distinct = sum(-(-length // 512) for length in contexts)
        assert rule.goes_by_rows(lens, contexts, lambda distinct=distinct: distinct) == by_rows, (lens[0], contexts[0])


def test_pages_that_requests_share_are_counted_where_they_decide_and_nowhere_else():
    rule = by_bytes(GLM, 8)
    lens, contexts = [128] * 64, [32768 + 128] * 64
    # 64 pages of the prefix in common, one each of their own; or nothing in common.
    assert rule.goes_by_rows(lens, contexts, lambda: 128)
    assert not rule.goes_by_rows(lens, contexts, lambda: 4160)
    # Nothing shared would do; and one context alone is too much.
    assert rule.goes_by_rows(lens, [4096 + 128] * 64, never)
    assert not rule.goes_by_rows([8, 300], [8, 1 << 20], never)


def test_a_way_that_was_asked_for_is_taken_by_every_chunk():
    sizes = sizes_of(GLM, 8)
    for lens, contexts in ([1, 1], [5, 1 << 20]), ([8192], [8192]):
        assert PrefillRule(sizes, "rows").goes_by_rows(lens, contexts, never)
        assert not PrefillRule(sizes, "queries").goes_by_rows(lens, contexts, never)
    with pytest.raises(ValueError, match=r"^way must be one of queries, rows, auto, got 'heads'$"):
        PrefillRule(sizes, "heads")
    assert PREFILL_WAYS == ("queries", "rows", "auto")


def test_no_request_at_all_goes_by_queries():
    assert not PrefillRule(sizes_of(GLM, 8), least_rows=0).goes_by_rows([], [], lambda: 0)


def test_every_sum_is_a_whole_number():
    """Fractions that round would part ranks on different machines."""
    for value_bytes in (2, 4, 8):
        sizes = sizes_of(GLM, 8, value_bytes=value_bytes)
        messages = {**sizes.received_by_queries(1001), **sizes.received_by_rows(1001, 126, 77)}
        assert all(type(count) is int for count in messages.values())
