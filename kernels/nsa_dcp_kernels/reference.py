"""The definition of every op, in plain PyTorch. What a CPU tensor runs, and what every kernel is tested against.

Arithmetic is float32, or float64 where the inputs are float64: with float64 the whole algorithm can be compared between
two ways of splitting it without rounding noise deciding a quantised byte.

T query tokens, H heads, K selection width, R cache rows, N dcp_size. Shapes, errors and sources are documented on the
public functions, which check their arguments before they come here.
"""

import torch

from nsa_dcp_kernels.kv_format import (
    FP8_MAX,
    INDEX_HEAD_DIM,
    INDEX_KEY_BYTES,
    KV_LORA_RANK,
    LATENT_BYTES,
    LATENT_DIM,
    NUM_TILES,
    PAGE_SIZE,
    QUANT_TILE,
)

# Bounds the gathered float copy of cache rows that `attend_sparse` holds at once.
_ATTEND_CHUNK_BYTES = 64 << 20
# Rows of one request that `score_index` scores at once, against no more keys than the last of them sees.
_SCORE_ROWS = 256
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_SCALES_AT = KV_LORA_RANK
_ROPE_AT = KV_LORA_RANK + 4 * NUM_TILES
# Sort keys below that of -inf.
_UNSEEN, _NAN = -(1 << 32), -(1 << 32) + 1
_PAGE_SCALES_AT = PAGE_SIZE * INDEX_HEAD_DIM


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _view_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reinterpret the bytes of the last dimension, of a copy where its strides are not a contiguous tensor's.

    `contiguous` alone keeps any stride of an empty tensor and of a dimension of one, which a view then trips over.
    """
    tensor = tensor.contiguous()
    canonical = torch.empty(tensor.shape, device="meta").stride()
    return (tensor if tensor.stride() == canonical else tensor.clone(memory_format=torch.contiguous_format)).view(dtype)


# --- ownership ------------------------------------------------------------------------------------------------------


def localize_topk(
    topk_slots: torch.Tensor, dcp_size: int, dcp_rank: int, interleave_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    owned = owned_slots(topk_slots, dcp_size, dcp_rank, interleave_size)
    rows = torch.where(owned, slot_rows(topk_slots, dcp_size, interleave_size), -1).to(torch.int32)
    order = torch.argsort((~owned).to(torch.int8), dim=-1, stable=True)
    return rows.gather(-1, order), owned.sum(-1, dtype=torch.int32)


def owned_slots(slots: torch.Tensor, dcp_size: int, dcp_rank: int, interleave_size: int = 1) -> torch.Tensor:
    # The sign is tested on its own: in Python -1 % N is N - 1, and the last rank would own the padding.
    return (slots >= 0) & ((slots // interleave_size) % dcp_size == dcp_rank)


def slot_rows(slots: torch.Tensor, dcp_size: int, interleave_size: int = 1) -> torch.Tensor:
    return slots // (interleave_size * dcp_size) * interleave_size + slots % interleave_size


# --- merge ----------------------------------------------------------------------------------------------------------


def merge_partials(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    acc = accumulator(out.dtype)
    empty = ~torch.isfinite(lse)
    lse = lse.to(acc).masked_fill(empty, float("-inf"))
    total = torch.logsumexp(lse, dim=0)
    # -inf - -inf is NaN where every partial is empty; the mask below takes those entries out.
    weight = torch.exp(lse - total).masked_fill(empty, 0.0)
    merged = (out.to(acc).masked_fill(empty.unsqueeze(-1), 0.0) * weight.unsqueeze(-1)).sum(0)
    return merged.to(out.dtype), total


def pack_partials(out: torch.Tensor, lse: torch.Tensor, dcp_size: int) -> torch.Tensor:
    num_tokens, num_heads, dim = out.shape
    heads = num_heads // dcp_size
    out_bytes = _view_as(out.reshape(num_tokens, dcp_size, heads, dim), torch.uint8)
    lse_bytes = _view_as(lse.reshape(num_tokens, dcp_size, heads, 1), torch.uint8)
    return torch.cat([out_bytes, lse_bytes], dim=-1).transpose(0, 1).contiguous()


def unpack_partials(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    lse_dtype = accumulator(dtype)
    out_bytes = packed.shape[-1] - lse_dtype.itemsize
    out = _view_as(packed[..., :out_bytes], dtype)
    lse = _view_as(packed[..., out_bytes:], lse_dtype).squeeze(-1)
    return out, lse


# --- latent cache ---------------------------------------------------------------------------------------------------


def pack_latent(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    tiles = k_nope.float().reshape(-1, NUM_TILES, QUANT_TILE)
    quantised, scale = quantise_tiles(tiles)
    return torch.cat(
        [
            _view_as(quantised.reshape(-1, KV_LORA_RANK), torch.uint8),
            _view_as(scale, torch.uint8),
            _view_as(k_rope.to(torch.bfloat16), torch.uint8),
        ],
        dim=-1,
    )


def quantise_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] float32 -> ([..., D] float8_e4m3fn, [...] float32): one scale per last dimension.

    A tile whose scale would be zero or subnormal holds zeros under scale 1: 1/scale would be inf and 0 * inf NaN.
    """
    scale = tiles.abs().amax(-1) / FP8_MAX
    scale = torch.where(scale < _SMALLEST_NORMAL, 1.0, scale)
    quantised = (tiles * scale.reciprocal().unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return quantised.to(torch.float8_e4m3fn), scale


def unpack_latent(packed: torch.Tensor) -> torch.Tensor:
    nope = packed[:, :KV_LORA_RANK].view(torch.float8_e4m3fn).float().reshape(-1, NUM_TILES, QUANT_TILE)
    scale = _view_as(packed[:, _SCALES_AT:_ROPE_AT], torch.float32)
    rope = _view_as(packed[:, _ROPE_AT:LATENT_BYTES], torch.bfloat16).float()
    return torch.cat([(nope * scale.unsqueeze(-1)).reshape(-1, KV_LORA_RANK), rope], dim=-1)


def scatter_latent_(
    cache: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
) -> None:
    owned = owned_slots(slots, dcp_size, dcp_rank)
    rows = slot_rows(slots[owned], dcp_size).long()
    k_nope, k_rope = k_nope[owned], k_rope[owned]
    if cache.dtype == torch.uint8:
        cache[rows] = pack_latent(k_nope, k_rope)
    else:
        cache[rows] = torch.cat([k_nope, k_rope], dim=-1).to(cache.dtype)


# --- index-key cache ------------------------------------------------------------------------------------------------


def scatter_index_keys_(
    cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, dcp_size: int = 1, dcp_rank: int = 0
) -> None:
    owned = owned_slots(slots, dcp_size, dcp_rank)
    rows, keys = slots[owned].long() // dcp_size, keys[owned]
    if cache.dtype != torch.uint8:
        cache[rows] = keys.to(cache.dtype)
        return
    quantised, scale = quantise_tiles(keys.float())
    page, offset = rows // PAGE_SIZE, rows % PAGE_SIZE
    key_view, scale_view = index_page_views(cache)
    key_view[page, offset] = quantised.view(torch.uint8)
    scale_view[page, offset] = scale


def gather_index_keys(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    valid = slots >= 0
    safe = slots.clamp(min=0).long()
    if cache.dtype == torch.uint8:
        page, offset = safe // PAGE_SIZE, safe % PAGE_SIZE
        key_view, scale_view = index_page_views(cache)
        keys = key_view[page, offset].view(torch.float8_e4m3fn).float() * scale_view[page, offset].unsqueeze(-1)
    else:
        keys = cache[safe]
        keys = keys.to(accumulator(keys.dtype))
    return keys.masked_fill(~valid.unsqueeze(-1), 0.0)


def gather_index_pages(
    cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, num_keys: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    key_view, scale_view = index_page_views(cache)
    keys, scales = [cache.new_empty(0, INDEX_HEAD_DIM)], [cache.new_empty(0, 4)]
    for pages, length in zip(page_table, seq_lens.tolist()):
        used = pages[: -(-length // PAGE_SIZE)].long()
        keys.append(key_view[used].flatten(0, 1)[:length])
        scales.append(scale_view[used].flatten()[:length, None].view(torch.uint8))
    return torch.cat(keys), torch.cat(scales)


def join_index_pages(shards: torch.Tensor) -> torch.Tensor:
    num_ranks, _, width = shards.shape
    if shards.dtype != torch.uint8:
        return shards.transpose(0, 1).reshape(-1, width)
    keys, scales = index_page_views(shards.reshape(-1, width))
    # [N, G, 64, ...] -> widened pages of 64 N slots, of which slot i * N + n is row i of rank n.
    keys = keys.unflatten(0, (num_ranks, -1)).permute(1, 2, 0, 3).reshape(-1, _PAGE_SCALES_AT)
    scales = scales.unflatten(0, (num_ranks, -1)).permute(1, 2, 0).reshape(-1, PAGE_SIZE)
    return torch.cat([keys, scales.contiguous().view(torch.uint8)], dim=1)


def index_page_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[pages, 64 * 132] uint8 -> keys [pages, 64, 128] uint8 and scales [pages, 64] float32, both views."""
    keys = cache[:, :_PAGE_SCALES_AT].unflatten(1, (PAGE_SIZE, INDEX_HEAD_DIM))
    if cache.is_contiguous():
        # A cache of one page or of none may have any stride between pages, and a view as another dtype asks for it.
        cache = cache.as_strided(cache.shape, (cache.shape[1], 1))
    scales = cache[:, _PAGE_SCALES_AT : PAGE_SIZE * INDEX_KEY_BYTES].view(torch.float32)
    return keys, scales


# --- page gather ----------------------------------------------------------------------------------------------------


def gather_pages(cache: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    return cache.unflatten(0, (-1, page_size))[pages.long()].flatten(0, 1)


def remap_to_gathered(
    topk_slots: torch.Tensor, page_pos: torch.Tensor, dcp_size: int, local_rows: int, page_size: int
) -> torch.Tensor:
    widened_page = page_size * dcp_size
    safe = topk_slots.clamp(min=0)
    position = page_pos[(safe // widened_page).long()]
    row = safe % dcp_size * local_rows + position * page_size + safe % widened_page // dcp_size
    return torch.where((topk_slots >= 0) & (position >= 0), row, -1).to(torch.int32)


def fill_page_table_(
    page_table: torch.Tensor,
    request_slots: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
) -> None:
    first_slots = request_slots[requests.long(), ::page_size][:, : page_table.shape[1]]
    held = torch.arange(first_slots.shape[1]) * page_size < lengths.unsqueeze(1)
    live = page_table[:, : first_slots.shape[1]]
    live.copy_(torch.where(held, first_slots // page_size, live))


def look_up_slots(
    positions: torch.Tensor, row_request: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    if not page_table.shape[1]:
        return torch.full(positions.shape, -1, dtype=torch.int32)
    safe = positions.clamp(min=0)
    page = page_table[row_request.unsqueeze(1).expand_as(positions).long(), (safe // page_size).long()]
    return torch.where(positions >= 0, page * page_size + safe % page_size, -1).to(torch.int32)


# --- attention ------------------------------------------------------------------------------------------------------


def attend_sparse(
    q: torch.Tensor, kv_rows: torch.Tensor, topk_rows: torch.Tensor, topk_length: torch.Tensor | None, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = accumulator(q.dtype)
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros(num_tokens, num_heads, KV_LORA_RANK, dtype=q.dtype)
    lse = torch.full((num_tokens, num_heads), float("-inf"), dtype=acc)
    width = topk_rows.shape[1]
    if topk_length is not None:
        # Nothing past the longest row is read: the work follows what this rank owns.
        width = int(topk_length.max()) if num_tokens else 0
    if not width or not kv_rows.shape[0]:
        return out, lse
    step = max(1, _ATTEND_CHUNK_BYTES // (width * LATENT_DIM * acc.itemsize))
    for start in range(0, num_tokens, step):
        part = slice(start, start + step)
        rows = topk_rows[part, :width]
        valid = rows >= 0
        if topk_length is not None:
            valid = valid & (torch.arange(width) < topk_length[part].unsqueeze(1))
        out[part], lse[part] = _attend(q[part].to(acc), kv_rows, rows, valid, sm_scale, out.dtype)
    return out, lse


def _attend(
    q: torch.Tensor, kv_rows: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, sm_scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    # Each cache row is converted once however many queries select it. Entries that select nothing read a row of zeros
    # put behind the others: a row that is not selected may hold NaN, and NaN * 0 is NaN.
    used, place = torch.unique(rows[valid], return_inverse=True)
    stored = kv_rows.index_select(0, used.long())
    stored = (unpack_latent(stored) if kv_rows.dtype == torch.uint8 else stored).to(q.dtype)
    stored = torch.cat([stored, stored.new_zeros(1, LATENT_DIM)])
    places = torch.full(rows.shape, used.shape[0])
    places[valid] = place
    kv = stored.index_select(0, places.flatten()).view(*rows.shape, LATENT_DIM)  # [t, K, 576]
    scores = (torch.bmm(q, kv.transpose(1, 2)) * sm_scale).masked_fill_(~valid.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weight = torch.exp(scores - lse.unsqueeze(-1)).masked_fill_(~valid.unsqueeze(1), 0.0)
    return torch.bmm(weight, kv[..., :KV_LORA_RANK]).to(dtype), lse


# --- indexer --------------------------------------------------------------------------------------------------------


def score_index(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    # Summed in float64 and rounded once: a row's scores must not depend on how a matrix product was blocked, since a
    # difference in the last bit could order two tokens differently on two ranks, in two batches or in two chunks.
    logits = torch.full((q.shape[0], max_context_len), float("-inf"), dtype=torch.float32)
    for request in torch.unique(row_request).tolist():
        of_request = (row_request == request).nonzero().squeeze(1)
        positions = torch.arange(min(int(context_lens[of_request].max()), max_context_len))
        slots = page_table[request].long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        keys = gather_index_keys(index_cache, slots).double()
        for rows in of_request.split(_SCORE_ROWS):
            length = min(int(context_lens[rows].max()), max_context_len)
            scores = torch.zeros(len(rows), length, dtype=torch.float64)
            for head in range(q.shape[1]):
                head_scores = torch.relu_(q[rows, head].double() @ keys[:length].T)
                scores += head_scores.mul_(weights[rows, head].double().unsqueeze(1))
            seen = positions[:length] < context_lens[rows].unsqueeze(1)
            logits[rows, :length] = scores.float().masked_fill(~seen, float("-inf"))
    return logits


def select_topk(logits: torch.Tensor, context_lens: torch.Tensor, topk: int) -> torch.Tensor:
    num_tokens, length = logits.shape
    topk_indices = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    if not num_tokens or not length:
        return topk_indices
    seen = torch.arange(length) < context_lens.unsqueeze(1)
    keys = torch.where(seen, sortable_keys(logits), _UNSEEN)
    threshold = keys.topk(min(topk, length), dim=-1).values[:, -1:]
    above, tied = keys > threshold, keys == threshold
    # Among those equal to the last one that fits, the lower positions win.
    vacant = topk - above.sum(-1, keepdim=True)
    chosen = seen & (above | (tied & (tied.cumsum(-1) <= vacant)))
    row, position = chosen.nonzero(as_tuple=True)
    column = chosen.cumsum(-1)[row, position] - 1
    topk_indices[row, column] = position.to(torch.int32)
    return topk_indices


def select_slots(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None,
    page_table: torch.Tensor | None,
    row_request: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    num_rows, width = scores.shape
    starts = torch.zeros(num_rows, dtype=torch.int64) if row_starts is None else row_starts.long()
    seen = torch.minimum(lengths.long(), width - starts).clamp(min=0)
    longest = int(seen.max()) if num_rows else 0
    # Each row's own columns, moved to the front.
    columns = (starts.unsqueeze(1) + torch.arange(longest)).clamp(max=max(width - 1, 0))
    positions = select_topk(scores.gather(1, columns), seen, topk)
    if page_table is None:
        return positions
    return look_up_slots(
        positions, torch.arange(num_rows) if row_request is None else row_request, page_table, page_size
    )


def sortable_keys(scores: torch.Tensor) -> torch.Tensor:
    """Map float32 scores to int64 keys of the same order: -0.0 equals 0.0, NaN lies below -inf and above `_UNSEEN`."""
    raw = _view_as(scores + 0.0, torch.int32).long()
    magnitude = raw & 0x7FFFFFFF
    return torch.where(torch.isnan(scores), _NAN, torch.where(raw < 0, -magnitude, magnitude))
