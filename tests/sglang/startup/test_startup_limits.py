"""What a scheduler built is held against the table of 32-bit products, and index keys are gathered at 64 bits."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.sglang.served_parts import make_weight_updater

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("registered", "on_hopper")]

DCP_SIZE, HEADS = 4, 64


@pytest.fixture
def start(make_rank, model_path, monkeypatch):
    """A function that builds the backend of rank 1 of 4, with a pool, a request table and arguments of one's own."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
    from sglang.srt.server_args import ServerArgs

    from nsa_dcp.sglang_plugin.attention import backend
    from nsa_dcp.sglang_plugin.selection import exact_topk

    class Ours(str):
        """What the factory asks of a backend that it has made."""

        dsa_topk_backend = DSATopKBackend.SGL_KERNEL
        device, dsa_index_topk, _fused_decode_metadata = "cpu", 2048, None

    monkeypatch.setattr(backend, "DcpDeepseekSparseAttnBackend", lambda model_runner: Ours("ours"))
    # Tried once in test_exact_topk.py.
    monkeypatch.setattr(exact_topk, "check_selection", lambda device, topk: None)
    monkeypatch.setattr(ATTENTION_BACKENDS["nsa"], "stock", lambda model_runner: "stock")
    made = []

    def build(*, draft_worker=False, columns=65_540, requests=64, pool_rows=None, **arguments):
        server_args = ServerArgs(
            model_path=model_path(),
            device="cuda",
            tp_size=DCP_SIZE,
            dcp_size=DCP_SIZE,
            attention_backend="nsa",
            **arguments,
        )
        server_args.resolve_once()
        rank = make_rank(DCP_SIZE, 1, "bfloat16")
        if pool_rows:
            # As large as it says, and no memory.
            rank.pool.size, rank.allocator.size = pool_rows, pool_rows * DCP_SIZE
            rows, slots = pool_rows + 64, (pool_rows + 64) * DCP_SIZE
            rank.pool.kv_buffer = [torch.empty(rows, 1, 576, dtype=torch.bfloat16, device="meta")] * 2
            pages = torch.empty(slots // 64, 64 * 132, dtype=torch.uint8, device="meta")
            rank.pool.index_key_cache.buffer = [pages] * 2
        attention = object.__new__(DeepseekV2AttentionMLA)
        torch.nn.Module.__init__(attention)
        attention.dcp_size, attention.layer_id, attention.skip_topk, attention.indexer = DCP_SIZE, 0, True, None
        attention.attn_mqa_for_dcp_decode = SimpleNamespace(tp_q_head_num=HEADS)
        model = torch.nn.ModuleList([attention])
        runner = SimpleNamespace(
            server_args=server_args,
            model_config=model_config_of(server_args),
            is_draft_worker=draft_worker,
            token_to_kv_pool=rank.pool,
            token_to_kv_pool_allocator=rank.allocator,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(requests + 1, columns, device="meta")),
            max_running_requests=requests,
            model=model,
            weight_updater=make_weight_updater(lambda: model),
            prefill_attention_backend_str="nsa",
            decode_attention_backend_str="nsa",
        )
        made.append(runner)
        return ATTENTION_BACKENDS["nsa"](runner)

    build.made = made
    return build


@pytest.mark.parametrize("draft_worker", [False, True])
def test_every_pool_of_ours_gathers_index_keys_at_64_bits(start, draft_worker):
    from nsa_dcp.sglang_plugin.selection.index_key_gather import WideIndexKeyGather

    assert start(draft_worker=draft_worker) == ("stock" if draft_worker else "ours")
    (runner,) = start.made
    assert isinstance(runner.token_to_kv_pool.index_key_cache.get_k_and_scale, WideIndexKeyGather)


def test_a_pool_past_sglangs_gather_is_served(start):
    """22.4 million tokens, what a pipeline's stage of GLM-5.2 holds."""
    assert start(pool_rows=22_373_376 // DCP_SIZE) == "ours"


def test_a_pool_past_the_last_slot_is_refused_with_the_rows_that_work(start):
    from nsa_dcp.planning.limits import largest_pool

    rows = largest_pool(DCP_SIZE)[0] // DCP_SIZE
    assert start(pool_rows=rows) == "ours"
    with pytest.raises(ValueError, match=rf"a pool of {(rows + 64) * DCP_SIZE:,} tokens.*--max-total-tokens {rows}\."):
        start(pool_rows=rows + 64)


def test_an_unfused_selection_is_refused_where_its_table_is_too_large(start):
    from sglang.srt.environ import envs

    assert start(columns=1_048_580, requests=4096) == "ours"
    with envs.SGLANG_DSA_FUSE_TOPK.override(False):
        assert start(columns=1_048_580, requests=2048) == "ours"
        with pytest.raises(ValueError, match=r"steps of 2,049 requests.*--max-running-requests 2048"):
            start(columns=1_048_580, requests=2049)


def test_the_line_names_what_is_held_beside_the_pools(start, caplog):
    with caplog.at_level("INFO", logger="nsa_dcp"):
        start(columns=65_540, requests=600)
    (line,) = [record.message for record in caplog.records if record.message.startswith("nsa-dcp serves ")]
    held = json.loads(line.removeprefix("nsa-dcp serves "))["held_bytes"]
    assert held["request_table"] == 601 * 65_540 * 4
    # The pool of 512 tokens holds no longer context.
    assert held["eager_decode"] == 600 * 512 * 12
    assert held["speculation"] == 0
    assert held["selections"] > 0


@pytest.mark.parametrize(
    ("captured", "requests", "rows", "drafts", "refused"),
    [(512, 4096, 4, True, 511), (511, 4096, 4, True, None), (0, 4096, 4, True, None), (512, 64, 4, True, None)],
)
def test_a_graph_of_speculation_is_refused_where_its_tables_are_too_large(captured, requests, rows, drafts, refused):
    from nsa_dcp.planning.limits import Sizes
    from nsa_dcp.sglang_plugin.admission.rules.pool_limits import find_step_problems

    sizes = Sizes(context=1_048_584, requests=requests, rows_per_request=rows, draft=drafts)
    problems = find_step_problems(sizes, captured)
    assert [f"--cuda-graph-max-bs-decode {refused}" in str(problem) for problem in problems] == [True] * bool(refused)
