"""The selections that `probe_topk` compares: sglang's, those of the libraries that it can use, and ours."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

TOPK = 2048
PAGE = 64


@dataclass(frozen=True)
class Rows:
    """Score rows: row i's candidates are scores[i, start : start + lengths[i]] with one start for all rows."""

    scores: torch.Tensor
    start: int
    lengths: torch.Tensor

    @property
    def length(self) -> int:
        return self.scores.shape[1] - self.start

    @property
    def window(self) -> torch.Tensor:
        return self.scores[:, self.start :]

    @property
    def starts(self) -> torch.Tensor:
        return torch.full_like(self.lengths, self.start)

    def pages(self) -> torch.Tensor:
        return torch.arange(-(-self.length // PAGE), dtype=torch.int32, device="cuda").repeat(len(self.scores), 1)


# A selection prepares what a server prepares once per forward, and returns the call of one layer: [rows, K] positions.
Prepare = Callable[[Rows], Callable[[], torch.Tensor]]


def fused_prefill(rows: Rows):
    from sgl_kernel import fast_topk_transform_fused

    table = torch.arange(rows.length, dtype=torch.int32, device="cuda").view(1, -1)
    ends = torch.tensor([0, len(rows.scores)], dtype=torch.int32, device="cuda")
    starts = rows.starts
    return lambda: fast_topk_transform_fused(rows.scores, rows.lengths, table, ends, TOPK, row_starts=starts)


def v2_paged(rows: Rows, static_threshold: int = -1):
    from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2, topk_transform_paged_v2

    plan = plan_topk_v2(rows.lengths, static_threshold)
    pages, scores = rows.pages(), rows.window

    def call():
        out = torch.empty((len(scores), TOPK), dtype=torch.int32, device="cuda")
        topk_transform_paged_v2(scores, rows.lengths, pages, out, PAGE, plan)
        return out

    return call


def v2_ragged(rows: Rows):
    from sglang.kernels.ops.attention.dsv4.topk import topk_transform_ragged_v2

    starts, offsets = rows.starts, torch.zeros_like(rows.lengths)
    # It writes to the columns just before a row's window.
    scores = rows.scores.clone()

    def call():
        out = torch.empty((len(scores), TOPK), dtype=torch.int32, device="cuda")
        topk_transform_ragged_v2(scores, rows.lengths, out_offsets=offsets, out_indices=out, row_starts=starts)
        return out

    return call


def flashinfer_paged(rows: Rows, deterministic: bool, tie_break: int):
    import flashinfer

    table = torch.arange(rows.length, dtype=torch.int32, device="cuda").repeat(len(rows.scores), 1)
    scores = rows.window.contiguous()
    return lambda: flashinfer.top_k_page_table_transform(
        scores, table, rows.lengths, TOPK, deterministic=deterministic, tie_break=tie_break, dsa_graph_safe=True
    )


def sglang_torch(rows: Rows):
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    starts = rows.starts
    return lambda: DSATopKBackend.TORCH.topk_func(rows.scores, rows.lengths, TOPK, row_starts=starts)


def ours(rows: Rows):
    from nsa_dcp_kernels import select_topk

    return lambda: select_topk(rows.window, rows.lengths, TOPK)


def ours_in_prefill(rows: Rows):
    from nsa_dcp_kernels import select_slots

    given = {"row_starts": rows.starts, "row_request": torch.zeros_like(rows.lengths), "page_size": 1}
    table = torch.arange(rows.length, dtype=torch.int32, device="cuda").view(1, -1)
    return lambda: select_slots(rows.scores, rows.lengths, TOPK, page_table=table, **given)


def ours_in_decode(rows: Rows):
    from nsa_dcp_kernels import select_slots

    pages = rows.pages()
    return lambda: select_slots(rows.window, rows.lengths, TOPK, page_table=pages)


@dataclass(frozen=True)
class Selection:
    name: str
    prepare: Prepare
    build: str | None = None
    is_ours: bool = False


SELECTIONS = (
    Selection("prefill: sgl_kernel fused", fused_prefill),
    Selection("decode: top-k v2, as planned", v2_paged, "v2"),
    Selection("decode: top-k v2, never clusters", lambda rows: v2_paged(rows, 1 << 30), "v2"),
    Selection("prefill ragged: top-k v2", v2_ragged, "v2"),
    Selection("--dsa-topk-backend torch", sglang_torch),
    Selection("--dsa-topk-backend flashinfer", lambda rows: flashinfer_paged(rows, False, 0), "flashinfer"),
    Selection("  deterministic", lambda rows: flashinfer_paged(rows, True, 0), "flashinfer"),
    Selection("  tie break small", lambda rows: flashinfer_paged(rows, True, 1), "flashinfer"),
    Selection("torch.topk", lambda rows: lambda: torch.topk(rows.window, TOPK, dim=-1, sorted=False).indices.int()),
    Selection("nsa_dcp_kernels.select_topk", ours, is_ours=True),
    Selection("select_slots, as in prefill", ours_in_prefill, is_ours=True),
    Selection("select_slots, as in decode", ours_in_decode, is_ours=True),
)
