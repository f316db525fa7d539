"""Timing of GPU ops: replays of a captured graph, over inputs that the L2 cache does not hold."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

# Written before every replay: several times a Hopper's L2.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 10th and 90th percentile over the replays."""

    us: float
    low: float
    high: float


@dataclass(frozen=True)
class Record:
    """One measured op.

    moved_bytes, flop: what the op cannot do without; its rate and its share of the measured ceiling follow from them.
    """

    op: str
    case: str
    timing: Timing
    moved_bytes: int = 0
    flop: int = 0

    def as_dict(self, ceilings: dict[str, float]) -> dict[str, object]:
        """For JSON."""
        row = {"op": self.op, "case": self.case} | asdict(self.timing)
        if self.moved_bytes:
            row["gb_per_s"] = self.moved_bytes / self.timing.us / 1e3
            row["share_of_copy"] = row["gb_per_s"] / ceilings["copy_gb_per_s"]
        if self.flop:
            row["tflop_per_s"] = self.flop / self.timing.us / 1e6
            row["share_of_bf16_matmul"] = row["tflop_per_s"] / ceilings["bf16_tflop_per_s"]
        return row


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 25) -> Timing:
    """Capture the calls one after the other in one graph, replay it, and divide by their number.

    Args:
        calls: the same op over different inputs, so that no call finds its inputs in the L2 cache.
        replays: timed replays.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    microseconds = sorted(1e3 * start.elapsed_time(end) / len(calls) for start, end in events)
    graph.reset()
    return Timing(
        statistics.median(microseconds),
        microseconds[len(microseconds) // 10],
        microseconds[-1 - len(microseconds) // 10],
    )


def measure_ceilings() -> dict[str, float]:
    """The device's copy bandwidth (bytes read and written) and bf16 matrix rate, measured."""
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # A kernel, not a copy: a graph hands copies to the copy engine, which is slower.
    copy = time_calls([lambda: torch.bitwise_not(source, out=target)])
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    matmul = time_calls([lambda: a @ b])
    return {
        "copy_gb_per_s": 2 * source.nbytes / copy.us / 1e3,
        "bf16_tflop_per_s": 2 * size**3 / matmul.us / 1e6,
    }
