"""How many tokens a node holds for a model with KV heads (GQA, MHA) at each dcp size, and what is gained.

A token costs each GPU of a DCP group

    2 * L * D * itemsize * max(1, K * dcp_size / tp_size) / dcp_size      bytes,

with `L` layers, `K` KV heads of `D` values, one or two bytes each; `tp_size` counts ranks that share their requests.
So a GPU holds `min(dcp_size, tp_size / K)` times the tokens of dcp 1, and nothing is gained where `K >= tp_size`.

Source: sglang 0.5.23 `DefaultPoolConfigurator` and `ModelConfig.get_num_kv_heads`, with which this agrees to the token
(checked in tests/sglang).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from nsa_dcp.planning.budget import GIB, budget_bytes, require_positive
from nsa_dcp.planning.kv_heads.dims import KvHeadDims
from nsa_dcp.planning.kv_heads.sizes import copies_of_a_kv_head, gain, smallest_useful_tp_size, useful_dcp_sizes

ITEMSIZES = {"fp8_e4m3": 1, "bfloat16": 2}


@dataclass(frozen=True)
class KvHeadRow:
    """What one dcp size holds with one KV dtype.

    Args:
        kv_heads_per_rank: KV heads of one GPU's rows, as sglang builds its pool.
        gathered_heads: query heads of an attention call over a rank's pages.
        bytes_per_token: of one GPU.
        gain: tokens relative to dcp 1 in the same memory, before rounding to pages.
        tokens_per_gpu, tokens_per_node, largest_context: as `capacity.PlanRow`; 0 where no memory was given.
        refusal: why this dcp size is of no use; empty when it is.
    """

    dcp_size: int
    kv_cache_dtype: str
    kv_heads_per_rank: int
    gathered_heads: int
    bytes_per_token: float
    gain: int
    tokens_per_gpu: int
    tokens_per_node: int
    largest_context: int
    refusal: str


@dataclass(frozen=True)
class KvHeadPlan:
    """A node's plan. `budget_bytes`: of one GPU's pool; 0 where no memory was given. `advice`: where DCP gains more."""

    model: KvHeadDims
    budget_bytes: int
    tp_size: int
    attn_dp_size: int
    page_size: int
    useful_dcp_sizes: tuple[int, ...]
    advice: str
    rows: tuple[KvHeadRow, ...]

    def as_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return asdict(self) | {"served": False}


def plan_kv_heads(
    model: KvHeadDims,
    *,
    gpu_memory_gib: float | None,
    kv_cache_dtypes: Sequence[str] = tuple(ITEMSIZES),
    mem_fraction_static: float = 1.0,
    weights_gib: float = 0.0,
    tp_size: int = 8,
    attn_dp_size: int = 1,
    gpus_per_node: int | None = None,
    dcp_sizes: Sequence[int] | None = None,
    page_size: int = 64,
) -> KvHeadPlan:
    """Plan the KV capacity of a node.

    Args:
        model: from `kv_head_preset` or `read_kv_head_config`.
        gpu_memory_gib: as in `capacity.plan`; None counts bytes and no tokens.
        gpus_per_node: a multiple of `tp_size`; default: `tp_size`.
        dcp_sizes: default: 1 and the useful ones, else 1 and 2, to say what 2 would do.
    The others are `capacity.plan`'s.

    Raises:
        ValueError: a size is not positive or does not divide; or the budget holds not one page.
    """
    require_positive(tp_size=tp_size, attn_dp_size=attn_dp_size, page_size=page_size)
    if tp_size % attn_dp_size:
        raise ValueError(f"tp_size must be a multiple of attn_dp_size, got {tp_size} and {attn_dp_size}")
    gpus = tp_size if gpus_per_node is None else gpus_per_node
    require_positive(gpus_per_node=gpus)
    if gpus % tp_size:
        raise ValueError(f"gpus_per_node must be a multiple of tp_size, got {gpus} and {tp_size}")
    span, kv_heads = tp_size // attn_dp_size, model.num_key_value_heads
    if model.num_attention_heads % span:
        raise ValueError(f"num_attention_heads must be a multiple of {span}, got {model.num_attention_heads}")
    useful = useful_dcp_sizes(span, kv_heads)
    budget = 0
    if gpu_memory_gib is not None:
        budget = budget_bytes(gpu_memory_gib, mem_fraction_static, weights_gib)
    if dcp_sizes is None:
        dcp_sizes = (1, *useful) if useful else (1, 2) if span % 2 == 0 else (1,)
    rows = []
    for kv_cache_dtype in kv_cache_dtypes:
        if kv_cache_dtype not in ITEMSIZES:
            raise ValueError(f"kv_cache_dtype must be one of {', '.join(ITEMSIZES)}, got {kv_cache_dtype!r}")
        for dcp_size in dcp_sizes:
            require_positive(dcp_size=dcp_size)
            if span % dcp_size:
                raise ValueError(f"dcp_size must divide tp_size / attn_dp_size = {span}, got {dcp_size}")
            row_heads = max(1, kv_heads // (span // dcp_size))
            row_bytes = 2 * model.num_hidden_layers * model.head_dim * row_heads * ITEMSIZES[kv_cache_dtype]
            pool_rows = budget // row_bytes // page_size * page_size
            if budget and not pool_rows:
                raise ValueError(
                    f"gpu_memory_gib must leave room for one page of {page_size * dcp_size} tokens "
                    f"({page_size * row_bytes:,} bytes), got {budget:,} bytes"
                )
            tokens = pool_rows * dcp_size
            rows.append(
                KvHeadRow(
                    dcp_size=dcp_size,
                    kv_cache_dtype=kv_cache_dtype,
                    kv_heads_per_rank=row_heads,
                    gathered_heads=model.num_attention_heads // span * dcp_size,
                    bytes_per_token=row_bytes / dcp_size,
                    gain=gain(dcp_size, span, kv_heads),
                    tokens_per_gpu=pool_rows,
                    tokens_per_node=tokens * attn_dp_size * (gpus // tp_size),
                    largest_context=min(tokens, model.max_context),
                    refusal="" if dcp_size == 1 or dcp_size in useful else _refusal(dcp_size, span, kv_heads),
                )
            )
    return KvHeadPlan(
        model=model,
        budget_bytes=budget,
        tp_size=tp_size,
        attn_dp_size=attn_dp_size,
        page_size=page_size,
        useful_dcp_sizes=useful,
        advice=_advise(model, span, attn_dp_size, useful),
        rows=tuple(rows),
    )


def format_kv_head_plan(plan: KvHeadPlan) -> str:
    """The plan as text."""
    model = plan.model
    lines = [
        f"{model.name}: {model.num_hidden_layers} layers, {model.num_attention_heads} heads, "
        f"{model.num_key_value_heads} KV heads of {model.head_dim}  ({model.source})",
        f"tp {plan.tp_size}, attention dp {plan.attn_dp_size}, page {plan.page_size}"
        + (f", pools of {plan.budget_bytes / GIB:.2f} GiB per GPU" if plan.budget_bytes else ""),
        plan.advice,
        "",
        "KV dtype  dcp  KV heads  query heads   bytes per token   gain" + _TOKENS * bool(plan.budget_bytes),
    ]
    for row in plan.rows:
        line = (
            f"{row.kv_cache_dtype:<9} {row.dcp_size:>3} {row.kv_heads_per_rank:>9} {row.gathered_heads:>12} "
            f"{row.bytes_per_token:>17,.0f} {row.gain:>5}x"
        )
        if plan.budget_bytes:
            line += f" {row.tokens_per_gpu:>12,} {row.tokens_per_node:>16,} {row.largest_context:>16,}"
        lines.append(line)
    notes = list(dict.fromkeys(f"dcp {row.dcp_size}: refused, {row.refusal}" for row in plan.rows if row.refusal))
    notes.append("KV heads, query heads, bytes: of one GPU, the cache's rows and an attention call over them")
    notes.append("not served under sglang yet: servers refuse DCP for these models; `nsa-dcp generate` runs it")
    if not plan.budget_bytes:
        notes.append("--gpu-memory-gib X counts tokens too")
    return "\n".join([*lines, "", *notes])


_TOKENS = "  rows per GPU  tokens per node  largest context"


def _advise(model: KvHeadDims, span: int, attn_dp_size: int, useful: tuple[int, ...]) -> str:
    heads = model.num_key_value_heads
    if useful:
        copies, sizes = copies_of_a_kv_head(span, heads), " or ".join(map(str, useful))
        return f"each KV head lies on {copies} ranks: dcp {sizes} would hold up to {copies} times the tokens"
    wider = smallest_useful_tp_size(heads, model.num_attention_heads)
    where = f"DCP gains from --tp-size {wider * attn_dp_size} on" if wider else "no --tp-size gains"
    return f"DCP gains nothing here: {heads} KV heads on {span} ranks, no head on two of them; {where}"


def _refusal(dcp_size: int, span: int, kv_heads: int) -> str:
    copies = copies_of_a_kv_head(span, kv_heads)
    if copies == 1:
        return "every rank has KV heads of its own, and a group would hold several: nothing is gained"
    return f"a group of {dcp_size} ranks would hold several KV heads: dcp must divide tp / KV heads, {copies}"
