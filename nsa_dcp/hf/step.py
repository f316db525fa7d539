"""One forward step's metadata: which tokens, where they go, what each query row sees.

Built on the host from a few Python ints per request; everything per token is a vectorised tensor expression.
"""

from dataclasses import dataclass

import torch

from nsa_dcp import comm, cp_layout
from nsa_dcp.cp_dcp import GatheredPages, plan_pages
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.layout import index_page_table, pages_for, slots_at


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
class ContextParallelStep:
    """What a token-sharded prefill chunk adds.

    restore: [T] int64, where each flat token stands in the gathered, padded shares.
    longest: tokens of the largest share.
    pages: the pages whose rows are gathered.
    """

    restore: torch.Tensor
    longest: int
    pages: GatheredPages

    def gather_tokens(self, share: torch.Tensor, group: comm.Group) -> torch.Tensor:
        """Put the ranks' shares of the chunk's tokens together.

        Args:
            share: [T_local, D]. This rank's tokens.
            group: the context-parallel ranks.

        Returns:
            [T, D], in the chunk's order.
        """
        padded = torch.nn.functional.pad(share, (0, 0, 0, self.longest - share.shape[0]))
        return comm.all_gather(padded, group).flatten(0, 1)[self.restore]


@dataclass(frozen=True)
class Step:
    """One step as one rank runs it. T tokens in the step, T_local of them on this rank (T without context parallelism).

    input_ids, positions: [T_local] int64. slots: [T] int32, where the step's tokens are cached.
    row_request, context_lens: [T_local] int32. page_table: [B_local, P] int32, widened pages.
    index_pages: [B_local, P * N] int32, pages of 64 slots of what index queries are scored against: the index-key cache
        or, where index keys are sharded, the gathered ones; [B_local, P], the rank's own, where it scores those alone.
    max_context_len: the largest context length. last_rows: [B] int64, each request's last token among the T.
    cp: None where the step is head-sharded.
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
    cp: ContextParallelStep | None
    index_gather: GatheredPages | None = None


def build_step(extends: list[Extend], ranks: Ranks, num_pages: int, device: torch.device) -> Step:
    """Build a step.

    Args:
        extends: one entry per request, none of them empty.
        ranks: this rank's place.
        num_pages: widened pages of the pool, the reserved one included.
        device: where the tensors go.

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

    cp = gathered = None
    request_table = page_table
    token_sharded = _is_token_sharded(lens, ranks)
    gathers_index_keys = ranks.config.shards_index_keys and max(lens) > 1
    if token_sharded or gathers_index_keys:
        plan = plan_pages(page_table, page_counts, num_pages)
        gathered = GatheredPages(plan.pages.to(device), plan.page_pos.to(device))
    if token_sharded and gathered:
        shares = cp_layout.split_tokens(lens, ranks.config.cp_size, ranks.config.cp_strategy)
        share = cp_layout.share_of(shares[ranks.rank], lens)
        cp = ContextParallelStep(
            restore=cp_layout.restore_index(shares).to(device),
            longest=max(len(tokens) for tokens in shares),
            pages=gathered,
        )
        input_ids, positions = input_ids[share.token_index], positions[share.token_index]
        row_request, request_table = share.row_request, page_table[share.request_index]
    index_pages = request_table
    if gathers_index_keys:
        # The padding of the table has no place; nothing is read there.
        index_pages = index_page_table(plan.page_pos[request_table.long()].clamp(min=0), dcp_size)
    elif not ranks.config.shards_index_keys:
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
        index_gather=gathered if gathers_index_keys else None,
    )


def _is_token_sharded(lens: list[int], ranks: Ranks) -> bool:
    """Prefill chunks are; decode steps, and chunks that the strategy cannot split, run head-sharded."""
    config = ranks.config
    return config.cp_size > 1 and max(lens) > 1 and cp_layout.can_split(lens, config.cp_size, config.cp_strategy)
