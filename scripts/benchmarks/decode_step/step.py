"""One rank's decode step, in parts and as a whole model's layers, over caches of realistic size.

Communication is real where the step is given a group. Without one, buffers drawn beforehand stand for what the other
ranks send, and everything this rank does to them is done: the rest is counted as bytes.
"""

from collections.abc import Callable

import torch

from nsa_dcp import comm
from nsa_dcp.indexer import select_positions, select_positions_row_split
from nsa_dcp.layout import index_page_table, pages_for, slots_at
from nsa_dcp.planning.dimensions import ModelDims
from nsa_dcp_kernels import (
    LocalSelection,
    _flash_mla,
    attend_selection,
    localize_selection,
    merge_packed,
    pack_latent,
    pack_partials,
    scatter_index_keys_,
    scatter_latent_,
)
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, KV_LORA_RANK, LATENT_DIM, PAGE_SIZE
from nsa_dcp_kernels.schedule import count_parts, plan_rows
from scripts.benchmarks.decode_step.cases import (
    INDEX_PAGE_BYTES,
    LATENT_PAGE_BYTES,
    DecodeCase,
    local_heads,
    physical_pages,
    selection_of_layers,
    window_starts,
)

SM_SCALE = LATENT_DIM**-0.5
# Inputs that a step has just computed rotate among this many sets; caches do not rotate, each layer has its own.
SETS = 8
# What a cache is filled with, over and over.
_TEMPLATE_PAGES = 1024


class DecodeCaches:
    """Memory for the caches of all layers of one rank, drawn once and cut up by each step.

    latents: [pages * 64, 656] uint8, packed normal values. index_keys: [pages, 64 * 132] uint8, or None.
    """

    def __init__(self, latent_pages: int, index_pages: int, device: str = "cuda") -> None:
        """Args: latent_pages, index_pages: pages of each; no index keys for 0."""
        held = min(_TEMPLATE_PAGES, max(latent_pages, index_pages))
        values = torch.randn(held * PAGE_SIZE, LATENT_DIM, device=device).bfloat16()
        packed = pack_latent(values[:, :KV_LORA_RANK].contiguous(), values[:, KV_LORA_RANK:].contiguous())
        self.latents = _tile(packed, latent_pages * PAGE_SIZE)
        self.index_keys = None
        if index_pages:
            keys = torch.zeros(held, INDEX_PAGE_BYTES, dtype=torch.uint8, device=device)
            slots = torch.arange(held * PAGE_SIZE, dtype=torch.int32, device=device)
            scatter_index_keys_(keys, values[:, :INDEX_HEAD_DIM].contiguous(), slots)
            self.index_keys = _tile(keys, index_pages)


class RankStep:
    """One rank's decode step of a model: every part as a method, layer by layer.

    T tokens (one per request), H heads of a TP rank, N ranks of the DCP group, K selected tokens.
    """

    def __init__(
        self,
        case: DecodeCase,
        dims: ModelDims,
        caches: DecodeCaches,
        cache_bytes: int,
        row_split: bool,
        with_indexer: bool,
        group: comm.Group = None,
    ) -> None:
        """Draw a step's inputs.

        Args:
            case: the step.
            dims: its model.
            caches: memory for all layers.
            cache_bytes: budget for the latents; the index keys take at most half of it more.
            row_split: each rank selects for its share of the rows and gathers the other selections.
            with_indexer: score and select; else selections are random.
            group: the DCP group, or None where communication is only counted.
        """
        self.case, self.dims, self.group, self.with_indexer = case, dims, group, with_indexer
        self.row_split = row_split and case.dcp_size > 1
        self.rank = comm.rank_in(group)
        self.selection_numbers = selection_of_layers(dims)
        device = caches.latents.device
        num_layers, num_selections = dims.num_hidden_layers, len(dims.indexer_layers)
        pages = physical_pages(num_layers, case.latent_pages, LATENT_PAGE_BYTES, cache_bytes)
        rows = case.latent_pages * PAGE_SIZE
        self.latents = [
            caches.latents[start * PAGE_SIZE : start * PAGE_SIZE + rows]
            for start in window_starts(num_layers, case.latent_pages, pages)
        ]
        self.distinct_share = pages / (num_layers * case.latent_pages)

        tokens, heads, size = case.batch, local_heads(dims), case.dcp_size
        self.heads = heads
        self.padded_heads = _flash_mla.pad_heads(heads * size)
        num_pages = pages_for(case.context, size)
        self.page_table = torch.randperm(case.latent_pages, device=device).view(tokens, num_pages).int()
        self.row_request = torch.arange(tokens, dtype=torch.int32, device=device)
        self.context_lens = torch.full((tokens,), case.context, dtype=torch.int32, device=device)
        self.new_slots = slots_at(self.context_lens - 1, self.row_request, self.page_table, size)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(SETS, *shape, device=device).bfloat16()

        self.latent_nope, self.latent_rope = draw(tokens, KV_LORA_RANK), draw(tokens, LATENT_DIM - KV_LORA_RANK)
        self.positions = [_draw_positions(tokens, case.context, dims.index_topk, device) for _ in range(SETS)]
        self.index_distinct_share = 0.0
        if with_indexer:
            pages = physical_pages(num_selections, case.index_pages, INDEX_PAGE_BYTES, cache_bytes // 2)
            self.index_keys = [
                caches.index_keys[start : start + case.index_pages]
                for start in window_starts(num_selections, case.index_pages, pages)
            ]
            self.index_distinct_share = pages / (num_selections * case.index_pages)
            self.index_table = index_page_table(self.page_table, size)
            self.index_q = draw(tokens, dims.index_n_heads, INDEX_HEAD_DIM)
            self.index_weights = draw(tokens, dims.index_n_heads).float()
            self.new_keys = draw(tokens, INDEX_HEAD_DIM)
        self.q = draw(tokens, heads, LATENT_DIM)
        if size == 1:
            # Made by the first call that is given it, outside of every graph.
            self.stock_schedule = _flash_mla.hold_schedule(None) if device.type == "cuda" else None
        elif group is None:
            self._draw_received(draw)

    def _draw_received(self, draw: Callable[..., torch.Tensor]) -> None:
        """What the other ranks would have sent: queries, partial results, selections."""
        tokens, heads, size = self.case.batch, self.heads, self.case.dcp_size
        self.received_q = draw(size, tokens, heads, LATENT_DIM)
        out = draw(tokens, size * heads, KV_LORA_RANK)
        lse = torch.randn(tokens, size * heads, device=out.device)
        self.received_partials = [pack_partials(out[at], lse, size) for at in range(SETS)]
        longest = -(-tokens // size)
        self.received_positions = [
            torch.nn.functional.pad(drawn, (0, 0, 0, longest * size - tokens), value=-1)
            .view(longest, size, -1)
            .transpose(0, 1)
            .contiguous()
            for drawn in self.positions
        ]

    def write_latent(self, layer: int) -> None:
        at, case = layer % SETS, self.case
        scatter_latent_(
            self.latents[layer], self.latent_nope[at], self.latent_rope[at], self.new_slots, case.dcp_size, self.rank
        )

    def write_key(self, selection: int) -> None:
        scatter_index_keys_(self.index_keys[selection], self.new_keys[selection % SETS], self.new_slots)

    def select(self, selection: int) -> torch.Tensor:
        """Score and select: [T, K] int32 positions."""
        at, size = selection % SETS, self.case.dcp_size
        keys = self.index_keys[selection]
        if self.row_split and self.group is not None:
            return select_positions_row_split(*self._scored(at, keys, slice(None)), group=self.group)
        if not self.row_split:
            return select_positions(*self._scored(at, keys, slice(None)))
        selected = select_positions(*self._scored(at, keys, slice(self.rank, None, size)))
        received = self.received_positions[at]
        received[self.rank, : len(selected)] = selected
        return received.transpose(0, 1).flatten(0, 1)[: self.case.batch]

    def _scored(self, at: int, keys: torch.Tensor, mine: slice) -> tuple:
        """Arguments of select_positions for some of the rows."""
        return (
            self.index_q[at][mine].contiguous(),
            self.index_weights[at][mine].contiguous(),
            keys,
            self.index_table,
            self.row_request[mine].contiguous(),
            self.context_lens[mine].contiguous(),
            self.case.context,
            self.dims.index_topk,
        )

    def look_up_slots(self, positions: torch.Tensor) -> torch.Tensor:
        return slots_at(positions, self.row_request, self.page_table, self.case.dcp_size)

    def localise(self, slots: torch.Tensor) -> LocalSelection:
        """Keep this rank's slots and plan FlashMLA's launches, as the first layer that attends would."""
        selection = localize_selection(slots, self.case.dcp_size, self.rank)
        parts = count_parts(_flash_mla.count_sms(slots.device), self.padded_heads)
        selection.plans[self.padded_heads] = plan_rows(selection.rows, selection.length, parts)
        return selection

    def gather_queries(self, layer: int) -> torch.Tensor:
        """[T, N * H, 576]."""
        at = layer % SETS
        if self.case.dcp_size == 1:
            return self.q[at]
        if self.group is not None:
            return comm.gather_heads(self.q[at], self.group)
        return self.received_q[at].transpose(0, 1).flatten(1, 2)

    def attend(
        self, layer: int, q: torch.Tensor, selection: LocalSelection | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A DCP rank attends to what it holds; a TP rank to all slots, with FlashMLA's own schedule."""
        if isinstance(selection, LocalSelection):
            return attend_selection(q, self.latents[layer], selection, SM_SCALE, raw_lse=True)
        padded = _flash_mla._padded_queries(q, self.padded_heads)
        out, lse = _flash_mla.launch_packed(padded, self.latents[layer], selection, SM_SCALE, self.stock_schedule)
        return out[:, : self.heads], lse[:, : self.heads]

    def merge(self, layer: int, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """[T, H, 512]."""
        if self.group is not None:
            return comm.merge_heads(out, lse, self.group, "a2a")
        pack_partials(out, lse, self.case.dcp_size)
        return merge_packed(self.received_partials[layer % SETS], out.dtype)[0]

    def prepare(self, positions: torch.Tensor) -> LocalSelection | torch.Tensor:
        """From positions to what `attend` takes."""
        slots = self.look_up_slots(positions)
        return slots if self.case.dcp_size == 1 else self.localise(slots)

    def run_model(self) -> None:
        """All layers; the layers without an indexer reuse the last selection."""
        selection, current = None, -1
        for layer, number in enumerate(self.selection_numbers):
            self.write_latent(layer)
            if number != current:
                current, positions = number, self.positions[number % SETS]
                if self.with_indexer:
                    self.write_key(number)
                    positions = self.select(number)
                selection = self.prepare(positions)
            out, lse = self.attend(layer, self.gather_queries(layer), selection)
            if self.case.dcp_size > 1:
                self.merge(layer, out, lse)

    def part_calls(self, count: int) -> dict[str, list[Callable[[], object]]]:
        """Each part `count` times, over the caches and inputs of as many layers; inputs are made beforehand."""
        sets = range(SETS)
        slots = [self.look_up_slots(positions) for positions in self.positions]
        selections = [self.prepare(positions) for positions in self.positions]
        queries = [self.gather_queries(at) for at in sets]
        partials = [self.attend(at, queries[at], selections[at]) for at in sets]
        return {
            "write latent": [lambda at=at: self.write_latent(at) for at in range(count)],
            "write key": [lambda at=at: self.write_key(at) for at in range(count)],
            "select": [lambda at=at: self.select(at) for at in range(count)],
            "slots": [lambda at=at: self.look_up_slots(self.positions[at % SETS]) for at in range(count)],
            "localise": [lambda at=at: self.localise(slots[at % SETS]) for at in range(count)],
            "gather q": [lambda at=at: self.gather_queries(at) for at in range(count)],
            "attend": [lambda at=at: self.attend(at, queries[at % SETS], selections[at % SETS]) for at in range(count)],
            "merge": [lambda at=at: self.merge(at, *partials[at % SETS]) for at in range(count)],
        }


def _draw_positions(num_tokens: int, context: int, topk: int, device: torch.device) -> torch.Tensor:
    """[T, K] int32: positions drawn without replacement, ascending, -1 behind them where the context is shorter."""
    held = min(topk, context)
    drawn = torch.rand(num_tokens, context, device=device).topk(held, dim=-1, sorted=False).indices
    return torch.nn.functional.pad(drawn.sort(-1).values.int(), (0, topk - held), value=-1)


def _tile(template: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, W]: the template's rows over and over."""
    tiled = torch.empty(num_rows, template.shape[1], dtype=template.dtype, device=template.device)
    for part in tiled.split(len(template)):
        part.copy_(template[: len(part)])
    return tiled
