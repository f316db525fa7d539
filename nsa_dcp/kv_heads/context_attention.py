"""Attention of models with KV heads (GQA, MHA) over a DCP group: queries travel, keys and values never do.

All ranks of a group hold the same KV head and every N-th token of it. A query head's owner adds what it alone computes,
its attention to the step's own tokens, to its partial of the prefix before the ranks' partials are exchanged: a merge
of N + 1 partials with the messages of N.
"""

from dataclasses import dataclass

import torch

from nsa_dcp import comm
from nsa_dcp_kernels import attend_chunk, attend_pages, merge_partials
from nsa_dcp_kernels.kv_format import PAGE_SIZE


@dataclass(frozen=True)
class LocalContext:
    """This rank's rows of each request's context, in one layer.

    k_rows, v_rows: [R, K, D], the rank's cache. page_table: [B, P] integer, widened pages, which are its pages too.
    lengths: [B] integer, rows of each request on this rank. row_request: [T] integer, the request of each query.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    row_request: torch.Tensor

    def attend(self, q: torch.Tensor, sm_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the rank's rows; as `attend_pages` returns it."""
        return attend_pages(
            q, self.k_rows, self.v_rows, self.page_table, self.lengths, self.row_request, sm_scale, PAGE_SIZE
        )


def attend_cached(
    q: torch.Tensor, context: LocalContext, sm_scale: float, group: comm.Group, comm_backend: str
) -> torch.Tensor:
    """Attend to whole contexts, one query of each request: a decode step, whose own tokens are cached already.

    Args:
        q: [T, H, D]. This rank's query heads. T and H are the same on every rank.
        context: of the cached tokens, the new ones among them.
        sm_scale: multiplies q . k before the softmax.
        group: the DCP group.
        comm_backend: "a2a" or "ag_rs".

    Returns:
        [T, H, D], dtype of `q`; zeros for a context of no tokens.
    """
    return comm.merge_heads(*context.attend(comm.gather_heads(q, group), sm_scale), group, comm_backend)


def attend_extended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    prefix: LocalContext | None,
    sm_scale: float,
    group: comm.Group,
    comm_backend: str,
) -> torch.Tensor:
    """Attend to cached prefixes without a mask and to the step's own tokens causally: prefill, verify, mixed steps.

    Args:
        q, sm_scale, group, comm_backend: as in `attend_cached`; any number of queries of each request.
        k, v: [T, K, D]. The step's own keys and values as the cache will read them back; the same on every rank.
        starts: [B + 1] integer. Request b's tokens are starts[b] up to starts[b + 1].
        prefix: of the tokens cached before this step; None, on every rank alike, where no request has any.

    Returns:
        [T, H, D], dtype of `q`.
    """
    own = attend_chunk(q, k, v, starts, sm_scale)
    if prefix is None:
        return own[0]
    out, lse = prefix.attend(comm.gather_heads(q, group), sm_scale)
    first = comm.rank_in(group) * q.shape[1]
    heads = slice(first, first + q.shape[1])
    out[:, heads], lse[:, heads] = merge_partials(
        torch.stack([out[:, heads], own[0]]), torch.stack([lse[:, heads], own[1]])
    )
    return comm.merge_heads(out, lse, group, comm_backend)
