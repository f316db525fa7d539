"""What the whole-model tests run on every rank. Importable by name, as processes need it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsa_dcp import indexer
from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.hf import attention
from nsa_dcp.hf.checkpoint import load_model
from nsa_dcp.hf.engine import Engine
from nsa_dcp.hf.families.sparse import SparseAttention
from nsa_dcp.hf.ranks import join_groups
from nsa_dcp.hf.static_decode import StaticDecode
from nsa_dcp.testing.cases import poison_
from nsa_dcp_kernels import reference

# An earlier run of this process may have left its counter in the module's name.
_quantise_tiles = reference.quantise_tiles
_select = attention.DcpAttention._select


def make_engine(
    rank: int, directory: Path, dtype: str, config: DcpConfig, cache: CacheConfig, device_type: str = "cpu"
) -> Engine:
    """Load the checkpoint and put it under DCP."""
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    return Engine(load_model(directory, dtype, device), join_groups(config, rank), cache)


def sparse_attention(engine: Engine) -> SparseAttention:
    """The attention of an engine that runs a DSA model."""
    assert isinstance(engine.attention, SparseAttention)
    return engine.attention


def generate_recorded(rank: int, _send: Any, runs: list[dict]) -> list[dict]:
    """Generate once per run; record tokens, logits, cache use, cached bytes by position, and quantised rows."""
    return [_generate_recorded(rank, **run) for run in runs]


def _generate_recorded(
    rank: int,
    directory: Path,
    config: DcpConfig,
    cache: CacheConfig,
    dtype: str,
    prompts: list[list[int]],
    max_new_tokens: int,
    chunked_prefill_size: int,
    device_type: str = "cpu",
    static_batch: int | None = None,
) -> dict:
    engine = make_engine(rank, directory, dtype, config, cache, device_type)
    for layer in sparse_attention(engine).index_keys.layers.values():
        poison_(layer)  # what this rank was not given must not be read
    run_decode = None
    if static_batch:
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        run_decode = StaticDecode(engine, static_batch, longest).forward
    logits: dict[int, list[torch.Tensor]] = {}
    requests: list = []
    quantised = _count_quantised_tiles()
    calls = _record_selections()

    def record(request: Any, row: torch.Tensor) -> None:
        if not any(request is known for known in requests):
            requests.append(request)
        logits.setdefault(id(request), []).append(row.cpu())

    output_ids = engine.generate(prompts, max_new_tokens, chunked_prefill_size, on_logits=record, run_decode=run_decode)
    requests.sort(key=lambda request: [torch.equal(request.prompt_ids, torch.tensor(p)) for p in prompts].index(True))
    return {
        "output_ids": output_ids,
        "logits": [torch.stack(logits[id(request)]) for request in requests] if rank == 0 else None,
        "usage": engine.usage(),
        "rows": [_rows_by_position(engine, request) for request in requests],
        "latent_tiles_quantised": quantised["latent"],
        "selections": _selections_by_row(engine, requests, calls),
    }


def _record_selections() -> list[tuple]:
    """Keep, of every selection of this process: layer, first page of each row's request, tokens seen, the selected.

    The selected are positions, or with sharded index keys this rank's rows.
    """
    calls: list[tuple] = []
    running: list[tuple] = []

    def select(module: attention.DcpAttention, x: Any, q_resid: Any, embeddings: Any, step: Any) -> Any:
        running[:] = [(module.layer, step)]
        return _select(module, x, q_resid, embeddings, step)

    def recording(select: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            selected = select(*args, **kwargs)
            rows = selected[0] if isinstance(selected, tuple) else selected
            # A captured step selects only when it is replayed, which nothing here sees.
            if not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
                layer, step = running[0]
                # By rows, a rank selects for its own alone.
                own = step.rows.own if step.rows else slice(None)
                first_pages, seen = step.page_table[step.row_request[own].long(), 0], step.context_lens[own]
                calls.append((layer, first_pages.cpu(), seen.cpu(), rows.cpu(), rows is not selected))
            return selected

        return run

    attention.DcpAttention._select = select  # type: ignore[method-assign, assignment]
    for name in ("select_positions", "select_positions_row_split", "select_own"):
        # Of the module itself: an earlier run of this process may have left a recorder in the attention's names.
        setattr(attention, name, recording(getattr(indexer, name)))
    return calls


def _selections_by_row(engine: Engine, requests: list, calls: list[tuple]) -> dict[tuple[int, int, int], list[int]]:
    """(request, layer, query position) -> selected positions, for the rows that this rank was given all of.

    With sharded index keys a decode step's are those that this rank owns.
    """
    dcp_size, dcp_rank = engine.ranks.config.dcp_size, engine.ranks.dcp_rank
    request_of = {request.pages[0]: number for number, request in enumerate(requests)}
    selections = {}
    for layer, first_pages, context_lens, selected, are_rows in calls:
        for page, length, row in zip(first_pages.tolist(), context_lens.tolist(), selected.tolist()):
            if not length:
                continue
            request, kept = request_of[page], [entry for entry in row if entry >= 0]
            if are_rows:
                page_at = {page: at for at, page in enumerate(requests[request].pages)}
                kept = [(page_at[entry // 64] * 64 + entry % 64) * dcp_size + dcp_rank for entry in kept]
            selections[request, layer, length - 1] = kept
    return selections


def _count_quantised_tiles() -> dict[str, int]:
    """Count the latent tiles that go through the one quantiser, by wrapping it in this process."""
    counted = {"latent": 0}

    def counting(tiles: torch.Tensor) -> Any:
        if tiles.dim() == 3:  # latents come as [T, 4, 128], index keys as [T, 128]
            counted["latent"] += tiles.shape[0] * tiles.shape[1]
        return _quantise_tiles(tiles)

    reference.quantise_tiles = counting
    return counted


def _rows_by_position(engine: Engine, request: Any) -> list[tuple[list[int], torch.Tensor]]:
    """Per layer: the positions of a request that this rank holds, and what it holds of them.

    Written with plain integers, so that it does not share the package's index math.
    """
    dcp_size, dcp_rank = engine.ranks.config.dcp_size, engine.ranks.dcp_rank
    positions, rows = [], []
    for position in range(request.cached):
        slot = request.pages[position // (64 * dcp_size)] * 64 * dcp_size + position % (64 * dcp_size)
        if slot % dcp_size == dcp_rank:
            positions.append(position)
            rows.append(slot // dcp_size)
    return [(positions, layer[rows].cpu()) for layer in sparse_attention(engine).latents.layers]


def generate_statically(
    rank: int,
    _send: Any,
    directory: Path,
    dtype: str,
    config: DcpConfig,
    cache: CacheConfig,
    prompts: list[list[int]],
    max_new_tokens: int,
) -> list[list[int]]:
    """Generate with decode steps in fixed buffers, larger than the batch and than any context."""
    engine = make_engine(rank, directory, dtype, config, cache)
    static = StaticDecode(engine, max_batch=len(prompts) + 2, max_context_len=512)
    return engine.generate(prompts, max_new_tokens, 64, run_decode=static.forward)


def record_selections(
    rank: int, _send: Any, directory: Path, dtype: str, cache: CacheConfig, prompts: list[list[int]], device_type: str
) -> list[torch.Tensor]:
    """What one rank selects while it caches the prompts: positions, [T, K] per step and indexer."""
    engine = make_engine(rank, directory, dtype, DcpConfig(), cache, device_type)
    selections = []
    original = indexer.select_topk

    def recording(logits: torch.Tensor, context_lens: torch.Tensor, topk: int) -> torch.Tensor:
        selected = original(logits, context_lens, topk)
        selections.append(selected.cpu())
        return selected

    indexer.select_topk = recording
    engine.generate(prompts, 1, 8192)
    return selections
