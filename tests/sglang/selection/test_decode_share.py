"""Which requests of a step a rank selects for, and in which pieces: each once, whatever sglang captures."""

from types import SimpleNamespace

import pytest


@pytest.mark.sglang
def captured_sizes(monkeypatch, speculative_algorithm):
    from sglang.srt.arg_groups import cuda_graph_hook

    monkeypatch.setattr(cuda_graph_hook, "resolving_view", lambda arguments: arguments)
    arguments = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm=speculative_algorithm)
    sizes = cuda_graph_hook.generate_decode_cuda_graph_batch_sizes(arguments, 1024)
    assert (sizes[0], sizes[-1]) == (1, 1024)
    return sizes


def requests_of_ranks(world_size, num_requests, num_rows):
    from nsa_dcp.sglang_plugin.selection.row_split_decode import RankRequests

    groups = [SimpleNamespace(world_size=world_size, rank_in_group=rank) for rank in range(world_size)]
    return [RankRequests(group).requests(num_requests, num_rows) for group in groups]


@pytest.mark.sglang
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_size_that_sglang_captures_is_split_from_64_rows(monkeypatch, world_size):
    for size in captured_sizes(monkeypatch, None):
        shares = requests_of_ranks(world_size, size, size)
        if size < 64:
            assert shares == [None] * world_size
        else:
            assert [request for share in shares for request in range(size)[share]] == list(range(size))


@pytest.mark.sglang
@pytest.mark.parametrize("rows_per_request", [2, 3, 4])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_under_speculation_it_is_split_where_its_requests_divide(monkeypatch, world_size, rows_per_request):
    whole = []
    for size in captured_sizes(monkeypatch, "EAGLE"):
        shares = requests_of_ranks(world_size, size, size * rows_per_request)
        if shares == [None] * world_size:
            whole.append(size)
        else:
            assert size * rows_per_request >= 64
            assert [request for share in shares for request in range(size)[share]] == list(range(size))
    large = [size for size in whole if size * rows_per_request >= 64]
    # sglang captures more sizes than without, and some of them do not divide.
    divided_by_4 = {2: [], 3: [22, 26, 30], 4: [18, 22, 26, 30]}
    divided_by_8 = {2: [44, 52, 60], 3: [22, 26, 28, 30, 44, 52, 60], 4: [18, 20, 22, 26, 28, 30, 44, 52, 60]}
    assert large == {2: [], 4: divided_by_4[rows_per_request], 8: divided_by_8[rows_per_request]}[world_size]


@pytest.mark.parametrize("total", [1, 29, 30, 31, 60, 61, 257])
def test_pieces_are_few_even_and_cover_everything_once(total):
    from nsa_dcp.sglang_plugin.selection.row_split_decode import cut_evenly

    pieces = cut_evenly(slice(5, 5 + total), 30)
    assert [number for piece in pieces for number in range(1000)[piece]] == list(range(5, 5 + total))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert len(sizes) == -(-total // 30) and max(sizes) <= 30 and max(sizes) - min(sizes) <= 1
