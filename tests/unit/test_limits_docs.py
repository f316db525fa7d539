"""The runbook's numbers are the table's: limits, what a request table takes, what speculation takes."""

import dataclasses
from pathlib import Path

from nsa_dcp.planning.held_memory import held_memory, request_table_columns
from nsa_dcp.planning.limits import LIMITS, Sizes, largest_chunk, largest_pool, most_requests

DOCS = Path(__file__).parents[2] / "docs"
RUNBOOK, SUPPORT = ((DOCS / name).read_text() for name in ("runbook.md", "support.md"))
BY_NAME = {limit.name: limit for limit in LIMITS}
DEEPSEEK = Sizes(local_heads=16, attended_heads=128, dcp_size=8, hidden_size=7168)
GLM = Sizes(local_heads=8, attended_heads=64, dcp_size=8, hidden_size=6144)
CONTEXT = 1_048_576


def row(text: str, start: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return found


def chunk(sizes: Sizes) -> str:
    return f"{largest_chunk(sizes)[0] // 64 * 64:,}"


def test_the_row_of_large_chunks():
    found = row(RUNBOOK, "`--chunked-prefill-size` above")
    assert f"above {chunk(GLM)} (64 gathered heads at dcp 8; {chunk(DEEPSEEK)} with 128" in found
    assert f"{chunk(dataclasses.replace(GLM, draft=True))} with speculation" in found


def test_the_rows_of_what_a_scheduler_builds():
    assert f"{largest_pool(8)[0]:,} tokens (dcp 8)" in row(RUNBOOK, "a pool of more than")
    unfused = Sizes(context=request_table_columns(CONTEXT, 8), unfused_topk=True)
    found = row(RUNBOOK, "`SGLANG_DSA_FUSE_TOPK=0`")
    assert f"more than {most_requests(unfused)[0]:,} requests at {CONTEXT:,} tokens" in found
    four = dataclasses.replace(unfused, rows_per_request=4)
    assert f"({most_requests(four)[0]} at 4 draft tokens)" in found
    drafted = Sizes(context=request_table_columns(CONTEXT, 8, 4), draft=True, rows_per_request=4)
    assert f"more than {most_requests(drafted)[0]} requests" in row(RUNBOOK, "speculation with graphs")


def test_what_is_gone():
    ends = [BY_NAME["query concatenation"].most(sizes) for sizes in (DEEPSEEK, GLM)]
    assert f"more than {ends[0]:,} rows of 128 gathered heads ({ends[1]:,} of 64)" in RUNBOOK
    assert f"past {ends[0]:,} rows" in SUPPORT and f"and {ends[1]:,} (GLM" in SUPPORT
    keys = BY_NAME["index-key gather, pages"].most(GLM) / 1e6
    assert 16.2 < keys < 16.3


def test_what_requests_hold_at_a_million_tokens():
    def held(requests: int, drafts: int = 0):
        sizes = dataclasses.replace(GLM, requests=requests, context=request_table_columns(CONTEXT, 8, drafts))
        return held_memory(sizes, longest=CONTEXT, draft_tokens=drafts)

    gib = [f"{held(requests).request_table / 2**30:.1f}" for requests in (2048, 512)]
    assert f"takes {gib[0]} GiB of every GPU" in RUNBOOK
    assert f"`--max-running-requests 512` takes {gib[1]}" in RUNBOOK
    assert f"would take another {held(601).eager_decode / 2**30:.1f} GiB" in RUNBOOK
    assert f"{(held(129, 4).speculation - held(128, 4).speculation) / 2**20:.0f} MiB" in RUNBOOK
