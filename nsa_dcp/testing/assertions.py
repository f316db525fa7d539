"""Comparisons that say what differs, where, and by how much."""

import math

import torch


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, rms: float, label: str = "") -> None:
    """Compare vectors by the relative root mean square of their difference, one vector (last dimension) at a time.

    A tolerance over the whole tensor would let one wrong row hide among many right ones. Infinities and NaN must stand
    at the same places with the same sign, and a vector of zeros must be zeros.

    Args:
        actual: [..., D], any float dtype.
        expected: [..., D], any float dtype.
        rms: the largest |actual - expected| / |expected| (Euclidean norms) of any one vector.
        label: says in the message what was compared.

    Raises:
        AssertionError: names the label, the worst vector's position, its error, and both of its worst values.
    """
    actual, expected = _comparable(actual, expected, label)
    if not expected.numel():
        return
    actual, expected = actual.reshape(-1, *actual.shape[-1:]), expected.reshape(-1, *expected.shape[-1:])
    difference, norm = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
    error = torch.where(difference == 0, 0.0, difference / norm)
    worst = int(error.argmax())
    if not error[worst] <= rms:
        entry = int((actual[worst] - expected[worst]).abs().argmax())
        raise AssertionError(
            f"{_prefix(label)}vector {worst} of {len(error)} differs by {float(error[worst]):.3g} relative RMS, "
            f"allowed {rms:.3g}; at entry {entry}: got {float(actual[worst, entry]):.9g}, "
            f"expected {float(expected[worst, entry]):.9g}"
        )


def assert_lse_close(actual: torch.Tensor, expected: torch.Tensor, *, atol: float, label: str = "") -> None:
    """Compare logarithms by their absolute difference; infinities and NaN must stand at the same places.

    Args:
        actual: any shape, float.
        expected: the same shape.
        atol: the largest |actual - expected|. A difference of d scales a partial's weight by exp(d).
        label: says in the message what was compared.

    Raises:
        AssertionError: names the label, the worst position, and both values.
    """
    actual, expected = _comparable(actual, expected, label)
    if not expected.numel():
        return
    difference = (actual - expected).abs()
    if not difference.max() <= atol:
        worst = _position(difference)
        raise AssertionError(
            f"{_prefix(label)}at {worst}: got {float(actual[worst]):.9g}, expected {float(expected[worst]):.9g}, "
            f"allowed difference {atol:.3g}"
        )


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, label: str = "") -> None:
    """Compare shape, dtype and every bit: NaN payloads and the sign of zero count.

    Raises:
        AssertionError: names the label, how many entries differ, the first one's position, and both values.
    """
    _assert_same_shape(actual, expected, label)
    assert actual.dtype == expected.dtype, f"{_prefix(label)}dtype {actual.dtype}, expected {expected.dtype}"
    actual, expected = actual.cpu().contiguous(), expected.cpu().contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    differs = actual.view(integers) != expected.view(integers)
    if differs.any():
        first = _position(differs.int())
        raise AssertionError(
            f"{_prefix(label)}{int(differs.sum())} of {differs.numel()} entries differ; the first at {first}: "
            f"got {actual[first].item()}, expected {expected[first].item()}"
        )


def _comparable(actual: torch.Tensor, expected: torch.Tensor, label: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Check shape and the places of infinities and NaN; return both as float64 with those entries zeroed."""
    _assert_same_shape(actual, expected, label)
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    for value in (math.nan, math.inf, -math.inf):
        is_value = torch.isnan if math.isnan(value) else lambda tensor, value=value: tensor == value
        differs = is_value(actual) != is_value(expected)
        if differs.any():
            first = _position(differs.int())
            raise AssertionError(
                f"{_prefix(label)}{value} is misplaced at {int(differs.sum())} entries; the first at {first}: "
                f"got {float(actual[first])}, expected {float(expected[first])}"
            )
    finite = torch.isfinite(expected)
    return actual.where(finite, 0.0), expected.where(finite, 0.0)


def _assert_same_shape(actual: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    assert actual.shape == expected.shape, (
        f"{_prefix(label)}shape {list(actual.shape)}, expected {list(expected.shape)}"
    )


def _position(values: torch.Tensor) -> tuple[int, ...]:
    """Return where the largest value stands, the first of equals."""
    return tuple(int(index) for index in torch.unravel_index(values.argmax(), values.shape))


def _prefix(label: str) -> str:
    return f"{label}: " if label else ""
