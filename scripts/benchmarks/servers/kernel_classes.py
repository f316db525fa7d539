"""Kernels of a trace by what they do, and how much of the communication other kernels of the rank hide."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The first that matches counts. Names of sglang 0.5.23, NCCL, FlashInfer, FlashMLA, DeepGEMM, cuBLAS, this package.
_CLASSES = (
    ("NCCL all-reduce", r"nccl\w*AllReduce"),
    ("NCCL all-gather", r"nccl\w*AllGather"),
    ("NCCL reduce-scatter", r"nccl\w*ReduceScatter"),
    ("NCCL send and receive, all-to-all", r"nccl\w*(SendRecv|AlltoAll)"),
    ("NCCL, other", r"nccl"),
    ("custom all-reduce", r"cross_device_reduce|all_?reduce|one_?shot|two_?shot|lamport|multimem|symm_mem"),
    (
        "partials: packed, merged",
        r"lse_combine|lse_weighted|merge_packed|merge_partials|correct_attn|pack_(a2a|partials)",
    ),
    ("index scores", r"mqa_logits|score_page"),
    ("gathered pages", r"gather_pages|list_pages|remap_to_gathered"),
    ("experts and routing", r"moe|expert|topk\w*(gating|softmax|sigmoid)|(silu|act)_and_mul"),
    ("selection", r"top_?k|_select_kernel|erase_past"),
    ("localise and schedule", r"localize|_schedule_kernel|transform_index|page_table|mla_metadata"),
    ("attention", r"flash_?mla|flash_fwd|sparse_(attn|mla)|splitkv|mla_combine|fmha"),
    ("cache writes and quantisation", r"quant|set_mla|scatter|pack_latent|index_k|store_cache|hadamard"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|gemv|splitK|xmma|matmul"),
    ("norm and RoPE", r"norm|rope|rotary"),
)
COMMUNICATION = tuple(name for name, _ in _CLASSES[:6])
OTHER = "other"
_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _CLASSES]

Interval = tuple[float, float]


@dataclass(frozen=True)
class ClassTime:
    """Microseconds of a class in the whole trace.

    launches: kernels. total: their time, each counted. exposed: communication while no other kernel of the GPU ran;
    None for other classes.
    """

    launches: int
    total: float
    exposed: float | None


def classify(name: str) -> str:
    """The class of a kernel's name; OTHER where none is known."""
    return next((found for found, pattern in _PATTERNS if pattern.search(name)), OTHER)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, as disjoint ascending intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length_of(intervals: Sequence[Interval]) -> float:
    """Length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Length that two lists of disjoint ascending intervals have in common."""
    common, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        common += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def sum_classes(kernels: Sequence[dict]) -> tuple[dict[str, ClassTime], float, float]:
    """Times by class of one rank's kernels.

    Args:
        kernels: complete events of a Chrome trace, `ts` and `dur` in microseconds.

    Returns:
        The classes by time; the span from the first start to the last end; the part of it in which no kernel ran.
    """
    spans: dict[str, list[Interval]] = {}
    for kernel in kernels:
        span = (kernel["ts"], kernel["ts"] + kernel["dur"])
        spans.setdefault(classify(kernel["name"]), []).append(span)
    if not spans:
        return {}, 0.0, 0.0
    working = merge_intervals(span for name, found in spans.items() if name not in COMMUNICATION for span in found)
    times = {}
    for name, found in spans.items():
        united = merge_intervals(found)
        exposed = length_of(united) - overlap(united, working) if name in COMMUNICATION else None
        times[name] = ClassTime(len(found), sum(end - start for start, end in found), exposed)
    busy = merge_intervals(span for found in spans.values() for span in found)
    whole = busy[-1][1] - busy[0][0]
    return dict(sorted(times.items(), key=lambda item: -item[1].total)), whole, whole - length_of(busy)


def format_classes(kernels: Sequence[dict], steps: int) -> list[str]:
    """A markdown table of one rank's classes, per step."""
    times, whole, idle = sum_classes(kernels)
    if not whole:
        return ["no kernels"]
    lines = [
        f"{whole / steps:.1f} us a step from the first kernel to the last, {idle / steps:.1f} us "
        f"({100 * idle / whole:.1f}%) of it without any.",
        "",
        "| Class | launches a step | us a step | share of the step | exposed, us | hidden, us |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, one in times.items():
        row = f"| {name} | {one.launches / steps:.1f} | {one.total / steps:.1f} | {100 * one.total / whole:.1f}% |"
        if one.exposed is None:
            lines.append(row + " | |")
        else:
            hidden = max(0.0, one.total - one.exposed)
            lines.append(row + f" {one.exposed / steps:.1f} | {hidden / steps:.1f} |")
    return lines
