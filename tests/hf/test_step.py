"""One step's metadata on every rank, against counting positions one by one. The ranks need no process of their own."""

import pytest
import torch

from nsa_dcp.config import DcpConfig
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.hf.step import Extend, build_step
from nsa_dcp.testing.batch import PAGE

CPU = torch.device("cpu")
NUM_PAGES = 40


def place(rank, **config):
    return Ranks(DcpConfig(**config), rank, None, None)


def draw_extends(starts_and_lens, dcp_size, spare=1):
    """Requests on scattered pages, one page more than they need."""
    pages = iter((torch.randperm(NUM_PAGES - 1) + 1).tolist())
    extends = []
    for start, length in starts_and_lens:
        count = -(-(start + length) // (PAGE * dcp_size)) + spare
        ids = torch.randint(0, 1000, (length,))
        extends.append(Extend(ids, start, [next(pages) for _ in range(count)]))
    return extends


def flat_tokens(extends, dcp_size):
    """(request, position, token id, slot) of each of the step's tokens."""
    page_slots = PAGE * dcp_size
    return [
        (
            request,
            extend.start + offset,
            int(token),
            extend.pages[(extend.start + offset) // page_slots] * page_slots + (extend.start + offset) % page_slots,
        )
        for request, extend in enumerate(extends)
        for offset, token in enumerate(extend.token_ids)
    ]


def check_rows(step, extends, tokens, dcp_size):
    """Compare what a rank is told about its rows with `tokens`, the rows it should have."""
    page_slots = PAGE * dcp_size
    assert step.input_ids.tolist() == [token for _, _, token, _ in tokens]
    assert step.positions.tolist() == [position for _, position, _, _ in tokens]
    assert step.context_lens.tolist() == [position + 1 for _, position, _, _ in tokens]
    assert step.max_context_len == max(step.context_lens.tolist())
    for tensor in (step.row_request, step.context_lens, step.page_table, step.index_pages, step.slots):
        assert tensor.dtype == torch.int32
    present = sorted({request for request, *_ in tokens})
    assert len(step.page_table) == len(step.index_pages) == len(present)
    for row, (request, position, _, slot) in enumerate(tokens):
        # Every lookup goes through the rank's own numbering of requests.
        local = int(step.row_request[row])
        assert present[local] == request
        for past in {0, position // 2, position}:
            expected = extends[request].pages[past // page_slots] * page_slots + past % page_slots
            assert int(step.page_table[local, past // page_slots]) * page_slots + past % page_slots == expected
            assert int(step.index_pages[local, past // PAGE]) * PAGE + past % PAGE == expected
        assert int(step.page_table[local, position // page_slots]) * page_slots + position % page_slots == slot


MIXED = [
    pytest.param([(0, 130)], id="one-prompt"),
    pytest.param([(0, 1), (0, 300), (7, 1), (0, 1)], id="single-tokens-around-a-long-prompt"),
    pytest.param([(128, 70), (0, 64), (129, 3)], id="cached-prefixes-on-and-off-a-page-edge"),
    pytest.param([(0, 5)], id="fewer-tokens-than-a-page"),
]


@pytest.mark.parametrize("requests", MIXED)
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4])
def test_a_head_sharded_step_is_the_same_on_every_rank(requests, dcp_size):
    extends = draw_extends(requests, dcp_size)
    tokens = flat_tokens(extends, dcp_size)
    for rank in range(dcp_size):
        step = build_step(extends, place(rank, tp_size=dcp_size, dcp_size=dcp_size), NUM_PAGES, CPU)
        assert step.cp is None
        check_rows(step, extends, tokens, dcp_size)
        assert step.slots.tolist() == [slot for *_, slot in tokens]
        check_last_rows(step, extends, tokens)


@pytest.mark.parametrize("requests", MIXED)
@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("shares_latents", [True, False], ids=["dcp", "no-dcp"])
def test_interleave_tells_every_rank_about_its_own_rows(requests, cp_size, shares_latents):
    """Also ranks that own no token of some requests. Sources: sgl-project/sglang 30439, 33059."""
    dcp_size = cp_size if shares_latents else 1
    extends = draw_extends(requests, dcp_size)
    tokens = flat_tokens(extends, dcp_size)
    shares = [tokens[rank::cp_size] for rank in range(cp_size)]
    check_token_sharded(extends, shares, tokens, dcp_size, "interleave")


@pytest.mark.parametrize("cp_size", [2, 4])
def test_interleave_leaves_requests_out_of_a_ranks_view(cp_size):
    extends = draw_extends([(0, 1), (0, 41), (0, 1), (9, 1)], cp_size)
    for rank in range(cp_size):
        step = build_step(extends, place(rank, tp_size=cp_size, dcp_size=cp_size, mode="cp"), NUM_PAGES, CPU)
        assert 1 <= len(step.page_table) < len(extends)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_zigzag_tells_every_rank_about_its_own_rows(cp_size):
    extends = draw_extends([(0, 8 * cp_size), (100, 2 * cp_size), (0, 3 * cp_size + 1)], cp_size)
    tokens = flat_tokens(extends, cp_size)
    shares = []
    for rank in range(cp_size):
        share = []
        for request in range(len(extends)):
            own = [token for token in tokens if token[0] == request]
            size, more = divmod(len(own), 2 * cp_size)
            edges = [0]
            for block in range(2 * cp_size):
                edges.append(edges[-1] + size + (block < more))
            for block in (rank, 2 * cp_size - 1 - rank):
                share += own[edges[block] : edges[block + 1]]
        shares.append(share)
    check_token_sharded(extends, shares, tokens, cp_size, "zigzag")


def check_token_sharded(extends, shares, tokens, dcp_size, strategy):
    cp_size = len(shares)
    used = {page for extend in extends for page in extend.pages[: -(-extend.end // (PAGE * dcp_size))]}
    seen = torch.full((cp_size, max(map(len, shares))), -1)
    for rank, share in enumerate(shares):
        config = {"tp_size": cp_size, "dcp_size": dcp_size, "mode": "cp", "cp_strategy": strategy}
        step = build_step(extends, place(rank, **config), NUM_PAGES, CPU)
        check_rows(step, extends, share, dcp_size)
        # Every rank caches all of the step's tokens, in the chunk's order, once they are restored to it.
        assert step.slots.tolist() == [slot for *_, slot in tokens]
        check_last_rows(step, extends, tokens)
        assert step.cp.longest == seen.shape[1]
        assert sorted(step.pages.pages.tolist()) == sorted(used)
        seen[rank, : len(share)] = step.input_ids
    assert seen.flatten()[step.cp.restore].tolist() == [token for _, _, token, _ in tokens]


def check_last_rows(step, extends, tokens):
    last = [tokens[row] for row in step.last_rows.tolist()]
    assert [(request, position) for request, position, *_ in last] == [
        (request, extend.end - 1) for request, extend in enumerate(extends)
    ]


@pytest.mark.parametrize(
    ("requests", "strategy"),
    [
        pytest.param([(10, 1), (63, 1), (0, 1), (128, 1)], "interleave", id="decode-step"),
        pytest.param([(0, 3)], "interleave", id="fewer-tokens-than-ranks"),
        pytest.param([(0, 300), (0, 7)], "zigzag", id="zigzag-with-a-short-request"),
        pytest.param([(0, 300), (40, 1)], "zigzag", id="zigzag-beside-a-decoding-request"),
    ],
)
def test_decode_steps_and_chunks_that_cannot_be_split_fall_back_to_head_sharding(requests, strategy):
    """They must neither fail nor keep a part of the token-sharded view. Source: sgl-project/sglang 30439."""
    extends = draw_extends(requests, 4)
    tokens = flat_tokens(extends, 4)
    for rank in range(4):
        config = {"tp_size": 4, "dcp_size": 4, "mode": "cp", "cp_strategy": strategy}
        step = build_step(extends, place(rank, **config), NUM_PAGES, CPU)
        assert step.cp is None
        check_rows(step, extends, tokens, 4)


@pytest.mark.parametrize("dcp_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("widened_pages", "extra"), [(1, -1), (1, 0), (1, 1), (2, -1), (2, 0), (2, 1)], ids=lambda value: str(value)
)
def test_a_request_needs_pages_for_all_its_tokens(dcp_size, widened_pages, extra):
    length = widened_pages * PAGE * dcp_size + extra
    needed = widened_pages + 1 if extra == 1 else widened_pages
    ranks = place(0, tp_size=dcp_size, dcp_size=dcp_size)
    pages = list(range(1, needed + 1))
    # The last token alone is new: the cached ones count too.
    step = build_step([Extend(torch.tensor([7]), length - 1, pages)], ranks, NUM_PAGES, CPU)
    assert step.page_table.tolist() == [pages]
    with pytest.raises(ValueError, match=rf"^pages must hold {length} tokens, got {needed - 1} pages$"):
        build_step([Extend(torch.tensor([7]), length - 1, pages[:-1])], ranks, NUM_PAGES, CPU)


def test_a_request_without_a_new_token_is_refused():
    extends = draw_extends([(0, 3), (5, 0), (0, 2)], 2)
    with pytest.raises(ValueError, match=r"^extends must each hold a new token, got an empty one$"):
        build_step(extends, place(0, tp_size=2, dcp_size=2), NUM_PAGES, CPU)


@pytest.mark.parametrize("mode", ["tp", "interleave", "zigzag"])
@pytest.mark.parametrize("dcp_size", [2, 3, 4])
def test_a_prompts_index_keys_are_found_where_their_pages_are_gathered(mode, dcp_size):
    """Every slot of the contexts that a rank's rows see, by plain integers; pages in the order that all gather."""
    config = {"tp_size": dcp_size, "dcp_size": dcp_size, "index_keys": "sharded"}
    if mode != "tp":
        config |= {"mode": "cp", "cp_strategy": mode}
    extends = draw_extends([(100, 16 * dcp_size), (0, 200 * dcp_size)], dcp_size)
    for rank in range(dcp_size):
        step = build_step(extends, place(rank, **config), NUM_PAGES, CPU)
        gathered = step.index_gather.pages.tolist()
        assert gathered == sorted({page for e in extends for page in e.pages[: -(-e.end // (64 * dcp_size))]})
        for row, request in enumerate(step.row_request.tolist()):
            for position in {0, int(step.positions[row]) // 2, int(step.positions[row])}:
                place_of = int(step.index_pages[request, position // PAGE]) * PAGE + position % PAGE
                page, within = divmod(place_of, PAGE * dcp_size)
                slot = int(step.page_table[request, position // (PAGE * dcp_size)]) * PAGE * dcp_size
                assert (gathered[page] * PAGE * dcp_size, within) == (slot, position % (PAGE * dcp_size))


@pytest.mark.parametrize("dcp_size", [1, 2, 3])
def test_a_decode_step_scores_the_ranks_own_pages_of_sharded_index_keys(dcp_size):
    extends = draw_extends([(100, 1), (700, 1)], dcp_size)
    config = {"tp_size": dcp_size, "dcp_size": dcp_size}
    step = build_step(extends, place(0, **config, index_keys="sharded"), NUM_PAGES, CPU)
    assert step.index_gather is None
    assert torch.equal(step.index_pages, step.page_table)
    assert build_step(extends, place(0, **config), NUM_PAGES, CPU).index_gather is None
