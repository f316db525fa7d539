"""Which rows of a decode step a rank selects for, and in which pieces: every row once, whatever sglang captures."""

from types import SimpleNamespace

import pytest


@pytest.mark.sglang
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_size_that_sglang_captures_is_split_from_64_rows(monkeypatch, world_size):
    from sglang.srt.arg_groups import cuda_graph_hook

    from nsa_dcp.sglang_plugin.row_split_decode import DecodeShare

    monkeypatch.setattr(cuda_graph_hook, "resolving_view", lambda arguments: arguments)
    arguments = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm=None)
    sizes = cuda_graph_hook.generate_decode_cuda_graph_batch_sizes(arguments, 1024)
    assert (sizes[0], sizes[-1]) == (1, 1024)
    shares = [DecodeShare(SimpleNamespace(world_size=world_size, rank_in_group=r)) for r in range(world_size)]
    for size in sizes:
        rows = [share.rows(size) for share in shares]
        if size < 64:
            assert rows == [None] * world_size
        else:
            assert [row for part in rows for row in range(size)[part]] == list(range(size))


@pytest.mark.parametrize("num_rows", [1, 29, 30, 31, 60, 61, 257])
def test_pieces_are_few_even_and_cover_every_row_once(num_rows):
    from nsa_dcp.sglang_plugin.row_split_decode import cut_rows

    pieces = cut_rows(slice(5, 5 + num_rows), 30)
    assert [row for piece in pieces for row in range(1000)[piece]] == list(range(5, 5 + num_rows))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert len(sizes) == -(-num_rows // 30) and max(sizes) <= 30 and max(sizes) - min(sizes) <= 1
