"""What each op of `peer_exchange` returns on one rank, by all ranks' inputs, in plain PyTorch: the definition."""

import math
from collections.abc import Sequence

import torch

from nsa_dcp_kernels import reference


def exchange_partials(
    ranks: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], rank: int, base_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Args: every rank's pieces; the rank whose result it is; the base. Returns: as `peer_exchange`."""
    outs = torch.stack([torch.cat([out for out, _ in pieces]) for pieces in ranks])
    lses = torch.stack([torch.cat([lse for _, lse in pieces]) for pieces in ranks])
    heads = outs.shape[2] // len(ranks)
    own = slice(rank * heads, (rank + 1) * heads)
    unit = math.log(2) if base_2 else 1.0
    merged, total = reference.merge_partials(outs[:, :, own], lses[:, :, own] * unit)
    return merged, total / unit


def gather_heads(queries: Sequence[torch.Tensor]) -> torch.Tensor:
    """Args: every rank's [T, H, D]. Returns: [T, N * H, D], the same on every rank."""
    return torch.cat(list(queries), dim=1)


def gather_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Args: every rank's [R, K]. Returns: [N * R, K], the same on every rank."""
    return torch.cat(list(rows))
