"""The collectives of a step: what each sends, how often a server's step issues it, and the step model's tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.steps.step_inputs import interpolate
from nsa_dcp_kernels.kv_format import KV_LORA_RANK, LATENT_BYTES, LATENT_DIM
from scripts.served_checks.servers.server_config import parse_sizes

# A partial in the message of `a2a`: a bfloat16 output and a float32 lse.
PARTIAL_BYTES = KV_LORA_RANK * 2 + 4
DECODE_ROWS = (1, 16, 64, 128, 256)
PREFILL_ROWS = 8192
GATHERED_TOKENS = (32768, 131072)
# Keys of the step model's tables of two ranks, bytes.
TABLE_BYTES = (4096, 65536, 524288, 2097152, 8388608, 67108864)
KINDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Collective:
    """One collective.

    part: of a step, or "table" for a size of the step model's tables. rows: query tokens, or tokens of gathered pages.
    kind: one of KINDS. sent_bytes: of a rank's input: its contribution to an all_gather, the whole send buffer of an
    all_to_all, the whole input of a reduce_scatter or all_reduce.
    """

    part: str
    rows: int
    kind: str
    sent_bytes: int
    dtype: str = "uint8"

    def received_bytes(self, num_ranks: int) -> int:
        """Bytes that a rank has to receive from the others at least."""
        if self.kind == "all_gather":
            return self.sent_bytes * (num_ranks - 1)
        share = self.sent_bytes * (num_ranks - 1) // num_ranks
        return 2 * share if self.kind == "all_reduce" else share


def list_collectives(dims: ModelDims, num_ranks: int, with_tables: bool = True) -> list[Collective]:
    """The collectives of decode steps and of a prefill chunk over all of `num_ranks`, and the tables' sizes."""
    heads = dims.num_attention_heads
    found = []
    for rows in (*DECODE_ROWS, PREFILL_ROWS):
        partials = rows * heads
        mine = -(-rows // num_ranks)
        found += [
            Collective("TP all-reduce", rows, "all_reduce", rows * dims.hidden_size * 2, "bfloat16"),
            Collective("queries", rows, "all_gather", partials // num_ranks * LATENT_DIM * 2),
            Collective("partials, a2a", rows, "all_to_all", partials * PARTIAL_BYTES),
            Collective("lse, ag_rs", rows, "all_gather", partials * 4),
            Collective("partials, ag_rs", rows, "reduce_scatter", partials * KV_LORA_RANK * 4, "float32"),
            Collective("merged heads", rows, "all_gather", partials // num_ranks * KV_LORA_RANK * 2),
            Collective("selections", rows, "all_gather", mine * dims.index_topk * 4),
            Collective("hidden states", rows, "all_gather", mine * dims.hidden_size * 2),
        ]
    found += [
        Collective("gathered pages", tokens, "all_gather", tokens // num_ranks * LATENT_BYTES)
        for tokens in GATHERED_TOKENS
    ]
    if with_tables:
        for kind in KINDS:
            dtype = {"reduce_scatter": "float32", "all_reduce": "bfloat16"}.get(kind, "uint8")
            found += [Collective("table", 0, kind, size, dtype) for size in TABLE_BYTES]
    return found


def count_per_step(config: str, dims: ModelDims, replicate_q_proj: bool, comm_backend: str) -> dict[str, int]:
    """How often a decode step of a server issues each part; norms, routing and sampling add none that are counted.

    Args:
        config: that of benchmarks/servers, `tpN-dcpM-...`; the group of all parts is taken to have N ranks.
        dims: the model.
        replicate_q_proj, comm_backend: as the server resolved them.
    """
    tp_size, dcp_size = parse_sizes(config)
    options = config.split("-")[2:]
    layers = dims.num_hidden_layers
    context_parallel = bool({"cpi", "cpz"} & set(options))
    sliced = not context_parallel or "slice" in options
    # Every layer's attention and MLP; and the embedding.
    counts = {"TP all-reduce": layers * (2 if sliced else 1) + 1} if tp_size > 1 else {}
    if dcp_size == 1:
        return counts
    if sliced and not replicate_q_proj:
        counts["queries"] = layers
    counts |= dict.fromkeys(["partials, a2a"] if comm_backend == "a2a" else ["lse, ag_rs", "partials, ag_rs"], layers)
    if not sliced:
        counts["merged heads"] = layers
    return counts


def share_of_step(
    counts: Mapping[str, int], times_us: Mapping[str, Mapping[int, float]], rows: int, step_us: float
) -> dict[str, float] | None:
    """Each part's time over the step's, as if nothing were hidden.

    Args:
        counts: of count_per_step.
        times_us: microseconds by part and rows, ascending; between two numbers of rows they are interpolated.
        rows: requests of the step.
        step_us: the measured step.

    Returns:
        The shares; None where a part was not timed, or not for as many rows.
    """
    if any(rows > max(times_us.get(part, {}), default=0) for part in counts):
        return None
    return {part: count * interpolate(times_us[part], rows) / step_us for part, count in counts.items()}


def model_tables(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """What `nsa-dcp model --tables` reads, from the worlds of two ranks; empty without one."""
    tables: dict[str, dict[str, float]] = {}
    for record in records:
        if record["part"] == "table" and record["ranks"] == 2:
            tables.setdefault(record["kind"], {})[str(record["sent_bytes"])] = record["us"]
    return tables
