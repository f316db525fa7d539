"""Which of the top-k selections that sglang can serve with are exact, and what each costs, on one GPU.

Each selection runs on drawn scores and on an indexer's own (DeepGEMM's FP8 logits of drawn queries and keys). An entry
is wrong where its score lies below the exact 2,048th: entries that tie with it never count. An entry that is missing,
repeated or outside its row counts too. Kernels that sglang compiles at run time are built in processes of their own, in
parallel, and a selection that cannot be built or run is named with the reason.

    python -m scripts.served_checks.probe_topk

Exits 0 where this repository's selections are exact, whatever the others are; 1 otherwise.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from scripts.served_checks.topk_selections import PAGE, SELECTIONS, TOPK, Rows, Selection

LENGTHS = (4096, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
TIMED_ROWS = (1, 8, 64)


def count_wrong(rows: Rows, positions: torch.Tensor) -> torch.Tensor:
    """[rows]: selected entries below the exact K-th score, and entries missing, repeated or outside the row."""
    window = rows.window
    wanted = min(TOPK, window.shape[1])
    threshold = torch.topk(window, wanted, dim=-1).values[:, -1:]
    positions = positions.long()
    inside = (positions >= 0) & (positions < window.shape[1])
    below = inside & (window.gather(1, positions.clamp(0, window.shape[1] - 1)) < threshold)
    ordered = torch.where(inside, positions, -1).sort(dim=-1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(-1) + 1 - (ordered[:, 0] < 0).int()
    return below.sum(-1) + (wanted - distinct)


def draw_normal(num_rows: int, length: int, mean: float, seed: int, start: int = 0) -> Rows:
    """N(mean, 1); columns before `start` belong to no row and would win."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.empty((num_rows, start + length), device="cuda").normal_(mean, 1.0, generator=generator)
    scores[:, :start] = 1e30
    return Rows(scores, start, torch.full((num_rows,), length, dtype=torch.int32, device="cuda"))


INDEXERS = ("independent, signed", "independent, weights > 0", "keys share a direction", "512 token kinds, weights > 0")


def draw_indexer(kind: str, heads: int, num_rows: int, length: int, seed: int) -> Rows:
    """An indexer's FP8 logits: the sum over heads of weight x ReLU(query . key), of one request."""
    from nsa_dcp_kernels import score_index

    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="cuda").normal_(generator=generator)

    keys, q, weights = normal(length, 128), normal(num_rows, heads, 128), normal(num_rows, heads)
    if kind != INDEXERS[0]:
        weights = weights.abs()
    if kind == INDEXERS[2]:
        direction = normal(128)
        keys, q = keys + direction, q + direction
    if kind == INDEXERS[3]:
        kinds = normal(512, 128)
        token = torch.randint(0, 512, (length,), device="cuda", generator=generator)
        keys = kinds[token] + 0.3 * keys
        q = q + kinds[token[:num_rows]].unsqueeze(1)
    scale = keys.abs().amax(-1, keepdim=True) / 448
    packed = torch.empty((length // PAGE, PAGE * 132), dtype=torch.uint8, device="cuda")
    packed[:, : PAGE * 128] = (keys / scale).to(torch.float8_e4m3fn).view(torch.uint8).view(-1, PAGE * 128)
    packed[:, PAGE * 128 :] = scale.view(-1, PAGE).contiguous().view(torch.uint8)
    table = torch.arange(length // PAGE, dtype=torch.int32, device="cuda").view(1, -1)
    request = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    lengths = torch.full((num_rows,), length, dtype=torch.int32, device="cuda")
    weights = weights * heads**-0.5 * 128**-0.5
    return Rows(score_index(q.bfloat16(), weights, packed, table, request, lengths, length), 0, lengths)


def bin_sizes(rows: Rows) -> tuple[float, int, int]:
    """Mean over deviation of the scores, and the largest threshold bin by 8 and by 10 bits of float16."""
    window = rows.window
    half = window.half().view(torch.int16).int() & 0xFFFF
    key = torch.where(half >= 0x8000, 0xFFFF - half, half + 0x8000)
    sizes = []
    kth = torch.topk(key, min(TOPK, key.shape[1]), dim=-1).values[:, -1:]
    for bits in (8, 10):
        sizes.append(int((key >> (16 - bits) == kth >> (16 - bits)).sum(-1).max()))
    return float((window.mean(-1) / window.std(-1)).mean()), *sizes


def time_call(call: Callable[[], torch.Tensor], replays: int = 9) -> float:
    """Median microseconds of one call in a captured graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            call()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    graph.reset()
    return statistics.median(1e3 * begin.elapsed_time(end) / 4 for begin, end in events)


def reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:150]


class Builds:
    """Compiles of run-time kernels, each in its own process, so that one that hangs or fails costs no other."""

    def __init__(self, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        names = {selection.build for selection in SELECTIONS if selection.build}
        self._children = {
            name: subprocess.Popen(
                [sys.executable, "-m", "scripts.served_checks.probe_topk", "--build", name],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for name in sorted(names)
        }
        self._results: dict[str, str | None] = {}

    def problem(self, name: str | None) -> str | None:
        """Wait for a build; why it has none, or None."""
        if name is None:
            return None
        if name not in self._results:
            child = self._children[name]
            try:
                _, errors = child.communicate(timeout=max(0.1, self._deadline - time.monotonic()))
                lines = [line.strip() for line in errors.splitlines() if line.strip()]
                picked = [line for line in lines if "rror" in line] or lines or ["no message"]
                self._results[name] = None if child.returncode == 0 else f"not built: {picked[-1][:150]}"
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.communicate()
                self._results[name] = "not built within the limit; another run finds what was compiled"
        return self._results[name]


def build(name: str) -> None:
    for selection in SELECTIONS:
        if selection.build == name:
            selection.prepare(draw_normal(2, 65536, 0.0, 1))()
    torch.cuda.synchronize()


class Probe:
    def __init__(self, builds: Builds, until: float) -> None:
        self.builds, self.until = builds, until
        self.unusable: dict[str, str] = {}
        self.ours_wrong = 0

    def run(self, selection: Selection, rows: Rows) -> Callable[[], torch.Tensor] | None:
        if selection.name in self.unusable:
            return None
        problem = self.builds.problem(selection.build)
        try:
            if problem is None:
                call = selection.prepare(rows)
                call()
                torch.cuda.synchronize()
                return call
        except Exception as error:
            problem = reason(error)
        self.unusable[selection.name] = problem
        print(f"{selection.name}: cannot run: {problem}", flush=True)
        return None

    def wrong(self, selection: Selection, rows: Rows) -> str:
        call = self.run(selection, rows)
        if call is None:
            return "-"
        count = int(count_wrong(rows, call()).max())
        if selection.is_ours:
            self.ours_wrong += count
        return str(count)

    def print_wrong(self, title: str, columns: list[str], draws: list[Callable[[], Rows]]) -> None:
        if time.monotonic() > self.until:
            print(f"{title}: left out, the time is up")
            return
        cells: dict[str, list[str]] = {selection.name: [] for selection in SELECTIONS}
        notes = []
        for draw in draws:
            try:
                rows = draw()
            except Exception as error:
                print(f"{title}: not drawn: {reason(error)}")
                return
            notes.append("{:.1f}/{}/{}".format(*bin_sizes(rows)))
            for selection in SELECTIONS:
                cells[selection.name].append(self.wrong(selection, rows))
        print(f"\n{title}: most wrong entries of {TOPK:,} in a row")
        print_row("", columns)
        for name, row in cells.items():
            if any(cell != "-" for cell in row):
                print_row(name, row)
        print("  mean/std, threshold bin by 8 bits, by 10: " + "  ".join(notes), flush=True)

    def print_times(self, columns: list[str], num_rows: int) -> None:
        print(f"\nmicroseconds, {num_rows} rows of N(2, 1), in a graph")
        print_row("", columns)
        for selection in SELECTIONS:
            cells = []
            for length in LENGTHS:
                late = time.monotonic() > self.until
                call = None if late else self.run(selection, draw_normal(num_rows, length, 2, 3, start=64))
                try:
                    cells.append("-" if call is None else f"{time_call(call):.1f}")
                except Exception as error:
                    cells.append("no graph")
                    print(f"{selection.name}: {reason(error)}")
            if any(cell != "-" for cell in cells):
                print_row(selection.name, cells)
        sys.stdout.flush()


def print_row(name: str, cells: list[str]) -> None:
    print(f"{name:<40}" + "".join(f"{cell:>9}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=85, help="seconds for everything, builds included (default 85)")
    parser.add_argument("--build-limit", type=float, default=50, help="seconds for run-time compiles (default 50)")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU, found none")
    if args.build:
        build(args.build)
        return 0
    began = time.monotonic()
    probe = Probe(Builds(args.build_limit), began + args.limit)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, K = {TOPK:,}", flush=True)

    # Selections that need no build first, while the others compile.
    warm = draw_normal(2, 65536, 0.0, 1)
    for selection in sorted(SELECTIONS, key=lambda selection: selection.build is not None):
        probe.run(selection, warm)
    print(f"built and loaded after {time.monotonic() - began:.0f} s", flush=True)

    names = [f"{length // 1024}K" for length in LENGTHS]

    def normal(num_rows: int, mean: float) -> None:
        draws = [partial(draw_normal, num_rows, length, mean, length + 1, start=64) for length in LENGTHS]
        probe.print_wrong(f"N({mean}, 1), {num_rows} rows", names, draws)

    def indexer(kind: str) -> None:
        cases = [(heads, length) for heads in (32, 64) for length in (32768, 131072, 524288, 1048576)]
        draws = [partial(draw_indexer, kind, heads, 16, length, 7) for heads, length in cases]
        columns = [f"{heads}h {length // 1024}K" for heads, length in cases]
        probe.print_wrong(f"indexer, {kind}, 16 rows", columns, draws)

    # What decides most comes first, should the time run out.
    normal(8, 2)
    indexer(INDEXERS[1])
    for num_rows in TIMED_ROWS:
        probe.print_times(names, num_rows)
    for kind in INDEXERS[:1] + INDEXERS[2:]:
        indexer(kind)
    for num_rows, mean in ((8, 0), (8, 5), (8, 10), (1, 5), (1, 10), (64, 5)):
        normal(num_rows, mean)
    ran = not any(selection.is_ours and selection.name in probe.unusable for selection in SELECTIONS)
    print(f"\nwrong entries of this repository's selections: {probe.ours_wrong}; {time.monotonic() - began:.0f} s")
    return 0 if ran and not probe.ours_wrong else 1


if __name__ == "__main__":
    sys.exit(main())
