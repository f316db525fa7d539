"""Queries whose heads lie too far apart for sglang's concatenation are joined, byte for byte; others are handed on."""

import numpy as np
import pytest
import torch

from nsa_dcp.planning.limits import INT32_MAX
from nsa_dcp.sglang_plugin.attention.query_layout import join_far_heads

HEADS, ROWS = 3, 2


def far_apart(stride: int, width: int, first: int = 0) -> torch.Tensor:
    """[T, H, width] bfloat16 whose heads begin `stride` values apart. Memory that is not touched takes none."""
    memory = torch.from_numpy(np.empty((HEADS - 1) * stride + ROWS * 576, np.uint16)).view(torch.bfloat16)
    view = memory.as_strided((ROWS, HEADS, width), (576, stride, 1), first)
    view.copy_(torch.arange(ROWS * HEADS * width).view(ROWS, HEADS, width) % 251)
    return view


@pytest.mark.parametrize("far", ["latent", "rope"])
def test_heads_that_begin_past_2_31_values_are_joined(far):
    stride = INT32_MAX // (HEADS - 1) // 2 * 2 + 2
    latent = far_apart(stride if far == "latent" else 576 * ROWS, 512)
    rope = far_apart(stride if far == "rope" else 576 * ROWS, 64, 512)
    q, rest = join_far_heads(latent, rope, HEADS, 512, 64)
    assert rest is None
    assert q.is_contiguous()
    assert torch.equal(q[..., :512], latent)
    assert torch.equal(q[..., 512:], rope)


def test_heads_that_begin_at_the_last_value_of_31_bits_are_handed_on():
    stride = INT32_MAX // (HEADS - 1)
    latent, rope = far_apart(stride, 512), torch.zeros(ROWS, HEADS, 64)
    q, rest = join_far_heads(latent, rope, HEADS, 512, 64)
    assert q is latent
    assert rest is rope


def test_flattened_queries_and_queries_that_are_one_are_understood():
    latent, rope = torch.randn(ROWS, HEADS * 512), torch.randn(ROWS, HEADS * 64)
    q, rest = join_far_heads(latent, rope, HEADS, 512, 64)
    assert (q is latent, rest is rope) == (True, True)
    assert join_far_heads(latent, None, HEADS, 512, 64) == (latent, None)


def test_one_head_and_no_rows_lie_nowhere_far():
    for rows, heads in ((0, 4), (5, 1)):
        q, rest = join_far_heads(torch.randn(rows, heads, 512), torch.randn(rows, heads, 64), heads, 512, 64)
        assert rest is not None
        assert q.shape == (rows, heads, 512)
