"""Collectives of a group of one: nothing is communicated, and what a rank alone computed is what comes back."""

import math

import pytest
import torch

from nsa_dcp import comm
from nsa_dcp.choices import COMM_BACKENDS
from nsa_dcp.layout import slots_at
from nsa_dcp.row_prefill import attend_gathered, localize_gathered, plan_pages
from nsa_dcp.testing.assertions import assert_bitwise_equal
from nsa_dcp.testing.batch import draw_batch
from nsa_dcp.tp_dcp import attend_sharded, deal_rows
from nsa_dcp_kernels import attend_sparse, localize_selection

BACKENDS = [pytest.param(backend, id=backend) for backend in COMM_BACKENDS]


def test_a_group_of_one_is_itself():
    assert (comm.size_of(None), comm.rank_in(None)) == (1, 0)
    assert comm.contiguous_group(1) is None
    values = torch.randn(3, 2, 4)
    assert comm.gather_heads(values, None) is values
    assert comm.all_reduce(values, None) is values
    assert comm.broadcast(values, None) is values
    assert_bitwise_equal(comm.exchange_heads_for_rows(values, [3], None), values)
    assert_bitwise_equal(comm.exchange_rows_for_heads(values, [3], None), values)
    assert comm.exchange(values, None) is values
    gathered = comm.all_gather(values, None)
    assert gathered.shape == (1, 3, 2, 4)
    assert torch.equal(gathered[0], values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["float32", "float64", "bf16"])
def test_merging_one_partial_returns_it_byte_for_byte(backend, dtype):
    out = torch.randn(5, 3, 512, dtype=torch.float64).to(dtype)
    lse = torch.randn(5, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert_bitwise_equal(comm.merge_heads(out, lse, None, backend), out)
    assert comm.merge_heads(out[:0], lse[:0], None, backend).shape == (0, 3, 512)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("marker", [-math.inf, math.inf, math.nan], ids=["-inf", "+inf", "nan"])
@pytest.mark.parametrize("content", [math.nan, math.inf, -math.inf, 1.0], ids=["nan", "+inf", "-inf", "finite"])
def test_an_empty_partial_of_a_group_of_one_gives_zeros(backend, marker, content):
    """However a kernel spells "empty", and whatever it left in the output; per token and head.

    Sources: vllm-project/vllm 38416, 46076, 49054; flashinfer-ai/flashinfer 4975; Dao-AILab/flash-attention 2573.
    """
    out, lse = torch.randn(4, 3, 8), torch.randn(4, 3)
    expected = out.clone()
    for token, head in ((0, 0), (2, 1), (3, 2)):
        out[token, head], lse[token, head], expected[token, head] = content, marker, 0.0
    assert_bitwise_equal(comm.merge_heads(out, lse, None, backend), expected)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"^dcp_comm_backend must be one of a2a, ag_rs, got 'ring'$"):
        comm.merge_heads(torch.zeros(1, 1, 8), torch.zeros(1, 1), None, "ring")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=["float32", "bf16", "fp8"])
def test_dcp_size_1_is_byte_for_byte_the_plain_path(backend, dtype):
    """Source: vllm-project/vllm 41623 (what every dcp size must match)."""
    batch = draw_batch([130, 64, 1], 1)
    positions = torch.full((5, 20), -1, dtype=torch.int32)
    positions[0, :20] = torch.randperm(130)[:20]
    positions[1, :6] = torch.randperm(64)[:6]
    positions[2, 0] = 0
    positions[4, 0] = 129
    row_request = torch.tensor([0, 1, 2, 0, 0])
    slots = slots_at(positions, row_request, batch.page_table, 1)
    q = torch.randn(5, 4, 576).to(torch.bfloat16 if dtype != torch.float32 else dtype)
    rows = batch.latent_cache(0, dtype).layers[0]
    # Undivided and unfiltered: a slot is a row.
    plain, lse = attend_sparse(q, rows, slots, None, 0.05)
    assert lse[3].eq(-math.inf).all()
    sharded = attend_sharded(q, rows, localize_selection(slots, 1, 0), 0.05, None, backend)
    assert_bitwise_equal(sharded, plain, "decode")

    plan = plan_pages(batch.page_table, [len(pages) for pages in batch.pages], batch.num_pages)
    selection = localize_gathered(slots, plan, 1)
    assert_bitwise_equal(attend_gathered(q, rows, plan, selection, 0.05, None), plain, "prefill")
    shares = deal_rows(5, 1, 0, torch.device("cpu"))
    out = attend_gathered(shares.take_rows(q, None), rows, plan, selection, 0.05, None)
    assert_bitwise_equal(shares.return_heads(out, None), plain, "prefill by rows")
