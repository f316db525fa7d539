"""What the pools of a GPU get, and checks of the numbers that a plan is asked with."""

from __future__ import annotations

import math

from nsa_dcp.planning.config_fields import LARGEST_INTEGER, shown

GIB = 1 << 30
# Of one GPU; beyond a terabyte a number is a slip, and further on it is no finite count of bytes.
_MOST_GIB = 1 << 20


def budget_bytes(gpu_memory_gib: float, mem_fraction_static: float, weights_gib: float) -> int:
    """Bytes that the pools of one GPU get, as in sglang. ValueError: a number is out of range, or nothing is left."""
    for name, value in (("gpu_memory_gib", gpu_memory_gib), ("mem_fraction_static", mem_fraction_static)):
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name} must be a positive number, got {value}")
        if value > _MOST_GIB:
            raise ValueError(f"{name} must be at most {_MOST_GIB}, got {value}")
    if mem_fraction_static > 1:
        raise ValueError(f"mem_fraction_static must be at most 1, got {mem_fraction_static}")
    if not math.isfinite(weights_gib) or weights_gib < 0:
        raise ValueError(f"weights_gib must be 0 or more, got {weights_gib}")
    if weights_gib > _MOST_GIB:
        raise ValueError(f"weights_gib must be at most {_MOST_GIB}, got {weights_gib}")
    budget = int((gpu_memory_gib * mem_fraction_static - weights_gib) * GIB)
    if budget <= 0:
        raise ValueError(
            "gpu_memory_gib * mem_fraction_static must exceed weights_gib, "
            f"got {gpu_memory_gib} * {mem_fraction_static} and {weights_gib}"
        )
    return budget


def require_positive(**sizes: int) -> None:
    """ValueError: one of the named sizes is not an integer of 1 or more."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {shown(value)}")
        _require_size(name, value)


def require_natural(**sizes: int) -> None:
    """ValueError: one of the named sizes is not an integer of 0 or more."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer of 0 or more, got {shown(value)}")
        _require_size(name, value)


def _require_size(name: str, value: int) -> None:
    if value > LARGEST_INTEGER:
        raise ValueError(f"{name} must be at most {LARGEST_INTEGER}, got {shown(value)}")
