"""The words that choose between ways of doing one thing, for the engine, the commands, the planner and the plugin.

Read by what must answer without torch, so that this module needs nothing.
"""

MODES = ("tp", "cp")
CP_STRATEGIES = ("interleave", "zigzag")
COMM_BACKENDS = ("a2a", "ag_rs")
WIRES = ("nccl", "peer")
SELECTIONS = ("replicated", "row_split")
# Every token's on every rank, or each token's on the rank that owns its latents.
INDEX_KEYS = ("replicated", "sharded")
# Of the embedded engine's caches. Servers and the planner have no float32 one, and servers spell bf16 as sglang does.
KV_CACHE_DTYPES = ("float32", "bf16", "fp8_e4m3")
