"""The words that choose between ways of doing one thing, for the engine, the commands, the planner and the plugin.

Read by what must answer without torch, so that this module needs nothing.
"""

import os
from collections.abc import Mapping

MODES = ("tp", "cp")
CP_STRATEGIES = ("interleave", "zigzag")
COMM_BACKENDS = ("a2a", "ag_rs")
# How a step's exchanges travel: NCCL's collectives, or kernels over memory that ranks map into each other.
WIRES = ("nccl", "peer")
WIRE_VARIABLE, DEFAULT_WIRE = "NSA_DCP_WIRE", "nccl"
SELECTIONS = ("replicated", "row_split")
# Of TP-DCP's prefills: planning.prefill_ways.
PREFILL_WAYS = ("queries", "rows", "auto")
# Every token's on every rank, or each token's on the rank that owns its latents.
INDEX_KEYS = ("replicated", "sharded")
# Of the embedded engine's caches. Servers and the planner have no float32 one.
KV_CACHE_DTYPES = ("float32", "bfloat16", "fp8_e4m3")


def chosen_wire(environ: Mapping[str, str] = os.environ) -> str:
    """`peer` or `nccl`, as NSA_DCP_WIRE says.

    Raises:
        ValueError: it says something else.
    """
    value = environ.get("NSA_DCP_WIRE") or DEFAULT_WIRE
    if value not in WIRES:
        raise ValueError(f"{WIRE_VARIABLE} must be one of {', '.join(WIRES)}, got {value!r}")
    return value
