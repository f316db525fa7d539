"""The answers of one process that holds everything: plain loops over positions, dense masks, float64.

Nothing here knows pages, slots or rows except `deal_slots`, which deals them out one by one; no index math is shared
with what it judges.
"""

import math

import torch


def deal_slots(num_slots: int, dcp_size: int, interleave_size: int = 1) -> list[tuple[int, int]]:
    """Deal slots out like cards: `interleave_size` to a rank, then on to the next one.

    Returns:
        (owner, row) of each slot; a row is how many slots the owner held before.
    """
    held = [0] * dcp_size
    dealt: list[tuple[int, int]] = []
    rank = 0
    while len(dealt) < num_slots:
        for _ in range(interleave_size):
            dealt.append((rank, held[rank]))
            held[rank] += 1
        rank = rank + 1 if rank + 1 < dcp_size else 0
    return dealt[:num_slots]


def attend_dense(
    q: torch.Tensor, latents: torch.Tensor, visible: list[list[int]], sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with each query to the positions it sees.

    Args:
        q: [T, H, 576], any float dtype.
        latents: [L, 576] by position, as the cache holds them (rounded or dequantised).
        visible: positions of each query; -1 is none.
        sm_scale: multiplies q . latent before the softmax.

    Returns:
        out: [T, H, 512] float64, zeros where nothing is seen. lse: [T, H] float64, natural log, -inf there.
    """
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros(num_tokens, num_heads, 512, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    for token, positions in enumerate(visible):
        seen = torch.zeros(len(latents), dtype=torch.bool)
        for position in positions:
            if position != -1:
                seen[position] = True
        if not seen.any():
            continue
        kv = latents[seen].double()
        scores = sm_scale * q[token].double() @ kv.T
        top = scores.amax(-1, keepdim=True)
        weight = torch.exp(scores - top)
        total = weight.sum(-1, keepdim=True)
        out[token] = weight @ kv[:, :512] / total
        lse[token] = (top + torch.log(total)).squeeze(-1)
    return out, lse


def merge_dense(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Merge partial results; one whose lse is not finite holds nothing.

    Args:
        out: [N, T, H, D]. lse: [N, T, H], natural log.

    Returns:
        [T, H, D] float64.
    """
    _, num_tokens, num_heads, dim = out.shape
    merged = torch.zeros(num_tokens, num_heads, dim, dtype=torch.float64)
    for token in range(num_tokens):
        for head in range(num_heads):
            held = [(float(part[token, head]), rank) for rank, part in enumerate(lse)]
            held = [(value, rank) for value, rank in held if math.isfinite(value)]
            if not held:
                continue
            top = max(value for value, _ in held)
            total = sum(math.exp(value - top) for value, _ in held)
            for value, rank in held:
                merged[token, head] += math.exp(value - top) / total * out[rank, token, head].double()
    return merged


def select_dense(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, context_lens: list[int], topk: int
) -> list[list[int]]:
    """Select each query's best-scored positions, the lower one of equals, and pad with -1.

    Args:
        q: [T, Hi, 128]. weights: [T, Hi].
        keys: [L, 128] by position, as the cache holds them.
        context_lens: positions that each query sees.
        topk: K.

    Returns:
        K positions per query, ascending, then -1. Scores are rounded to float32 once: equal there is equal.
    """
    selected = []
    for token, length in enumerate(context_lens):
        per_head = torch.relu(q[token].double() @ keys[:length].double().T)
        scores = (weights[token].double().unsqueeze(1) * per_head).sum(0).float().tolist()
        best = sorted(range(length), key=lambda position: (-scores[position], position))[:topk]
        selected.append(sorted(best) + [-1] * (topk - len(best)))
    return selected
