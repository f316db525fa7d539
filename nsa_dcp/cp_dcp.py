"""CP-DCP prefill: the ranks share out a chunk's tokens, and attend with their own by `row_prefill`."""

from dataclasses import dataclass

import torch

from nsa_dcp import comm, cp_layout


@dataclass(frozen=True)
class TokenShares:
    """How a chunk's tokens are spread over the ranks.

    restore: [T] int64, where each flat token stands in the gathered, padded shares.
    longest: tokens of the largest share.
    """

    restore: torch.Tensor
    longest: int

    def gather(self, share: torch.Tensor, group: comm.Group) -> torch.Tensor:
        """Put the ranks' shares of the chunk's tokens together.

        Args:
            share: [T_local, D]. This rank's tokens.
            group: the context-parallel ranks.

        Returns:
            [T, D], in the chunk's order.
        """
        padded = torch.nn.functional.pad(share, (0, 0, 0, self.longest - share.shape[0]))
        return comm.all_gather(padded, group).flatten(0, 1)[self.restore]


def describe_shares(shares: list[torch.Tensor], device: torch.device) -> TokenShares:
    """Describe the ranks' shares of a chunk.

    Args:
        shares: `cp_layout.split_tokens`' result.
        device: where the tokens are.
    """
    return TokenShares(cp_layout.restore_index(shares).to(device), max(len(tokens) for tokens in shares))
