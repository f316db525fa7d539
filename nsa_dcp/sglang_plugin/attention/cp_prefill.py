"""CP-DCP prefill attention: this rank's own query tokens, all heads, over the pages gathered from every rank.

Nothing is quantised here, and no result is exchanged: the chunk was written to the cache once, by the ordinary write,
and its pages come with the prefix's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from nsa_dcp.row_prefill import GatheredPages, localize_gathered
from nsa_dcp.sglang_plugin.attention.cp_pages import PageBuffer
from nsa_dcp_kernels import LocalSelection, attend_selection, merge_partials

# Query tokens that are merged at once: with 128 heads, what that takes beside the results is 0.4 GiB.
_MERGED_ROWS = 1024


class PartSelections:
    """Of each part of a forward the tokens of one selection that lie in it, for `attend_parts`.

    Of a forward in one part they are prepared once, for all layers that share the selection. Of several parts each
    takes as much memory as the whole selection, so that they are prepared anew in every layer, one after the other.
    The selection itself is not held: its tensor carries this object (`backend.prepare_once`).

    Args:
        topk_slots: [T, K] int32, slots of the widened pool, -1 anywhere. This rank's query tokens.
        parts: the forward's.
        dcp_size: ranks that contribute.
    """

    def __init__(self, topk_slots: torch.Tensor, parts: Sequence[GatheredPages], dcp_size: int) -> None:
        self._parts, self._dcp_size = parts, dcp_size
        self._only = localize_gathered(topk_slots, parts[0], dcp_size) if len(parts) == 1 else None

    def of(self, topk_slots: torch.Tensor) -> Iterator[LocalSelection]:
        """Return the parts' selections, in order. `topk_slots`: the selection that this was made of."""
        if self._only is not None:
            return iter((self._only,))
        return (localize_gathered(topk_slots, part, self._dcp_size) for part in self._parts)


def attend_parts(
    q: torch.Tensor,
    cache_rows: torch.Tensor,
    parts: Sequence[GatheredPages],
    selections: Iterator[LocalSelection],
    buffer: PageBuffer,
    sm_scale: float,
) -> torch.Tensor:
    """Attend to a selection of tokens that lie on all ranks. All ranks must call it, with the same parts.

    Args:
        q: [T, H, 576]. Absorbed queries of this rank's tokens, all heads. T differs between ranks.
        cache_rows: [R, 656] uint8 or [R, 576] bfloat16, this rank's rows of one layer, the chunk's included.
        parts: the forward's, at least one.
        selections: of the same parts, in their order: what `PartSelections.of` returns.
        buffer: where the pages land.
        sm_scale: multiplies q . k before the softmax.

    Returns:
        [T, H, 512], dtype of `q`; zeros for a row that selects nothing.
    """

    def attend(part: GatheredPages) -> tuple[torch.Tensor, torch.Tensor]:
        # merge_partials reads an empty row's +inf as it reads -inf.
        return attend_selection(q, buffer.gather(cache_rows, part), next(selections), sm_scale, raw_lse=True)

    out, lse = attend(parts[0])
    for part in parts[1:]:
        # Not named: a part's result must be gone before the next part's is made.
        _merge_into(out, lse, *attend(part))
    return out


def _merge_into(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merge another part's result into `out` and `lse`, some rows at a time, so that whole results are not copied."""
    for start in range(0, out.shape[0], _MERGED_ROWS):
        rows = slice(start, start + _MERGED_ROWS)
        out[rows], lse[rows] = merge_partials(
            torch.stack((out[rows], more[rows])), torch.stack((lse[rows], more_lse[rows]))
        )
