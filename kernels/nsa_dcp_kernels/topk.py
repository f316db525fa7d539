"""Exact selection of the best-scored positions.

The order is (score descending, position ascending), so that every rank that sees the same scores selects the same set,
whatever the batch around a row. -0.0 ties with 0.0; NaN comes after every number.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_tensor


def select_topk(logits: torch.Tensor, context_lens: torch.Tensor, topk: int) -> torch.Tensor:
    """Select the first `topk` positions of each row in the order (score descending, position ascending).

    Args:
        logits: [T, L] float32. Never used at or past context_lens, where it may be garbage.
        context_lens: [T] int32. Valid entries per row.
        topk: K, positions to select at most.

    Returns:
        [T, K] int32: the selected positions in ascending order, then -1.

    Raises:
        ValueError: a shape or dtype is not as above, or topk is below 1.
    """
    check_tensor(logits, "logits", (None, None), torch.float32)
    check_tensor(context_lens, "context_lens", (logits.shape[0],), torch.int32, like=logits)
    check(topk >= 1, "topk", "be at least 1", topk)
    if logits.is_cuda:
        from nsa_dcp_kernels._triton.topk import select_topk as launch

        return launch(logits, context_lens, topk)
    return reference.select_topk(logits, context_lens, topk)
