"""One rank's prefill chunk in TP-DCP, by queries and by rows, and in CP-DCP, part by part, over a pool and a gathered
buffer of realistic size.

Nothing is communicated: buffers drawn beforehand stand for what the other ranks send, and all that this rank does to
them is done.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch

from nsa_dcp.indexer import select_positions
from nsa_dcp.layout import index_page_table, slots_at
from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp.row_prefill import localize_gathered, plan_pages
from nsa_dcp_kernels import (
    LocalSelection,
    _flash_mla,
    attend_selection,
    gather_pages,
    localize_selection,
    merge_packed,
    pack_partials,
)
from nsa_dcp_kernels.dequantisation import dequantised_bytes
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, KV_LORA_RANK, LATENT_DIM, PAGE_SIZE
from nsa_dcp_kernels.schedule import count_parts, plan_rows
from scripts.benchmarks.decode_step.step import SM_SCALE, DecodeCaches
from scripts.benchmarks.prefill_chunk.cases import MODES, PrefillCase
from scripts.benchmarks.timing import time_calls

# Inputs that do not fit the L2 cache many times over rotate among this many sets; each layer has a pool of its own.
_SETS = 2
_PAGE_LISTS = 8
_REPLAYS = 10

Calls = dict[str, list[Callable[[], object]]]


class RankChunk:
    """The last rank's work on a chunk: its rows are the latest, so it selects from the longest contexts.

    T tokens of the chunk, N ranks, H heads of the model, K selected tokens.
    """

    def __init__(self, case: PrefillCase, dims: ModelDims, pool_pages: int, device: str = "cuda") -> None:
        """Draw a chunk's inputs.

        Args:
            case: the chunk.
            dims: its model.
            pool_pages: pages of one layer's cache on this rank.

        Raises:
            ValueError: the pool does not hold the request.
        """
        if pool_pages < case.pages:
            raise ValueError(f"the pool must hold the request's {case.pages} pages a rank, got {pool_pages}")
        size = case.dcp_size
        self.case, self.dims, self.rank, self.device = case, dims, size - 1, device
        caches = DecodeCaches(_SETS * pool_pages, size * pool_pages, device)
        self.latents = caches.latents.split(pool_pages * PAGE_SIZE)
        self.index_keys = caches.index_keys
        self.page_tables = [
            torch.randperm(pool_pages, device=device)[: case.pages].int().unsqueeze(0) for _ in range(_PAGE_LISTS)
        ]
        self.plans = [plan_pages(table, [case.pages], pool_pages) for table in self.page_tables]
        row_request = torch.zeros(case.chunk, dtype=torch.int32, device=device)
        self.context_lens = torch.arange(case.prefix + 1, case.context + 1, dtype=torch.int32, device=device)
        self.slots = [
            slots_at(draw_positions(self.context_lens, dims.index_topk), row_request, table, size)
            for table in self.page_tables[:_SETS]
        ]

    def part_calls(self, mode: str) -> Calls:
        """A mode's parts of one layer, in order; each over several inputs."""
        calls = {"tp_dcp": self._tp_dcp_calls, "tp_dcp_rows": self._by_rows_calls, "cp_dcp": self._cp_dcp_calls}
        return calls[mode]()

    def _tp_dcp_calls(self) -> Calls:
        size, heads = self.case.dcp_size, self.dims.num_attention_heads
        # Rows are split in blocks, as by the plugin.
        block = slice(self.rank * self.case.rank_tokens, None)
        received_q = self._draw(size, self.case.chunk, heads // size, LATENT_DIM)
        q = received_q.transpose(0, 1).flatten(1, 2)
        selections = [self._localise(slots) for slots in self.slots]
        out, lse = self._attend(q, 0, selections[0])
        received = pack_partials(out, lse, size)
        sets = range(_SETS)
        return {
            "select": [self._select_call(block)],
            "localise": [lambda at=at: self._localise(self.slots[at]) for at in sets],
            "arrange": [lambda: received_q.transpose(0, 1).flatten(1, 2)],
            "attend": [lambda at=at: self._attend(q, at, selections[at]) for at in sets],
            "merge": [lambda: (pack_partials(out, lse, size), merge_packed(received, out.dtype))],
        }

    def _by_rows_calls(self) -> Calls:
        size, own, heads = self.case.dcp_size, self.case.rank_tokens, self.dims.num_attention_heads
        received_q = self._draw(size, own, heads // size, LATENT_DIM)
        out = self._draw(own, size, heads // size, KV_LORA_RANK)

        def arrange() -> tuple[torch.Tensor, torch.Tensor]:
            # With blocks of rows what is sent of the queries, and received of the results, lies as it should.
            return received_q.transpose(0, 1).flatten(1, 2), out.transpose(0, 1).contiguous()

        return self._own_rows_calls(slice(self.rank * own, None), arrange)

    def _cp_dcp_calls(self) -> Calls:
        received = self._draw(self.case.dcp_size, self.case.rank_tokens, LATENT_DIM)
        # Rows are dealt out round robin: interleave.
        dealt = slice(self.rank, None, self.case.dcp_size)
        return self._own_rows_calls(dealt, lambda: received.transpose(0, 1).flatten(0, 1))

    def _own_rows_calls(self, own: slice, arrange: Callable[[], object]) -> Calls:
        """Attention with all heads of a rank's own rows, over gathered pages."""
        size, heads = self.case.dcp_size, self.dims.num_attention_heads
        q = self._draw(self.case.rank_tokens, heads, LATENT_DIM)
        buffer = DecodeCaches(size * self.case.pages, 0, self.device).latents
        slots = [drawn[own].contiguous() for drawn in self.slots]
        sets = range(_SETS)
        selections = [self._localise_gathered(slots[at], at, len(buffer)) for at in sets]
        return {
            "select": [self._select_call(own)],
            "localise": [lambda at=at: self._localise_gathered(slots[at], at, len(buffer)) for at in sets],
            "arrange": [arrange],
            "pack pages": [
                lambda at=at: gather_pages(self.latents[at % _SETS], self.plans[at].pages) for at in range(_PAGE_LISTS)
            ],
            "attend": [
                lambda at=at: attend_selection(q, buffer, selections[at], SM_SCALE, raw_lse=True) for at in sets
            ],
        }

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)

    def _select_call(self, rows: slice) -> Callable[[], torch.Tensor]:
        """Scoring and selecting for some of the rows."""
        context_lens = self.context_lens[rows].contiguous()
        num_tokens, heads = context_lens.shape[0], self.dims.index_n_heads
        args = (
            self._draw(num_tokens, heads, INDEX_HEAD_DIM),
            torch.randn(num_tokens, heads, device=self.device),
            self.index_keys,
            index_page_table(self.page_tables[0], self.case.dcp_size),
            torch.zeros(num_tokens, dtype=torch.int32, device=self.device),
            context_lens,
            self.case.context,
            self.dims.index_topk,
        )
        return lambda: select_positions(*args)

    def _localise(self, slots: torch.Tensor) -> LocalSelection:
        selection = localize_selection(slots, self.case.dcp_size, self.rank)
        return plan_ahead(selection, len(self.latents[0]), self.dims.num_attention_heads)

    def _localise_gathered(self, slots: torch.Tensor, at: int, buffer_rows: int) -> LocalSelection:
        selection = localize_gathered(slots, self.plans[at], self.case.dcp_size)
        return plan_ahead(selection, buffer_rows, self.dims.num_attention_heads)

    def _attend(self, q: torch.Tensor, at: int, selection: LocalSelection) -> tuple[torch.Tensor, torch.Tensor]:
        return attend_selection(q, self.latents[at], selection, SM_SCALE, raw_lse=True)


@torch.inference_mode()
def bench_case(case: PrefillCase, dims: ModelDims, pool_pages: int) -> dict[str, object]:
    """Time the parts of one layer in each mode. Returns plain data: timings by mode and part, rows attended over."""
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    chunk = RankChunk(case, dims, pool_pages)
    parts = {}
    for mode in MODES:
        calls = chunk.part_calls(mode)
        # What was drawn is read on another stream next.
        torch.cuda.synchronize()
        parts[mode] = {name: asdict(time_calls(listed, _REPLAYS)) for name, listed in calls.items()}
        del calls
        torch.cuda.empty_cache()
    attended = {
        "tp_dcp": (case.chunk, pool_pages * PAGE_SIZE, case.dcp_size),
    }
    # Whatever the ranks hold, all of a selection lies in the gathered rows.
    attended["tp_dcp_rows"] = attended["cp_dcp"] = (case.rank_tokens, case.dcp_size * case.pages * PAGE_SIZE, 1)
    return {
        "parts": parts,
        "attended_rows": {mode: rows for mode, (_, rows, _) in attended.items()},
        "dequantised": {mode: dequantised_bytes(*sizes) > 0 for mode, sizes in attended.items()},
    }


def plan_ahead(selection: LocalSelection, num_rows: int, num_heads: int) -> LocalSelection:
    """Plan FlashMLA's launches, as the first layer that attends would: a selection's cost, not a layer's."""
    heads, num_tokens = _flash_mla.pad_heads(num_heads), selection.rows.shape[0]
    if not dequantised_bytes(num_tokens, num_rows, selection.dcp_size) and _flash_mla.planning_pays(
        num_tokens, heads, selection.dcp_size
    ):
        parts = count_parts(_flash_mla.count_sms(selection.rows.device), heads)
        selection.plans[heads] = plan_rows(selection.rows, selection.length, parts)
    return selection


def draw_positions(context_lens: torch.Tensor, topk: int) -> torch.Tensor:
    """[T, K] int32: positions that each row sees, ascending; all of them and then -1 where it sees no more than K.

    Longer rows are drawn with replacement, which is as good where only time is measured.
    """
    seen = context_lens.unsqueeze(1)
    drawn = (torch.rand(len(context_lens), topk, device=context_lens.device) * seen).int().minimum(seen - 1)
    every = torch.arange(topk, dtype=torch.int32, device=context_lens.device)
    return torch.where(seen <= topk, torch.where(every < seen, every, -1), drawn.sort(-1).values)
