"""One rank's place in the embedded engine, and the groups it talks to."""

from dataclasses import dataclass

from nsa_dcp import comm
from nsa_dcp.config import DcpConfig


@dataclass(frozen=True)
class Ranks:
    """A rank's groups.

    rank: among the `tp_size` ranks.
    tp_group: all ranks: they sum the output projection, and share a prefill chunk's tokens in cp mode.
    dcp_group: the ranks that share each request's latents.
    """

    config: DcpConfig
    rank: int
    tp_group: comm.Group
    dcp_group: comm.Group

    @property
    def dcp_rank(self) -> int:
        """Place in the DCP group."""
        return self.rank % self.config.dcp_size


def join_groups(config: DcpConfig, rank: int, timeout_s: float | None = None) -> Ranks:
    """Make the groups of a world of `config.tp_size` ranks. Every rank must call it.

    Args:
        config: how the ranks share the model.
        rank: this one.
        timeout_s: as in `contiguous_group`.
    """
    tp_group = comm.contiguous_group(config.tp_size, timeout_s)
    dcp_group = tp_group if config.dcp_size == config.tp_size else comm.contiguous_group(config.dcp_size, timeout_s)
    return Ranks(config, rank, tp_group, dcp_group)
