"""sglang's DSA attention backend for TP-DCP whose prefills may go by rows.

Which forwards do is decided when their metadata are made, by numbers that every rank of the group has alike
(`planning.prefill_ways`). sglang's layers read their `dcp_size` anew in each forward: a layer that is told 1 gathers no
heads and merges nothing, and hands the backend its own heads of every row. So the backend tells all layers 1 for a
forward by rows, and dcp_size for every other: decode, verify, a graph's capture and replay, and prefills by queries. A
layer that was told wrongly has another number of heads than the backend wants, which then raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_dcp.planning.prefill_ways import PrefillRule
from nsa_dcp.row_prefill import GatheredPages
from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend, cache_rows, prepare_once
from nsa_dcp.sglang_plugin.attention.cp_pages import PageBuffer, plan_parts
from nsa_dcp.sglang_plugin.attention.cp_prefill import PartSelections, attend_parts
from nsa_dcp.sglang_plugin.attention.row_exchange import RowPlan, plan_own_rows, return_heads, take_rows
from nsa_dcp_kernels.kv_format import PAGE_SIZE

# The attribute of a forward's metadata that holds its plan, where it goes by rows.
_PLAN = "_nsa_dcp_rows"


class RowPrefillBackend(DcpDeepseekSparseAttnBackend):
    """By queries as its parent; by rows in the prefills that its rule sends that way."""

    def __init__(
        self,
        model_runner: Any,
        group: Any,
        tell_layers: Callable[[int], None],
        rule: PrefillRule,
        buffer_pages: int,
    ) -> None:
        """Make the backend, run the kernel once, and allocate the gather buffer.

        Args:
            model_runner: sglang's ModelRunner, not a draft's.
            group: sglang's DCP group.
            tell_layers: tells the model's attention layers over how many ranks the next forward runs DCP.
            rule: which prefills go by rows.
            buffer_pages: pages of each rank that the gather buffer holds.

        Raises:
            RuntimeError: as the kernel's trial.
        """
        super().__init__(model_runner)
        self._group, self._tell_layers, self._rule = group, tell_layers, rule
        first_layer = self.token_to_kv_pool.get_key_buffer(self.token_to_kv_pool.start_layer)
        self._buffer = PageBuffer(cache_rows(first_layer), buffer_pages, group)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make sglang's metadata of a forward that no graph runs, choose its way, and tell the layers.

        Args:
            forward_batch: sglang's ForwardBatch.
        """
        super().init_forward_metadata(forward_batch)
        plan = self._plan(forward_batch)
        if plan is not None:
            # The dataclass is frozen, and made anew for each forward: the plan lives as long as it does.
            object.__setattr__(self.forward_metadata, _PLAN, plan)
        self._tell_layers(self.dcp_size if plan is None else 1)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """As sglang's, for a graph that is captured or replayed: its layers gather heads and merge.

        Args:
            forward_batch, in_capture: handed through.
        """
        self._tell_layers(self.dcp_size)
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def count_rows(self, metadata: Any) -> int | None:
        """Return the query rows of a forward by rows, each rank of which selects for its own; None elsewhere.

        Args:
            metadata: sglang's DSAMetadata of the forward.
        """
        plan = getattr(metadata, _PLAN, None)
        return None if plan is None else plan.num_rows

    def _plan(self, forward_batch: Any) -> RowPlan | None:
        from sglang.srt.layers.logits_processor import get_in_autotune_dummy_run

        # EXTEND and MIXED. Verify steps have few rows and, in graphs, fixed shapes; a draft has a backend of its own.
        if not forward_batch.forward_mode.is_context_parallel_extend() or get_in_autotune_dummy_run():
            return None
        extend_lens, context_lens = list(forward_batch.extend_seq_lens_cpu), forward_batch.seq_lens_cpu.tolist()
        num_rows = sum(extend_lens)
        parts: tuple[GatheredPages, ...] = ()

        def list_pages() -> tuple[GatheredPages, ...]:
            return parts or plan_parts(
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                context_lens,
                self.dcp_size,
                self.token_to_kv_pool.get_key_buffer(self.token_to_kv_pool.start_layer).shape[0] // PAGE_SIZE,
                self._buffer.pages,
            )

        def count_pages() -> int:
            nonlocal parts
            parts = list_pages()
            return sum(part.pages.shape[0] for part in parts)

        if not num_rows or not self._rule.goes_by_rows(extend_lens, context_lens, count_pages):
            return None
        return plan_own_rows(num_rows, self._group, list_pages())

    def _forward_flashmla_kv(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        sm_scale: float,
        layer: Any,
        metadata: Any,
        page_table_1: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend, by queries as the parent, or by rows.

        Args:
            q_all: [T, H, 576] bfloat16, absorbed queries. By rows: this rank's heads of every row.
            kv_cache, v_head_dim, sm_scale, layer, metadata: as the parent.
            page_table_1: [T, K] int32. The selection as slots of the widened pool, -1 anywhere. By rows: at least this
                rank's rows of it.

        Returns:
            By queries: as the parent. By rows: [T, H, 512] bfloat16, complete; zeros for a row that selects nothing.

        Raises:
            RuntimeError: by queries as the parent; by rows, the layer attends with other heads than this rank's, or the
                forward has other rows than it was planned for.
        """
        plan: RowPlan | None = getattr(metadata, _PLAN, None)
        if plan is None:
            return super()._forward_flashmla_kv(
                q_all=q_all,
                kv_cache=kv_cache,
                v_head_dim=v_head_dim,
                sm_scale=sm_scale,
                layer=layer,
                metadata=metadata,
                page_table_1=page_table_1,
            )
        heads = layer.tp_q_head_num
        queries, rows = q_all.view(-1, heads, layer.head_dim), cache_rows(kv_cache)
        num_rows, selected = queries.shape[0], page_table_1.shape[0]
        if (heads, num_rows) != (self.num_q_heads, plan.num_rows) or selected < num_rows:
            raise RuntimeError(
                f"layer {layer.layer_id} attends with {heads} heads, {num_rows} rows and {selected} selections in a "
                f"prefill by rows of {self.num_q_heads} heads and {plan.num_rows} rows; nsa-dcp cannot serve this phase"
            )
        own = page_table_1[plan.start : plan.stop]
        selections = prepare_once(
            page_table_1, layer.layer_id, metadata, lambda _: PartSelections(own, plan.parts, self.dcp_size)
        )
        taken = take_rows(queries, plan, self._group)
        out = attend_parts(taken, rows, plan.parts, selections.of(own), self._buffer, sm_scale)
        return return_heads(out, plan, self._group)
