"""CP-DCP prefill attention: this rank's own query tokens, all heads, over the pages gathered from every rank.

Nothing is quantised here, and no result is exchanged: the chunk was written to the cache once, by the ordinary write,
and its pages come with the prefix's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsa_dcp.prefill import GatheredPages, localize_gathered
from nsa_dcp.sglang_plugin.cp_pages import PageBuffer
from nsa_dcp_kernels import LocalSelection, attend_selection, merge_partials

# Query tokens that are merged at once: with 128 heads, what that takes beside the results is 0.4 GiB.
_MERGED_ROWS = 1024


@dataclass(frozen=True)
class PrefillPages:
    """The pages of one forward.

    metadata: sglang's metadata object of that forward, which is how it is recognised.
    parts: what is gathered in each layer, one after the other.
    """

    metadata: object
    parts: tuple[GatheredPages, ...]


def localize_parts(
    topk_slots: torch.Tensor, parts: Sequence[GatheredPages], dcp_size: int
) -> tuple[LocalSelection, ...]:
    """Prepare a selection for `attend_parts`; layers that share a selection share this.

    Args:
        topk_slots: [T, K] int32, slots of the widened pool, -1 anywhere. This rank's query tokens.
        parts: the forward's.
        dcp_size: ranks that contribute.

    Returns:
        For each part, the selected tokens that lie in it.
    """
    return tuple(localize_gathered(topk_slots, part, dcp_size) for part in parts)


def attend_parts(
    q: torch.Tensor,
    cache_rows: torch.Tensor,
    parts: Sequence[GatheredPages],
    selections: Sequence[LocalSelection],
    buffer: PageBuffer,
    sm_scale: float,
) -> torch.Tensor:
    """Attend to a selection of tokens that lie on all ranks. All ranks must call it, with the same parts.

    Args:
        q: [T, H, 576]. Absorbed queries of this rank's tokens, all heads. T differs between ranks.
        cache_rows: [R, 656] uint8 or [R, 576] bfloat16, this rank's rows of one layer, the chunk's included.
        parts: the forward's, at least one.
        selections: from `localize_parts`.
        buffer: where the pages land.
        sm_scale: multiplies q . k before the softmax.

    Returns:
        [T, H, 512], dtype of `q`; zeros for a row that selects nothing.
    """
    # merge_partials reads an empty row's +inf as it reads -inf.
    out, lse = attend_selection(q, buffer.gather(cache_rows, parts[0]), selections[0], sm_scale, raw_lse=True)
    for part, selection in zip(parts[1:], selections[1:], strict=True):
        # Not named: a part's result must be gone before the next part's is made.
        _merge_into(out, lse, *attend_selection(q, buffer.gather(cache_rows, part), selection, sm_scale, raw_lse=True))
    return out


def _merge_into(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merge another part's result into `out` and `lse`, some rows at a time, so that whole results are not copied."""
    for start in range(0, out.shape[0], _MERGED_ROWS):
        rows = slice(start, start + _MERGED_ROWS)
        out[rows], lse[rows] = merge_partials(
            torch.stack((out[rows], more[rows])), torch.stack((lse[rows], more_lse[rows]))
        )
