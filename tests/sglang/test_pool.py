"""sglang's own pool under DCP: who owns a slot, what a row holds, and how far the index keys reach."""

from types import SimpleNamespace

import pytest
import torch

from nsa_dcp_kernels import localize_topk, pack_latent, unpack_latent

pytestmark = pytest.mark.sglang

GROUPS = [(2, rank) for rank in range(2)] + [(4, rank) for rank in range(4)] + [(8, 0), (8, 7)]


def latents(count, seed=0):
    """Values that FP8 holds exactly: the interpreter does not round as a GPU does, so no code may need rounding."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 9, (count, 4, 128), generator=generator).float()
    codes[:, :, 0] = 448.0
    exponents = torch.randint(-6, 3, (count, 4, 1), generator=generator).float()
    k_nope = (codes * torch.exp2(exponents)).reshape(count, 512).to(torch.bfloat16)
    k_rope = torch.randn(count, 64, generator=generator).to(torch.bfloat16)
    return k_nope, k_rope


def write(rank, slots, k_nope, k_rope, layer=1):
    rank.pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), slots, k_nope.unsqueeze(1), k_rope.unsqueeze(1))


@pytest.mark.parametrize("kv_format", ["fp8", "bfloat16"])
@pytest.mark.parametrize(("dcp_size", "dcp_rank"), GROUPS)
def test_every_slot_is_written_to_the_row_that_we_read(make_rank, dcp_size, dcp_rank, kv_format):
    rank = make_rank(dcp_size, dcp_rank, kv_format)
    # Slot 0 is where sglang lets padding write. The last slots are the last row of every rank's last page.
    past_the_end = (rank.pool.size + rank.pool.page_size) * dcp_size
    some = torch.randperm(past_the_end - 1, generator=torch.Generator().manual_seed(1))[:100] + 1
    slots = torch.unique(torch.cat([some, torch.arange(past_the_end - dcp_size, past_the_end)])).flip(0)
    k_nope, k_rope = latents(len(slots))
    rank.pool.kv_buffer[1].view(torch.uint8).fill_(0xFF)
    write(rank, slots, k_nope, k_rope)

    rows, length = localize_topk(slots.to(torch.int32).unsqueeze(0), dcp_size, dcp_rank)
    rows = rows[0, : length[0]].long()
    mine = slots % dcp_size == dcp_rank
    stored = rank.pool.get_key_buffer(1)[rows, 0]
    if kv_format == "fp8":
        assert torch.equal(stored.view(torch.uint8), pack_latent(k_nope[mine], k_rope[mine]))
    else:
        assert torch.equal(stored, torch.cat([k_nope[mine], k_rope[mine]], dim=-1))
    untouched = torch.ones(rank.pool.kv_buffer[1].shape[0], dtype=torch.bool)
    untouched[rows] = False
    assert (rank.pool.kv_buffer[1][untouched].view(torch.uint8) == 0xFF).all()


def test_scales_and_rope_of_arbitrary_latents_are_ours_to_the_byte(publish_rank):
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

    k_nope, k_rope = torch.randn(40, 512).to(torch.bfloat16) * 7, torch.randn(40, 64).to(torch.bfloat16)
    nope_bytes, rope_bytes = quantize_k_cache_separate(k_nope.unsqueeze(1), k_rope.unsqueeze(1))
    theirs = torch.cat([nope_bytes[:, 0], rope_bytes[:, 0]], dim=-1)
    ours = pack_latent(k_nope, k_rope)
    assert torch.equal(theirs[:, 512:], ours[:, 512:])


def test_an_all_zero_tile_of_ours_is_read_back_as_zeros():
    packed = pack_latent(torch.zeros(3, 512, dtype=torch.bfloat16), torch.ones(3, 64, dtype=torch.bfloat16))
    latent = unpack_latent(packed)
    assert torch.equal(latent[:, :512], torch.zeros(3, 512))
    assert torch.equal(latent[:, 512:], torch.ones(3, 64))


@pytest.mark.parametrize("dcp_size", [2, 4, 8])
def test_index_keys_reach_every_slot_on_every_rank(make_rank, dcp_size):
    rank = make_rank(dcp_size, dcp_size - 1, size=256)
    slots = (256 + 64) * dcp_size
    for layer in range(2):
        assert rank.pool.get_index_k_with_scale_buffer(layer).shape == (slots // 64, 64 * 132)
    assert rank.allocator.size == 256 * dcp_size
    assert rank.allocator.page_size == 64 * dcp_size


def test_a_layer_that_shares_a_selection_keeps_no_index_keys(make_rank):
    rank = make_rank(4, 1, skip_topk_layers=[False, True])
    assert rank.pool.get_index_k_with_scale_buffer(0).shape[0] > 0
    assert rank.pool.get_index_k_with_scale_buffer(1).shape[0] == 0


@pytest.mark.parametrize("dcp_size", [2, 8])
def test_an_allocated_page_starts_at_a_multiple_of_its_size(make_rank, dcp_size):
    rank = make_rank(dcp_size, 0)
    slots = rank.allocator.alloc(64 * dcp_size * 2)
    assert slots.min() >= 64 * dcp_size
    assert torch.equal(slots % dcp_size, torch.arange(len(slots)) % dcp_size)


@pytest.mark.parametrize("dcp_size", [1, 2, 8])
def test_reported_capacity_counts_every_ranks_rows(publish_rank, dcp_size):
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    publish_rank(dcp_size, 0)
    configurator = object.__new__(KVCacheConfigurator)
    configurator.is_hybrid_swa = False
    configurator.is_draft_worker = False
    assert configurator.logical_token_capacity(max_total_num_tokens=1000) == 1000 * dcp_size
