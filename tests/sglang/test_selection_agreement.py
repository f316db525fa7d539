"""Every rank attends to the same selection: what sglang's indexer returns is rank 0's, whatever path it took."""

import ast
import inspect
import itertools
import textwrap

import pytest
import torch

pytestmark = pytest.mark.sglang


@pytest.fixture
def broadcasting():
    from sglang.srt.environ import envs

    from nsa_dcp.sglang_plugin.startup import select_alike_on_every_rank

    was_set = envs.SGLANG_DSA_TOPK_BROADCAST.is_set()
    select_alike_on_every_rank()
    yield
    if not was_set:
        envs.SGLANG_DSA_TOPK_BROADCAST.clear()


def test_a_selection_becomes_that_of_the_groups_first_rank(publish_rank, broadcasting):
    from sglang.srt.layers.attention.dsa.dsa_indexer import _broadcast_indexer_topk_from_rank0

    first = torch.tensor([[7, 3, -1]], dtype=torch.int32)
    calls = []

    def broadcast(tensor, src):
        calls.append(src)
        tensor.copy_(first)

    publish_rank(4, 2).attn_tp_group.broadcast = broadcast
    other = torch.tensor([[3, 9, -1]], dtype=torch.int32)
    assert torch.equal(_broadcast_indexer_topk_from_rank0(other), first)
    assert calls == [0]


def test_it_is_off_before_we_turn_it_on():
    from sglang.srt.environ import envs

    assert not envs.SGLANG_DSA_TOPK_BROADCAST.get()


def test_no_path_of_the_indexer_returns_an_unbroadcast_selection():
    """Each `return` of a selection directly follows an assignment of the broadcast's result to the name it returns."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    function = ast.parse(textwrap.dedent(inspect.getsource(Indexer.forward_cuda))).body[0]
    blocks = [block for node in ast.walk(function) for block in (getattr(node, "body", 0), getattr(node, "orelse", 0))]
    checked = 0
    for block in blocks:
        for previous, statement in itertools.pairwise([None, *block] if isinstance(block, list) else []):
            if not isinstance(statement, ast.Return) or ast.unparse(statement) == "return None":
                continue
            assert ast.unparse(statement.value.func) == "maybe_capture_indexer_topk"
            assert ast.unparse(previous.targets[0]) == ast.unparse(statement.value.args[1])
            assert ast.unparse(previous.value.func) == "_broadcast_indexer_topk_from_rank0"
            checked += 1
    assert checked == 6
