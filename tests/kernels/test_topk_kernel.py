"""The selection kernel against the reference, exactly: order, ties, NaN, lengths, batches."""

import math

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp_kernels import reference
from nsa_dcp_kernels._triton import topk as kernels

SPECIAL = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45])


def draw_logits(kind: str, num_tokens: int, length: int) -> torch.Tensor:
    logits = torch.randn(num_tokens, length)
    if kind == "ties":
        return (3 * logits).round()
    if kind == "special":
        return SPECIAL[torch.randint(0, len(SPECIAL), logits.shape)]
    if kind == "constant":
        return torch.full_like(logits, -3.5)
    if kind == "last-bit":
        # All but the last eight bits agree, so every pass decides something.
        return (torch.randint(0, 1 << 9, logits.shape, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    return logits


@pytest.mark.parametrize("kind", ["normal", "ties", "special", "constant", "last-bit"])
@pytest.mark.parametrize(
    ("num_tokens", "length", "topk"),
    [
        pytest.param(3, 5000, 2048, id="one-segment"),
        pytest.param(1, 17000, 64, id="two-segments"),
        pytest.param(2, 70000, 2048, id="five-segments"),
        pytest.param(4, 100, 512, id="fewer-than-topk"),
        pytest.param(2, 2048, 2048, id="exactly-topk"),
        pytest.param(2, 2049, 1, id="one-of-many"),
    ],
)
def test_kernel_selects_as_the_reference(device, num_tokens, length, topk, kind):
    logits = draw_logits(kind, num_tokens, length)
    context_lens = torch.randint(0, length + 1, (num_tokens,), dtype=torch.int32)
    context_lens[0] = length
    if num_tokens > 2:
        context_lens[1:3] = torch.tensor([0, 1])
    # What lies past a context is garbage: here what would win.
    logits[torch.arange(length) >= context_lens.unsqueeze(1)] = math.inf
    selected = kernels.select_topk(logits.to(device), context_lens.to(device), topk)
    assert_bitwise_equal(selected.cpu(), reference.select_topk(logits, context_lens, topk))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ties", "constant"])
@pytest.mark.parametrize(
    ("num_tokens", "length"), [(1, 131072), (8, 131072), (64, 32768), (256, 4096), (1000, 8192), (8192, 2500)], ids=str
)
def test_kernel_selects_as_the_reference_at_size(num_tokens, length, kind):
    logits = draw_logits(kind, num_tokens, length)
    context_lens = torch.randint(length // 2, length + 1, (num_tokens,), dtype=torch.int32)
    selected = kernels.select_topk(logits.cuda(), context_lens.cuda(), 2048)
    # The reference is plain torch, but allocates on the CPU: rows are compared in a few places.
    rows = torch.randint(0, num_tokens, (16,)).unique()
    assert_bitwise_equal(selected.cpu()[rows], reference.select_topk(logits[rows], context_lens[rows], 2048))


def test_selection_of_a_row_does_not_depend_on_its_batch(device):
    logits = draw_logits("ties", 9, 6000)
    context_lens = torch.tensor([6000, 10, 4097, 0, 6000, 5999, 2048, 2049, 1], dtype=torch.int32)
    batch = kernels.select_topk(logits.to(device), context_lens.to(device), 2048)
    for row in (0, 2, 8):
        alone = kernels.select_topk(logits[row : row + 1].to(device), context_lens[row : row + 1].to(device), 2048)
        assert_bitwise_equal(alone[0], batch[row])


def test_rows_of_a_wider_tensor_are_read_in_place(device):
    wide = draw_logits("normal", 3, 3000).to(device)
    context_lens = torch.tensor([2000, 1500, 7], dtype=torch.int32)
    selected = kernels.select_topk(wide[:, :2000], context_lens.to(device), 256)
    assert_bitwise_equal(selected.cpu(), reference.select_topk(wide[:, :2000].cpu(), context_lens, 256))


@pytest.mark.parametrize("shape", [(0, 100), (3, 0)], ids=str)
def test_nothing_to_select_from_gives_padding(device, shape):
    context_lens = torch.zeros(shape[0], dtype=torch.int32, device=device)
    selected = kernels.select_topk(torch.empty(shape, device=device), context_lens, 64)
    assert selected.shape == (shape[0], 64)
    assert (selected == -1).all()


@pytest.mark.gpu
def test_captured_selection_follows_lengths_and_scores():
    logits, context_lens = torch.randn(16, 20000, device="cuda"), torch.full((16,), 20000, device="cuda").int()
    kernels.select_topk(logits, context_lens, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = kernels.select_topk(logits, context_lens, 2048)
    for _ in range(3):
        logits.normal_()
        context_lens.copy_(torch.randint(0, 20001, (16,)))
        graph.replay()
        assert_bitwise_equal(selected.cpu(), reference.select_topk(logits.cpu(), context_lens.cpu(), 2048))
        repeated = [kernels.select_topk(logits, context_lens, 2048) for _ in range(20)]
        assert all(torch.equal(again, selected) for again in repeated)
