"""The step's collectives, over a group that the caller hands in. A group of one rank, or None, communicates nothing."""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nsa_dcp.choices import COMM_BACKENDS
from nsa_dcp_kernels import merge_packed, pack_partials
from nsa_dcp_kernels.reference import accumulator

Group = dist.ProcessGroup | None

# torch 2.13 renamed the single-tensor collectives and warns on the names that 2.10 to 2.12 have.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def size_of(group: Group) -> int:
    """Ranks in a group; 1 for None."""
    return 1 if group is None else group.size()


def rank_in(group: Group) -> int:
    """This process's rank in a group; 0 for None."""
    return 0 if group is None else group.rank()


def connect(init_method: str, rank: int, world_size: int, device_type: str, timeout_s: float) -> None:
    """Join the world of ranks: gloo for CPU tensors, NCCL for CUDA tensors.

    Args:
        init_method: where the ranks meet, such as "file:///path" or "tcp://127.0.0.1:port".
        rank, world_size: this process's place.
        device_type: "cpu" or "cuda".
        timeout_s: seconds after which a collective of the whole world that some rank never joined raises; a group
            has its own.
    """
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def disconnect() -> None:
    """Leave the world of ranks."""
    dist.destroy_process_group()


def contiguous_group(group_size: int, timeout_s: float | None = None) -> Group:
    """Cut the world into groups of consecutive ranks and return this rank's. Every rank must call it, in one order.

    Args:
        group_size: ranks of a group.
        timeout_s: as in `connect`, for the group's collectives. None: what torch sets, whatever the world's is.
    """
    if group_size == 1:
        return None
    world = dist.get_world_size()
    starts = range(0, world, group_size)
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    groups = [dist.new_group(list(range(start, start + group_size)), timeout=timeout) for start in starts]
    return groups[dist.get_rank() // group_size]


def barrier() -> None:
    """Wait until every rank of the world is here."""
    dist.barrier()


def all_gather(local: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather equally shaped tensors.

    Args:
        local: any shape and dtype, the same on every rank.
        group: ranks to gather from.

    Returns:
        [N, *local.shape], in rank order.
    """
    if size_of(group) == 1:
        return local.unsqueeze(0)
    gathered = local.new_empty(size_of(group), *local.shape)
    # Flat, as gloo takes no tensor without dimensions.
    _all_gather_single(gathered.flatten(), local.contiguous().flatten(), group=group)
    return gathered


def exchange(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """Give rank n part n, and get its part for this rank.

    Args:
        parts: [N, ...], any dtype, the same shape on every rank.
        group: ranks to exchange with.

    Returns:
        Shape of `parts`: entry n is what rank n had for this rank.
    """
    if size_of(group) == 1:
        return parts
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received.flatten(), parts.contiguous().flatten(), group=group)
    return received


def all_reduce(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group; `values` itself is overwritten where the group has several ranks."""
    if size_of(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def broadcast(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Give every rank the first rank's values; `values` itself is overwritten on the others."""
    if size_of(group) > 1:
        dist.broadcast(values, group_src=0, group=group)
    return values


def gather_heads(q: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather the query heads of a DCP group.

    Args:
        q: [T, H, D]. This rank's heads.
        group: the DCP group.

    Returns:
        [T, N * H, D], heads in rank order.
    """
    if size_of(group) == 1:
        return q
    return all_gather(q, group).transpose(0, 1).flatten(1, 2)


def exchange_heads_for_rows(q: torch.Tensor, counts: list[int], group: Group) -> torch.Tensor:
    """Give every rank all heads of its rows. All ranks must call it, also one without a row.

    Args:
        q: [T, H, D]. This rank's heads of every row: rank 0's rows first, then rank 1's, ..
        counts: rows of each rank, the same list on every rank. They sum to T.
        group: the DCP group.

    Returns:
        [t, N * H, D], this rank's t rows, heads in rank order.

    Raises:
        ValueError: the counts are not those of the group's ranks, or of other rows.
    """
    size = size_of(group)
    own = _own_count(counts, group)
    if q.shape[0] != sum(counts):
        raise ValueError(f"q must have the {sum(counts)} rows of counts, got {q.shape[0]}")
    received = _exchange_blocks(q, counts, [own] * size, group)
    return received.view(size, own, *q.shape[1:]).transpose(0, 1).flatten(1, 2)


def exchange_rows_for_heads(out: torch.Tensor, counts: list[int], group: Group) -> torch.Tensor:
    """Give every rank its heads of all rows: undoes `exchange_heads_for_rows`. All ranks must call it.

    Args:
        out: [t, N * H, D]. This rank's rows, heads in rank order.
        counts, group: as there.

    Returns:
        [T, H, D]: rank 0's rows first, then rank 1's, ..

    Raises:
        ValueError: as there.
    """
    size, own = size_of(group), _own_count(counts, group)
    if out.shape[0] != own:
        raise ValueError(f"out must have this rank's {own} rows, got {out.shape[0]}")
    by_head = out.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)
    return _exchange_blocks(by_head, [own] * size, counts, group)


def _own_count(counts: list[int], group: Group) -> int:
    if len(counts) != size_of(group) or min(counts) < 0:
        raise ValueError(f"counts must be of {size_of(group)} ranks, each 0 or more, got {counts}")
    return counts[rank_in(group)]


def _exchange_blocks(
    sent: torch.Tensor, sent_counts: list[int], received_counts: list[int], group: Group
) -> torch.Tensor:
    """All-to-all of blocks of rows: the next `sent_counts[n]` rows go to rank n; what comes lies in rank order."""
    if size_of(group) == 1:
        return sent
    received = sent.new_empty(sum(received_counts), *sent.shape[1:])
    dist.all_to_all_single(received, sent.contiguous(), received_counts, sent_counts, group=group)
    return received


def merge_heads(out: torch.Tensor, lse: torch.Tensor, group: Group, comm_backend: str) -> torch.Tensor:
    """Merge the ranks' partial results and keep this rank's heads.

    Args:
        out: [T, N * H, D]. All heads, attended to this rank's tokens.
        lse: [T, N * H] float32 (float64 with a float64 `out`), natural log, -inf where this rank had no token; +inf and
            NaN are taken for that too.
        group: the DCP group.
        comm_backend: "a2a" exchanges (out, lse) packed in one message and merges locally; "ag_rs" gathers lse, scales
            locally and reduce-scatters.

    Returns:
        [T, H, D], dtype of `out`: zeros where no rank had a token.

    Raises:
        ValueError: the backend is unknown.
    """
    if comm_backend not in COMM_BACKENDS:
        raise ValueError(f"dcp_comm_backend must be one of {', '.join(COMM_BACKENDS)}, got {comm_backend!r}")
    if size_of(group) == 1:
        return out.masked_fill(~torch.isfinite(lse).unsqueeze(-1), 0.0)
    if not out.shape[0]:
        return out[:, : out.shape[1] // size_of(group)]
    return _merge_a2a(out, lse, group) if comm_backend == "a2a" else _merge_ag_rs(out, lse, group)


def _merge_a2a(out: torch.Tensor, lse: torch.Tensor, group: Group) -> torch.Tensor:
    sent = pack_partials(out, lse, size_of(group))
    return merge_packed(exchange(sent, group), out.dtype)[0]


def _merge_ag_rs(out: torch.Tensor, lse: torch.Tensor, group: Group) -> torch.Tensor:
    lse = lse.masked_fill(~torch.isfinite(lse), float("-inf"))
    total = torch.logsumexp(all_gather(lse, group), dim=0)
    empty = lse == float("-inf")
    # Replaced, not multiplied by 0: what an empty partial holds may be NaN.
    weight = torch.exp(lse - total).masked_fill(empty, 0.0).unsqueeze(-1)
    scaled = out.to(accumulator(out.dtype)).masked_fill(empty.unsqueeze(-1), 0.0) * weight
    num_tokens, _, dim = out.shape
    chunks = scaled.view(num_tokens, size_of(group), -1, dim).transpose(0, 1).contiguous()
    merged = torch.empty_like(chunks[0])
    _reduce_scatter_single(merged, chunks.flatten(0, 1), group=group)
    return merged.to(out.dtype)


@dataclass(frozen=True)
class PeerMemory:
    """Memory of this rank's GPU that the group's other ranks write into, and theirs.

    local: [bytes] uint8, zeroed. addresses: where each rank's begins for this GPU, in rank order. handle: keeps it.
    """

    local: torch.Tensor
    addresses: list[int]
    handle: object


def map_peer_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory | str:
    """Set memory aside on every rank of a group and map it into all. Every rank must call it, before it captures.

    Args:
        num_bytes: of each rank, the same on all.
        group: of several ranks on GPUs, NCCL's.
        device: this rank's GPU.

    Returns:
        The memory, on every rank; or on every rank why some rank has none.
    """
    mapped: PeerMemory | None = None
    reason = ""
    try:
        # Not in every build of torch.
        import torch.distributed._symmetric_memory as symmetric_memory

        local = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        local.zero_()
        torch.cuda.synchronize(device)
    except (ImportError, RuntimeError, NotImplementedError) as error:
        reason = _first_line(error)
    # Mapping waits for every rank, so none may begin it where one has nothing to map.
    if not agree(not reason, group, device):
        return reason or "another rank could not set memory aside"
    try:
        handle = symmetric_memory.rendezvous(local, group)
        mapped = PeerMemory(local, [int(address) for address in handle.buffer_ptrs], handle)
    except RuntimeError as error:
        reason = _first_line(error)
    if not agree(mapped is not None, group, device):
        return reason or "another rank could not map it"
    assert mapped is not None
    return mapped


def agree(holds: bool, group: Group, device: torch.device) -> bool:
    """Whether something holds on every rank of a group; all of them must ask."""
    return bool(all_gather(torch.tensor(holds, dtype=torch.int32, device=device), group).all())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
