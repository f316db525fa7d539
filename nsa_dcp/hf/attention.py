"""What replaces a transformers DSA attention module: absorbed MLA on the sharded, paged cache.

    q_latent[t, h] = q_nope[t, h] @ w_kc[h],    out[t, h] = attend(q_latent, q_rope)[t, h] @ w_vc[h]^T

with w_kc and w_vc the key and value halves of `kv_b_proj`. The projections, norms and RoPE are the model's own.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nsa_dcp import comm
from nsa_dcp.cache import IndexKeyCache, LatentCache
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.hf.step import Step
from nsa_dcp.indexer import gather_index_cache, select_own, select_positions, select_positions_row_split
from nsa_dcp.layout import slots_at
from nsa_dcp.row_prefill import attend_gathered, localize_gathered
from nsa_dcp.tp_dcp import attend_sharded
from nsa_dcp_kernels import LocalSelection, localize_selection
from nsa_dcp_kernels.reference import accumulator

# The function that rotates index queries and keys: interleaved pairs in GLM, halves in DeepSeek-V3.2.
_INDEX_ROPE = {
    "GlmMoeDsaAttention": "apply_rotary_pos_emb_interleave",
    "DeepseekV32Attention": "apply_rotary_pos_emb",
}
# Decoder layers that hand a layer's selection on to the next one.
_SHARES_SELECTIONS = ("GlmMoeDsaAttention",)


class DcpAttention(nn.Module):
    """One layer's attention under DCP. Its forward has the signature of the module it replaces, plus `step`."""

    def __init__(
        self,
        original: Any,
        layer: int,
        ranks: Ranks,
        latents: LatentCache,
        index_keys: IndexKeyCache,
    ) -> None:
        """Take over a module's weights.

        Args:
            original: a `GlmMoeDsaAttention` or `DeepseekV32Attention`.
            layer: its index.
            ranks: this rank's place.
            latents, index_keys: this rank's caches.
        """
        super().__init__()
        self.layer, self.ranks, self.latents, self.index_keys = layer, ranks, latents, index_keys
        kind = type(original).__name__
        self.returns_selection = kind in _SHARES_SELECTIONS
        self.sm_scale = original.scaling
        self.nope_dim, self.rope_dim = original.qk_nope_head_dim, original.qk_rope_head_dim
        self.latent_dim = original.kv_lora_rank
        self.q_a_proj, self.q_a_layernorm = original.q_a_proj, original.q_a_layernorm
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = original.kv_a_proj_with_mqa, original.kv_a_layernorm
        self.indexer = original.indexer
        model_code = sys.modules[type(original).__module__]
        self.rotate: Callable = model_code.apply_rotary_pos_emb_interleave
        self.rotate_index: Callable = getattr(model_code, _INDEX_ROPE[kind])

        heads = original.num_heads
        self.w_q = original.q_b_proj.weight.view(heads, self.nope_dim + self.rope_dim, -1)
        w_kv = original.kv_b_proj.weight.view(heads, -1, self.latent_dim)
        self.w_kc, self.w_vc = w_kv[:, : self.nope_dim], w_kv[:, self.nope_dim :]
        self.w_o = original.o_proj.weight.view(-1, heads, w_kv.shape[1] - self.nope_dim)
        self.o_bias = original.o_proj.bias
        per_rank = heads // ranks.config.tp_size
        self.own_heads = slice(ranks.rank * per_rank, (ranks.rank + 1) * per_rank)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: None,
        step: Step,
        prev_topk_indices: LocalSelection | None = None,
        **_: object,
    ) -> tuple:
        """Run the layer's attention over a step.

        Args:
            hidden_states: [1, T_local, hidden].
            position_embeddings: (cos, sin), [1, T_local, 64] each.
            attention_mask: unused: what a row sees is in `step`.
            step: the step's metadata.
            prev_topk_indices: the selection of the last layer that owns an indexer.

        Returns:
            ([1, T_local, hidden], None) and, where layers share selections, the selection used.
        """
        x = hidden_states[0]
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        compressed = self.kv_a_proj_with_mqa(x)
        k_nope = self.kv_a_layernorm(compressed[:, : self.latent_dim])
        k_rope = self._rotated(self.rotate, compressed[:, self.latent_dim :].unsqueeze(1), position_embeddings)
        new_keys = [k_nope, k_rope.squeeze(1)]
        if self.indexer is not None:
            new_keys.append(self._index_key(x, position_embeddings))
        self._write(step, new_keys)

        selection = prev_topk_indices
        if self.indexer is not None:
            selection = self._select(x, q_resid, position_embeddings, step)
        if selection is None:
            raise ValueError(f"layer {self.layer} owns no indexer and must be given a selection, got None")

        heads = slice(None) if step.cp else self.own_heads
        q = self._absorbed_query(q_resid, position_embeddings, heads)
        if q.is_cuda:
            q = q.to(torch.bfloat16)  # FlashMLA's queries
        out = self._attend(q, selection, step)
        out = self._project(out.to(x.dtype), heads, reduce=step.cp is None).unsqueeze(0)
        return (out, None, selection) if self.returns_selection else (out, None)

    def _attend(self, q: torch.Tensor, selection: LocalSelection, step: Step) -> torch.Tensor:
        """Attend with this rank's heads of the step's rows or, token-sharded, with all heads of its tokens."""
        kv_rows, group = self.latents.layers[self.layer], self.ranks.dcp_group
        if step.pages is None:
            backend, wire = self.ranks.config.dcp_comm_backend, self.ranks.wire
            return attend_sharded(q, kv_rows, selection, self.sm_scale, group, backend, wire)
        if step.rows is None:
            return attend_gathered(q, kv_rows, step.pages, selection, self.sm_scale, group)
        taken = step.rows.take_rows(q, group)
        out = attend_gathered(taken, kv_rows, step.pages, selection, self.sm_scale, group)
        return step.rows.return_heads(out, group)

    def _absorbed_query(
        self, q_resid: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], heads: slice
    ) -> torch.Tensor:
        w_q = self.w_q[heads]
        q = F.linear(q_resid, w_q.flatten(0, 1)).view(-1, w_q.shape[0], self.nope_dim + self.rope_dim)
        q_rope = self._rotated(self.rotate, q[..., self.nope_dim :], position_embeddings)
        q_latent = torch.bmm(q[..., : self.nope_dim].transpose(0, 1), self.w_kc[heads]).transpose(0, 1)
        return torch.cat([q_latent, q_rope], dim=-1)

    def _project(self, out: torch.Tensor, heads: slice, reduce: bool) -> torch.Tensor:
        values = torch.bmm(out.transpose(0, 1), self.w_vc[heads].transpose(1, 2)).transpose(0, 1)
        projected = F.linear(values.flatten(1), self.w_o[:, heads].flatten(1))
        if reduce:
            projected = comm.all_reduce(projected, self.ranks.tp_group)
        return projected if self.o_bias is None else projected + self.o_bias

    def _index_key(self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        key = self.indexer.k_norm(self.indexer.wk(x)).unsqueeze(1)
        rotated = self._rotated(self.rotate_index, key[..., : self.rope_dim], position_embeddings)
        return torch.cat([rotated, key[..., self.rope_dim :]], dim=-1).squeeze(1)

    def _write(self, step: Step, new_keys: list[torch.Tensor]) -> None:
        """Cache the step's tokens; in a token-sharded step the ranks exchange theirs first, unquantised."""
        if step.cp:
            rows = step.cp.gather(torch.cat(new_keys, dim=-1), self.ranks.tp_group)
            new_keys = list(rows.split([part.shape[1] for part in new_keys], dim=-1))
        self.latents.write(self.layer, new_keys[0].contiguous(), new_keys[1].contiguous(), step.slots)
        if self.indexer is not None:
            self.index_keys.write(self.layer, new_keys[2].contiguous(), step.slots)

    def _select(
        self,
        x: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: Step,
    ) -> LocalSelection:
        indexer, config = self.indexer, self.ranks.config
        # By rows, a rank needs the selections of the rows that it attends with, and no others.
        own = step.rows.own if step.rows else slice(None)
        cos, sin = position_embeddings
        q = indexer.wq_b(q_resid[own]).view(-1, indexer.n_heads, indexer.head_dim)
        rotated = self._rotated(self.rotate_index, q[..., : self.rope_dim], (cos[:, own], sin[:, own]))
        q = torch.cat([rotated, q[..., self.rope_dim :]], dim=-1)
        weights = indexer.weights_proj(x[own].to(indexer.weights_proj.weight.dtype)).to(accumulator(q.dtype))
        weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        row_request = step.row_request[own].contiguous()
        index_cache = self.index_keys.layers[self.layer]
        if step.index_gather:
            index_cache = gather_index_cache(index_cache, step.index_gather.pages, self.ranks.dcp_group)
        scored = (
            q,
            weights,
            index_cache,
            step.index_pages,
            row_request,
            step.context_lens[own].contiguous(),
            step.max_context_len,
            indexer.index_topk,
        )
        if config.shards_index_keys and not step.index_gather:
            return LocalSelection(*select_own(*scored, group=self.ranks.dcp_group), config.dcp_size)
        if config.selection == "row_split" and step.pages is None:
            positions = select_positions_row_split(*scored, group=self.ranks.dcp_group)
        else:
            positions = select_positions(*scored)
        slots = slots_at(positions, row_request, step.page_table, config.dcp_size)
        if step.pages is not None:
            return localize_gathered(slots, step.pages, config.dcp_size)
        packed = self.latents.layers[self.layer].dtype == torch.uint8
        attended_heads = self.w_q.shape[0] // config.tp_size * config.dcp_size
        return localize_selection(
            slots, config.dcp_size, self.ranks.dcp_rank, planned_heads=attended_heads if packed else None
        )

    @staticmethod
    def _rotated(
        rotate: Callable, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Apply the model's RoPE to [T, H, 64]; its function rotates a query and a key together, so x goes twice."""
        cos, sin = position_embeddings
        return rotate(x.unsqueeze(0), x.unsqueeze(0), cos, sin, unsqueeze_dim=2)[0].squeeze(0)
