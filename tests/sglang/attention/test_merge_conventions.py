"""sglang's two merges, fed with what our backend returns, give the softmax over the union of the ranks' tokens."""

import math

import pytest
import torch

pytestmark = pytest.mark.sglang

HEADS, DIM = 4, 16


def partials(num_ranks, num_tokens, seed=0):
    """Keys spread at random over ranks, some ranks empty for some tokens, one token empty everywhere."""
    generator = torch.Generator().manual_seed(seed)
    keys = 24
    scores = 4 * torch.randn(num_tokens, HEADS, keys, generator=generator)
    values = torch.randn(keys, DIM, generator=generator)
    owner = torch.randint(0, num_ranks, (num_tokens, keys), generator=generator)
    owner[0] = num_ranks - 1
    owner[1] = -1
    outs, lses = [], []
    for rank in range(num_ranks):
        masked = scores.masked_fill((owner != rank).unsqueeze(1), -math.inf)
        lse = torch.logsumexp(masked, dim=-1)
        weights = torch.where(torch.isinf(lse).unsqueeze(-1), 0.0, torch.exp(masked - lse.unsqueeze(-1)))
        outs.append(weights @ values)
        lses.append(lse)
    masked = scores.masked_fill((owner < 0).unsqueeze(1), -math.inf)
    expected = torch.nan_to_num(torch.softmax(masked, dim=-1)) @ values
    return torch.stack(outs), torch.stack(lses), expected


def merge_a2a(outs, lses):
    from sglang.kernels.ops.attention.dcp_kernels import dcp_lse_combine_triton

    return dcp_lse_combine_triton(outs, lses, is_lse_base_on_e=False)[0]


def merge_ag_rs(outs, lses):
    from sglang.kernels.ops.attention.dcp_kernels import correct_attn_out

    corrected = []
    for rank in range(outs.shape[0]):
        new_output = torch.full((HEADS, outs.shape[1], DIM), math.nan)
        correct_attn_out(outs[rank], lses, rank, None, new_output, is_lse_base_on_e=False)
        corrected.append(new_output)
    return torch.stack(corrected).sum(0).transpose(0, 1)


@pytest.mark.parametrize("merge", [merge_a2a, merge_ag_rs])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_base_2_partials_merge_to_the_union(merge, num_ranks):
    from nsa_dcp.sglang_plugin.attention.backend import LOG2_E

    outs, lses, expected = partials(num_ranks, num_tokens=7)
    merged = merge(outs, lses * LOG2_E)
    assert torch.allclose(merged, expected, atol=2e-6)
    assert torch.equal(merged[1], torch.zeros(HEADS, DIM))


@pytest.mark.parametrize("merge", [merge_a2a, merge_ag_rs])
def test_natural_partials_would_not(merge):
    outs, lses, expected = partials(4, num_tokens=7)
    assert (merge(outs, lses) - expected).abs().max() > 0.05


@pytest.mark.parametrize("backend", ["nsa", "dsa"])
def test_the_model_asks_for_base_2(backend):
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import is_mla_dcp_lse_base_on_e

    assert not is_mla_dcp_lse_base_on_e(backend)
