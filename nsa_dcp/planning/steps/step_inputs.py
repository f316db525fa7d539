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
from typing import Any

from nsa_dcp.planning.dimensions import ModelDims

_ON_H200 = "measured on one H200, {}, torch 2.11.0+cu130, sgl-flash-mla 1.0.0, CUDA-graph replays"
H200, H200_PAGES = _ON_H200.format("2026-11-29"), _ON_H200.format("2026-11-30")
H200_PAIR = "measured on two H200 (NV18), 2026-11-29, torch 2.14.1, NCCL 2.30.7, graph-captured, one GPU per rank"
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
    "memory_bandwidth_gbs": StepInput(4230.0, "GB/s", f"device-to-device copy, read + write, {H200}"),
    "cache_write_us": StepInput(
        2.1, "us per layer, and once more per selection", f"writing latents, writing index keys, {H200}"
    ),
    "slots_us": StepInput(
        0.0,
        "us per selection",
        f"0: not counted unless set; the embedded engine's look-up takes 2.3 to 3.0 with 16 to 256 rows, {H200_PAGES}",
    ),
    "rows_scored_at_once": StepInput(
        132.0,
        "query rows",
        "stated: the SMs of an H100 or H200; sglang 0.5.23 scores more in pieces and joins those (an H20 has 78)",
    ),
    "page_program_ns": StepInput(
        0.61,
        "ns per 128 tokens of the context length, per request",
        f"sglang 0.5.23's page table, 160 us for 64 requests of up to 524,288 tokens, {H200_PAGES}",
    ),
    "row_split_us": StepInput(
        13.2,
        "us per row-split selection",
        "the embedded engine's taking a rank's rows and putting all ranks' together: a rank's selection less a TP "
        f"rank's of as many rows (12.5 to 15.0); the plugin's, which copies less, was not measured, {H200}",
    ),
    "take_own_us": StepInput(
        5.0, "us per selection over sharded index keys", f"a rank's own rows up to the threshold, {_ASSUMED}"
    ),
    "take_whole_us": StepInput(
        4.0,
        "us per selection over sharded index keys",
        f"a rank that owns no more tokens than are selected hands on all of them, {_ASSUMED}",
    ),
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
        {1: 18.7, 8: 21.9, 16: 30.3, 32: 47.1, 64: 73.9, 96: 106.9, 128: 109.1, 160: 156.3, 200: 196.9, 256: 213.5},
        "rows -> us",
        "FlashMLA sparse fp8 decode, 64 heads, 2,048 valid indices, its own schedule; 32, 96, 160 and 200 rows: with "
        f"localisation, less what that adds at the others (2.3 to 3.4), {H200}",
    ),
    "attend_64_valid_256": StepInput(
        {
            1: 12.5,
            8: 13.0,
            16: 14.7,
            32: 17.7,
            64: 24.3,
            96: 23.8,
            128: 25.0,
            133: 37.7,
            160: 41.9,
            200: 46.6,
            256: 47.0,
        },
        "rows -> us",
        f"the same kernel, planned schedule, valid indices Binomial(2048, 1/8), {H200}",
    ),
    "attend_64_valid_512": StepInput(
        {
            1: 13.3,
            8: 14.8,
            16: 17.5,
            32: 21.9,
            64: 30.6,
            96: 37.1,
            128: 38.7,
            133: 53.6,
            160: 60.9,
            200: 72.0,
            256: 73.0,
        },
        "rows -> us",
        f"the same, Binomial(2048, 1/4), {H200}",
    ),
    "attend_64_valid_1024": StepInput(
        {
            1: 18.3,
            8: 21.1,
            16: 21.5,
            32: 31.2,
            64: 45.2,
            96: 63.6,
            128: 64.5,
            133: 81.5,
            160: 98.1,
            200: 122.2,
            256: 121.6,
        },
        "rows -> us",
        f"the same, Binomial(2048, 1/2), {H200}",
    ),
    "attend_128_valid_256": StepInput(
        {1: 11.9, 16: 16.4, 32: 21.1, 64: 21.6, 80: 36.0, 96: 38.6, 128: 39.1},
        "rows -> us",
        f"128 heads, Binomial(2048, 1/8); one launch holds 132 rows, more run as several, {H200}",
    ),
    "attend_128_valid_1024": StepInput(
        {1: 18.0, 16: 26.8, 32: 36.5, 64: 51.8, 80: 79.5, 96: 97.4, 128: 98.8},
        "rows -> us",
        f"128 heads, Binomial(2048, 1/2), {H200}",
    ),
    "attend_128_valid_2048": StepInput(
        {1: 18.2, 16: 35.3, 32: 55.2, 64: 89.4, 80: 125.3, 96: 145.8, 128: 174.3},
        "rows -> us",
        f"128 heads, 2,048 valid indices, {H200}",
    ),
    "pad_heads": StepInput(
        {16: 3.9, 64: 6.1, 128: 9.5, 256: 17.1},
        "rows of 64 heads -> us",
        "a stock server pads queries to 64 heads with zeros and a copy: measured on two H200, 2026-11-29, sglang "
        "0.5.23, tp 2, for 64 rows of 32 heads, a fill of 2.2 and a copy of 3.9; the other rows are scaled from it as "
        "an earlier revision's padding of 8 heads, also with zeros, took 5.0, 7.9, 12.3 and 22.1",
    ),
    "pad_heads_dcp": StepInput(
        {16: 3.1, 64: 4.8, 128: 6.3, 256: 11.6},
        "rows of 64 heads -> us",
        "a DCP rank copies its queries into 64 heads and fills in nothing: attention of 16 and 32 gathered heads less "
        f"the same kernel's with 64, the mean of both (they differ by up to 2.5), {H200}",
    ),
    "arrange_heads": StepInput(
        {294912: 3.2, 589824: 3.4, 1179648: 3.6, 2359296: 5.4, 4718592: 8.2, 9437184: 13.5, 18874368: 24.6},
        "bytes of all gathered heads -> us",
        f"gathered queries copied from by rank to by head, {H200}",
    ),
    "localize": StepInput(
        {64: 5.6, 128: 5.8, 256: 7.4},
        "rows -> us",
        f"localising and scheduling one selection, 64 heads, dcp 8, {H200}",
    ),
    "combine": StepInput(
        {256: 4.0, 512: 4.3, 1024: 4.7, 2048: 5.7, 4096: 7.5, 8192: 10.4, 16384: 17.1, 262144: 209.4},
        "rows * gathered heads -> us",
        f"packing this rank's partial results, unpacking and merging those received, {H200}",
    ),
    "index_scores": StepInput(
        {16384: 15.7, 131072: 19.1, 262144: 22.9, 1048576: 57.1, 2097152: 94.0},
        "rows * context tokens -> us",
        "queries quantised, DeepGEMM fp8_paged_mqa_logits, entries past a context erased, 64 index heads (used "
        "unscaled for fewer); means where a size was measured as several shapes; 16,384 (1 row), 262,144 and half of "
        f"131,072: scoring and selecting less selecting, {H200}",
    ),
    "select_context": StepInput(
        {16384: 18.3, 32768: 25.0, 131072: 39.1},
        "context tokens -> us",
        f"this package's selection of 2,048, used for sglang's too: the least by context, 8, 64 and 8 rows, {H200}",
    ),
    "select_entries": StepInput(
        {131072: 18.3, 2097152: 19.9, 67108864: 454.3},
        "rows * context tokens -> us",
        f"the same, the least by size: 8 x 16,384, 256 x 8,192, 2,048 x 32,768, {H200}",
    ),
    "all_gather": StepInput(
        {4096: 9.8, 65536: 10.5, 524288: 15.2, 2097152: 30.0, 8388608: 56.7, 67108864: 291.3},
        "bytes contributed per rank, 2 ranks -> us",
        H200_PAIR,
    ),
    "all_to_all": StepInput(
        {4096: 10.2, 65536: 14.5, 524288: 17.1, 2097152: 18.7, 8388608: 34.8, 67108864: 138.2},
        "bytes of a rank's send buffer, 2 ranks -> us",
        H200_PAIR,
    ),
    "peer_exchange": StepInput(
        {32896: 4.5, 263168: 5.6, 526336: 6.8, 2105344: 13.4, 4210688: 21.8, 8421376: 36.3},
        "bytes received per GPU, 2 ranks -> us",
        "one kernel that exchanges partial results over peer memory and merges them, 64 heads: measured on two H200, "
        "2026-11-30, torch 2.14.1, triton 3.8.0, with an earlier kernel of the same kind; that queries take as long, "
        "and more ranks as long for as many bytes, is assumed, not measured",
    ),
    "fill_page_table": StepInput(
        {262144: 3.7, 8388608: 9.0}, "tokens of all contexts -> us per step, this package's kernel", H200_PAGES
    ),
    "reduce_scatter": StepInput(
        {4096: 9.5, 65536: 10.2, 524288: 12.4, 2097152: 20.2, 8388608: 37.3, 67108864: 161.5},
        "bytes of a rank's input, float32, 2 ranks -> us",
        H200_PAIR,
    ),
    "all_reduce": StepInput(
        {4096: 10.2, 65536: 11.4, 524288: 14.5, 2097152: 29.9, 8388608: 49.0, 67108864: 247.4},
        "bytes of a rank's buffer, 2 ranks -> us",
        H200_PAIR,
    ),
}


def measured_inputs(model: ModelDims) -> dict[str, StepInput]:
    """The inputs as measured, with the weight sizes and the context length of `model`."""
    weights = {
        "context_length": StepInput(
            float(model.max_context),
            "tokens",
            f"stated: the longest context of {model.name}; sglang's captured steps join scores and launch page-table "
            "programs for as many; set your --context-length, or 0 to count neither",
        ),
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


def _number(text: Any, name: str, zero_allowed: bool) -> float:
    least = "0 or more" if zero_allowed else "more than 0"
    try:
        value = float(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number of {least}, got {text!r}") from error
    if isinstance(text, bool) or not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
        raise ValueError(f"{name} must be a number of {least}, got {text!r}")
    return value
