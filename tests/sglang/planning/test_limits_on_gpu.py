"""Every row of `planning/limits.py` that a Hopper GPU holds: right at the limit; past it
wrong in sglang's own kernel, so that the row says the truth, and right or refused in a server of ours.

Memory is laid out so that a wrapped offset meets mapped bytes: 4 GiB lie in front of what is read. Values are chosen so
that one wrong head, rank, page or row shows. Needs sglang 0.5.23 and, for its own kernels, nvcc.
"""

import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.planning.limits import INT32_MAX, LIMITS, Sizes, largest_chunk
from nsa_dcp_kernels import attend_selection, localize_selection, pack_latent
from tests.sglang.served_parts import make_layer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
pytest.importorskip("sglang", reason="needs sglang 0.5.23")

GIB = 1 << 30
DEEPSEEK = Sizes(local_heads=16, attended_heads=128, dcp_size=8, hidden_size=7168)
GLM = Sizes(local_heads=8, attended_heads=64, dcp_size=8, hidden_size=6144)
BY_NAME = {limit.name: limit for limit in LIMITS}


@pytest.fixture(autouse=True)
def emptied_gpu():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def need(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free:.0f}")


def behind_4_gib(values: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor with 2**31 values of memory in front of it, whatever they are."""
    memory = torch.empty(2**31 + values, dtype=dtype, device="cuda")
    memory[: 2**31].fill_(100)
    return memory[2**31 :]


def head_values(heads: int) -> torch.Tensor:
    return torch.arange(heads, device="cuda", dtype=torch.bfloat16)


def gathered_queries(rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all_gather_q_for_mla_decode returns; the latent part of head h is h, of odd rows h + 1/2, its rope -h."""
    gathered = behind_4_gib(heads * rows * 576, torch.bfloat16).view(heads, rows, 576)
    gathered[:, :, :64] = -head_values(heads)[:, None, None]
    gathered[:, :, 64:] = head_values(heads)[:, None, None]
    gathered[:, 1::2, 64:] += 0.5
    rope, latent = (part.transpose(0, 1) for part in gathered.split([64, 512], dim=-1))
    return latent, rope


def wrong_heads(q: torch.Tensor) -> list[int]:
    """Heads of [T, H, 576] that are not as `gathered_queries` has them."""
    wrong = []
    for head in range(q.shape[1]):
        latent, rope = q[:, head, :512], q[:, head, 512:]
        right = (latent[::2] == head).all() & (latent[1::2] == head + 0.5).all() & (rope == -head).all()
        if not bool(right):
            wrong.append(head)
    return wrong


def largest_page_aligned(sizes: Sizes) -> int:
    return largest_chunk(sizes)[0] // 64 * 64


@pytest.mark.parametrize(("sizes", "first_wrong"), [(DEEPSEEK, 29_357), (GLM, 59_179)], ids=["deepseek", "glm"])
def test_sglangs_own_concatenation_ends_where_the_table_says(sizes, first_wrong):
    from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general

    need(20)
    heads = sizes.attended_heads
    assert BY_NAME["query concatenation"].most(sizes) == first_wrong - 1
    for rows, wrong in ((first_wrong - 1, []), (first_wrong, [heads - 1])):
        assert wrong_heads(concat_mla_absorb_q_general(*gathered_queries(rows, heads))) == wrong
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("rows", "heads"),
    [
        (29_356, 128),
        (29_357, 128),
        (32_768, 128),
        (largest_page_aligned(DEEPSEEK), 128),
        (59_178, 64),
        (59_179, 64),
        (65_536, 64),
        (largest_page_aligned(GLM), 64),
    ],
    ids=str,
)
def test_queries_of_every_head_reach_attention(rows, heads):
    """As our backend hands them on: joined where sglang's kernel would wrap, by that kernel elsewhere."""
    from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general

    from nsa_dcp.sglang_plugin.attention.query_layout import join_far_heads

    need(24)
    q, rope = join_far_heads(*gathered_queries(rows, heads), heads, 512, 64)
    assert (rope is None) == ((heads - 1) * rows * 576 > INT32_MAX)
    joined = q if rope is None else concat_mla_absorb_q_general(q, rope)
    del q, rope
    assert joined.is_contiguous()
    assert joined.shape == (rows, heads, 576)
    assert wrong_heads(joined) == []


def test_the_absorbed_projection_of_an_unspread_chunk_keeps_its_heads():
    """CP-DCP, zigzag: all heads of a chunk that is not spread, by batched products whose heads lie rows * 512 apart."""
    from nsa_dcp.sglang_plugin.attention.query_layout import join_far_heads

    need(30)
    rows, heads = largest_page_aligned(dataclasses.replace(GLM, local_heads=64, spread=True, zigzag=True)), 64
    assert (heads - 1) * rows * 512 > INT32_MAX
    q_nope = torch.zeros(rows, heads, 192, dtype=torch.bfloat16, device="cuda")
    q_nope[:, :, 0] = head_values(heads)
    q_nope[1::2, :, 1] = 0.5
    weights = torch.ones(heads, 192, 512, dtype=torch.bfloat16, device="cuda")
    latent = torch.bmm(q_nope.transpose(0, 1), weights).transpose(0, 1)
    rope = (-head_values(heads))[:, None].expand(rows, heads, 64).contiguous()
    q, none = join_far_heads(latent, rope, heads, 512, 64)
    assert none is None
    assert wrong_heads(q) == []


def merged(sizes: Sizes, rows: int) -> torch.Tensor:
    """sglang's merge of results that are 1 on the first rank, 2 on the second, ..., all equally heavy."""
    from sglang.kernels.ops.attention.dcp_kernels import dcp_lse_combine_triton

    ranks, heads = sizes.dcp_size, sizes.attended_heads // sizes.dcp_size
    received = behind_4_gib(ranks * rows * heads * 514, torch.bfloat16).view(ranks, rows, heads, 514)
    received[..., :512] = torch.arange(1, ranks + 1, device="cuda", dtype=torch.bfloat16)[:, None, None, None]
    received.view(torch.float32)[..., 256] = 0.0
    out, _ = dcp_lse_combine_triton(received[..., :512], received.view(torch.float32)[..., 256], is_lse_base_on_e=False)
    return out


@pytest.mark.parametrize("sizes", [DEEPSEEK, GLM], ids=["deepseek", "glm"])
def test_sglangs_merge_is_right_for_the_largest_chunk_and_a_larger_one_is_refused(sizes):
    """Its source multiplies in 32 bits. One row past the limit triton 3.8's code was right all the same (H200,
    2026-12-01), which no source promises.
    """
    need(14)
    most, limit = largest_chunk(sizes)
    assert limit.name == "merge of the ranks' results"
    assert limit.most(sizes) == most
    assert bool((merged(sizes, most) == 4.5).all())


class LoopbackGroup:
    """A DCP group whose every rank sends what this one does."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.rank_in_group = world_size, 0

    def all_to_all_single(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        output.copy_(input_)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [(DEEPSEEK, 32_768), (DEEPSEEK, largest_page_aligned(DEEPSEEK)), (GLM, 65_536), (GLM, largest_page_aligned(GLM))],
    ids=["deepseek-32768", "deepseek-most", "glm-65536", "glm-most"],
)
def test_results_go_to_the_rank_of_their_head_and_are_merged(sizes, rows):
    """Packing, the exchange's bytes and the merge, as the model calls them after attention."""
    from sglang.srt.layers.dcp.comm import dcp_a2a_lse_reduce

    need(24)
    out = head_values(sizes.attended_heads)[:, None].expand(rows, sizes.attended_heads, 512).contiguous()
    lse = torch.zeros(rows, sizes.attended_heads, device="cuda")
    got = dcp_a2a_lse_reduce(out, lse, LoopbackGroup(sizes.dcp_size), is_lse_base_on_e=False)
    own = sizes.attended_heads // sizes.dcp_size
    # Rank i sent its heads i * own + h: their mean.
    expected = head_values(own) + own * (sizes.dcp_size - 1) / 2
    assert got.shape == (rows, own, 512)
    assert bool((got == expected[:, None]).all())


@pytest.mark.parametrize("sizes", [DEEPSEEK, GLM], ids=["deepseek", "glm"])
def test_the_ag_rs_correction_is_right_for_the_largest_chunk(sizes):
    from sglang.kernels.ops.attention.dcp_kernels import correct_attn_out

    need(20)
    rows, heads = largest_page_aligned(sizes), sizes.attended_heads
    out = head_values(heads)[:, None].expand(rows, heads, 512).contiguous()
    lses = torch.zeros(sizes.dcp_size, rows, heads, device="cuda")
    new = torch.empty(heads, rows, 512, dtype=torch.bfloat16, device="cuda")
    corrected, lse = correct_attn_out(out, lses, 3, None, new, is_lse_base_on_e=False)
    # Each of 8 equal ranks has an eighth.
    assert bool((corrected == (head_values(heads) / sizes.dcp_size)[:, None, None]).all())
    assert torch.allclose(lse, torch.full_like(lse, 3.0))


@pytest.mark.parametrize(
    ("rows", "heads", "cache_rows"),
    [(32_768, 128, 1_000_000), (32_768, 128, 100_032), (65_536, 64, 1_000_000), (65_536, 64, 100_032)],
    ids=["deepseek-packed", "deepseek-dequantised", "glm-packed", "glm-dequantised"],
)
def test_a_large_chunk_attends_as_its_rows_do_alone(rows, heads, cache_rows):
    """From the gathered queries to results and log-sum-exps, through the backend's own door, rank 3 of 8."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from nsa_dcp.sglang_plugin.attention import backend as module

    need(36)
    generator = torch.Generator("cuda").manual_seed(0)
    backend = object.__new__(module.DcpDeepseekSparseAttnBackend)
    values = torch.randn(cache_rows, 576, device="cuda", generator=generator, dtype=torch.bfloat16)
    cache = pack_latent(values[:, :512], values[:, 512:]).unsqueeze(1)
    del values
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer_id: cache)
    backend.dcp_size, backend.dcp_rank, backend.dsa_kv_cache_store_fp8 = 8, 3, True
    backend.num_q_heads, backend.num_dcp_q_heads = heads // 8, heads
    backend.dsa_prefill_impl = backend.dsa_decode_impl = "flashmla_kv"
    backend.dsa_index_kpool, backend.dsa_index_topk = 1, 2048
    backend.use_mha, backend.hisparse_coordinator = False, None
    backend.use_fused_topk, backend.dsa_topk_backend = True, DSATopKBackend.SGL_KERNEL
    backend.forward_metadata = SimpleNamespace(page_table_1=None, cu_seqlens_q=None, dsa_extend_seq_lens_list=None)

    gathered = torch.randn(heads, rows, 576, device="cuda", generator=generator, dtype=torch.bfloat16)
    rope, latent = (part.transpose(0, 1) for part in gathered.split([64, 512], dim=-1))
    slots = torch.randint(0, cache_rows * 8, (rows, 2048), device="cuda", generator=generator, dtype=torch.int32)
    slots[5], slots[rows - 2] = -1, -1
    out, lse = backend.forward_extend(
        latent,
        None,
        None,
        make_layer(1, heads, 0.05),
        SimpleNamespace(forward_mode=ForwardMode.EXTEND, out_cache_loc=None),
        q_rope=rope,
        topk_indices=slots,
    )
    assert out.shape == (rows, heads, 512)
    far = 2**31 // (heads * 576)
    some = sorted({0, 5, 263, 264, far - 1, far, far + 1, 2**31 // (heads * 512) - 1, rows - 2, rows - 1})
    some = torch.tensor(some, device="cuda")
    alone_q = torch.cat([latent[some], rope[some]], dim=-1)
    alone, alone_lse = attend_selection(alone_q, cache.squeeze(1), localize_selection(slots[some], 8, 3), 0.05)
    assert torch.allclose(out[some].float(), alone.float(), atol=0.02, rtol=0.02)
    assert torch.allclose(lse[some] / module.LOG2_E, alone_lse, atol=5e-3)
    assert bool(torch.isneginf(lse[5]).all())
    assert not bool(out[5].any())


def index_pool(pages: int) -> torch.Tensor:
    memory = torch.full((pages + 258_000, 8448), 99, dtype=torch.uint8, device="cuda")
    return memory[258_000:]


def test_sglangs_index_key_gather_ends_where_the_table_says_and_ours_does_not():
    from sglang.kernels.ops.kvcache.dsa_index_k_cache import _get_k_and_s_triton

    from nsa_dcp.sglang_plugin.selection.index_key_gather import WideIndexKeyGather

    need(10)
    limit = BY_NAME["index-key gather, pages"]
    assert limit.most(Sizes(dcp_size=8)) // 64 + 8 == 254_200
    pool = index_pool(600_001)
    ours = WideIndexKeyGather(SimpleNamespace(get_buffer=lambda layer_id: pool))
    for page in (1_000, 254_199, 254_200, 254_201, 300_000, 600_000):
        pool[page] = 7
        table, lens = torch.tensor([[page]], dtype=torch.int32, device="cuda"), torch.tensor([64], device="cuda")
        stock = [part.unique().tolist() for part in _get_k_and_s_triton(pool, table, lens, 64, 64, 64, 128)]
        assert (stock == [[7], [7]]) == (page < 254_200), (page, stock)
        assert [part.unique().tolist() for part in ours(0, lens, table, 64, 64)] == [[7], [7]]
        pool[page] = 99


def test_our_index_key_gather_is_sglangs_to_the_byte_where_both_reach():
    from sglang.kernels.ops.kvcache.dsa_index_k_cache import _get_k_and_s_triton

    from nsa_dcp.sglang_plugin.selection.index_key_gather import WideIndexKeyGather

    pool = torch.randint(0, 256, (5_000, 8448), dtype=torch.uint8, device="cuda")
    ours = WideIndexKeyGather(SimpleNamespace(get_buffer=lambda layer_id: pool))
    for lengths in ([131_072], [1, 64, 65, 5_000], [300] * 33):
        lens = torch.tensor(lengths, device="cuda")
        widest = -(-max(lengths) // 64) + 1
        table = torch.randint(0, 5_000, (len(lengths), widest), dtype=torch.int32, device="cuda")
        stock = _get_k_and_s_triton(pool, table, lens, sum(lengths), max(lengths), 64, 128)
        for mine, theirs in zip(ours(0, lens, table, sum(lengths), max(lengths)), stock):
            assert torch.equal(mine, theirs)


def test_a_drafts_attention_is_right_at_its_largest_chunk():
    """Stock FlashMLA over one launch: every row of equal latents is that latent, split or not."""
    flash_mla = pytest.importorskip("flash_mla")
    need(40)
    sizes = dataclasses.replace(GLM, draft=True)
    most, limit = largest_chunk(sizes)
    assert (most, limit.name) == (65_403, "split results of a draft's attention")
    from nsa_dcp_kernels._flash_mla import as_pages

    rows = most // 64 * 64
    latents = torch.ones(4_096, 576, dtype=torch.bfloat16, device="cuda")
    cache = as_pages(pack_latent(latents[:, :512], latents[:, 512:]))
    q = torch.ones(rows, 1, 64, 576, dtype=torch.bfloat16, device="cuda")
    indices = torch.arange(2048, dtype=torch.int32, device="cuda").expand(rows, 1, 2048).contiguous()
    meta, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        cache,
        None,
        None,
        512,
        meta,
        softmax_scale=0.01,
        is_fp8_kvcache=True,
        indices=indices,
        use_legacy=True,
        kv_format="V32",
    )
    assert bool((out == 1).all())
    # 576 products of 1, scaled, and the logarithm of 2,048 equal keys.
    assert torch.allclose(lse, torch.full_like(lse, 5.76 + 7.6246), atol=0.01)


def test_an_unfused_selection_reads_its_table_up_to_the_limit_and_not_past_it():
    from sglang.kernels.ops.attention.dsa.transform_index import transform_index_page_table_decode

    need(36)
    columns = 1_048_580
    most = BY_NAME["page table of an unfused selection"].most(Sizes(context=columns, unfused_topk=True))
    assert (most - 1) * columns <= INT32_MAX < most * columns
    memory = torch.zeros(2**31 + (most + 1) * columns, dtype=torch.int32, device="cuda")
    table = memory[2**31 :].view(most + 1, columns)
    positions = torch.arange(0, columns, columns // 2048, device="cuda", dtype=torch.int32)[:2048]
    for rows in (most, most + 1):
        table[rows - 1] = torch.arange(columns, device="cuda", dtype=torch.int32) + rows
        got = transform_index_page_table_decode(table[:rows], positions.expand(rows, 2048).contiguous())
        assert torch.equal(got[rows - 1], positions + rows) == (rows == most)


def test_speculations_tables_are_copied_whole_at_the_limit():
    from sglang.kernels.ops.attention.dsa.fused_metadata_copy import fused_metadata_copy_cuda

    need(22)
    columns, drafts = 1_048_584, 4
    sizes = Sizes(context=columns, rows_per_request=drafts, draft=True)
    requests = BY_NAME["page tables of speculation's graphs"].most(sizes)
    rows = requests * drafts
    source = torch.zeros(rows, columns, dtype=torch.int32, device="cuda")
    source[:, 0], source[:, -1] = 3, 5
    source[-1] = 9
    target = torch.full_like(source, -1)
    lens = torch.ones(rows + 1, dtype=torch.int32, device="cuda")
    many = (lens[:requests], lens[: requests + 1], source, lens[:rows], lens[:rows], lens, None, None, None)
    copies = tuple(part.clone() if part is not None and part is not source else part for part in many)
    fused_metadata_copy_cuda(*many, *copies[:2], target, *copies[3:], 1, requests, columns, columns, rows)
    assert torch.equal(target[-1], source[-1])
    assert bool((target[:-1, 0] == 3).all() & (target[:-1, -1] == 5).all() & (target[:-1, 1:-1] == 0).all())


def test_index_queries_are_quantised_right_at_the_limit():
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant

    need(12)
    sizes = Sizes(dcp_size=8, spread=True, zigzag=True, index_heads=64)
    rows = BY_NAME["quantised index queries"].most(sizes)
    assert rows == 262_143
    x = torch.ones(rows, 64, 128, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 3.0
    codes, scales = act_quant(x, 128, None)
    assert bool((codes[:, :, 0].float() == 448).all() & (codes[-1, -1].float() == 448).all())
    assert torch.allclose(scales[-1, -1], torch.tensor(3.0 / 448, device="cuda"))
    assert torch.allclose(scales[:-1], torch.tensor(1.0 / 448, device="cuda"))
