"""What only a GPU shows: graph capture and replay, no synchronisation, and addresses beyond 32 bits."""

from collections.abc import Callable

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.cases import draw_latents, draw_partials, draw_selection, poisoned
from nsa_dcp_kernels import (
    gather_pages,
    merge_packed,
    merge_partials,
    pack_partials,
    remap_to_gathered,
    scatter_index_keys_,
    scatter_latent_,
    unpack_latent,
)

pytestmark = pytest.mark.gpu

TOKENS, HEADS, DCP_SIZE = 63, 8, 8


def merge_case(seed: int) -> tuple[torch.Tensor, ...]:
    return draw_partials(DCP_SIZE, TOKENS, HEADS, 512, torch.bfloat16, seed)


def message_case(seed: int) -> tuple[torch.Tensor, ...]:
    out, lse = draw_partials(1, TOKENS, DCP_SIZE * HEADS, 512, torch.bfloat16, seed)
    return out[0], lse[0]


def latent_case(seed: int) -> tuple[torch.Tensor, ...]:
    return *draw_latents(TOKENS, torch.bfloat16, seed), draw_selection(1, TOKENS, 64 * DCP_SIZE, seed)[0]


def remap_case(seed: int) -> tuple[torch.Tensor, ...]:
    page_pos = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).to(torch.int32) - 1
    return draw_selection(TOKENS, 100, 5 * 64 * DCP_SIZE, seed), page_pos


def exchange(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    packed = pack_partials(out, lse, DCP_SIZE)
    return packed, *merge_packed(packed, out.dtype)


def write(k_nope: torch.Tensor, k_rope: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    latents = torch.zeros(64, 656, dtype=torch.uint8, device=k_nope.device)
    keys = torch.zeros(DCP_SIZE, 64 * 132, dtype=torch.uint8, device=k_nope.device)
    scatter_latent_(latents, k_nope, k_rope, slots, DCP_SIZE, 3)
    scatter_index_keys_(keys, k_nope[:, :128], slots)
    return latents, keys, unpack_latent(latents)


def remap(topk_slots: torch.Tensor, page_pos: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (remap_to_gathered(topk_slots, page_pos, DCP_SIZE, 256),)


@pytest.mark.parametrize(
    ("op", "draw"),
    [(merge_partials, merge_case), (exchange, message_case), (write, latent_case), (remap, remap_case)],
    ids=["merge", "exchange", "write", "remap"],
)
def test_captured_op_replays_on_new_values_without_synchronising(op: Callable, draw: Callable):
    inputs = [tensor.cuda() for tensor in draw(0)]
    op(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*inputs)
    for seed in (1, 2):
        for tensor, value in zip(inputs, draw(seed)):
            tensor.copy_(value)
        graph.replay()
        for result, expected in zip(captured, op(*inputs)):
            assert_bitwise_equal(result, expected, f"seed {seed}")


def test_rows_beyond_two_gibibytes_are_addressed():
    num_rows = 64 * 52_000  # 656 * 64 * 52,000 bytes = 2.03 GiB
    cache = torch.zeros(num_rows, 656, dtype=torch.uint8, device="cuda")
    k_nope, k_rope = (tensor.cuda() for tensor in draw_latents(2, torch.bfloat16))
    scatter_latent_(cache, k_nope, k_rope, torch.tensor([2 * num_rows - 1, 1], device="cuda"), 2, 1)
    alone = poisoned(1, 656, dtype=torch.uint8, device="cuda")
    scatter_latent_(alone, k_nope[:1], k_rope[:1], torch.zeros(1, dtype=torch.int64, device="cuda"), 1, 0)
    assert_bitwise_equal(cache[-1:], alone)
    last_page = gather_pages(cache, torch.tensor([num_rows // 64 - 1], dtype=torch.int32, device="cuda"))
    assert_bitwise_equal(last_page, cache[-64:])
