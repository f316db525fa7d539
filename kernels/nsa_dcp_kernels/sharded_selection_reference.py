"""The definition of selection over sharded index keys, in plain PyTorch; and all ranks of it in one process."""

import torch

from nsa_dcp_kernels.kv_format import PAGE_SIZE
from nsa_dcp_kernels.reference import localize_topk, look_up_slots, select_slots, sortable_keys

# Sort keys: of no token, and of NaN, which comes after -inf.
NOTHING = -(1 << 31)
NAN = NOTHING + 1
LAST_POSITION = (1 << 31) - 1


def localize_contexts(
    page_table: torch.Tensor, lengths: torch.Tensor, dcp_size: int, dcp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    first_of_widened = page_table[:, ::dcp_size]
    local_pages = torch.where(first_of_widened >= 0, first_of_widened // dcp_size, -1).to(torch.int32)
    seen = lengths.clamp(min=0)
    local_lengths = seen // dcp_size + (seen % dcp_size > dcp_rank)
    return local_pages, local_lengths.to(torch.int32)


def select_candidates(scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
    local = select_slots(scores, lengths, topk, None, None, None, PAGE_SIZE)
    # One column more, so that a row of no scores has one to look at.
    padded = torch.nn.functional.pad(scores, (0, 1))
    keys = sortable_keys(padded.gather(1, local.clamp(min=0).long())).clamp(min=NAN)
    return torch.stack([torch.where(local >= 0, keys, NOTHING).to(torch.int32), local], dim=1)


def find_threshold(lists: torch.Tensor) -> torch.Tensor:
    num_ranks, _, _, topk = lists.shape
    keys, local = lists.long().unbind(2)
    positions = local * num_ranks + torch.arange(num_ranks)[:, None, None]
    # One integer that orders as (key descending, position ascending) does, from the largest on.
    order = torch.where(local >= 0, (keys << 32) + (LAST_POSITION - positions), NOTHING << 32)
    order = order.transpose(0, 1).flatten(1)
    last = order.topk(topk, dim=-1).values[:, -1]
    key, position = last >> 32, LAST_POSITION - (last & 0xFFFFFFFF)
    no_more = (order > NOTHING << 32).sum(-1) <= topk
    all_fit = (order >> 32 >= key.unsqueeze(1)).sum(-1) <= topk
    key = torch.where(no_more, NOTHING, key)
    cut = torch.where(no_more | all_fit, LAST_POSITION, position)
    return torch.stack([key, cut], dim=1).to(torch.int32)


def take_own(
    candidates: torch.Tensor,
    cutoffs: torch.Tensor,
    local_pages: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    row_request: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, local = candidates.long().unbind(1)
    threshold, cut = cutoffs.long().split(1, dim=1)
    at_threshold = (keys == threshold) & (local * dcp_size + dcp_rank <= cut)
    own = torch.where((local >= 0) & ((keys > threshold) | at_threshold), local, -1)
    requests = torch.arange(candidates.shape[0]) if row_request is None else row_request
    return localize_topk(look_up_slots(own, requests, local_pages, PAGE_SIZE), 1, 0, 1)


def select_sharded(scores: torch.Tensor, lengths: torch.Tensor, topk: int, dcp_size: int) -> list[torch.Tensor]:
    """Select as `dcp_size` ranks do that hold every dcp_size-th score each, in one process.

    Args:
        scores: [T, L] float32, of all positions. lengths: [T] integer. topk: K.

    Returns:
        For each rank [T, K] int32: the positions that it attends to, ascending, then -1. Together, `select_topk`'s.
    """
    num_rows, width = scores.shape
    pages = torch.arange(-(-width // PAGE_SIZE), dtype=torch.int32).expand(num_rows, -1)
    shards = [localize_contexts(pages, lengths, dcp_size, rank) for rank in range(dcp_size)]
    candidates = [select_candidates(scores[:, rank::dcp_size], shards[rank][1], topk) for rank in range(dcp_size)]
    cutoffs = find_threshold(torch.stack(candidates))
    parts = []
    for rank, own in enumerate(candidates):
        # A page holds its own number of rows before it, so that rows are local indices.
        rows, _ = take_own(own, cutoffs, shards[rank][0], dcp_size, rank, None)
        parts.append(torch.where(rows >= 0, rows * dcp_size + rank, -1))
    return parts
