"""Kernels over peer memory: partial results exchanged and merged, rows gathered. `peer_channels` has the protocol.

A launch's work is cut into units, and unit u belongs to program u % programs, on every rank: a program's units for a
rank lie one behind the other in the slot that it writes there.
"""

import functools
import zlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from nsa_dcp_kernels._triton.lse_merge import total_lse
from nsa_dcp_kernels._triton.peer_channels import (
    await_flags,
    begin_epoch,
    end_epoch,
    pointer_to,
    release_flags,
    slot_of,
)
from nsa_dcp_kernels.peer_memory import KIND_CODES, PeerChannels, Unit, partial_unit, row_unit

_MOST_WARPS = 8
_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _exchange_partials_kernel(
    outs,
    lses,
    starts,
    merged_ptr,
    total_ptr,
    peers_ptr,
    epochs_ptr,
    rank,
    message,
    wait_limit,
    num_tokens,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    PIECES: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    BASE_2: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_BYTES: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """A unit is a token and BLOCK_H of a rank's heads: in a slot their outputs, then their log-sum-exps."""
    dtype: tl.constexpr = merged_ptr.dtype.element_ty
    out_bytes: tl.constexpr = BLOCK_H * D * (dtype.primitive_bitwidth // 8)
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    channel = tl.program_id(0)
    programs = tl.num_programs(0)
    units = num_tokens * head_blocks
    mine = (units - channel + programs - 1) // programs
    block_h = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    in_slot = (block_h * D)[:, None] + dim[None, :]
    held = (dim < D)[None, :]
    epoch = begin_epoch(epochs_ptr, channel)

    for i in range(mine):
        unit = channel + i * programs
        token = unit // head_blocks
        out_ptr, lse_ptr, first = _piece_of(outs, lses, starts, token, PIECES)
        out_row = out_ptr + (token - first).to(tl.int64) * out_stride_t
        lse_row = lse_ptr + (token - first).to(tl.int64) * lse_stride_t
        head = unit % head_blocks * BLOCK_H + block_h
        kept = head < HEADS
        moved = kept[:, None] & held
        for k in tl.static_range(1, N):
            peer = (rank + k) % N
            at = (peer * HEADS + head).to(tl.int64)
            out = tl.load(out_row + (at * out_stride_h)[:, None] + dim[None, :], mask=moved)
            lse = tl.load(lse_row + at * lse_stride_h, mask=kept)
            slot = slot_of(peers_ptr, peer, rank, channel, epoch, N, CHANNELS, CHANNEL_BYTES) + i * UNIT_BYTES
            tl.store(pointer_to(slot, dtype) + in_slot, out, mask=moved)
            tl.store(pointer_to(slot + out_bytes, tl.float32) + block_h, lse, mask=kept)

    release_flags(peers_ptr, rank, channel, epoch, message, N, CHANNELS)
    await_flags(peers_ptr, epochs_ptr, rank, channel, epoch, message, wait_limit, KIND, N, CHANNELS, CLOCK)

    for i in range(mine):
        unit = channel + i * programs
        token = unit // head_blocks
        out_ptr, lse_ptr, first = _piece_of(outs, lses, starts, token, PIECES)
        out_row = out_ptr + (token - first).to(tl.int64) * out_stride_t
        lse_row = lse_ptr + (token - first).to(tl.int64) * lse_stride_t
        head = unit % head_blocks * BLOCK_H + block_h
        kept = head < HEADS
        moved = kept[:, None] & held
        sums = ()
        for n in tl.static_range(N):
            slot = slot_of(peers_ptr, rank, n, channel, epoch, N, CHANNELS, CHANNEL_BYTES) + i * UNIT_BYTES
            if n == rank:
                lse = tl.load(lse_row + (n * HEADS + head).to(tl.int64) * lse_stride_h, mask=kept, other=float("-inf"))
            else:
                sums_ptr = pointer_to(slot + out_bytes, tl.float32) + block_h
                lse = tl.load(sums_ptr, mask=kept, other=float("-inf"), cache_modifier=".cg")
            real = (lse == lse) & (tl.abs(lse) != float("inf"))
            # Triton unrolls the loop, with a longer tuple each time.
            sums = sums + (tl.where(real, lse, float("-inf")),)  # type: ignore[assignment]
        m = tl.full([BLOCK_H], float("-inf"), tl.float32)
        for n in tl.static_range(N):
            m = tl.maximum(m, sums[n])
        # With every partial empty the maximum is -inf, and -inf - -inf is NaN.
        shift = tl.where(m == float("-inf"), 0.0, m)
        denominator = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        # In rank order, this rank's own in its place: every sum is that of `merge_partials`.
        for n in tl.static_range(N):
            slot = slot_of(peers_ptr, rank, n, channel, epoch, N, CHANNELS, CHANNEL_BYTES) + i * UNIT_BYTES
            if n == rank:
                at = (n * HEADS + head).to(tl.int64) * out_stride_h
                out = tl.load(out_row + at[:, None] + dim[None, :], mask=moved, other=0.0)
            else:
                out = tl.load(pointer_to(slot, dtype) + in_slot, mask=moved, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(sums[n] - shift) if BASE_2 else tl.exp(sums[n] - shift)
            # An empty partial's output may be NaN.
            real = sums[n] != float("-inf")
            acc += tl.where(real[:, None], out, 0.0).to(tl.float32) * weight[:, None]
            denominator += weight
        acc = acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
        if BASE_2:
            summed = denominator > 0.0
            total = tl.where(summed, m + tl.log2(tl.where(summed, denominator, 1.0)), float("-inf"))
        else:
            total = total_lse(m, denominator)
        row = token.to(tl.int64) * HEADS + head
        tl.store(merged_ptr + (row * D)[:, None] + dim[None, :], acc.to(dtype), mask=moved)
        tl.store(total_ptr + row, total, mask=kept)

    end_epoch(epochs_ptr, channel, epoch)


@triton.jit
def _piece_of(outs, lses, starts, token, PIECES: tl.constexpr):
    """Pointers to the piece that holds a token's partial result, and the piece's first token."""
    out_ptr, lse_ptr, first = outs[0], lses[0], token * 0
    for piece in tl.static_range(1, PIECES):
        later = token >= starts[piece]
        out_ptr = tl.where(later, outs[piece], out_ptr)
        lse_ptr = tl.where(later, lses[piece], lse_ptr)
        first = tl.where(later, starts[piece], first)
    return out_ptr, lse_ptr, first


@triton.jit
def _gather_rows_kernel(
    rows_ptr,
    gathered_ptr,
    peers_ptr,
    epochs_ptr,
    rank,
    message,
    wait_limit,
    num_rows,
    row_stride,
    part_stride,
    gathered_row_stride,
    gathered_rank_stride,
    WORDS: tl.constexpr,
    PART_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_BYTES: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """A unit is BLOCK_W 4-byte words of a row. A row's parts (heads) may lie apart; where they land they do not."""
    blocks: tl.constexpr = (WORDS + BLOCK_W - 1) // BLOCK_W
    channel = tl.program_id(0)
    programs = tl.num_programs(0)
    mine = (num_rows * blocks - channel + programs - 1) // programs
    in_slot = tl.arange(0, BLOCK_W)
    epoch = begin_epoch(epochs_ptr, channel)

    for i in range(mine):
        unit = channel + i * programs
        row = (unit // blocks).to(tl.int64)
        word = unit % blocks * BLOCK_W + in_slot
        held = word < WORDS
        at = row * row_stride + (word // PART_WORDS).to(tl.int64) * part_stride + word % PART_WORDS
        values = tl.load(rows_ptr + at, mask=held)
        for k in tl.static_range(1, N):
            peer = (rank + k) % N
            slot = slot_of(peers_ptr, peer, rank, channel, epoch, N, CHANNELS, CHANNEL_BYTES) + i * (BLOCK_W * 4)
            tl.store(pointer_to(slot, tl.int32) + in_slot, values, mask=held)
        tl.store(gathered_ptr + row * gathered_row_stride + rank * gathered_rank_stride + word, values, mask=held)

    release_flags(peers_ptr, rank, channel, epoch, message, N, CHANNELS)
    await_flags(peers_ptr, epochs_ptr, rank, channel, epoch, message, wait_limit, KIND, N, CHANNELS, CLOCK)

    for i in range(mine):
        unit = channel + i * programs
        row = (unit // blocks).to(tl.int64)
        word = unit % blocks * BLOCK_W + in_slot
        held = word < WORDS
        for k in tl.static_range(1, N):
            source = (rank + k) % N
            slot = slot_of(peers_ptr, rank, source, channel, epoch, N, CHANNELS, CHANNEL_BYTES) + i * (BLOCK_W * 4)
            values = tl.load(pointer_to(slot, tl.int32) + in_slot, mask=held, cache_modifier=".cg")
            landed = gathered_ptr + row * gathered_row_stride + source.to(tl.int64) * gathered_rank_stride
            tl.store(landed + word, values, mask=held)

    end_epoch(epochs_ptr, channel, epoch)


def exchange_partials(
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], channels: PeerChannels, base_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    outs = [out if out.stride(2) == 1 else out.contiguous() for out, _ in pieces]
    lses = [lse for _, lse in pieces]
    if any(out.stride() != outs[0].stride() for out in outs) or any(lse.stride() != lses[0].stride() for lse in lses):
        outs, lses = [out.contiguous() for out in outs], [lse.contiguous() for lse in lses]
    starts, num_tokens = [], 0
    for out in outs:
        starts.append(num_tokens)
        num_tokens += out.shape[0]
    heads, dim, dtype = outs[0].shape[1] // channels.num_ranks, outs[0].shape[2], outs[0].dtype
    merged = torch.empty((num_tokens, heads, dim), dtype=dtype, device=outs[0].device)
    total = torch.empty((num_tokens, heads), dtype=torch.float32, device=outs[0].device)
    if merged.numel() == 0:
        return merged, total
    unit = partial_unit(num_tokens, heads, dim, dtype.itemsize, channels.num_ranks)
    _exchange_partials_kernel[(min(unit.count, channels.count),)](
        tuple(outs),
        tuple(lses),
        tuple(starts),
        merged,
        total,
        channels.addresses,
        channels.epochs,
        channels.rank,
        _message("partials", num_tokens, heads, dim, dtype.itemsize, base_2),
        channels.wait_limit,
        num_tokens,
        *outs[0].stride()[:2],
        *lses[0].stride(),
        PIECES=len(outs),
        HEADS=heads,
        D=dim,
        BLOCK_H=unit.block,
        BLOCK_D=triton.next_power_of_2(dim),
        UNIT_BYTES=unit.bytes,
        BASE_2=base_2,
        KIND=KIND_CODES["partials"],
        N=channels.num_ranks,
        CHANNELS=channels.count,
        CHANNEL_BYTES=channels.bytes,
        CLOCK=not _INTERPRETED,
        num_warps=_warps(unit),
    )
    return merged, total


def gather_heads(q: torch.Tensor, channels: PeerChannels) -> torch.Tensor:
    num_tokens, heads, dim = q.shape
    gathered = torch.empty((num_tokens, channels.num_ranks * heads, dim), dtype=q.dtype, device=q.device)
    words = _as_words(q)
    _gather(words, gathered.view(torch.int32), words.shape[1] * words.shape[2], channels, "queries")
    return gathered


def gather_rows(rows: torch.Tensor, channels: PeerChannels) -> torch.Tensor:
    num_rows, width = rows.shape
    gathered = torch.empty((channels.num_ranks * num_rows, width), dtype=torch.int32, device=rows.device)
    _gather(_as_words(rows.unsqueeze(1)), gathered, num_rows * width, channels, "selections")
    return gathered


def _gather(words: torch.Tensor, gathered: torch.Tensor, rank_stride: int, channels: PeerChannels, kind: str) -> None:
    """Launch. words: [rows, parts, part words]; gathered: a row's words begin at its row, and at its rank's stride."""
    num_rows, parts, part_words = words.shape
    if words.numel() == 0:
        return
    row_words = parts * part_words
    unit = row_unit(num_rows, row_words)
    _gather_rows_kernel[(min(unit.count, channels.count),)](
        words,
        gathered,
        channels.addresses,
        channels.epochs,
        channels.rank,
        _message(kind, num_rows, row_words),
        channels.wait_limit,
        num_rows,
        words.stride(0),
        words.stride(1),
        gathered.stride(0),
        rank_stride,
        WORDS=row_words,
        PART_WORDS=part_words,
        BLOCK_W=unit.block,
        KIND=KIND_CODES[kind],
        N=channels.num_ranks,
        CHANNELS=channels.count,
        CHANNEL_BYTES=channels.bytes,
        CLOCK=not _INTERPRETED,
        num_warps=_warps(unit),
    )


def _warps(unit: Unit) -> int:
    """A 16-byte vector for each thread."""
    vectors = unit.bytes // 16
    return max(1, min(_MOST_WARPS, (1 << vectors.bit_length() - 1) // 32))


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """[rows, parts, values] as int32 words, copied only where values do not lie in whole words one behind the other."""
    step = 4 // rows.itemsize
    aligned = rows.storage_offset() % step == 0 and all(stride % step == 0 for stride in rows.stride()[:-1])
    if rows.stride(-1) != 1 or not aligned:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int32)


@functools.lru_cache(maxsize=4096)
def _message(*facts: object) -> int:
    """16 bits of what is exchanged, alike on ranks that exchange the same."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFF
