"""(out, lse) of all gathered heads <-> the one message per rank that `a2a` exchanges.

A head's entry is its output's bytes followed by its lse's: D * itemsize + 4 bytes (+ 8 with float64).
Memory-bound: moves every byte once in and once out.
"""

import torch

from nsa_dcp_kernels import reference
from nsa_dcp_kernels._checks import check, check_tensor
from nsa_dcp_kernels.lse_merge import FLOATS


def pack_partials(out: torch.Tensor, lse: torch.Tensor, dcp_size: int) -> torch.Tensor:
    """Arrange partial results so that chunk n holds the heads of rank n.

    Args:
        out: [T, H_all, D] bfloat16, float16 or float32 (float64 on a CPU).
        lse: [T, H_all] float32 (float64 with a float64 `out`).
        dcp_size: N. H_all must be a multiple of it; rank n's heads are the n-th block of H_all / N.

    Returns:
        [N, T, H_all / N, D * itemsize + lse.itemsize] uint8, contiguous.

    Raises:
        ValueError: a shape or dtype is not as above.
        NotImplementedError: on a GPU, a head's output is not a whole number of 4-byte words.
    """
    check_tensor(out, "out", (None, None, None), FLOATS)
    check_tensor(lse, "lse", tuple(out.shape[:2]), reference.accumulator(out.dtype), like=out)
    _check_on_gpu(out, out.dtype)
    check(dcp_size >= 1 and out.shape[1] % dcp_size == 0, "out", f"have a multiple of {dcp_size} heads", out.shape[1])
    if out.is_cuda:
        from nsa_dcp_kernels._triton.partial_pack import pack_partials as launch

        return launch(out, lse, dcp_size)
    return reference.pack_partials(out, lse, dcp_size)


def unpack_partials(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Take exchanged messages apart.

    Args:
        packed: [N, T, H, B] uint8. Entry n came from rank n.
        dtype: of the outputs that were packed.

    Returns:
        out: [N, T, H, D] of `dtype`, D = (B - lse.itemsize) / dtype.itemsize.
        lse: [N, T, H] float32 (float64 with float64).

    Raises:
        ValueError: a shape or dtype is not as above.
        NotImplementedError: on a GPU, a head's output is not a whole number of 4-byte words.
    """
    _check_packed(packed, dtype)
    if packed.is_cuda:
        from nsa_dcp_kernels._triton.partial_pack import unpack_partials as launch

        return launch(packed, dtype)
    return reference.unpack_partials(packed, dtype)


def merge_packed(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge exchanged messages without taking them apart first: `merge_partials(*unpack_partials(packed, dtype))`.

    Args and errors: as `unpack_partials`, and a ValueError if N is 0. Returns: as `merge_partials`.
    """
    _check_packed(packed, dtype)
    check(packed.shape[0] >= 1, "packed", "hold at least one partial", packed.shape[0])
    if packed.is_cuda:
        from nsa_dcp_kernels._triton.partial_pack import merge_packed as launch

        return launch(packed, dtype)
    return reference.merge_partials(*reference.unpack_partials(packed, dtype))


def _check_packed(packed: torch.Tensor, dtype: torch.dtype) -> None:
    check_tensor(packed, "packed", (None, None, None, None), torch.uint8)
    check(dtype in FLOATS, "dtype", "be a floating-point dtype", dtype)
    _check_on_gpu(packed, dtype)
    out_bytes = packed.shape[3] - reference.accumulator(dtype).itemsize
    check(out_bytes > 0 and out_bytes % dtype.itemsize == 0, "packed", "hold whole values and a lse", packed.shape[3])


def _check_on_gpu(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    check(not (tensor.is_cuda and dtype == torch.float64), "dtype", "not be float64 on a GPU", dtype)
