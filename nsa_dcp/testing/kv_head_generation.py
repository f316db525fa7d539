"""What the whole-model tests of models with KV heads run on every rank. Importable by name, as processes need it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.hf.engine import Engine, Request
from nsa_dcp.hf.families.kv_heads import KvHeadAttention
from nsa_dcp.hf.static_decode import StaticDecode
from nsa_dcp.hf.step import Extend
from nsa_dcp.testing.recorded_generation import make_engine


@dataclass(frozen=True)
class KvHeadRun:
    """One run of an engine whose cache is NaN wherever nothing is written.

    steps: of `forward_recorded`: per step, request -> number of its next tokens. static_batch: rows of decode steps in
    fixed buffers; 0 runs them as they come.
    """

    directory: Path
    config: DcpConfig
    cache: CacheConfig
    dtype: str
    prompts: list[list[int]]
    max_new_tokens: int = 4
    chunked_prefill_size: int = 8192
    steps: list[dict[int, int]] = field(default_factory=list)
    static_batch: int = 0


def generate_poisoned(rank: int, _send: Any, runs: list[KvHeadRun]) -> list[dict]:
    """Generate once per run; record tokens, logits, cache use, and which rows of the cache hold something."""
    return [_generate_poisoned(rank, run) for run in runs]


def forward_recorded(rank: int, _send: Any, runs: list[KvHeadRun]) -> list[dict[int, list[torch.Tensor]]]:
    """Run prompts through steps of any shape, mixed ones among them; the logits after each step, by request."""
    results = []
    for run in runs:
        engine, _ = _poisoned_engine(rank, run)
        requests = [Request(torch.tensor(prompt)) for prompt in run.prompts]
        for request in requests:
            assert engine.admit(request, 1)
        logits: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(requests))}
        for step in run.steps:
            extends = []
            for number, count in step.items():
                request = requests[number]
                tokens = request.prompt_ids[request.cached : request.cached + count]
                extends.append(Extend(tokens, request.cached, request.pages))
            for (number, count), row in zip(step.items(), engine.forward(extends)):
                requests[number].cached += count
                logits[number].append(row)
        results.append(logits)
    return results


def _poisoned_engine(rank: int, run: KvHeadRun) -> tuple[Engine, KvHeadAttention]:
    engine = make_engine(rank, run.directory, run.dtype, run.config, run.cache)
    attention = engine.attention
    assert isinstance(attention, KvHeadAttention)
    for keys, values in attention.cache.layers:
        keys.fill_(math.nan)
        values.fill_(math.nan)
    return engine, attention


def _generate_poisoned(rank: int, run: KvHeadRun) -> dict:
    engine, attention = _poisoned_engine(rank, run)
    logits: dict[int, list[torch.Tensor]] = {}
    run_decode = None
    if run.static_batch:
        longest = max(len(prompt) for prompt in run.prompts) + run.max_new_tokens
        run_decode = StaticDecode(engine, run.static_batch, longest).forward
    pages: dict[int, list[int]] = {}

    def record(request: Request, row: torch.Tensor) -> None:
        logits.setdefault(request.number, []).append(row)
        pages[request.number] = list(request.pages)

    outputs = engine.generate(
        run.prompts, run.max_new_tokens, run.chunked_prefill_size, on_logits=record, run_decode=run_decode
    )
    written = [
        {row for row, held in enumerate((~keys.float().isnan()).flatten(1).any(1).tolist()) if held}
        for keys, _ in attention.cache.layers
    ]
    return {
        "output_ids": outputs,
        "logits": [torch.stack(logits[number]) for number in range(len(run.prompts))],
        "usage": engine.usage(),
        "written": written,
        "pages": [pages[number] for number in range(len(run.prompts))],
        "tokens": [len(prompt) + run.max_new_tokens - 1 for prompt in run.prompts],
    }
