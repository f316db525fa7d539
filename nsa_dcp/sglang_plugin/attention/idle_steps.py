"""An idle attention-DP shard prepares its layers as without DCP, instead of warning once a layer and step.

A shard without requests runs a step that is not captured with padding rows. No head is gathered and no result merged
for them, on any rank of the shard; but sglang's attention layer, which knows decode and extend under DCP, logs that the
mode is not supported, 78 times a step for GLM-5.2. With a `dcp_size` of 1 it does the same and says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def prepare_idle_steps_quietly(model: Any) -> None:
    """Stand before `forward_absorb_prepare` of each attention layer of a model. May be called more than once.

    Args:
        model: a loaded DSA model, whose layers gather and merge over DCP ranks themselves (TP-DCP).
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    for layer in model.modules():
        if isinstance(layer, DeepseekV2AttentionMLA) and "forward_absorb_prepare" not in vars(layer):
            layer.forward_absorb_prepare = functools.partial(_prepare, layer, layer.forward_absorb_prepare)


def _prepare(layer: Any, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
    if not forward_batch.forward_mode.is_idle():
        return prepare(*args, **kwargs)
    dcp_size, layer.dcp_size = layer.dcp_size, 1
    try:
        return prepare(*args, **kwargs)
    finally:
        layer.dcp_size = dcp_size
