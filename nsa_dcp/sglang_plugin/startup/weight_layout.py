"""The decode slice cuts loaded weights as matrices [N, K]; here it is seen that they are, before a server answers."""

from __future__ import annotations

from typing import Any

import torch

from nsa_dcp.sglang_plugin.compat import require


def check_sliced_weights(model: torch.nn.Module) -> None:
    """Raise unless sglang's decode slice can cut every attention layer's weights.

    It narrows `weight` and `weight_scale_inv` of q_b_proj along N and of o_proj along K, whatever their layout.

    Args:
        model: a loaded DSA model.

    Raises:
        RuntimeError: weights are packed, transposed, or have scales that are no [N / 128, K / 128].
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    for layer in model.modules():
        if isinstance(layer, DeepseekV2AttentionMLA):
            for name in ("q_b_proj", "o_proj"):
                projection = getattr(layer, name)
                require(
                    is_row_major(projection),
                    f"{name} in bfloat16 or in FP8 blocks of 128 x 128, row by row, for --enable-cp-decode-attn-tp",
                    describe_weight(projection),
                )


def is_row_major(projection: Any) -> bool:
    """Whether a linear layer's `weight` is [N, K], unquantised or in FP8 with one scale for 128 x 128 values."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    weight, method = getattr(projection, "weight", None), projection.quant_method
    # sglang notes a rank's part of the dimension that it splits alone; FP8 notes both.
    rows = getattr(projection, "output_size_per_partition", projection.output_size)
    columns = getattr(projection, "input_size_per_partition", projection.input_size)
    if weight is None or tuple(weight.shape) != (rows, columns):
        return False
    if isinstance(method, UnquantizedLinearMethod):
        return True
    if not isinstance(method, Fp8LinearMethod) or method.use_marlin or method.use_mxfp8 or method.block_fp8_as_mxfp8:
        return False
    scales = getattr(projection, "weight_scale_inv", None)
    return (
        method.weight_block_size == [128, 128]
        and weight.dtype == torch.float8_e4m3fn
        and scales is not None
        and scales.dtype == torch.float32
        and tuple(scales.shape) == (-(-rows // 128), -(-columns // 128))
    )


def describe_weight(projection: Any) -> str:
    """A linear layer's quantisation, and its weight's dtype and shape, in words."""
    weight = getattr(projection, "weight", None)
    stored = "no weight of that name" if weight is None else f"{weight.dtype} {list(weight.shape)}"
    return f"{type(projection.quant_method).__name__}, {stored}"
