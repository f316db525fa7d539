"""One selection on every rank of a group, made so by whoever selects.

Each rank of a DCP group keeps its own part of the latents, so a token on which two ranks' selections disagree is
attended to twice, or not at all. sglang's top-k keeps equal scores in the order in which threads meet them, so the same
scores do not make ranks agree. SGLANG_DSA_TOPK_BROADCAST would, by a broadcast of every selection; most of them agree
already. `Indexer.forward_cuda` returns a selection from one of these:

- `_get_topk_ragged`, prefill: `RowSplitSelection` stands there. Each row is selected for once, and gathered.
- `_get_topk_paged`, decode, target-verify, draft-extend and a captured idle step: `RowSplitDecodeSelection` stands
  there. Rows of large decode and verify batches are gathered likewise; elsewhere the first rank's selection is
  broadcast. Draft-extend would be too, but is a draft's step, whose indexers are sglang's.
- `_forward_cuda_k_only`, prefill of contexts that no selection is too small for: a row selects its whole context,
  whatever the order, and no rank depends on the order. Without `return_indices` it returns nothing. The host's lengths
  decide, which are those of the batch. In decode a ROCm graph alone comes here.
- an idle step that is not captured, and a batch of no requests: every row selects nothing.
- the indexer inside a prefill graph: `validation` refuses those under DCP, and the call would hand `RowSplitSelection`
  a buffer that it does not take.
- `_gfx950_fused_decode`: not on this hardware.

Layers without an indexer are handed the tensor of the layer that selected.

That is TP-DCP, whose ranks all work on every row. In CP-DCP decode's, verify's and idle steps are like that, and agree
in the same ways, over the DCP group. `_get_topk_ragged` is left as it is: where a prefill is spread over the ranks, a
rank selects for its own rows and attends to all ranks' tokens, so there is nothing to agree on; a chunk that is not
spread is broadcast by the backend. `_forward_cuda_k_only` is not taken with `--enable-prefill-cp`.
"""

from __future__ import annotations

import functools
from typing import Any

from nsa_dcp.sglang_plugin import patches
from nsa_dcp.sglang_plugin.compat import require
from nsa_dcp.sglang_plugin.selection.row_split import RowSplitSelection
from nsa_dcp.sglang_plugin.selection.row_split_decode import RowSplitDecodeSelection


def select_alike_on_every_rank(model: Any, group: Any) -> None:
    """Let the ranks of a group share each selection's work and agree on it; check that every layer does.

    Args:
        model: a loaded DSA model, not a draft.
        group: sglang's attention-TP group, which contains the DCP group.

    Raises:
        RuntimeError: a layer would select in another way.
    """
    # It is over the attention-TP group, and takes PyNCCL while a graph is captured.
    from sglang.srt.layers.attention.dsa.dsa_indexer import _broadcast_indexer_topk_from_rank0_impl

    patches.split_rows(model, group)
    patches.split_decode_rows(model, group, _broadcast_indexer_topk_from_rank0_impl)
    _check(model, {"_get_topk_ragged": RowSplitSelection, "_get_topk_paged": RowSplitDecodeSelection})


def select_alike_in_decode(model: Any, group: Any) -> None:
    """Let the ranks of a DCP group share the work of selecting in decode, and agree wherever `_get_topk_paged` selects.

    Args:
        model: a loaded DSA model, not a draft.
        group: sglang's DCP group, which under context parallelism is its attention-CP group. Every rank has every row
            of a step that is not a spread prefill.

    Raises:
        RuntimeError: a layer would select in another way.
    """
    # sglang's graph capture enters the DCP group: both collectives are captured.
    patches.split_decode_rows(model, group, functools.partial(group.broadcast, src=0))
    _check(model, {"_get_topk_paged": RowSplitDecodeSelection})


def _check(model: Any, standing: dict[str, type]) -> None:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    for layer in model.modules():
        if isinstance(layer, DeepseekV2AttentionMLA) and not layer.skip_topk:
            for method, split in standing.items():
                require(
                    isinstance(getattr(layer.indexer, method, None), split),
                    f"layer {layer.layer_id} to select by {split.__name__}",
                    f"{method} of {type(layer.indexer).__name__}",
                )
