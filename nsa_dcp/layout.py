"""Who owns which token, in pages and lengths: pure index math. One slot is filtered *and* divided by `localize_topk`.

    owner(slot) = slot % dcp_size,    row(slot) = slot // dcp_size

The allocator hands out widened pages of `page_size * dcp_size` slots, so a page starts at a multiple of that and
`slot % dcp_size == position % dcp_size`: ownership can be told from a position or from a slot. A widened page is one
page of `page_size` rows on every rank, and `dcp_size` consecutive pages of the index-key cache, which is never divided.
"""

import torch

from nsa_dcp_kernels import look_up_slots
from nsa_dcp_kernels.kv_format import PAGE_SIZE


def local_seq_lens(seq_lens: torch.Tensor, dcp_size: int, dcp_rank: int, interleave_size: int = 1) -> torch.Tensor:
    """Count the tokens of each sequence that one rank owns.

    Args:
        seq_lens: [B] integer, tokens per sequence.
        dcp_size, dcp_rank: the rank's place.
        interleave_size: consecutive tokens on one rank before the next rank's turn; 1 wherever this package serves.

    Returns:
        [B], dtype of `seq_lens`. Over all ranks they sum to `seq_lens`.

    Raises:
        ValueError: the rank is outside the group.
    """
    if not 0 <= dcp_rank < dcp_size:
        raise ValueError(f"dcp_rank must be in [0, {dcp_size}), got {dcp_rank}")
    cycle = interleave_size * dcp_size
    rest = seq_lens % cycle - dcp_rank * interleave_size
    return seq_lens // cycle * interleave_size + rest.clamp(0, interleave_size)


def widened_page_size(dcp_size: int) -> int:
    """Slots per page of the allocator."""
    return PAGE_SIZE * dcp_size


def pages_for(num_tokens: int, dcp_size: int) -> int:
    """Widened pages that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // widened_page_size(dcp_size))


def slots_at(
    positions: torch.Tensor, row_request: torch.Tensor, page_table: torch.Tensor, dcp_size: int
) -> torch.Tensor:
    """Look up the slots of positions.

    Args:
        positions: [T] or [T, K] integer; a negative entry is "none".
        row_request: [T] integer. The request of each row.
        page_table: [B, P] int32. Widened pages of each request, in order.
        dcp_size: ranks in the group.

    Returns:
        Same shape as `positions`, int32; -1 for "none".
    """
    table_of_rows = positions.unsqueeze(1) if positions.dim() == 1 else positions
    return look_up_slots(table_of_rows, row_request, page_table, widened_page_size(dcp_size)).view(positions.shape)


def index_page_table(page_table: torch.Tensor, dcp_size: int) -> torch.Tensor:
    """Turn a table of widened pages into one of 64-slot pages of the full-span index-key cache.

    Args:
        page_table: [B, P] int32, widened pages.
        dcp_size: ranks in the group.

    Returns:
        [B, P * dcp_size] int32: widened page w is index pages w * dcp_size ... w * dcp_size + dcp_size - 1.
    """
    inner = torch.arange(dcp_size, dtype=torch.int32, device=page_table.device)
    return (page_table.unsqueeze(-1) * dcp_size + inner).flatten(1)
