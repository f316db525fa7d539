"""Which DCP sizes gain anything for models that cache keys and values by head (GQA, MHA). Pure: no torch.

Tensor parallelism gives every rank `K / tp_size` KV heads, or, with more ranks than heads, each head to
`tp_size / K` consecutive ranks. Only those copies can be taken apart: a DCP group must hold one and the same head.
"""

from __future__ import annotations


def copies_of_a_kv_head(tp_size: int, num_kv_heads: int) -> int:
    """Consecutive ranks that hold the same KV head; 1 where every rank has heads of its own.

    ValueError: the heads cannot be dealt out: neither number divides the other, or one is below 1.
    """
    if tp_size < 1 or num_kv_heads < 1:
        raise ValueError(f"tp_size and num_key_value_heads must be at least 1, got {tp_size} and {num_kv_heads}")
    if tp_size % num_kv_heads and num_kv_heads % tp_size:
        raise ValueError(
            f"tp_size must divide num_key_value_heads or be a multiple of it, got {tp_size} and {num_kv_heads}"
        )
    return max(tp_size // num_kv_heads, 1)


def kv_head_of(rank: int, tp_size: int, num_kv_heads: int) -> int:
    """The first KV head that a rank holds; the only one where `tp_size` is at least `num_kv_heads`.

    Args:
        rank: in `[0, tp_size)`.
        tp_size, num_kv_heads: as in `copies_of_a_kv_head`.
    """
    copies_of_a_kv_head(tp_size, num_kv_heads)
    return rank * num_kv_heads // tp_size


def useful_dcp_sizes(tp_size: int, num_kv_heads: int) -> tuple[int, ...]:
    """Sizes above 1 that spread copies and nothing else, ascending: the divisors of `tp_size / num_kv_heads`."""
    copies = copies_of_a_kv_head(tp_size, num_kv_heads)
    return tuple(size for size in range(2, copies + 1) if copies % size == 0)


def gain(dcp_size: int, tp_size: int, num_kv_heads: int) -> int:
    """How many times the tokens of dcp 1 a GPU's memory holds: `min(dcp_size, tp_size / K)`, 1 where `K >= tp_size`."""
    return min(dcp_size, copies_of_a_kv_head(tp_size, num_kv_heads))


def smallest_useful_tp_size(num_kv_heads: int, num_heads: int) -> int | None:
    """The smallest `tp_size` that copies KV heads and still divides the query heads; None where there is none."""
    sizes = range(2 * num_kv_heads, num_heads + 1, num_kv_heads)
    return next((size for size in sizes if num_heads % size == 0), None)
