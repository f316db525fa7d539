"""One rank's place in the embedded engine, and the groups it talks to."""

import sys
from dataclasses import dataclass, replace

import torch

from nsa_dcp import comm
from nsa_dcp.config import DcpConfig
from nsa_dcp.transport import VARIABLE, chosen_transport
from nsa_dcp.wire import PeerWire, WireLoad, end_process, open_wire


@dataclass(frozen=True)
class Ranks:
    """A rank's groups.

    rank: among the `tp_size` ranks.
    tp_group: all ranks: they sum the output projection, and share a prefill chunk's tokens in cp mode.
    dcp_group: the ranks that share each request's latents.
    wire: between the GPUs of the DCP group, where there is one.
    """

    config: DcpConfig
    rank: int
    tp_group: comm.Group
    dcp_group: comm.Group
    wire: PeerWire | None = None

    @property
    def dcp_rank(self) -> int:
        """Place in the DCP group."""
        return self.rank % self.config.dcp_size


def join_groups(config: DcpConfig, rank: int, timeout_s: float | None = None) -> Ranks:
    """Make the groups of a world of `config.tp_size` ranks, without a wire. Every rank must call it.

    Args:
        config: how the ranks share the model.
        rank: this one.
        timeout_s: as in `contiguous_group`.
    """
    tp_group = comm.contiguous_group(config.tp_size, timeout_s)
    dcp_group = tp_group if config.dcp_size == config.tp_size else comm.contiguous_group(config.dcp_size, timeout_s)
    return Ranks(config, rank, tp_group, dcp_group)


def lay_wire(ranks: Ranks, num_heads: int, max_batch: int, device: torch.device) -> Ranks:
    """Return ranks whose DCP group exchanges over peer memory, where NSA_DCP_WIRE asks for it. Every rank must call it.

    Where it cannot be had, a line on the first rank says why, and collectives serve.

    Args:
        ranks: of `join_groups`.
        num_heads: of the model.
        max_batch: the most query tokens of a decode step.
        device: this rank's.

    Raises:
        ValueError: the variable says neither `peer` nor `nccl`.
        RuntimeError: peer memory does not carry what is sent.
    """
    if chosen_transport() != "peer" or ranks.config.dcp_size == 1:
        return ranks
    heads = num_heads // ranks.config.tp_size * ranks.config.dcp_size
    wire = open_wire(ranks.dcp_group, device, WireLoad(max_batch, heads), end_process)
    if isinstance(wire, str):
        if ranks.rank == 0:
            print(f"nsa-dcp: {VARIABLE}=peer, but the ranks exchange by collectives: {wire}", file=sys.stderr)
        return ranks
    return replace(ranks, wire=wire)
