"""The two parts of absorbed queries, joined where sglang's kernel would lose its way.

sglang joins them by a kernel that multiplies a head by the stride between heads in 32 bits. After a gather of heads
that stride is a whole chunk, rows * 576, so that the last of 128 heads begins 2**31 values in from 29,357 rows on
(`planning/limits.py`): the kernel would read 4 GiB earlier. torch's concatenation has no such limit and gives the same
bytes. sglang then joins them once more, out of heads that lie 576 values apart: one more copy, of such chunks alone.
"""

from __future__ import annotations

import torch

from nsa_dcp.planning.limits import INT32_MAX


def join_far_heads(
    q: torch.Tensor, q_rope: torch.Tensor | None, num_heads: int, latent_dim: int, rope_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return queries that sglang's backend may be given: joined where its own kernel does not reach their heads.

    Args:
        q: [T, H, 512], or with `q_rope` None [T, H, 576]; or either with its last two dimensions flattened.
        q_rope: [T, H, 64], or flattened; None where the two are one already.
        num_heads: H.
        latent_dim, rope_dim: 512 and 64.

    Returns:
        (q, q_rope) as they came; or ([T, H, 576] contiguous, None) where a head of either part begins past 2**31
        values.
    """
    if q_rope is None:
        return q, q_rope
    latent = q.view(-1, num_heads, latent_dim)
    rope = q_rope.view(-1, num_heads, rope_dim)
    if max(latent.stride(1), rope.stride(1)) * (num_heads - 1) <= INT32_MAX:
        return q, q_rope
    return torch.cat([latent, rope], dim=-1), None
