"""How programs of different ranks meet: channels over peer memory.

Program c of every launch owns channel c, on every rank. A channel is, in each rank's memory, two slots and a flag for
every source rank, and an epoch that the program keeps for itself: its launches so far. In epoch e the program

    1. writes for every other rank into slot e % 2 of that rank's memory,
    2. releases its flag there, which then reads e,
    3. waits until every other rank's flag in its own memory reads e or e + 1 (acquire),
    4. reads slot e % 2 of its own memory, and keeps e.

Channels share nothing, so launches of any kind, number of rows and grid may follow each other, as long as all ranks
launch the same ones in one order, each rank on one stream at a time. What that gives:

- Nothing is read before it was written: 2 follows 1 and 4 follows 3.
- Nothing is overwritten before it was read. Rank a writes slot e % 2 at b again in epoch e + 2, which it begins after
  it saw b's flag of e + 1; b releases that in a later launch than the one that read in epoch e, and a launch begins
  when the one before it on the stream has ended. For the same reason a flag is at most one epoch ahead.
- Nobody waits for ever. A program waits only for programs of its own number, and has itself pushed before it waits. If
  every rank's launch has all its programs on the GPU at once, all push, and so all go on: the launch functions start no
  more programs than there are channels, and whoever makes the channels makes no more of them than all ranks that share
  a GPU can have there together. Programs that start in the order of their numbers would do with one place a rank: of
  the lowest number that has not ended everywhere, every rank has started its program. Kernels of other streams may
  hold places for a while, but end by themselves.
- A replayed graph needs no reset, and no epoch ever comes again: 47 bits of them last for centuries.

A flag is an epoch above 16 bits that say what is exchanged (kind and sizes). Ranks that exchange different things, and
waits that take too long, end in `_report`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from nsa_dcp_kernels import peer_memory

LATE, OTHER_MESSAGE = tl.constexpr(peer_memory.LATE), tl.constexpr(peer_memory.OTHER_MESSAGE)
KIND_BITS, RANK_BITS = tl.constexpr(peer_memory.KIND_BITS), tl.constexpr(peer_memory.RANK_BITS)
CHANNEL_BITS, EPOCH_BITS = tl.constexpr(peer_memory.CHANNEL_BITS), tl.constexpr(peer_memory.EPOCH_BITS)
MESSAGE_BITS = tl.constexpr(peer_memory.MESSAGE_BITS)
MESSAGE_MASK = tl.constexpr((1 << peer_memory.MESSAGE_BITS) - 1)
EPOCH_MASK = tl.constexpr((1 << peer_memory.EPOCH_BITS) - 1)
SLOTS = tl.constexpr(peer_memory.SLOTS)
FLAG_BYTES = tl.constexpr(peer_memory.FLAG_BYTES)
# Between two looks at the clock, about half a millisecond.
_POLLS_A_LOOK = tl.constexpr(1024)
# After a fault was written and before the GPU's context is ended: time for the host to read it and say so.
_GRACE_NS = tl.constexpr(3_000_000_000)


@triton.jit
def begin_epoch(epochs_ptr, channel):
    """The epoch that this program's launch is. [], int64."""
    return tl.load(epochs_ptr + channel) + 1


@triton.jit
def end_epoch(epochs_ptr, channel, epoch):
    tl.store(epochs_ptr + channel, epoch)


@triton.jit
def slot_of(peers_ptr, owner, source, channel, epoch, N: tl.constexpr, CHANNELS: tl.constexpr, BYTES: tl.constexpr):
    """Address of what `source` writes for `owner` in this epoch. [], int64, a multiple of 128."""
    flag_bytes: tl.constexpr = (N * CHANNELS * FLAG_BYTES + 127) // 128 * 128
    place = (epoch % SLOTS * N + source) * CHANNELS + channel
    return tl.load(peers_ptr + owner) + flag_bytes + place * BYTES


@triton.jit
def pointer_to(address, dtype: tl.constexpr):
    """A pointer to values at an address that is a multiple of 16, which says so: loads and stores are wide."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def release_flags(peers_ptr, rank, channel, epoch, message, N: tl.constexpr, CHANNELS: tl.constexpr):
    """Tell every other rank that its slot is written."""
    # All threads' writes come before the one thread's release.
    tl.debug_barrier()
    for k in tl.static_range(1, N):
        peer = (rank + k) % N
        flag = tl.load(peers_ptr + peer) + (rank * CHANNELS + channel) * FLAG_BYTES
        tl.atomic_xchg(
            flag.to(tl.pointer_type(tl.int64)), (epoch << MESSAGE_BITS) + message, sem="release", scope="sys"
        )


@triton.jit
def await_flags(
    peers_ptr,
    epochs_ptr,
    rank,
    channel,
    epoch,
    message,
    wait_limit,
    KIND: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Wait until every other rank has written this program's slots; report what does not come, or is something else.

    wait_limit: [], int64, for each rank; nanoseconds with CLOCK, and polls without, where there is no clock.

    All threads take each decision alike, as barriers require: a scalar atomic's result is one thread's, handed to all.
    """
    own = tl.load(peers_ptr + rank)
    for k in tl.static_range(1, N):
        source = (rank + k) % N
        flag = (own + (source * CHANNELS + channel) * FLAG_BYTES).to(tl.pointer_type(tl.int64))
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls = tl.full([], 0, tl.int64)
        began = tl.full([], 0, tl.int64)
        spent = tl.full([], 0, tl.int64)
        while ((seen >> MESSAGE_BITS) < epoch) & (spent <= wait_limit):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            polls += 1
            if CLOCK:
                if polls % _POLLS_A_LOOK == 0:
                    clock_ptr = epochs_ptr + CHANNELS + channel
                    tl.atomic_xchg(clock_ptr, globaltimer(), sem="relaxed", scope="gpu")
                    now = tl.atomic_add(clock_ptr, 0, sem="relaxed", scope="gpu")
                    began = tl.where(began == 0, now, began)
                    spent = now - began
            else:
                spent = polls
        ahead = (seen >> MESSAGE_BITS) - epoch
        # A rank that is one epoch ahead has found this rank's message to be its own.
        differs = (ahead > 1) | ((ahead == 0) & ((seen & MESSAGE_MASK) != message))
        if (ahead < 0) | differs:
            reason = tl.where(ahead < 0, LATE, OTHER_MESSAGE)
            _report(peers_ptr, reason, source, channel, epoch, KIND, N, CLOCK)


@triton.jit
def _report(peers_ptr, reason, source, channel, epoch, KIND: tl.constexpr, N: tl.constexpr, CLOCK: tl.constexpr):
    """Write a fault word into the host's memory, and end this GPU's context: no result may leave it any more."""
    word = (reason.to(tl.int64) << KIND_BITS) + KIND
    word = (word << RANK_BITS) + source
    word = (word << CHANNEL_BITS) + channel
    word = (word << EPOCH_BITS) + (epoch & EPOCH_MASK)
    # Behind the ranks' addresses stands that of the fault word.
    fault_ptr = tl.load(peers_ptr + N).to(tl.pointer_type(tl.int64))
    # The first one tells most: what comes after may follow from it.
    if tl.load(fault_ptr, volatile=True) == 0:
        tl.atomic_xchg(fault_ptr, word, sem="release", scope="sys")
    if CLOCK:
        until = globaltimer() + _GRACE_NS
        while globaltimer() < until:
            pass
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
