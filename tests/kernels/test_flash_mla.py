"""Attention on Hopper: against float64, bit for bit between repeats and graph replays."""

import math

import pytest
import torch

from nsa_dcp.testing.assertions import assert_bitwise_equal, assert_close, assert_lse_close
from nsa_dcp_kernels import _flash_mla, attend_selection, attend_sparse, localize_selection, reference
from nsa_dcp_kernels.kv_format import KV_LORA_RANK, LATENT_DIM

SM_SCALE = LATENT_DIM**-0.5
# Of the whole result, and of its worst row and head.
RMS = {torch.uint8: (6e-3, 2e-2), torch.bfloat16: (4e-3, 1.5e-2)}
# Against float64 on the operands that FlashMLA multiplies, and on the stored values: it rounds a row's four scales to
# bfloat16, which moves every score of that row alike and averages out over the rows of a long selection only.
LSE_ATOL, LSE_ATOL_STORED = 1e-3, 1.5e-2
CHECKED_TOKENS = 48


def draw_slots(num_tokens: int, width: int, num_slots: int, kept: float = 0.9) -> torch.Tensor:
    """[T, K] int32 distinct slots a token, with holes; row 0 is full, row 1 (of several) selects nothing."""
    steps = torch.tensor([step for step in range(1, num_slots) if math.gcd(step, num_slots) == 1])
    step = steps[torch.randint(0, len(steps), (num_tokens, 1))]
    slots = (torch.randint(0, num_slots, (num_tokens, 1)) + step * torch.arange(width)) % num_slots
    shares = kept * torch.rand(num_tokens, 1).sqrt()
    shares[0] = 1
    if num_tokens > 1:
        shares[1] = 0
    return torch.where(torch.rand(num_tokens, width) < shares, slots, -1).to(torch.int32)


def draw_cache(num_rows: int, dtype: torch.dtype, used: torch.Tensor) -> torch.Tensor:
    """A cache whose unused rows are NaN in every value, scale and RoPE entry."""
    latent = torch.randn(num_rows, LATENT_DIM)
    packed = dtype == torch.uint8
    cache = reference.pack_latent(latent[:, :KV_LORA_RANK], latent[:, KV_LORA_RANK:]) if packed else latent.to(dtype)
    unused = torch.ones(num_rows, dtype=torch.bool)
    unused[used] = False
    cache[unused] = 255 if packed else math.nan
    return cache


def stored_values(kv_rows: torch.Tensor) -> torch.Tensor:
    return reference.unpack_latent(kv_rows) if kv_rows.dtype == torch.uint8 else kv_rows


def multiplied_values(kv_rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """What FlashMLA multiplies: packed values times their scale, both and the product rounded to bfloat16.

    Where the rows are dequantised first, only the product is rounded.
    """
    if kv_rows.dtype != torch.uint8:
        return kv_rows
    if _flash_mla.dequantised_bytes(num_tokens, len(kv_rows), None):
        return reference.unpack_latent(kv_rows).bfloat16()
    rounded = kv_rows.clone()
    scales = rounded[:, 512:528].view(torch.float32)
    scales.copy_(scales.bfloat16())
    return reference.unpack_latent(rounded).bfloat16()


def attend_float64(q: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention by its formula, a token at a time."""
    outs, lses = [], []
    for query, selected in zip(q.double(), rows):
        kv = values[selected[selected >= 0].long()].double()
        scores = query @ kv.T * SM_SCALE
        lse = torch.logsumexp(scores, -1)
        lses.append(lse)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        outs.append(weights @ kv[:, :KV_LORA_RANK] if len(kv) else torch.zeros_like(query[:, :KV_LORA_RANK]))
    return torch.stack(outs), torch.stack(lses)


def poison_free_memory() -> None:
    """What the next allocations find is NaN."""
    for size in (1 << 20, 1 << 26, 1 << 28):
        torch.full((size,), math.nan, device="cuda")
    torch.full((1 << 28,), math.nan, device="cuda", dtype=torch.bfloat16)


def check_attention(q: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, lse: torch.Tensor):
    """Compare some tokens, launch boundaries among them, with float64."""
    num_tokens = len(q)
    assert out.shape == (num_tokens, q.shape[1], KV_LORA_RANK)
    assert lse.shape == q.shape[:2]
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    edges = [token for token in (0, 1, 131, 132, 263, 264, 527, 528, num_tokens - 1) if token < num_tokens]
    tokens = torch.cat([torch.tensor(edges), torch.randint(0, num_tokens, (CHECKED_TOKENS,))]).unique()
    q, cache, out, lse = q[tokens].cpu(), cache.cpu(), out[tokens].cpu(), lse[tokens].cpu()
    expected, expected_lse = attend_float64(q, stored_values(cache), rows[tokens].cpu())
    whole, worst = RMS[cache.dtype]
    assert_close(out, expected, rms=worst)
    assert_lse_close(lse, expected_lse, atol=LSE_ATOL_STORED)
    assert (out.double() - expected).norm() <= whole * expected.norm()
    _, multiplied_lse = attend_float64(q, multiplied_values(cache, num_tokens), rows[tokens].cpu())
    assert_lse_close(lse, multiplied_lse, atol=LSE_ATOL)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize(
    ("num_tokens", "width", "dcp_size", "num_heads"),
    [
        (1, 64, 1, 64),
        (1, 2048, 8, 128),
        (63, 512, 2, 64),
        (64, 1024, 3, 128),
        (65, 2048, 4, 64),
        (66, 2048, 8, 128),
        (67, 512, 1, 128),
        (100, 2048, 1, 64),
        (132, 2048, 8, 64),
        (132, 64, 2, 128),
        (133, 2048, 8, 64),
        (133, 1024, 1, 128),
        (160, 2048, 2, 64),
        (264, 2048, 1, 64),
        (264, 512, 8, 128),
        (265, 2048, 8, 64),
        (265, 64, 3, 64),
        (1000, 1024, 4, 128),
        (1000, 2048, 1, 64),
        (8192, 2048, 8, 64),
        (5, 2048, 8, 1),
        (7, 512, 2, 40),
        (9, 192, 2, 65),
        (3, 2048, 4, 127),
    ],
)
def test_attention_matches_float64(num_tokens, width, dcp_size, num_heads, dtype):
    """Rows that no token selects, which the others' ranks own, are NaN; so is the memory the result is written to."""
    num_slots = 4 * width * dcp_size
    slots = draw_slots(num_tokens, width, num_slots)
    rank = dcp_size - 1
    rows, _ = reference.localize_topk(slots, dcp_size, rank, 1)
    cache = draw_cache(num_slots // dcp_size, dtype, rows[rows >= 0].long().unique()).cuda()
    q = torch.randn(num_tokens, num_heads, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    selection = localize_selection(slots.cuda(), dcp_size, rank)
    assert_bitwise_equal(selection.rows.cpu(), rows)
    poison_free_memory()
    out, lse = attend_selection(q, cache, selection, SM_SCALE)
    check_attention(q, cache, rows, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("with_length", [True, False])
def test_rows_with_holes_and_garbage_past_their_length(dtype, with_length):
    num_rows, width = 300, 320
    rows = draw_slots(70, width, num_rows, kept=0.5)
    length = torch.randint(0, width + 1, (70,), dtype=torch.int32)
    seen = rows.masked_fill(torch.arange(width) >= length.unsqueeze(1), -1) if with_length else rows
    if with_length:
        # Far outside the cache: reading it is a fault.
        rows = torch.where(torch.arange(width) >= length.unsqueeze(1), 1 << 29, rows).to(torch.int32)
    cache = draw_cache(num_rows, dtype, seen[seen >= 0].long().unique()).cuda()
    q = torch.randn(70, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    out, lse = attend_sparse(q, cache, rows.cuda(), length.cuda() if with_length else None, SM_SCALE)
    check_attention(q, cache, seen, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize(("num_tokens", "num_rows", "width"), [(0, 64, 64), (3, 0, 64), (3, 64, 0)], ids=str)
def test_nothing_to_attend_to_gives_zeros(num_tokens, num_rows, width, dtype):
    cache = torch.zeros(num_rows, 656 if dtype == torch.uint8 else 576, dtype=dtype, device="cuda")
    q = torch.randn(num_tokens, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.full((num_tokens, width), -1, dtype=torch.int32, device="cuda")
    out, lse = attend_sparse(q, cache, rows, None, SM_SCALE)
    assert torch.equal(out, torch.zeros(num_tokens, 64, KV_LORA_RANK, dtype=torch.bfloat16, device="cuda"))
    assert (lse == -math.inf).all()


@pytest.mark.gpu
def test_queries_in_a_wider_tensor_are_read_in_place():
    slots = draw_slots(9, 256, 1024)
    cache = draw_cache(1024, torch.uint8, slots[slots >= 0].long().unique()).cuda()
    wide = torch.randn(9, 128, LATENT_DIM + 64, dtype=torch.bfloat16, device="cuda")
    q = wide[:, 64:, :LATENT_DIM]
    assert _flash_mla._padded_queries(q, 64).data_ptr() == q.data_ptr()
    out, lse = attend_sparse(q, cache, slots.cuda(), None, SM_SCALE)
    check_attention(q, cache, slots, out, lse)


def test_queries_that_tma_cannot_read_are_copied():
    flat = torch.randn(2 * 64 * LATENT_DIM + 1).bfloat16()
    q = flat[1:].view(2, 64, LATENT_DIM)
    readable = _flash_mla._padded_queries(q, 64)
    assert readable.data_ptr() % 16 == 0 and torch.equal(readable, q)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 64, 160, 300])
def test_repeats_are_bitwise_equal(num_tokens, dtype):
    slots = draw_slots(num_tokens, 2048, 8192)
    cache = draw_cache(4096, dtype, torch.arange(4096)).cuda()
    q = torch.randn(num_tokens, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    first = attend_selection(q, cache, localize_selection(slots.cuda(), 2, 1), SM_SCALE)
    for _ in range(20):
        again = attend_selection(q, cache, localize_selection(slots.cuda(), 2, 1), SM_SCALE)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("num_tokens", [4, 128, 200])
def test_captured_step_follows_its_lengths(num_tokens, dtype):
    """Localise once, attend in two layers; then replay with other selections, one of them empty."""
    caches = [draw_cache(4096, dtype, torch.arange(4096)).cuda() for _ in range(2)]
    q = torch.randn(num_tokens, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    slots = draw_slots(num_tokens, 2048, 4 * 4096).cuda()

    def step():
        selection = localize_selection(slots, 4, 1)
        return [attend_selection(q, cache, selection, SM_SCALE) for cache in caches]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for drawn in (
        draw_slots(num_tokens, 2048, 4 * 4096, 0.3),
        torch.full_like(slots, -1),
        draw_slots(num_tokens, 2048, 16384),
    ):
        slots.copy_(drawn)
        q.normal_()
        graph.replay()
        for (out, lse), (eager_out, eager_lse) in zip(captured, step()):
            assert torch.equal(out, eager_out)
            assert torch.equal(lse, eager_lse)


@pytest.mark.gpu
def test_layers_that_share_a_selection_share_its_plan():
    slots = draw_slots(5, 256, 1024)
    cache = draw_cache(512, torch.uint8, torch.arange(512)).cuda()
    selection = localize_selection(slots.cuda(), 4, 0)
    q = torch.randn(5, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    attend_selection(q, cache, selection, SM_SCALE)
    plan = selection.plans[64][0]
    attend_selection(q, cache, selection, SM_SCALE)
    assert selection.plans[64][0] is plan


@pytest.mark.parametrize(
    ("num_tokens", "heads", "dcp_size", "pays"),
    [
        pytest.param(16, 64, 1, False, id="few-rows-of-one-rank"),
        pytest.param(32, 64, 1, True, id="many-rows-of-one-rank"),
        pytest.param(16, 128, 1, True, id="128-heads-have-half-the-parts"),
        pytest.param(8, 64, 2, False, id="few-rows-of-two-ranks"),
        pytest.param(1, 64, 4, True, id="four-ranks"),
        pytest.param(1, 64, None, True, id="spread-not-known"),
    ],
)
def test_rows_are_planned_where_a_plan_can_save_more_than_it_costs(num_tokens, heads, dcp_size, pays):
    assert _flash_mla.planning_pays(num_tokens, heads, dcp_size) == pays


@pytest.mark.gpu
@pytest.mark.parametrize("first_in_graph", [False, True])
def test_rows_that_are_not_planned_match_float64(first_in_graph, monkeypatch):
    """FlashMLA's own schedule, kept by shape: of a captured first call it stays in the graph."""
    monkeypatch.setattr(_flash_mla, "_own_schedules", {})
    for num_rows in (4096, 4095, 4096):
        slots = draw_slots(6, 512, num_rows)
        cache = draw_cache(num_rows, torch.uint8, slots[slots >= 0].long().unique()).cuda()
        q = torch.randn(6, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
        on_device = slots.cuda()
        if first_in_graph:
            # Of another shape: kernels are loaded, no schedule of this shape is made.
            attend_selection(q[:5], cache, localize_selection(on_device[:5], 1, 0), SM_SCALE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, lse = attend_selection(q, cache, localize_selection(on_device, 1, 0), SM_SCALE)
            graph.replay()
        else:
            out, lse = attend_selection(q, cache, localize_selection(on_device, 1, 0), SM_SCALE)
        check_attention(q, cache, slots, out, lse)
        kept = [key[1] for key in _flash_mla._own_schedules]
        assert (6 in kept) != first_in_graph


@pytest.mark.gpu
@pytest.mark.parametrize("dcp_size", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [3, 40, 264, 265])
def test_plan_made_with_the_localisation_gives_the_same_bits(num_tokens, dcp_size):
    slots = draw_slots(num_tokens, 1024, 2048 * dcp_size).cuda()
    cache = draw_cache(2048, torch.uint8, torch.arange(2048)).cuda()
    q = torch.randn(num_tokens, 40, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    later, at_once = (localize_selection(slots, dcp_size, 0, planned_heads=heads) for heads in (None, 40))
    one_launch = num_tokens <= 2 * _flash_mla.count_sms(q.device)
    assert (64 in at_once.plans) == (one_launch and _flash_mla.planning_pays(num_tokens, 64, dcp_size))
    for expected, got in zip(
        attend_selection(q, cache, later, SM_SCALE), attend_selection(q, cache, at_once, SM_SCALE)
    ):
        assert_bitwise_equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("dcp_size", [1, 8])
def test_raw_lse_differs_in_the_sign_of_empty_rows_only(dcp_size, dtype):
    slots = draw_slots(9, 512, 1024 * dcp_size).cuda()
    cache = draw_cache(1024, dtype, torch.arange(1024)).cuda()
    q = torch.randn(9, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    selection = localize_selection(slots, dcp_size, 0)
    out, lse = attend_selection(q, cache, selection, SM_SCALE)
    raw_out, raw_lse = attend_selection(q, cache, selection, SM_SCALE, raw_lse=True)
    assert torch.equal(raw_out, out)
    assert (lse[1] == -math.inf).all()
    assert_bitwise_equal(torch.where(raw_lse == math.inf, -math.inf, raw_lse), lse)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
def test_installed_flash_mla_follows_our_schedules(heads):
    assert _flash_mla.schedule_is_understood(torch.device("cuda", 0), heads)


@pytest.mark.gpu
def test_schedules_that_flash_mla_does_not_follow_are_not_used(monkeypatch):
    """A FlashMLA with another schedule layout: here, one that gives other results for a schedule that it is handed."""
    launch = _flash_mla.launch_packed

    def launch_otherwise(q, kv_rows, rows, sm_scale, meta):
        return launch(q if meta.tile_scheduler_metadata is None else 2 * q, kv_rows, rows, sm_scale, meta)

    monkeypatch.setattr(_flash_mla, "launch_packed", launch_otherwise)
    understood = _flash_mla.schedule_is_understood.__wrapped__
    with pytest.warns(RuntimeWarning, match="does not follow the schedules"):
        assert not understood(torch.device("cuda", 0), 64)
    monkeypatch.setattr(_flash_mla, "launch_packed", launch)
    monkeypatch.setattr(_flash_mla, "schedule_is_understood", lambda device, heads: False)
    slots = draw_slots(150, 512, 1024)
    cache = draw_cache(1024, torch.uint8, slots[slots >= 0].long().unique()).cuda()
    q = torch.randn(150, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    out, lse = attend_selection(q, cache, localize_selection(slots.cuda(), 1, 0), SM_SCALE)
    check_attention(q, cache, slots, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("pays", [True, False], ids=["dequantised", "scheduled"])
def test_prefill_rows_match_float64_either_way(pays, monkeypatch):
    monkeypatch.setattr(_flash_mla, "dequantised_bytes", lambda *_: int(pays))
    slots = draw_slots(600, 1024, 4096)
    rows, _ = reference.localize_topk(slots, 4, 2, 1)
    cache = draw_cache(1024, torch.uint8, rows[rows >= 0].long().unique()).cuda()
    q = torch.randn(600, 64, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    out, lse = attend_selection(q, cache, localize_selection(slots.cuda(), 4, 2), SM_SCALE)
    check_attention(q, cache, rows, out, lse)


def test_schedule_in_another_layout_is_told_apart():
    """What is read back before any schedule of ours is launched: FlashMLA's own, for 3 rows of 4 blocks on 2 parts."""
    own = [[0, 1, 0, 2, 0, 0, 1, 0], [1, 2, 2, 4, 1, 1, 0, 0]]
    num_splits = [0, 1, 3, 4]
    assert _flash_mla.walks_every_block(own, num_splits, 3, 4)
    idle = [3, 2, 0, 4, 0, 0, 0, 0]
    assert _flash_mla.walks_every_block([*own, idle], num_splits, 3, 4)
    other_field_order = [[row[0], row[2], row[1], *row[3:]] for row in own]
    assert not _flash_mla.walks_every_block(other_field_order, num_splits, 3, 4)
    inclusive_end = [[*row[:3], row[3] - 1, *row[4:]] for row in own]
    assert not _flash_mla.walks_every_block(inclusive_end, num_splits, 3, 4)
    assert not _flash_mla.walks_every_block(own, [0, 1, 2, 3], 3, 4)
    assert not _flash_mla.walks_every_block([own[0], [9, 12, 0, 4, 0, 0, 0, 0]], num_splits, 3, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(9, 16), (70, 32), (9, 96), (300, 16)])
def test_what_stands_in_the_padding_of_heads_reaches_no_result(num_tokens, num_heads, dtype):
    slots = draw_slots(num_tokens, 512, 4096).cuda()
    cache = draw_cache(2048, dtype, torch.arange(2048)).cuda()
    q = torch.randn(num_tokens, num_heads, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    zeros = torch.nn.functional.pad(q, (0, 0, 0, (64 if num_heads < 64 else 128) - num_heads))
    selection = localize_selection(slots, 2, 0)
    expected = attend_selection(zeros, cache, selection, SM_SCALE)
    # Memory that the next allocations of these sizes are given.
    poison = [torch.full_like(zeros, float("nan")) for _ in range(8)]
    del poison
    out, lse = attend_selection(q, cache, selection, SM_SCALE)
    for actual, padded in zip((out, lse), expected):
        assert_bitwise_equal(actual.contiguous(), padded[:, :num_heads].contiguous())
