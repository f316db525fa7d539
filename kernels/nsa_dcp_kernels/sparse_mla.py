"""Sparse MLA attention of absorbed queries over selected cache rows.

s[t, h, k] = sm_scale * q[t, h] . kv[row(t, k)],    out = softmax(s) @ kv[row, :512],    lse = log sum_k exp(s)
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_tensor
from nsa_dcp_kernels.kv_format import LATENT_BYTES, LATENT_DIM


def attend_sparse(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    topk_rows: torch.Tensor,
    topk_length: torch.Tensor | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the selected rows of this rank's cache.

    Args:
        q: [T, H, 576] bfloat16 (float32 and float64 on a CPU). Absorbed queries: 512 latent, then 64 RoPE values.
        kv_rows: [R, 656] uint8 (packed FP8) or [R, 576] bfloat16 (float32 and float64 on a CPU).
        topk_rows: [T, K] int32. Rows to attend to; an entry of -1 is skipped wherever it stands.
        topk_length: [T] int32. Entries past it are not read. None: every entry that is not -1 counts.
        sm_scale: multiplies q . k before the softmax.

    Returns:
        out: [T, H, 512], dtype of `q`; zeros for a row that attends to nothing.
        lse: [T, H] float32 (float64 with a float64 `q`), natural log; -inf for a row that attends to nothing.

    Raises:
        ValueError: a shape or dtype is not as above.
        NotImplementedError: on a GPU, more than 128 heads.
        RuntimeError: on a GPU, no Hopper GPU or no FlashMLA.
    """
    check_attend(q, kv_rows, topk_rows, topk_length)
    if q.is_cuda:
        from nsa_dcp_kernels._flash_mla import attend_sparse as launch

        return launch(q, kv_rows, topk_rows, topk_length, sm_scale)
    return reference.attend_sparse(q, kv_rows, topk_rows, topk_length, sm_scale)


def check_attend(
    q: torch.Tensor, kv_rows: torch.Tensor, topk_rows: torch.Tensor, topk_length: torch.Tensor | None
) -> None:
    """Check the arguments of `attend_sparse`.

    Raises:
        ValueError: a shape or dtype is not as documented there.
    """
    floats = (torch.bfloat16, torch.float32, torch.float64)
    check_tensor(q, "q", (None, None, LATENT_DIM), floats)
    width = LATENT_BYTES if kv_rows.dtype == torch.uint8 else LATENT_DIM
    check_tensor(kv_rows, "kv_rows", (None, width), (torch.uint8, *floats), like=q)
    served = not kv_rows.is_cuda or kv_rows.dtype in (torch.uint8, torch.bfloat16)
    check(served, "kv_rows", "be uint8 or bfloat16 on a GPU", kv_rows.dtype)
    check_tensor(topk_rows, "topk_rows", (q.shape[0], None), torch.int32, like=q)
    if topk_length is not None:
        check_tensor(topk_length, "topk_length", (q.shape[0],), torch.int32, like=q)
    check(not q.is_cuda or q.dtype == torch.bfloat16, "q", "be bfloat16 on a GPU", q.dtype)
