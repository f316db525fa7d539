"""Merge partial attention results that were computed over disjoint sets of tokens.

    out = sum_n exp(lse_n - lse) * out_n,    lse = log sum_n exp(lse_n)

Derivation: docs/math.md. Memory-bound: reads N*T*H*(D + 2) elements' bytes, writes T*H*(D + 2).
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def merge_partials(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge N partial attention results into one.

    Args:
        out: [N, T, H, D] bfloat16, float16 or float32 (float64 on a CPU). Partial outputs, each normalised by its own
            softmax. Never used where `lse` is not finite, so NaN there is harmless.
        lse: [N, T, H] float32 (float64 with a float64 `out`). Natural log of each partial's softmax denominator. -inf
            for a partial that attended to no token; +inf and NaN are taken for that too.

    Returns:
        merged: [T, H, D], dtype of `out`; zeros where every partial is empty.
        total: [T, H], dtype of `lse`; -inf where every partial is empty.

    Raises:
        ValueError: a shape or dtype is not as above, or N is 0.

    Source:
        The split-K combine of FlashDecoding. FlashMLA's own combine uses base 2 and +inf for empty rows.
    """
    check_tensor(out, "out", (None, None, None, None), FLOATS)
    check_tensor(lse, "lse", tuple(out.shape[:3]), reference.accumulator(out.dtype), like=out)
    check(out.shape[0] >= 1, "out", "hold at least one partial", out.shape[0])
    check(not (out.is_cuda and out.dtype == torch.float64), "out", "not be float64 on a GPU", out.dtype)
    if out.is_cuda:
        from nsa_dcp_kernels._triton.lse_merge import merge_partials as launch

        return launch(out, lse)
    return reference.merge_partials(out, lse)
