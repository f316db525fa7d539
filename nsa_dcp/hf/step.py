"""One forward step's metadata: which tokens, where they go, what each query row sees.

Built on the host from a few Python ints per request; everything per token is a vectorised tensor expression.
"""

from dataclasses import dataclass

import torch

from nsa_dcp import cp_layout
from nsa_dcp.cp_dcp import TokenShares, describe_shares
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.layout import index_page_table, pages_for, slots_at
from nsa_dcp.planning.prefill_ways import PrefillRule
from nsa_dcp.row_prefill import GatheredPages, plan_pages
from nsa_dcp.tp_dcp import RowShares, deal_rows


@dataclass(frozen=True)
class Extend:
    """New tokens of one request in a step.

    token_ids: [n] int64, the new tokens. start: tokens already cached. pages: widened pages of the request, in order.
    """

    token_ids: torch.Tensor
    start: int
    pages: list[int]

    @property
    def end(self) -> int:
        """Sequence length after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Step:
    """One step as one rank runs it. T tokens in the step, T_local of them on this rank (T without context parallelism).

    input_ids, positions: [T_local] int64. slots: [T] int32, where the step's tokens are cached.
    row_request, context_lens: [T_local] int32. page_table: [B_local, P] int32, widened pages.
    index_pages: [B_local, P * N] int32, pages of 64 slots of what index queries are scored against: the index-key cache
        or, where index keys are sharded, the gathered ones; [B_local, P], the rank's own, where it scores those alone.
    max_context_len: the largest context length. last_rows: [B] int64, each request's last token among the T.
    cp: how the tokens are spread over the ranks; None where every rank has all of them and its heads.
    rows: which rank attends with which of the T rows, where they travel; None elsewhere.
    pages: what is gathered where a rank attends with rows of its own, so with `cp` or `rows`; None where query heads
        are gathered instead.
    index_gather: the pages whose index keys are gathered; None where they are not.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_request: torch.Tensor
    context_lens: torch.Tensor
    page_table: torch.Tensor
    index_pages: torch.Tensor
    max_context_len: int
    last_rows: torch.Tensor
    cp: TokenShares | None = None
    rows: RowShares | None = None
    pages: GatheredPages | None = None
    index_gather: GatheredPages | None = None


def build_step(
    extends: list[Extend],
    ranks: Ranks,
    num_pages: int,
    device: torch.device,
    rule: PrefillRule | None = None,
) -> Step:
    """Build a step.

    Args:
        extends: one entry per request, none of them empty.
        ranks: this rank's place.
        num_pages: widened pages of the pool, the reserved one included.
        device: where the tensors go.
        rule: the way of chunks that are not token-sharded; None: all by queries.

    Returns:
        The step: token-sharded in cp mode where the chunk has several tokens of some request and can be split.

    Raises:
        ValueError: there is no request, a request has no new token, or its pages do not hold them.
    """
    dcp_size = ranks.config.dcp_size
    if not extends:
        raise ValueError("extends must hold a request, got none")
    for extend in extends:
        if not len(extend.token_ids):
            raise ValueError("extends must each hold a new token, got an empty one")
        if len(extend.pages) < pages_for(extend.end, dcp_size):
            raise ValueError(f"pages must hold {extend.end} tokens, got {len(extend.pages)} pages")
    lens = [len(extend.token_ids) for extend in extends]
    page_counts = [pages_for(extend.end, dcp_size) for extend in extends]
    page_table = torch.zeros(len(extends), max(page_counts), dtype=torch.int32)
    for request, (extend, count) in enumerate(zip(extends, page_counts)):
        page_table[request, :count] = torch.tensor(extend.pages[:count], dtype=torch.int32)
    lens_t = torch.tensor(lens)
    row_request = torch.repeat_interleave(torch.arange(len(extends)), lens_t)
    firsts = torch.tensor([extend.start for extend in extends]) - (lens_t.cumsum(0) - lens_t)
    positions = torch.arange(sum(lens)) + firsts[row_request]
    input_ids = torch.cat([extend.token_ids for extend in extends])
    slots = slots_at(positions, row_request, page_table, dcp_size)
    last_rows = lens_t.cumsum(0) - 1

    cp = rows = pages = index_gather = None
    gathers_index_keys = ranks.config.shards_index_keys and max(lens) > 1
    request_table = page_table
    if _is_token_sharded(lens, ranks):
        shares = cp_layout.split_tokens(lens, ranks.config.cp_size, ranks.config.cp_strategy)
        share = cp_layout.share_of(shares[ranks.rank], lens)
        cp = describe_shares(shares, device)
        input_ids, positions = input_ids[share.token_index], positions[share.token_index]
        row_request, request_table = share.row_request, page_table[share.request_index]
    elif rule and max(lens) > 1:
        # Decode steps go by queries: their shapes are fixed, and a graph holds them.
        ends = [extend.end for extend in extends]
        if rule.goes_by_rows(lens, ends, lambda: plan_pages(page_table, page_counts, num_pages).pages.shape[0]):
            rows = deal_rows(sum(lens), dcp_size, ranks.dcp_rank, device)
    index_pages = request_table
    if cp or rows or gathers_index_keys:
        plan = plan_pages(page_table, page_counts, num_pages)
        gathered = GatheredPages(plan.pages.to(device), plan.page_pos.to(device))
        pages = gathered if cp or rows else None
        if gathers_index_keys:
            index_gather = gathered
            # The padding of the table has no place; nothing is read there.
            index_pages = index_page_table(plan.page_pos[request_table.long()].clamp(min=0), dcp_size)
    if not ranks.config.shards_index_keys:
        index_pages = index_page_table(request_table, dcp_size)
    return Step(
        input_ids=input_ids.to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        row_request=row_request.to(device, torch.int32),
        context_lens=(positions + 1).to(device, torch.int32),
        page_table=request_table.to(device),
        index_pages=index_pages.to(device),
        max_context_len=int(positions.max()) + 1,
        last_rows=last_rows.to(device),
        cp=cp,
        rows=rows,
        pages=pages,
        index_gather=index_gather,
    )


def _is_token_sharded(lens: list[int], ranks: Ranks) -> bool:
    """Prefill chunks are; decode steps, and chunks that the strategy cannot split, run head-sharded."""
    config = ranks.config
    return config.cp_size > 1 and max(lens) > 1 and cp_layout.can_split(lens, config.cp_size, config.cp_strategy)
