"""The table of 32-bit products: each against the arithmetic of its kernel, written again, and what follows from it."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nsa_dcp.planning.limits import (
    INT32_MAX,
    LIMITS,
    Answer,
    Sizes,
    largest_chunk,
    largest_pool,
    limits_of,
    most_requests,
    tightest,
)

ROOT = Path(__file__).parents[3]
BY_NAME = {limit.name: limit for limit in LIMITS}
DEEPSEEK = Sizes(local_heads=16, attended_heads=128, dcp_size=8, hidden_size=7168, index_heads=64, q_lora_rank=1536)
GLM = Sizes(local_heads=8, attended_heads=64, dcp_size=8, hidden_size=6144, index_heads=32, q_lora_rank=2048)


def wraps(value: int) -> bool:
    """Whether an int of 32 bits holds another value."""
    return (value + 2**31) % 2**32 - 2**31 != value


def concatenation(s: Sizes, rows: int) -> list[int]:
    """Where heads begin in the views that sglang hands its kernel: gathered [H, T, 576], or a product's [H, T, 512]."""
    if not s.spread:
        return [head * (rows * 576) for head in range(s.attended_heads)]
    together = rows if s.zigzag else min(rows, s.dcp_size - 1)
    return [head * (t * 512) for t in (-(-rows // s.dcp_size), together) for head in range(s.attended_heads)]


def merge(s: Sizes, rows: int) -> list[int]:
    """Where ranks' parts begin in [N, T, H / N, 514]."""
    return [rank * (rows * (s.attended_heads // s.dcp_size) * 514) for rank in range(s.dcp_size)]


def split_results(s: Sizes, rows: int) -> list[int]:
    """The end of FlashMLA's [T + parts, heads, 512], which holds the partial results of split rows."""
    heads = 64 if s.local_heads <= 64 else 128
    own = -(-rows // s.dcp_size) if s.spread else rows
    return [(own + 132 // (heads // 64)) * heads * 512] if s.draft else []


def draft_concatenation(s: Sizes, rows: int) -> list[int]:
    own = -(-rows // s.dcp_size) if s.spread else rows
    return [head * own * 512 for head in range(s.local_heads)] if s.draft else []


@st.composite
def sizes(draw):
    dcp_size = draw(st.sampled_from([2, 3, 4, 8, 16, 32]))
    spread = draw(st.booleans())
    local = draw(st.sampled_from([1, 2, 4, 8, 16, 64, 128]))
    attended = local if spread else local * dcp_size
    assume(attended <= 128 and attended % dcp_size == 0)
    zigzag = spread and draw(st.booleans())
    return Sizes(
        local_heads=local,
        attended_heads=attended,
        dcp_size=dcp_size,
        spread=spread,
        zigzag=zigzag,
        draft=not zigzag and draw(st.booleans()),
        hidden_size=draw(st.sampled_from([0, 4096, 6144, 7168])),
    )


@settings(max_examples=200)
@given(
    sizes(),
    st.sampled_from(
        [
            ("query concatenation", concatenation),
            ("query concatenation of a draft", draft_concatenation),
            ("merge of the ranks' results", merge),
            ("split results of a draft's attention", split_results),
            ("hidden states", lambda s, rows: [rows * s.hidden_size]),
        ]
    ),
)
def test_a_chunk_is_right_up_to_its_bound_and_wraps_past_it(drawn, named):
    name, offsets = named
    most = BY_NAME[name].most(drawn)
    if most is None:
        assert not any(wraps(offset) for offset in offsets(drawn, 1 << 30))
        return
    assert not any(wraps(offset) for offset in offsets(drawn, most))
    # Of a spread chunk each rank has its share, so the next row may be another rank's.
    step = drawn.dcp_size if drawn.spread else 1
    assert any(wraps(offset) or offset > INT32_MAX for offset in offsets(drawn, most + step))


@pytest.mark.parametrize(
    ("name", "drawn", "most"),
    [
        ("query concatenation", DEEPSEEK, 29_356),
        ("query concatenation", GLM, 59_178),
        ("query concatenation", dataclasses.replace(GLM, local_heads=64, spread=True, zigzag=True), 66_576),
        ("merge of the ranks' results", DEEPSEEK, 37_303),
        ("merge of the ranks' results", GLM, 74_606),
        ("split results of a draft's attention", dataclasses.replace(GLM, draft=True), 65_403),
        ("split results of a draft's attention", dataclasses.replace(GLM, draft=True, local_heads=128), 32_701),
        ("hidden states", DEEPSEEK, 299_593),
        ("hidden states", GLM, 349_525),
        ("hidden states", dataclasses.replace(GLM, shards=4), 87_381),
        ("quantised index queries", dataclasses.replace(DEEPSEEK, spread=True, zigzag=True), 262_143),
        ("quantised index queries", DEEPSEEK, None),
        ("index-key gather, blocks of a context", GLM, 65_535 * 256),
        ("page table of an unfused selection", Sizes(context=1_048_580, unfused_topk=True), 2_048),
        ("page table of an unfused selection", Sizes(context=1_048_580, unfused_topk=True, rows_per_request=4), 512),
        ("page tables of speculation's graphs", Sizes(context=1_048_584, draft=True, rows_per_request=4), 511),
        ("sums of lengths", Sizes(context=1_048_580), 2_047),
        ("rows of the scoring kernel's schedule", Sizes(rows_per_request=4), 14_528),
    ],
)
def test_bounds_of_the_published_models(name, drawn, most):
    assert BY_NAME[name].most(drawn) == most


@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8, 16, 32])
def test_sglangs_index_key_gather_ends_at_254_200_pages(dcp_size):
    """Page 254,199's last scale is at 254,199 * 8,448 + 8,444; that of page 254,200 is past 2**31."""
    most = BY_NAME["index-key gather, pages"].most(Sizes(dcp_size=dcp_size))
    last = most // 64 + dcp_size - 1
    assert not wraps(last * 8448 + 8444)
    assert wraps((last + 1) * 8448 + 8444)
    assert last == 254_199


@pytest.mark.parametrize("dcp_size", [2, 4, 8, 16])
def test_a_pool_at_its_bound_is_whole_pages_and_its_last_slot_an_int32(dcp_size):
    most, limit = largest_pool(dcp_size)
    assert limit.name == "slots"
    assert most % (64 * dcp_size) == 0
    assert most + 64 * dcp_size - 1 <= INT32_MAX < most + 2 * 64 * dcp_size


def test_what_is_refused_is_bounded_by_the_tightest_of_its_rows():
    for drawn in (DEEPSEEK, GLM, dataclasses.replace(GLM, draft=True)):
        bounds = [limit.most(drawn) for limit in limits_of("rows", Answer.REFUSED)]
        assert largest_chunk(drawn)[0] == min(bound for bound in bounds if bound is not None)
    assert tightest([], DEEPSEEK) is None
    assert most_requests(Sizes(context=1 << 20)) is None


@settings(max_examples=100)
@given(sizes())
def test_what_is_said_not_to_be_reached_lies_past_what_is_refused(drawn):
    # Both models have at least 64 heads, and under context parallelism a rank has all of them.
    assume(not drawn.spread or drawn.local_heads >= 64)
    drawn = dataclasses.replace(drawn, hidden_size=drawn.hidden_size or 6144, index_heads=64, q_lora_rank=2048)
    most, _ = largest_chunk(drawn)
    assert all(limit.holds(dataclasses.replace(drawn, rows=most)) for limit in limits_of("rows", Answer.NOT_REACHED))


def test_every_row_says_what_is_done_and_where():
    assert len(BY_NAME) == len(LIMITS)
    fields = {field.name for field in dataclasses.fields(Sizes)}
    for limit in LIMITS:
        assert limit.size in fields
        assert ":" in limit.source or "as above" in limit.source or limit.name == "hidden states"
        for path in re.findall(r"sglang_plugin/\S+\.py", limit.how):
            assert (ROOT / "nsa_dcp" / path).is_file(), path
