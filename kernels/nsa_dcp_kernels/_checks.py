"""One-sentence argument errors: "{name} must ..., got ..."."""

import torch


def check(condition: bool, name: str, rule: str, got: object) -> None:
    """Raise a ValueError that says which argument broke which rule.

    Raises:
        ValueError: `condition` is false.
    """
    if not condition:
        raise ValueError(f"{name} must {rule}, got {got}")


def check_tensor(
    tensor: torch.Tensor,
    name: str,
    shape: tuple[int | None, ...],
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    like: torch.Tensor | None = None,
) -> None:
    """Check a tensor's shape (None is any size), dtype, and that it lies on the device of `like`.

    Without `like`, a tensor on a GPU must lie on the current one.

    Raises:
        ValueError: one of them differs.
    """
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    fits = len(tensor.shape) == len(shape) and all(want in (None, got) for want, got in zip(shape, tensor.shape))
    wanted = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
    check(fits, name, f"have shape {wanted}", list(tensor.shape))
    allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    check(tensor.dtype in dtypes, name, f"have dtype {allowed}", str(tensor.dtype).removeprefix("torch."))
    if like is None:
        check_current_device(tensor, name)
    else:
        check(tensor.device == like.device, name, f"be on {like.device}", tensor.device)


def check_current_device(tensor: torch.Tensor, name: str) -> None:
    """Check that a tensor is not on a GPU other than the current one, which is where Triton and DeepGEMM launch.

    Raises:
        ValueError: it is.
    """
    if tensor.is_cuda:
        current = torch.cuda.current_device()
        check(tensor.device.index == current, name, f"be on the current device, cuda:{current}", tensor.device)


def check_rank(dcp_size: int, dcp_rank: int, interleave_size: int = 1) -> None:
    """Check a rank's place in its DCP group.

    Raises:
        ValueError: `dcp_size` or `interleave_size` is below 1, or `dcp_rank` is outside the group.
    """
    check(dcp_size >= 1, "dcp_size", "be at least 1", dcp_size)
    check(0 <= dcp_rank < dcp_size, "dcp_rank", f"be in [0, {dcp_size})", dcp_rank)
    check(interleave_size >= 1, "interleave_size", "be at least 1", interleave_size)
