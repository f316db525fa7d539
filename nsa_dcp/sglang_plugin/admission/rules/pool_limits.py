"""What a scheduler's pool and steps may hold, of the table in `planning/limits.py`: asked when the pool has been built.

sglang decides the tokens of a pool and the requests of a step from the memory that it finds, so no command says them.
"""

from __future__ import annotations

from dataclasses import replace

from nsa_dcp.planning.limits import Sizes, largest_pool, most_requests
from nsa_dcp.sglang_plugin.admission.server_settings import Problem


def find_pool_problems(pool_tokens: int, dcp_size: int) -> list[Problem]:
    """Return why a pool is too large; empty when it is not.

    Args:
        pool_tokens: tokens of the widened pool, without the reserved page.
        dcp_size: ranks that it is spread over.
    """
    most, limit = largest_pool(dcp_size)
    if pool_tokens <= most:
        return []
    return [
        Problem(
            f"a pool of {pool_tokens:,} tokens",
            f"past {most:,} the {limit.name} exceed 32 bits",
            # sglang counts a rank's rows there.
            f"add --max-total-tokens {most // dcp_size}",
        )
    ]


def find_step_problems(sizes: Sizes, captured: int) -> list[Problem]:
    """Return why a decode or verify step could be too large; empty when it cannot.

    Args:
        sizes: `requests`, `rows_per_request`, `context`, `draft` and `unfused_topk` count.
        captured: requests of the largest graph; 0 without graphs. Speculation's tables are a graph's.
    """
    problems = []
    if sizes.unfused_topk:
        problems += _too_many(replace(sizes, draft=False), "--max-running-requests")
    if sizes.draft and captured:
        graph = replace(sizes, unfused_topk=False, requests=min(captured, sizes.requests))
        problems += _too_many(graph, "--cuda-graph-max-bs-decode")
    return problems


def _too_many(sizes: Sizes, flag: str) -> list[Problem]:
    found = most_requests(sizes)
    if found is None or sizes.requests <= found[0]:
        return []
    most, limit = found
    rows = f" of {sizes.rows_per_request} rows each" if sizes.rows_per_request > 1 else ""
    return [
        Problem(
            f"steps of {sizes.requests:,} requests{rows}, with contexts of {sizes.context:,} tokens",
            f"the offsets of the {limit.name} exceed 32 bits past {most:,} requests",
            f"add {flag} {most}, or a smaller --context-length",
        )
    ]
