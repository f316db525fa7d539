"""What the step model is fed: measured tables and a few stated numbers, each with its unit and where it was measured.

Every number can be replaced: a scalar by name, a table from a JSON file. A number that nobody measured says "assumed".
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_dcp.model_dims import ModelDims

H200 = "measured on one H200, 2026-11, torch 2.11.0+cu130, sgl-flash-mla 1.0.0, CUDA-graph replays"
H200_PAIR = "measured on two H200 (NV18), 2026-11, NCCL 2.28.9, graph-captured, one GPU per rank"
_ASSUMED = "assumed, not measured"

Table = dict[float, float]


@dataclass(frozen=True)
class StepInput:
    """One input of the step model.

    Args:
        value: a number, or for a table a mapping of ascending positive keys to values of 0 or more; empty: not used.
        unit: of the value; a table's is `key -> value`.
        source: where it was measured, or that it is assumed or overridden.
    """

    value: float | Table
    unit: str
    source: str


_SCALARS = {
    "memory_bandwidth_gbs": StepInput(4220.0, "GB/s", f"device-to-device copy, read + write, {H200}"),
    "localize_us": StepInput(5.0, "us per selection", f"localising and scheduling one selection, {_ASSUMED}"),
    "combine_us": StepInput(5.0, "us per layer", f"merging the partials of one layer, {_ASSUMED}"),
    "other_us_per_layer": StepInput(
        0.0, "us per layer", f"norms, RoPE, router, launches: not counted unless set, {_ASSUMED}"
    ),
    "link_bandwidth_gbs": StepInput(
        0.0,
        "GB/s received per GPU",
        "0: use the collective tables; set it for another link (latency stays the table's first)",
    ),
}

_TABLES = {
    "attend_stock_64": StepInput(
        {1: 21.9, 8: 26.6, 32: 52.1, 64: 79.7, 128: 119.0, 256: 225.4},
        "rows -> us",
        f"FlashMLA sparse fp8 decode, 64 heads, 2,048 valid indices, stock schedule, {H200}",
    ),
    "attend_width_256": StepInput(
        {1: 16.2, 8: 16.4, 32: 24.6, 64: 24.6, 128: 28.4, 256: 49.0},
        "rows -> us",
        f"the same kernel, index width 256, {H200}",
    ),
    "attend_width_512": StepInput(
        {1: 17.0, 8: 17.5, 32: 27.5, 64: 39.2, 128: 39.3, 256: 68.3},
        "rows -> us",
        f"the same kernel, index width 512, {H200}",
    ),
    "attend_width_1024": StepInput(
        {1: 18.3, 8: 20.4, 32: 32.6, 64: 49.4, 128: 58.8, 256: 108.3},
        "rows -> us",
        f"the same kernel, index width 1,024, {H200}",
    ),
    "attend_dynamic_64": StepInput(
        {1: 15.1, 16: 18.2, 32: 22.3, 64: 28.0, 96: 28.1, 128: 30.0, 200: 50.2, 256: 52.0},
        "rows -> us",
        f"the same kernel, exact schedule, valid indices Binomial(2048, 1/8), 64 heads, {H200}",
    ),
    "attend_dynamic_128": StepInput(
        {1: 15.5, 16: 21.0, 32: 24.1, 64: 25.5, 96: 41.6, 128: 43.3},
        "rows -> us",
        f"the same with 128 heads; one launch holds 132 rows, more run as several, {H200}",
    ),
    "index_scores": StepInput(
        {131072: 13.2, 262144: 18.4, 1048576: 46.0, 2097152: 80.1},
        "rows * context tokens -> us",
        f"DeepGEMM fp8_paged_mqa_logits, 64 index heads (used unscaled for fewer), {H200}",
    ),
    "select_topk": StepInput(
        {4096: 50.0, 16384: 105.0, 32768: 115.0},
        "context tokens -> us",
        f"torch.topk(2048) on those logits, 8 and 64 rows, the larger where both, {H200}",
    ),
    "all_gather": StepInput(
        {4096: 9.2, 65536: 10.4, 524288: 14.2, 2097152: 28.3, 8388608: 56.8, 67108864: 292.0},
        "bytes contributed per rank, 2 ranks -> us",
        H200_PAIR,
    ),
    "all_to_all": StepInput(
        {4096: 10.8, 65536: 11.8, 524288: 13.1, 2097152: 18.3, 8388608: 33.0, 67108864: 139.0},
        "bytes of a rank's send buffer, 2 ranks -> us",
        H200_PAIR,
    ),
    "reduce_scatter": StepInput(
        {4096: 9.4, 65536: 9.8, 524288: 22.4, 2097152: 17.6, 8388608: 34.8, 67108864: 162.0},
        "bytes of a rank's input, float32, 2 ranks -> us",
        H200_PAIR,
    ),
    "all_reduce": StepInput(
        {},
        "bytes of a rank's buffer, 2 ranks -> us",
        f"empty: the sum of a reduce-scatter and an all-gather, {H200_PAIR}",
    ),
}


def measured_inputs(model: ModelDims) -> dict[str, StepInput]:
    """The inputs as measured, with the weight sizes of `model`."""
    weights = {
        "expert_bytes": StepInput(
            model.expert_bytes, "bytes per routed-expert weight", f"stated for {model.name}: {model.source}"
        ),
        "dense_bytes": StepInput(
            model.dense_bytes, "bytes per other weight", f"stated for {model.name}: {model.source}"
        ),
    }
    return {**_SCALARS, **weights, **_TABLES}


def override_inputs(
    inputs: Mapping[str, StepInput], settings: Sequence[str] = (), tables: Path | None = None
) -> dict[str, StepInput]:
    """Replace scalars by `NAME=VALUE` and tables by those of a JSON file `{name: {key: value}}`.

    ValueError: a name is unknown, a value is not a number of 0 or more, or a table is empty or not numeric.
    """
    changed = dict(inputs)
    for setting in settings:
        name, equals, text = setting.partition("=")
        scalars = [known for known, entry in inputs.items() if not isinstance(entry.value, dict)]
        if not equals or name not in scalars:
            raise ValueError(f"set must be NAME=VALUE with NAME one of {', '.join(scalars)}, got {setting!r}")
        changed[name] = StepInput(
            _number(text, name, name != "memory_bandwidth_gbs"), inputs[name].unit, "given with --set"
        )
    if tables is None:
        return changed
    try:
        given = json.loads(Path(tables).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"tables must be a readable JSON file, got {str(tables)!r}: {error}") from error
    known = [name for name, entry in inputs.items() if isinstance(entry.value, dict)]
    if not isinstance(given, dict) or not set(given) <= set(known):
        raise ValueError(f"tables must be a JSON object with names among {', '.join(known)}, got {str(tables)!r}")
    for name, table in given.items():
        if not isinstance(table, dict) or not table:
            raise ValueError(f"table {name} must be an object of at least one key, got {table!r}")
        points = {
            _number(key, f"{name} key", False): _number(value, f"{name}[{key}]", True) for key, value in table.items()
        }
        changed[name] = StepInput(dict(sorted(points.items())), inputs[name].unit, f"given in {tables}")
    return changed


def interpolate(table: Mapping[float, float], key: float, *, extend: bool = False) -> float:
    """Value at `key`: linear between points, flat outside, or with `extend` on the last slope past the end."""
    keys = list(table)
    if key <= keys[0]:
        return table[keys[0]]
    for low, high in itertools.pairwise(keys):
        if key <= high:
            return table[low] + (table[high] - table[low]) * (key - low) / (high - low)
    if not extend or len(keys) == 1:
        return table[keys[-1]]
    low, high = keys[-2], keys[-1]
    return table[high] + (table[high] - table[low]) * (key - high) / (high - low)


def _number(text: object, name: str, zero_allowed: bool) -> float:
    least = "0 or more" if zero_allowed else "more than 0"
    try:
        value = float(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number of {least}, got {text!r}") from error
    if isinstance(text, bool) or not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
        raise ValueError(f"{name} must be a number of {least}, got {text!r}")
    return value
