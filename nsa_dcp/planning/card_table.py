"""What `nsa-dcp plan` answers when it is told a model and no memory: the usual cards, a row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from nsa_dcp.planning import capacity
from nsa_dcp.planning.budget import GIB, budget_bytes, require_positive
from nsa_dcp.planning.checkpoints import CARDS, CHECKPOINTS, USUAL_FRACTION, Card, Checkpoint, weights_gib
from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.planning.index_key_choice import SHARDED_NOTE, other_choice, shards_of
from nsa_dcp.planning.served_format import PAGE_SIZE

# As many as the largest decode graph that sglang captures for these cards holds.
USUAL_REQUESTS = 512
# In place of a checkpoint's name.
GIVEN = "given"


@dataclass(frozen=True)
class CardRow:
    """A node of one card serving one checkpoint.

    Args:
        card, free_gib: from `CARDS`.
        checkpoint: its name, or `GIVEN` where the weights were given.
        mem_fraction_static: sglang's flag.
        weights_gib: of one GPU, without DCP.
        tokens: dcp size -> tokens of context that the node holds; 0 where the weights leave no room.
        other_tokens: the same with the other choice of index keys; `index_keys` is the one that was made.
        beside_gib, left_gib: at the largest dcp size, what lies beside pools and weights at the most, and what is left
            for it; `beside_gib` is 0 where nothing fits.
    """

    card: str
    free_gib: float
    checkpoint: str
    mem_fraction_static: float
    weights_gib: float
    tokens: dict[int, int]
    index_keys: str
    other_tokens: dict[int, int]
    beside_gib: float
    left_gib: float


def plan_cards(
    model: ModelDims,
    *,
    kv_cache_dtype: str = "fp8_e4m3",
    mem_fraction_static: float | None = None,
    given_weights_gib: float | None = None,
    dcp_sizes: Sequence[int] | None = None,
    max_running_requests: int = USUAL_REQUESTS,
    tp_size: int = 8,
    context: int | None = None,
    chunked_prefill_size: int = 8192,
    index_keys: str = "replicated",
) -> list[CardRow]:
    """A row for each card and published checkpoint; those of one checkpoint stand together.

    Args:
        model: a preset's, or any where `given_weights_gib` is.
        mem_fraction_static: default: `USUAL_FRACTION`.
        given_weights_gib: weights of one GPU at every dcp size, instead of counted ones.
        dcp_sizes: default: the powers of two that divide `tp_size`.
        index_keys: one of `INDEX_KEYS`.
    The others are `capacity.plan`'s.

    ValueError: as `capacity.plan`, or the model is no preset and its weights are not given.
    """
    checkpoints: Sequence[Checkpoint] = CHECKPOINTS.get(model.name, ())
    if given_weights_gib is not None:
        checkpoints = (Checkpoint(GIVEN, 0.0),)
    if not checkpoints:
        raise ValueError(
            "gpu_memory_gib must be given for a config, whose weights may have any size, or weights_gib, for the usual "
            "cards; got neither"
        )
    require_positive(tp_size=tp_size)
    fraction = USUAL_FRACTION if mem_fraction_static is None else mem_fraction_static
    # What no card can hold is a mistake in the arguments; what one card cannot hold is its row.
    budget_bytes(max(card.free_gib for card in CARDS), fraction, given_weights_gib or 0.0)
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if tp_size % size == 0] if dcp_sizes is None else list(dcp_sizes)
    rows = []
    for checkpoint in checkpoints:
        for card in CARDS:
            plans = {
                choice: {
                    size: _plan_row(
                        model,
                        card,
                        kv_cache_dtype,
                        fraction,
                        weights_gib(model, checkpoint.expert_bytes, tp_size, size)
                        if given_weights_gib is None
                        else given_weights_gib,
                        tp_size=tp_size,
                        dcp_size=size,
                        context=context,
                        chunked_prefill_size=chunked_prefill_size,
                        max_running_requests=max_running_requests,
                        index_shards=shards_of(choice, size),
                    )
                    for size in sizes
                }
                for choice in (index_keys, other_choice(index_keys))
            }
            chosen, other = plans.values()
            last = chosen[sizes[-1]]
            alone = given_weights_gib
            rows.append(
                CardRow(
                    card=card.name,
                    free_gib=card.free_gib,
                    checkpoint=checkpoint.name,
                    mem_fraction_static=fraction,
                    weights_gib=weights_gib(model, checkpoint.expert_bytes, tp_size) if alone is None else alone,
                    tokens=_tokens(chosen),
                    index_keys=index_keys,
                    other_tokens=_tokens(other),
                    beside_gib=most_beside(last) / GIB if last else 0.0,
                    left_gib=card.free_gib * (1 - fraction),
                )
            )
    return rows


def _plan_row(
    model: ModelDims,
    card: Card,
    kv_cache_dtype: str,
    fraction: float,
    weights: float,
    *,
    tp_size: int,
    dcp_size: int,
    context: int | None,
    chunked_prefill_size: int,
    max_running_requests: int,
    index_shards: int,
) -> capacity.PlanRow | None:
    """One dcp size of one card; None where the weights leave no room."""
    require_positive(dcp_size=dcp_size)
    cost = capacity.bytes_per_token(model, kv_cache_dtype, dcp_size, index_shards=index_shards)
    widened_page = cost.total * PAGE_SIZE * dcp_size
    if (card.free_gib * fraction - weights) * GIB < 2 * widened_page:
        return None
    (row,) = capacity.plan(
        model,
        gpu_memory_gib=card.free_gib,
        kv_cache_dtypes=(kv_cache_dtype,),
        mem_fraction_static=fraction,
        weights_gib=weights,
        tp_size=tp_size,
        gpus_per_node=tp_size,
        dcp_sizes=(dcp_size,),
        context=context,
        chunked_prefill_size=chunked_prefill_size,
        sm_count=card.sm_count,
        max_running_requests=max_running_requests,
        index_shards=index_shards,
    ).rows
    return row


def _tokens(plans: dict[int, capacity.PlanRow | None]) -> dict[int, int]:
    return {size: row.tokens_per_node if row else 0 for size, row in plans.items()}


def most_beside(row: capacity.PlanRow) -> int:
    """Bytes of one GPU that a server needs beside its pools and weights, at the most."""
    buffers = row.temporary_buffers
    needed = row.held.total + buffers.attention_scratch + buffers.gathered_q + buffers.exchange
    return needed + buffers.dequantised + row.reserved_bytes


def format_cards(
    model: ModelDims, rows: Sequence[CardRow], *, kv_cache_dtype: str, tp_size: int, max_running_requests: int
) -> str:
    """The rows as text, and what was assumed."""
    sizes, other = list(rows[0].tokens), other_choice(rows[0].index_keys)
    lines = [
        f"{model.name}: tokens of context that {tp_size} GPUs hold, tp {tp_size}, {kv_cache_dtype}, "
        f"--mem-fraction-static {rows[0].mem_fraction_static:g}, up to {max_running_requests} requests at once",
        "",
        "checkpoint  card      free  weights"
        + "".join(f"  {f'dcp {size}':>10}" for size in sizes)
        + (f"  {f'dcp {sizes[-1]}, {other}':>18}" if sizes[-1] > 1 else "")
        + "  beside the pools",
    ]
    for row in rows:
        cells = "".join(f"  {tokens:>10,}" if tokens else f"  {'no room':>10}" for tokens in row.tokens.values())
        if sizes[-1] > 1:
            there = row.other_tokens[sizes[-1]]
            cells += f"  {there:>18,}" if there else f"  {'no room':>18}"
        beside = f"{row.beside_gib:.1f} of {row.left_gib:.1f}" if row.beside_gib else "-"
        short = " !" if row.beside_gib > row.left_gib else ""
        lines.append(
            f"{row.checkpoint:<10}  {row.card:<8}  {row.free_gib:>4.0f}  {row.weights_gib:>7.1f}{cells}  "
            f"{beside:>16}{short}"
        )
    lines += ["", "free: GiB of a card before a server loads, seen on an H200, assumed of the others"]
    if rows[0].checkpoint == GIVEN:
        lines.append("weights: GiB of a GPU, as given")
    else:
        lines += [
            "weights: GiB of a GPU without DCP, assumed: counted from the dimensions; DCP's columns count a replicated "
            "query projection too",
            "  a server's log has the real number, `mem usage` of `Load weight end`: --weights-gib",
        ]
    if sizes[-1] > 1:
        lines.append(f"{other}: with --index-keys {other}, at dcp {sizes[-1]}")
        lines.append(SHARDED_NOTE)
    lines.append(f"beside the pools: GiB that a GPU needs at dcp {sizes[-1]} at the most, of what is left")
    if any(row.beside_gib > row.left_gib for row in rows):
        lines.append("  !: too much; lower --mem-fraction-static or --max-running-requests")
    lines.append("--gpu-memory-gib X answers for one card in detail")
    return "\n".join(lines)


def cards_as_dict(model: ModelDims, rows: Sequence[CardRow]) -> dict[str, object]:
    """The rows as plain data, for JSON."""
    return {
        "model": model.name,
        "weights": "given" if rows[0].checkpoint == GIVEN else "counted, not measured",
        "cards": [asdict(row) for row in rows],
    }
