"""Sharded index keys in sglang's own pool and configurator: bytes, charge, writes and retraction, to the token."""

import pytest
import torch

from nsa_dcp.planning.capacity import GIB, plan
from nsa_dcp.planning.dimensions import read_config
from nsa_dcp_kernels.reference import index_page_views
from tests.sglang.planning.test_pool_capacity import DEEPSEEK, GLM, GLM_TYPES, sglang_server  # noqa: F401
from tests.sglang.served_parts import make_pool

pytestmark = pytest.mark.sglang

SIZES = [1, 2, 4, 8]


@pytest.fixture
def sharded():
    """sglang's objects as its registry changes them, and afterwards as they were."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
    from sglang.srt.plugins.hook_registry import HookRegistry

    from nsa_dcp.sglang_plugin.selection import sharded_key_cache

    names = {
        DSATokenToKVPool: ["_create_index_key_cache"],
        DefaultPoolConfigurator: ["_compute_dsa_indexer_cell_size", "_compute_cell_size"],
    }
    stock = [(owner, name, owner.__dict__[name]) for owner, methods in names.items() for name in methods]
    HookRegistry.reset()
    sharded_key_cache.register_hooks()
    HookRegistry.apply_hooks()
    assert all(owner.__dict__[name] is not method for owner, name, method in stock)
    yield sharded_key_cache
    HookRegistry.reset()
    for owner, name, method in stock:
        setattr(owner, name, method)


@pytest.mark.parametrize("draft_layers", [0, 1], ids=["no draft", "one draft layer"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize("dcp_size", SIZES, ids=lambda size: f"dcp {size}")
@pytest.mark.parametrize("config", [pytest.param(GLM, id="glm-5.2"), pytest.param(DEEPSEEK, id="deepseek-v3.2")])
def test_sglang_sizes_the_planned_pool(
    sharded,
    sglang_server,  # noqa: F811
    tmp_path,
    config,
    dcp_size,
    kv_cache_dtype,
    draft_layers,
):
    """A charge that is wrong by one byte is lost capacity, or memory that runs out."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    configurator = create_memory_pool_configurator(sglang_server(config, dcp_size, kv_cache_dtype, draft_layers))
    budget = 40 * GIB + 12_345_677
    (row,) = plan(
        read_config(tmp_path),
        gpu_memory_gib=budget / GIB,
        kv_cache_dtypes=(kv_cache_dtype,),
        dcp_sizes=(dcp_size,),
        draft_layers=draft_layers,
        index_shards=8,
    ).rows
    assert type(configurator._cell_size) is int
    assert row.bytes_per_token.total * dcp_size == configurator._cell_size
    assert row.tokens_per_gpu == configurator.calculate_pool_sizes(budget, 64).max_total_num_tokens


@pytest.mark.parametrize("dcp_size", [3, 6, 7])
def test_a_group_that_is_no_power_of_two_is_charged_exactly(sharded, monkeypatch, dcp_size):
    from types import SimpleNamespace

    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_dcp_size=dcp_size))
    kvc = SimpleNamespace(is_draft_worker=False)
    for size in (132, 61 * 132, 21 * 132 + 1):
        charged = sharded.charge_own_index_keys(lambda *_, size=size, **__: size, None, kvc=kvc, num_layers=1)
        assert int(charged * dcp_size) == charged * dcp_size == size


@pytest.mark.parametrize("dcp_size", SIZES, ids=lambda size: f"dcp {size}")
def test_the_pool_holds_the_planned_bytes_and_one_reserved_page(sharded, sglang_server, tmp_path, dcp_size):  # noqa: F811
    sglang_server(GLM_TYPES, dcp_size, "fp8_e4m3", 0)
    dims = read_config(tmp_path)
    (row,) = plan(dims, gpu_memory_gib=0.02, kv_cache_dtypes=("fp8_e4m3",), dcp_sizes=(dcp_size,), index_shards=8).rows
    skipped = [layer not in dims.indexer_layers for layer in range(dims.num_hidden_layers)]
    pool = make_pool(row.tokens_per_gpu, dims.num_hidden_layers, skip_topk_layers=skipped)
    held = sum(buffer.nbytes for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer))
    assert held == row.bytes_per_token.total * row.tokens_per_gpu * dcp_size + row.reserved_bytes
    assert sharded.holds_own_index_keys(pool) == (dcp_size > 1)
    for layer, latents in enumerate(pool.kv_buffer):
        keys = pool.get_index_k_with_scale_buffer(layer)
        assert keys.shape[0] * 64 == (0 if skipped[layer] else latents.shape[0])


def test_a_drafts_pool_stays_whole(sharded, publish_rank):
    """Its rows are slots of the widened pool, on every rank."""
    from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    publish_rank(4, 1)
    pool = DSATokenToKVPool(
        1024,
        page_size=256,
        kv_lora_rank=512,
        dtype=torch.float8_e4m3fn,
        qk_rope_head_dim=64,
        layer_num=1,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=656,
        dcp_replicated=True,
    )
    assert type(pool.index_key_cache) is IndexKeyCache
    assert pool.get_index_k_with_scale_buffer(0).shape[0] * 64 >= 1024 + 256
    assert not sharded.holds_own_index_keys(pool)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dcp_size", SIZES)
def test_a_write_goes_to_its_owners_row_and_elsewhere_to_the_reserved_page(sharded, dcp_size, dtype):
    slots = torch.randperm(64 * dcp_size * 3)[:100].to(dtype)
    owners = torch.zeros(len(slots), dtype=torch.int64)
    for rank in range(dcp_size):
        rows = sharded.localise_writes(slots, dcp_size, rank)
        assert rows.dtype == dtype
        for slot, row in zip(slots.tolist(), rows.tolist()):
            assert row == (slot // dcp_size if slot % dcp_size == rank else 0)
        owners += (slots % dcp_size == rank).long()
    assert owners.eq(1).all()


@pytest.mark.parametrize("dcp_size", [2, 8])
def test_keys_that_sglang_quantised_are_kept_by_their_owner_alone(sharded, publish_rank, dcp_size, monkeypatch):
    from sglang.kernels.ops.kvcache import dsa_index_k_cache

    def set_in_torch(pool, buf, loc, index_k, index_k_scale):
        keys, scales = index_page_views(buf)
        keys[loc // 64, loc % 64] = index_k.view(torch.uint8)
        scales[loc // 64, loc % 64] = index_k_scale.view(-1)

    monkeypatch.setattr(dsa_index_k_cache.SetKAndS, "execute", set_in_torch)
    slots = torch.randperm(64 * dcp_size)[:50] + 64 * dcp_size
    keys = torch.randn(50, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(50, 1) + 0.5
    for rank in range(dcp_size):
        publish_rank(dcp_size, rank)
        pool = make_pool(128, 1)
        pool.index_key_cache.buffer[0].fill_(0xFF)
        pool.index_key_cache.store_quantized(0, slots, keys, scales)
        stored, stored_scales = index_page_views(pool.index_key_cache.buffer[0])
        mine = slots % dcp_size == rank
        rows = slots[mine] // dcp_size
        assert torch.equal(stored[rows // 64, rows % 64], keys[mine].view(torch.uint8))
        assert torch.equal(stored_scales[rows // 64, rows % 64], scales[mine, 0])
        others = torch.ones(stored.shape[0] * 64, dtype=torch.bool)
        others[rows] = False
        others[:64] = False  # the reserved page
        assert stored.flatten(0, 1)[others].eq(0xFF).all()


@pytest.mark.parametrize("length", [1, 63, 64, 200, 511])
@pytest.mark.parametrize("dcp_size", [2, 4])
def test_a_retracted_requests_keys_come_back_to_other_pages(sharded, publish_rank, dcp_size, length, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    widened = 64 * dcp_size
    for rank in range(dcp_size):
        publish_rank(dcp_size, rank)
        pool = make_pool(64 * 12, 2, skip_topk_layers=[False, True])
        cache = pool.index_key_cache
        cache.buffer[0].random_(0, 256)
        count = -(-length // widened)
        pages = torch.randperm(12)[: 2 * count] + 1
        before, after = pages[:count], pages[count:]
        position = torch.arange(length)
        slots = [places[position // widened] * widened + position % widened for places in (before, after)]
        kept, untouched = cache.buffer[0][before].clone(), cache.buffer[0].clone()
        copied = cache.cpu_copy(slots[0])
        cache.buffer[0][before] = 0
        cache.load_cpu_copy(copied, slots[1])
        assert torch.equal(cache.buffer[0][after], kept)
        rest = [page for page in range(13) if page not in pages.tolist()]
        assert torch.equal(cache.buffer[0][rest], untouched[rest])


def test_a_token_is_not_moved_to_another_slot(sharded, publish_rank):
    publish_rank(2, 0)
    cache = make_pool(128, 1).index_key_cache
    cache.move(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="a slot's rank is part of it"):
        cache.move(torch.tensor([5]), torch.tensor([9]))
