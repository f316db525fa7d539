"""The definition of every op of models with KV heads (GQA, MHA), in plain PyTorch.

Arithmetic is float32, or float64 where the queries are. Shapes, errors and sources are documented on the public
functions, which check their arguments before they come here.
"""

import itertools
import math

import torch

from nsa_dcp_kernels.kv_format import FP8_MAX
from nsa_dcp_kernels.reference import accumulator, owned_slots, slot_rows

FP8 = torch.float8_e4m3fn


def store(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Values as a cache of `dtype` holds them: divided by `scale` and clamped where that is FP8."""
    if dtype != FP8:
        return values.to(dtype)
    return (values.to(accumulator(values.dtype)) / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def read(stored: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What a cache holds, as `dtype`."""
    return stored.to(dtype) if stored.dtype != FP8 else stored.to(torch.float32).to(dtype) * scale


def scatter_kv_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    k_scale: float,
    v_scale: float,
) -> None:
    owned = owned_slots(slots, dcp_size, dcp_rank, 1)
    rows = slot_rows(slots[owned], dcp_size, 1).long()
    k_cache[rows] = store(k[owned], k_cache.dtype, k_scale)
    v_cache[rows] = store(v[owned], v_cache.dtype, v_scale)


def attend_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    row_request: torch.Tensor,
    sm_scale: float,
    page_size: int,
    k_scale: float,
    v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = accumulator(q.dtype)
    out, lse = _nothing(q)
    for request in torch.unique(row_request).tolist():
        length = int(lengths[request])
        if length <= 0:
            continue
        positions = torch.arange(length)
        rows = page_table[request].long()[positions // page_size] * page_size + positions % page_size
        queries = (row_request == request).nonzero().squeeze(1)
        k, v = read(k_cache[rows], acc, k_scale), read(v_cache[rows], acc, v_scale)
        out[queries], lse[queries] = _attend(q[queries], k, v, sm_scale, None)
    return out, lse


def attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = accumulator(q.dtype)
    out, lse = _nothing(q)
    bounds = starts.tolist()
    for first, last in itertools.pairwise(bounds):
        place = torch.arange(last - first)
        unseen = place.unsqueeze(0) > place.unsqueeze(1)
        part = slice(first, last)
        out[part], lse[part] = _attend(q[part], k[part].to(acc), v[part].to(acc), sm_scale, unseen)
    return out, lse


def _nothing(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=accumulator(q.dtype))


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, unseen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k and v [L, K, D] in the accumulator's dtype, unseen [T, L]; every row sees at least one key."""
    grouped = q.to(k.dtype).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("tkgd,lkd->tkgl", grouped, k) * sm_scale
    if unseen is not None:
        scores = scores.masked_fill(unseen[:, None, None, :], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weight = torch.exp(scores - lse.unsqueeze(-1))
    return torch.einsum("tkgl,lkd->tkgd", weight, v).flatten(1, 2).to(q.dtype), lse.flatten(1)
