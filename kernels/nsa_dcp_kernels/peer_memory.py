"""Memory of each rank that the other ranks write into: its layout, its size, and what a fault found in it means.

Which protocol runs over it is told in `_triton/peer_channels.py`. Nothing here knows how memory is mapped.
"""

from dataclasses import dataclass, field

import torch

from nsa_dcp_kernels._checks import check

MAX_RANKS = 8
# Slots of a channel, by the epoch's remainder. With one, a rank would overwrite what another still reads.
SLOTS = 2
FLAG_BYTES = 8
# A flag is an epoch above so many bits that say what is exchanged.
MESSAGE_BITS = 16
# Fields of a fault word, from the highest: reason, kind, source rank, channel, epoch.
KIND_BITS, RANK_BITS, CHANNEL_BITS, EPOCH_BITS = 4, 4, 16, 32
LATE, OTHER_MESSAGE = 1, 2
KIND_CODES = {"partials": 1, "queries": 2, "selections": 3}
_ALIGNMENT = 128
# Heads of a program's unit. Eight, with eight ranks' values of them at once, would not fit its registers.
_MOST_VALUES, _MOST_HEADS, _FEWEST_HEADS = 32, 8, 2
_MANY_UNITS = 128
# The largest of which a row wastes no more than an eighth.
_BLOCK_WORDS = (2048, 1024, 512)


@dataclass(frozen=True)
class PeerChannels:
    """The channels of one rank.

    Args:
        addresses: [N + 1] int64, on the GPU: where each rank's memory begins, its own included, as this rank's GPU
            addresses it, in rank order; then the address of `fault`. Memory is `memory_bytes`, zeroed before any rank's
            first launch.
        epochs: [2, count] int64, on the GPU, zero at first: a program's epoch, and where it writes down the time.
        fault: [1] int64 that the host reads and the GPU writes (pinned). 0, or a word for `describe_fault`.
        rank: in the group.
        count: channels; the most programs of a launch. All of all ranks that share a GPU must have room on it at once.
        bytes: of a slot, a multiple of 128.
        wait_limit: how long a program waits for one rank: nanoseconds; under Triton's interpreter polls.
        memory: what the addresses are of, kept alive.
    """

    addresses: torch.Tensor
    epochs: torch.Tensor
    fault: torch.Tensor
    rank: int
    count: int
    bytes: int
    wait_limit: int
    memory: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check(2 <= self.num_ranks <= MAX_RANKS, "addresses", f"be of 2 to {MAX_RANKS} ranks", self.num_ranks)
        check(0 <= self.rank < self.num_ranks, "rank", f"be in [0, {self.num_ranks})", self.rank)
        check(1 <= self.count < 1 << CHANNEL_BITS, "count", f"be in [1, {1 << CHANNEL_BITS})", self.count)
        check(self.bytes > 0 and self.bytes % _ALIGNMENT == 0, "bytes", f"be a multiple of {_ALIGNMENT}", self.bytes)
        check(self.epochs.shape == (2, self.count), "epochs", f"have shape [2, {self.count}]", list(self.epochs.shape))

    @property
    def num_ranks(self) -> int:
        """N."""
        return self.addresses.shape[0] - 1

    def holds(self, unit: "Unit") -> bool:
        """Whether a program's share of so many units fits a slot."""
        return -(-unit.count // self.count) * unit.bytes <= self.bytes


@dataclass(frozen=True)
class Unit:
    """What a program handles at once: `block` heads or words in `bytes` of a slot, and how many such there are."""

    count: int
    block: int
    bytes: int


def partial_unit(num_tokens: int, heads: int, dim: int, itemsize: int, num_ranks: int) -> Unit:
    """How partial results are cut. More units of fewer heads where there would be few; the same on every rank.

    Args:
        num_tokens: T.
        heads: of one rank.
        dim: D, a multiple of 8.
        itemsize: bytes of a value.
        num_ranks: N.
    """
    block = min(
        _MOST_HEADS if num_ranks * _MOST_HEADS <= _MOST_VALUES else _MOST_HEADS // 2, 1 << (heads - 1).bit_length()
    )
    while block > _FEWEST_HEADS and num_tokens * -(-heads // block) < _MANY_UNITS:
        block //= 2
    values = block * dim * itemsize
    return Unit(num_tokens * -(-heads // block), block, values + max(16, 4 * block))


def row_unit(num_rows: int, words: int) -> Unit:
    """How rows of 4-byte words are cut. The same on every rank."""
    small = max(32, 1 << (words - 1).bit_length())
    fitting = (block for block in _BLOCK_WORDS if 8 * (-(-words // block) * block - words) <= words)
    block = next(fitting, min(_BLOCK_WORDS[-1], small))
    return Unit(num_rows * -(-words // block), block, 4 * block)


def slot_bytes(units: list[Unit], count: int) -> int:
    """Bytes of a slot that holds a program's share of any of these exchanges, with `count` channels."""
    return _align(max(-(-unit.count // count) * unit.bytes for unit in units))


def memory_bytes(num_ranks: int, count: int, bytes_of_slot: int) -> int:
    """Bytes that each rank sets aside for a group of `num_ranks`."""
    return _align(num_ranks * count * FLAG_BYTES) + SLOTS * num_ranks * count * bytes_of_slot


def describe_fault(word: int) -> str | None:
    """Return what a fault word says, as a part of a sentence; None for 0.

    Args:
        word: the value of `PeerChannels.fault`.
    """
    if not word:
        return None
    fields = []
    for bits in (EPOCH_BITS, CHANNEL_BITS, RANK_BITS, KIND_BITS):
        fields.append(word & ((1 << bits) - 1))
        word >>= bits
    epoch, channel, source, code = fields
    kind = {number: name for name, number in KIND_CODES.items()}.get(code, f"messages of kind {code}")
    told = "did not arrive in time" if word == LATE else "are not what this rank exchanges: they differ in kind or size"
    return f"the {kind} of rank {source} {told} (exchange {epoch} of channel {channel})"


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
