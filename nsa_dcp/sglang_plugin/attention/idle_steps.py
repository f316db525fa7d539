"""An idle attention-DP shard prepares its layers as without DCP, instead of warning once a layer and step.

A shard without requests runs a step that is not captured with padding rows. No head is gathered and no result merged
for them, on any rank of the shard; but sglang's attention layer, which knows decode and extend under DCP, logs that the
mode is not supported, 78 times a step for GLM-5.2. With a `dcp_size` of 1 it does the same and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def prepare_idle_step(layer: Any, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands before an attention layer's `forward_absorb_prepare`.

    Args:
        layer: sglang's DeepseekV2AttentionMLA, which gathers and merges over DCP ranks itself (TP-DCP).
        prepare: its own method.
        args, kwargs: handed through.
    """
    forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
    if not forward_batch.forward_mode.is_idle():
        return prepare(*args, **kwargs)
    dcp_size, layer.dcp_size = layer.dcp_size, 1
    try:
        return prepare(*args, **kwargs)
    finally:
        layer.dcp_size = dcp_size
