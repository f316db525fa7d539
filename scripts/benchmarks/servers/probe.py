"""Timing a running server: one long prefill, and the steps of a steady decode batch as the server itself logs them."""

import re
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from scripts.benchmarks.servers.cases import NEW_TOKENS, Prompts, ServerCase
from scripts.served_checks.servers.server_process import ASKING_ERRORS, Server

# The first lines of a full batch still hold steps of a smaller one, or a prefill.
_DISCARDED = 2
_DECODE_LINE = re.compile(
    r"Decode batch.*?#running-req: (\d+),.*?: (True|False), gen throughput \(token/s\): ([\d.]+), #queue-req: (\d+)"
)
_PREFILL_GROUP_TOKENS = 131072
# Fewer say nothing about how long many take.
_TELLING_TOKENS = 8192


@dataclass(frozen=True)
class LoggedSteps:
    """One line of the log: requests that ran, whether from a graph, tokens per second, requests that waited."""

    running: int
    graph: bool
    throughput: float
    queued: int

    @property
    def step_us(self) -> float:
        return 1e6 * self.running / self.throughput


def parse_decode_lines(text: str) -> list[LoggedSteps]:
    """The decode lines of a log, in order; those that tell no throughput are left out."""
    found = [
        (int(run), graph == "True", float(rate), int(wait)) for run, graph, rate, wait in _DECODE_LINE.findall(text)
    ]
    return [LoggedSteps(*values) for values in found if values[0] and values[2]]


def choose_samples(lines: list[LoggedSteps], concurrency: int, wanted: int) -> list[LoggedSteps]:
    """Lines of the full batch without its first ones; where it never was full, those of the most requests that ran."""
    running = concurrency
    if not any(line.running == concurrency for line in lines):
        counts = statistics.multimode(line.running for line in lines)
        running = max(counts, default=0)
    full = [line for line in lines if line.running == running]
    return full[_DISCARDED:][:wanted]


class ServerProbe:
    """Asks one server. Remembers which prompts it has prefilled, and how fast."""

    def __init__(self, server: Server, prompts: Prompts, capacity: int, deadline: float) -> None:
        """Args: deadline: of time.monotonic(), after which nothing is asked."""
        self.server, self.prompts, self.capacity, self.deadline = server, prompts, capacity, deadline
        self.tokens_per_s = 0.0
        self._held: dict[int, int] = {}

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def time_prefill(self, length: int, repeats: int = 1) -> dict[str, object]:
        """Prefill one new prompt, alone; the last of `repeats` counts, each with tokens of its own."""
        for number in range(repeats):
            ids = self.prompts.take(f"prefill {length} {number}", length)
            started = time.monotonic()
            (meta,) = self.server.generate([ids], 1, self._timeout(300))
            seconds = time.monotonic() - started
        if length >= _TELLING_TOKENS:
            self.tokens_per_s = max(self.tokens_per_s, length / seconds)
        return {
            "tokens": length,
            "seconds": seconds,
            "tokens_per_s": length / seconds,
            "cached_tokens": meta.get("cached_tokens"),
        }

    def time_decode(
        self, case: ServerCase, samples: int, during: Callable[[], None] | None = None
    ) -> dict[str, object]:
        """Run a batch until `samples` log lines of it are there.

        Args:
            case: the batch.
            samples: lines to take.
            during: called once the samples are there, while the batch goes on.

        Raises:
            TimeoutError: prefilling its prompts would take longer than there is time.
            RuntimeError: the server refused, or logged no decode step.
        """
        prefilled, prefill_s = self._prefill(case)
        ids = [self.prompts.take(number, case.context) for number in range(case.concurrency)]
        outcome: list[object] = []
        timeout_s = self._timeout(90)

        def ask() -> None:
            try:
                outcome.append(self.server.generate(ids, NEW_TOKENS, timeout_s))
            except ASKING_ERRORS as error:
                outcome.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        until = time.monotonic() + timeout_s
        with self.server.log.open(errors="replace") as log:
            log.seek(0, 2)
            asking.start()
            text, chosen = "", []
            while len(chosen) < samples and asking.is_alive() and time.monotonic() < until:
                time.sleep(0.05)
                text += log.read()
                chosen = [line for line in parse_decode_lines(text) if line.running == case.concurrency]
                chosen = chosen[_DISCARDED:]
            if during and asking.is_alive():
                during()
            if asking.is_alive():
                self.server.post({"abort_all": True}, 20, "/abort_request")
            asking.join(30)
            text += log.read()
        lines = choose_samples(parse_decode_lines(text), case.concurrency, samples)
        if not lines:
            error = outcome[0] if outcome and isinstance(outcome[0], Exception) else "no full batch in the log"
            raise RuntimeError(f"{case.name}: no decode step was timed: {error}")
        steps = sorted(line.step_us for line in lines)
        step = statistics.median(steps)
        return {
            "context": case.context,
            "concurrency": case.concurrency,
            "largest": case.largest,
            "running": lines[0].running,
            "step_us": step,
            "low_us": steps[len(steps) // 10],
            "high_us": steps[-1 - len(steps) // 10],
            "samples": len(steps),
            "tokens_per_s": 1e6 * lines[0].running / step,
            "graph": all(line.graph for line in lines),
            "queued": max(line.queued for line in lines),
            "prefilled_tokens": prefilled,
            "prefill_s": prefill_s,
        }

    def _prefill(self, case: ServerCase) -> tuple[int, float]:
        """Bring the case's prompts into the prefix cache; return how many tokens that were, and the seconds."""
        page_tokens = sum(max(self._held.get(number, 0), case.context) for number in range(case.concurrency))
        rest = sum(length for number, length in self._held.items() if number >= case.concurrency)
        if page_tokens + rest > 0.9 * self.capacity:
            # What was not asked for lately goes first.
            self._held = {number: length for number, length in self._held.items() if number < case.concurrency}
        missing = [number for number in range(case.concurrency) if self._held.get(number, 0) < case.context]
        tokens = sum(case.context - self._held.get(number, 0) for number in missing)
        if self.tokens_per_s and tokens / self.tokens_per_s > self.seconds_left:
            raise TimeoutError(
                f"{case.name}: {tokens} tokens to prefill take {tokens / self.tokens_per_s:.0f} s, "
                f"{self.seconds_left:.0f} s are left"
            )
        size = max(1, _PREFILL_GROUP_TOKENS // case.context)
        started = time.monotonic()
        for start in range(0, len(missing), size):
            group = missing[start : start + size]
            self.server.generate([self.prompts.take(number, case.context) for number in group], 1, self._timeout(120))
            self._held |= dict.fromkeys(group, case.context)
        seconds = time.monotonic() - started
        if tokens >= _TELLING_TOKENS:
            self.tokens_per_s = tokens / seconds
        return tokens, seconds

    def _timeout(self, most: float) -> float:
        if not self.seconds_left:
            raise TimeoutError("the time to ask this server is up")
        return min(most, self.seconds_left + 5)
