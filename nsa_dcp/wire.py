"""What a group's ranks exchange in a step, over memory that they write into each other's, where a user chooses that.

Partial results, query heads and selections travel in one kernel each (`nsa_dcp_kernels.peer_exchange`); what is larger
than the memory that was set aside goes through collectives, as everything does without a wire. The memory is mapped
once, before any CUDA graph is captured. Calls must be made on one stream at a time, on every rank in one order.

A rank that fails to come ends the others: their kernels write which exchange it was and stop their GPU, so that nothing
computed without it is ever answered, and `FaultWatch`, which reads that word all the while, says so in one sentence.
"""

import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nsa_dcp import comm
from nsa_dcp.transport import VARIABLE
from nsa_dcp_kernels import (
    PeerChannels,
    exchange_partials,
    gather_heads_from_peers,
    gather_rows_from_peers,
    peer_reference,
)
from nsa_dcp_kernels.kv_format import KV_LORA_RANK, LATENT_DIM
from nsa_dcp_kernels.peer_exchange import MAX_PIECES, holds_partials, holds_rows
from nsa_dcp_kernels.peer_memory import MAX_RANKS, describe_fault, memory_bytes, partial_unit, row_unit, slot_bytes

# Longer than ranks are apart while they compile kernels or capture graphs; a collective of torch waits for ten minutes.
WAIT_LIMIT_S = 300.0
# Programs of a launch for each SM. Registers and threads of either kernel let three be there at once.
_CHANNELS_PER_SM = 2
_LOOK_EVERY_S = 0.2
FAULT_EXIT_CODE = 70

Pieces = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class WireLoad:
    """The largest step that a wire takes: bfloat16 results and queries, int32 selections.

    rows: query tokens, as many as the largest captured batch has. heads: of the whole group. topk: width of a
    selection; 0 where none travels.
    """

    rows: int
    heads: int
    topk: int = 0

    def bytes_of_slot(self, num_ranks: int, channels: int) -> int:
        """Of a channel for one source, with so many of each."""
        heads = self.heads // num_ranks
        units = [
            partial_unit(self.rows, heads, KV_LORA_RANK, 2, num_ranks),
            row_unit(self.rows, heads * LATENT_DIM // 2),
        ]
        if self.topk:
            units.append(row_unit(-(-self.rows // num_ranks), self.topk))
        return slot_bytes(units, channels)

    def memory_bytes(self, num_ranks: int, channels: int) -> int:
        """That each rank sets aside."""
        return memory_bytes(num_ranks, channels, self.bytes_of_slot(num_ranks, channels))


class PeerWire:
    """One rank's end of a group's wire.

    Args:
        channels: over mapped memory.
        nbytes: of it, on this rank.
    """

    def __init__(self, channels: PeerChannels, nbytes: int) -> None:
        self.channels = channels
        self.nbytes = nbytes

    def takes_queries(self, q: torch.Tensor) -> bool:
        """Whether `gather_heads` takes [T, H, D]. The same on every rank, as shapes are."""
        return q.dtype == torch.bfloat16 and holds_rows(self.channels, q.shape[0], q.shape[1] * q.shape[2] // 2)

    def takes_partials(self, pieces: Pieces) -> bool:
        """Whether `merge_heads` takes these. The same on every rank, as shapes are."""
        first = pieces[0][0]
        tokens = sum(out.shape[0] for out, _ in pieces)
        fits = holds_partials(self.channels, tokens, first.shape[1], first.shape[2], first.dtype)
        return fits and len(pieces) <= MAX_PIECES and first.dtype == torch.bfloat16

    def takes_rows(self, rows: torch.Tensor) -> bool:
        """Whether `gather_rows` takes [R, K]. The same on every rank, as shapes are."""
        return rows.dtype == torch.int32 and holds_rows(self.channels, *rows.shape)

    def gather_heads(self, q: torch.Tensor) -> torch.Tensor:
        """[T, H, D] of every rank -> [T, N * H, D], in rank order."""
        return gather_heads_from_peers(q, self.channels)

    def merge_heads(self, pieces: Pieces) -> torch.Tensor:
        """(out, lse) of all heads over this rank's tokens, natural log -> [T, H, D], this rank's heads over all."""
        return exchange_partials(pieces, self.channels)[0]

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, K] int32 of every rank -> [N * R, K], in rank order."""
        return gather_rows_from_peers(rows, self.channels)


def open_wire(
    group: comm.Group,
    device: torch.device,
    load: WireLoad,
    end: Callable[[str], None],
    *,
    wait_limit_s: float = WAIT_LIMIT_S,
) -> PeerWire | str:
    """Map a group's peer memory, try every exchange once, and begin to watch for faults. Every rank must call it.

    Args:
        group: the ranks.
        device: this rank's.
        load: the largest step, the same on every rank.
        end: called from a thread with one sentence when an exchange failed: it must end this process.
        wait_limit_s: how long an exchange waits for a rank.

    Returns:
        The wire; or, on every rank, why there is none.

    Raises:
        RuntimeError: the memory is mapped, and what travels through it is not what was sent.
    """
    num_ranks = comm.size_of(group)
    if device.type != "cuda":
        return "ranks without GPUs have no peer memory"
    if group is None or not 2 <= num_ranks <= MAX_RANKS or load.heads % num_ranks:
        return f"{num_ranks} ranks of {load.heads} heads do not share a wire of 2 to {MAX_RANKS} ranks"
    channels = _count_channels(group, device)
    size = load.memory_bytes(num_ranks, channels)
    memory = comm.map_peer_memory(size, group, device)
    if isinstance(memory, str):
        return memory
    # The host's address of pinned memory is the GPU's too.
    fault = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    wire = PeerWire(
        PeerChannels(
            addresses=torch.tensor([*memory.addresses, fault.data_ptr()], device=device),
            epochs=torch.zeros(2, channels, dtype=torch.int64, device=device),
            fault=fault,
            rank=comm.rank_in(group),
            count=channels,
            bytes=load.bytes_of_slot(num_ranks, channels),
            wait_limit=int(wait_limit_s * 1e9),
            memory=memory,
        ),
        size,
    )
    FaultWatch(fault, end).start()
    right = _try_exchanges(wire, load, device)
    if not comm.agree(right, group, device):
        raise RuntimeError(
            f"{VARIABLE}=peer: a rank did not receive what the others sent through peer memory; set {VARIABLE}=nccl"
        )
    return wire


class FaultWatch(threading.Thread):
    """Reads a wire's fault word until it says something, then says it and ends the process.

    A thread, so that no step waits for the word: the kernel leaves it time, and then ends the GPU's context, so that
    whatever the step would have answered is lost either way.

    Args:
        fault: [1] int64, in memory that the GPU writes.
        end: called with the sentence.
    """

    def __init__(self, fault: torch.Tensor, end: Callable[[str], None]) -> None:
        super().__init__(name="nsa-dcp wire faults", daemon=True)
        self.fault, self.end = fault, end
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look every fifth of a second."""
        while not self._stopped.wait(_LOOK_EVERY_S):
            told = describe_fault(int(self.fault))
            if told is not None:
                self.end(f"nsa-dcp's exchange over peer memory failed: {told}; nothing of this step is answered")
                return

    def stop(self) -> None:
        """Look no longer."""
        self._stopped.set()


def end_process(sentence: str) -> None:
    """Say it and end this process at once: its GPU cannot be used any more."""
    print(sentence, file=sys.stderr, flush=True)
    os._exit(FAULT_EXIT_CODE)


def _count_channels(group: comm.Group, device: torch.device) -> int:
    """As many as every rank's GPU has room for at once, shared with whichever ranks use the same one."""
    properties = torch.cuda.get_device_properties(device)
    mine = torch.tensor([properties.multi_processor_count, zlib.crc32(str(properties.uuid).encode())], device=device)
    gathered = comm.all_gather(mine, group).tolist()
    places = [gpu for _, gpu in gathered]
    return max(1, min(_CHANNELS_PER_SM * sms // places.count(gpu) for sms, gpu in gathered))


def _try_exchanges(wire: PeerWire, load: WireLoad, device: torch.device) -> bool:
    """Every kind of exchange, of one row and of all that are taken, twice for both slots, against its definition."""
    channels = wire.channels
    num_ranks, rank, heads = channels.num_ranks, channels.rank, load.heads // channels.num_ranks
    right = True
    for rows in (1, load.rows) * 2:
        generator = torch.Generator().manual_seed(rows)
        outs = torch.randn(num_ranks, rows, 1, KV_LORA_RANK, generator=generator).to(device, torch.bfloat16)
        lses = torch.randn(num_ranks, rows, load.heads, generator=generator).to(device)
        parts = [[(out.expand(-1, load.heads, -1).contiguous(), lse)] for out, lse in zip(outs, lses)]
        merged, expected = wire.merge_heads(parts[rank]), peer_reference.exchange_partials(parts, rank)[0]
        right &= bool(torch.allclose(merged.float(), expected.float(), atol=0.05, rtol=0.02))
        queries = [out.repeat(1, heads, 2)[..., :LATENT_DIM] for out in outs]
        right &= torch.equal(wire.gather_heads(queries[rank]), peer_reference.gather_heads(queries))
        if load.topk:
            share = -(-rows // num_ranks)
            drawn = torch.randint(-1, 1 << 30, (num_ranks, share, load.topk), generator=generator, dtype=torch.int32)
            selections = list(drawn.to(device))
            right &= torch.equal(wire.gather_rows(selections[rank]), peer_reference.gather_rows(selections))
    return right
