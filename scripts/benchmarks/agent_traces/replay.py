"""Replay sessions against an OpenAI-compatible server: sessions in parallel, the calls of a session in order.

Whatever happens to a call is a result: a refused or dropped connection, an HTTP error, a stream that is not one.
Standard library only.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from scripts.benchmarks.agent_traces.dataset import Session


@dataclass(frozen=True)
class Server:
    """Where and how to call.

    Args:
        base_url: `http://host:port`, with or without `/v1`.
        model: the model name to send.
        max_tokens: tokens to ask for in each call.
        ignore_eos: ask for exactly `max_tokens` (an sglang and vLLM extension).
        timeout_s: longest silence of the server, seconds; the first call of a fresh server compiles kernels.
        api_key: bearer token; empty for none.
    """

    base_url: str
    model: str
    max_tokens: int
    ignore_eos: bool = False
    timeout_s: float = 600.0
    api_key: str = ""

    def connect(self) -> tuple[http.client.HTTPConnection, str]:
        """A connection that is not open yet, and the path prefix. ValueError: the URL is not http(s)://host."""
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"url must be http://host:port or https://host:port, got {self.base_url!r}")
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        prefix = url.path.rstrip("/").removesuffix("/v1")
        return kind(url.hostname, url.port, timeout=self.timeout_s), prefix

    def headers(self) -> dict[str, str]:
        """Request headers."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}


@dataclass(frozen=True)
class CallResult:
    """One call.

    Args:
        started_s: seconds since the replay began.
        ttft_s: seconds to the first token; None if there was none.
        tpot_s: mean seconds between later tokens; None with fewer than two.
        latency_s: seconds to the end, or to the error.
        prompt_tokens, cached_tokens, output_tokens: as the server counts; None where it does not say. Without a count,
            `output_tokens` is the number of streamed pieces.
        error: what went wrong; empty when nothing did.
    """

    session: str
    call: int
    started_s: float
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    error: str = ""


def replay(
    sessions: Sequence[Session],
    server: Server,
    *,
    concurrency: int,
    max_turns: int | None,
    on_result: Callable[[CallResult], None],
    stop: threading.Event,
) -> list[threading.Thread]:
    """Start the replay; results come through `on_result`, from one thread at a time.

    Args:
        concurrency: sessions in flight.
        max_turns: calls of each session; None for all.
        stop: set it to end the replay after the calls in flight.

    Returns:
        The threads to join.
    """
    waiting: queue.SimpleQueue[Session] = queue.SimpleQueue()
    for session in sessions:
        waiting.put(session)
    lock, began = threading.Lock(), time.perf_counter()

    def work() -> None:
        while not stop.is_set():
            try:
                session = waiting.get_nowait()
            except queue.Empty:
                return
            for call in range(1, min(session.num_calls, max_turns or session.num_calls) + 1):
                if stop.is_set():
                    return
                result = perform_call(session, call, server, began, stop)
                with lock:
                    on_result(result)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(sessions)))]
    for thread in threads:
        thread.start()
    return threads


def perform_call(session: Session, call: int, server: Server, began: float, stop: threading.Event) -> CallResult:
    """Make one call and time its stream. Never raises for what the server does."""
    body = {
        "model": server.model,
        "messages": session.messages(call),
        "max_tokens": server.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if server.ignore_eos else {}),
    }
    started, times, usage, error = time.perf_counter(), [], {}, ""
    connection, prefix = server.connect()
    try:
        connection.request("POST", f"{prefix}/v1/chat/completions", json.dumps(body), server.headers())
        response = connection.getresponse()
        if response.status != 200:
            error = f"HTTP {response.status}: {response.read(200).decode(errors='replace').strip()}"
        else:
            usage, error = _read_stream(response, times, stop)
    except TimeoutError:
        error = f"timed out after {server.timeout_s:g} s of silence"
    except (OSError, http.client.HTTPException) as problem:
        error = f"connection: {type(problem).__name__}: {problem}".rstrip(": ")
    finally:
        connection.close()
    ended = time.perf_counter()
    details = usage.get("prompt_tokens_details")
    counted = _count(usage, "completion_tokens")
    pieces = len(times) if counted is None else counted
    return CallResult(
        session=session.name,
        call=call,
        started_s=started - began,
        ttft_s=times[0] - started if times else None,
        tpot_s=(times[-1] - times[0]) / (pieces - 1) if pieces > 1 and len(times) > 1 else None,
        latency_s=ended - started,
        prompt_tokens=_count(usage, "prompt_tokens"),
        cached_tokens=_count(details, "cached_tokens"),
        output_tokens=pieces if times else counted,
        error=error,
    )


def list_models(server: Server) -> list[str]:
    """Names that the server answers to. RuntimeError: it does not answer, or not with a list of models."""
    connection, prefix = server.connect()
    try:
        connection.request("GET", f"{prefix}/v1/models", headers=server.headers())
        response = connection.getresponse()
        answer = json.loads(response.read())
        return [entry["id"] for entry in answer["data"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as problem:
        raise RuntimeError(
            f"the server must list its models at {server.base_url}/v1/models, got {type(problem).__name__}: {problem}; "
            "start it, or name the model with --model"
        ) from problem
    finally:
        connection.close()


def _read_stream(
    response: http.client.HTTPResponse, times: list[float], stop: threading.Event
) -> tuple[dict[str, object], str]:
    """Collect the arrival times of pieces; returns the server's usage and what went wrong."""
    usage: dict[str, object] = {}
    while line := response.readline():
        if stop.is_set():
            return usage, "interrupted"
        text = line.decode(errors="replace").strip()
        if not text.startswith("data:"):
            continue
        data = text.removeprefix("data:").strip()
        if data == "[DONE]":
            return usage, "" if times or usage.get("completion_tokens") == 0 else "the stream held no token"
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError:
            return usage, f"the stream held a line that is not JSON: {data[:80]!r}"
        if not isinstance(chunk, dict):
            return usage, f"the stream held a line that is no object: {data[:80]!r}"
        if chunk.get("error"):
            return usage, f"the server said: {str(chunk['error'])[:200]}"
        if isinstance(chunk.get("usage"), dict):
            usage = chunk["usage"]
        if _carries_text(chunk.get("choices")):
            times.append(time.perf_counter())
    return usage, "the connection was dropped before the end of the stream"


def _carries_text(choices: object) -> bool:
    deltas = (
        [choice.get("delta") for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    )
    fields = ("content", "reasoning_content", "tool_calls")
    return any(isinstance(delta, dict) and any(delta.get(field) for field in fields) for delta in deltas)


def _count(holder: object, name: str) -> int | None:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
