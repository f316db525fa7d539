"""From a selection of slots to this rank's rows.

    owner(slot) = slot // interleave_size % dcp_size
    row(slot)   = slot // (interleave_size * dcp_size) * interleave_size + slot % interleave_size

Memory-bound: reads and writes 4 * T * K bytes.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check_rank, check_tensor


def localize_topk(
    topk_slots: torch.Tensor, dcp_size: int, dcp_rank: int, interleave_size: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the slots that one rank owns, as rows of its cache.

    Args:
        topk_slots: [T, K] int32. Slots in any order; a negative entry is "none" and may stand anywhere. Not modified.
        dcp_size: ranks in the group.
        dcp_rank: this rank, in [0, dcp_size).
        interleave_size: consecutive slots on one rank before the next rank's turn.

    Returns:
        topk_rows: [T, K] int32. The owned rows first, in the order of their slots, then -1.
        topk_length: [T] int32. Rows owned per token.

    Raises:
        ValueError: a shape, a dtype or the rank is not as above.
    """
    check_tensor(topk_slots, "topk_slots", (None, None), torch.int32)
    check_rank(dcp_size, dcp_rank, interleave_size)
    if topk_slots.is_cuda:
        from nsa_dcp_kernels._triton.localize import localize_topk as launch

        return launch(topk_slots, dcp_size, dcp_rank, interleave_size)
    return reference.localize_topk(topk_slots, dcp_size, dcp_rank, interleave_size)
