"""Memory beside the pools: each part against the shape that is allocated, written again."""

import dataclasses

import pytest

from nsa_dcp.planning.held_memory import default_requests, held_memory, request_table_columns
from nsa_dcp.planning.limits import Sizes
from nsa_dcp.sglang_plugin.admission.held_report import describe_held_memory
from nsa_dcp.sglang_plugin.admission.validation import ModelFacts, ServerSettings

GIB = 1 << 30
CONTEXT = 1_048_576
GLM = Sizes(rows=8192, local_heads=8, attended_heads=64, dcp_size=8)


def held(requests, *, drafts=0, captured=512, longest=CONTEXT, **changes):
    columns = request_table_columns(CONTEXT, 8, drafts)
    sizes = dataclasses.replace(GLM, requests=requests, context=columns, **changes)
    return held_memory(sizes, longest=longest, captured=captured, draft_tokens=drafts)


@pytest.mark.parametrize(("requests", "gib"), [(2048, 8.0), (512, 2.0), (4096, 16.0)])
def test_the_request_table_has_a_row_more_than_requests_and_four_columns_more_than_the_context(requests, gib):
    assert held(requests).request_table == (requests + 1) * (CONTEXT + 4) * 4
    assert held(requests).request_table / GIB == pytest.approx(gib, abs=0.01)


def test_an_eager_step_takes_a_table_and_twice_its_scores_with_one_long_context():
    """601 requests of which one has 1M tokens: 2.3 GiB of slots and 4.7 of scores."""
    assert held(601).eager_decode == 601 * CONTEXT * 12
    assert held(601, longest=4096).eager_decode == 601 * 4096 * 12
    # A step that one pass scores, and steps that every graph has.
    assert held(100, captured=0).eager_decode == 100 * CONTEXT * 8
    assert held(512).eager_decode == 0
    assert held(513).eager_decode > 0


def test_speculations_tables_have_every_slot_of_every_row():
    for requests, gib in ((48, 3.4), (128, 9.0), (512, 36.1)):
        assert held(requests, drafts=4).speculation / GIB == pytest.approx(gib, abs=0.06)
    assert held(48).speculation == 0
    # Of graphs there are no more than requests, and of requests no more than the largest graph has.
    assert held(2048, drafts=4, captured=64).speculation == held(64, drafts=4).speculation
    assert held(64, drafts=4, captured=0).speculation == 0


def test_a_chunks_parts_grow_with_its_rows_and_its_gathered_heads():
    parts = held(64)
    assert parts.joined_queries == 8192 * 64 * 576 * 2
    assert held(64, rows=59_178).joined_queries == 59_178 * 64 * 576 * 2
    assert held(64, rows=59_179).joined_queries == 59_179 * 64 * 576 * 4
    assert parts.selections == 3 * 8192 * 2048 * 4
    assert parts.gathered_index_keys == CONTEXT * 132
    assert parts.draft_prefill == 0
    drafted = held(64, drafts=4).draft_prefill
    assert drafted == (8192 + 132) * 64 * 512 * 4 + 8192 * 64 * 576 * 2 + 8192 * 64 * 512 * 2


def test_a_spread_chunk_is_a_ranks_share_but_where_zigzag_leaves_it_whole():
    spread = held(64, spread=True, local_heads=64)
    assert spread.selections == 3 * 1024 * 2048 * 4
    assert held(64, spread=True, zigzag=True, local_heads=64).selections == 3 * 8192 * 2048 * 4


def test_the_total_has_the_larger_of_a_prefill_and_an_eager_step():
    for parts in (held(64), held(2048), held(48, drafts=4)):
        prefill = parts.joined_queries + parts.selections + parts.gathered_index_keys + parts.draft_prefill
        assert parts.total == parts.at_start + max(prefill, parts.eager_decode)
        assert set(parts.as_bytes()) == {field.name for field in dataclasses.fields(parts)}


def test_sglangs_default_of_requests():
    assert default_requests(1_000_000, CONTEXT) == 2048
    assert default_requests(10 * CONTEXT, CONTEXT) == 4096
    assert default_requests(6 * CONTEXT, CONTEXT) == 3072
    assert default_requests(6 * CONTEXT, CONTEXT, draft_tokens=4) == 48


MODEL = ModelFacts(is_dsa=True, num_attention_heads=64, index_topk=2048, hidden_size=6144, context_length=CONTEXT)
SERVER = ServerSettings(dcp_size=8, tp_size=8)


def test_doctor_names_what_lies_beside_the_pools():
    line = describe_held_memory(SERVER, MODEL)
    assert "2,048 requests, sglang's default or more, of up to 1,048,576 tokens" in line
    assert "request table 8.0" in line
    assert "a step past the largest graph" in line
    fewer = describe_held_memory(dataclasses.replace(SERVER, max_running_requests=512), MODEL)
    assert "512 requests, of up to" in fewer
    assert "request table 2.0" in fewer
    assert "largest graph" not in fewer
    drafted = describe_held_memory(dataclasses.replace(SERVER, speculative_algorithm="EAGLE"), MODEL)
    assert "48 requests" in drafted
    assert "tables of speculation 3.4" in drafted
    assert describe_held_memory(SERVER, dataclasses.replace(MODEL, context_length=0)) == ""
    sharded = dataclasses.replace(SERVER, attn_dp_size=2, dcp_size=4, max_running_requests=512)
    assert "256 requests" in describe_held_memory(sharded, MODEL)
