"""No schedule is computed for the kernel call that we replace, wherever sglang would, and none can be taken for one.

sglang's own metadata code makes, captures and refreshes the metadata of our backend.
"""

import ast
import inspect
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from tests.sglang import decode_metadata as decode

pytestmark = pytest.mark.sglang

MAX_REQUESTS, MAX_LEN, TOPK, DRAFTS = 24, 200, 64, 3


@pytest.fixture
def kernels(monkeypatch):
    """FlashMLA's two calls, which must not be made."""

    def fail(**_):
        raise AssertionError("FlashMLA was called")

    module = SimpleNamespace(get_mla_metadata=fail, flash_mla_with_kvcache=fail)
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.flash_mla_interface", module)


@pytest.fixture
def backend(kernels, publish_rank, monkeypatch):
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    from nsa_dcp.sglang_plugin.attention.backend import DcpDeepseekSparseAttnBackend

    def expand(extend_seq_lens, seq_lens, total_len, max_q_len):
        rows = [torch.arange(length - extend + 1, length + 1) for extend, length in zip(extend_seq_lens, seq_lens)]
        return torch.cat(rows).to(torch.int32)

    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expand)
    publish_rank(2, 0)
    made = decode.make_metadata_backend(
        MAX_REQUESTS, MAX_LEN, TOPK, DSATopKBackend.TORCH, False, DcpDeepseekSparseAttnBackend
    )
    made.speculative_num_draft_tokens, made.supports_mha_one_shot = DRAFTS, False
    made.init_cuda_graph_state(MAX_REQUESTS, MAX_REQUESTS * DRAFTS)
    return made


def make_batch(mode, lengths):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode[mode],
        batch_size=len(lengths),
        req_pool_indices=torch.arange(len(lengths)),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        extend_seq_lens=torch.tensor([2] * len(lengths), dtype=torch.int32),
        extend_seq_lens_cpu=[2] * len(lengths),
        extend_prefix_lens_cpu=[length - 2 for length in lengths],
        attn_cp_metadata=None,
        global_num_tokens_cpu=None,
        spec_info=None,
    )


def assert_no_schedule(metadata, rows):
    from nsa_dcp.sglang_plugin.attention.backend import NoSchedule

    assert type(metadata.flashmla_metadata) is NoSchedule
    assert metadata.dsa_cache_seqlens_int32.shape[0] == rows
    for tensor in ("flashmla_metadata", "num_splits"):
        assert not hasattr(metadata.flashmla_metadata, tensor)


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_a_captured_step_is_prepared_and_refreshed_without_a_schedule(backend, mode):
    tokens = 1 if mode == "DECODE" else DRAFTS
    for size in (1, 8, MAX_REQUESTS):
        captured = make_batch(mode, [5] * size)
        backend.init_forward_metadata_out_graph(captured, in_capture=True)
        backend.init_forward_metadata_out_graph(captured, in_capture=True)
        metadata = backend.forward_metadata
        for shift in (0, 3):
            lengths = [(7 * request + shift) % (MAX_LEN - DRAFTS - 3) + 4 for request in range(size)]
            backend.init_forward_metadata_out_graph(make_batch(mode, lengths))
            assert backend.forward_metadata is metadata
            assert_no_schedule(metadata, size * tokens)
            written = torch.tensor(lengths) + (DRAFTS if mode == "TARGET_VERIFY" else 0)
            assert metadata.cache_seqlens_int32.tolist() == written.tolist()


@pytest.mark.parametrize(("mode", "tokens"), [("DECODE", 1), ("TARGET_VERIFY", DRAFTS), ("EXTEND", 2), ("MIXED", 2)])
def test_a_step_that_is_not_captured_is_prepared_without_a_schedule(backend, mode, tokens):
    backend.init_forward_metadata(make_batch(mode, [9, 130, 2]))
    assert_no_schedule(backend.forward_metadata, 3 * tokens)


def test_sglangs_own_kernel_call_would_fail_on_it_before_the_kernel(backend):
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    backend.init_forward_metadata(make_batch("DECODE", [9, 130]))
    backend.flashmla_kv_num_q_heads, backend.kv_cache_dim, backend.dsa_kv_cache_store_fp8 = 64, 656, True
    backend.flashmla_kv_format = None
    with pytest.raises(AttributeError, match="'NoSchedule' object has no attribute 'flashmla_metadata'"):
        DeepseekSparseAttnBackend._forward_flashmla_kv(
            backend,
            torch.zeros(2, 4, 576),
            torch.zeros(64, 1, 656, dtype=torch.uint8),
            512,
            1.0,
            SimpleNamespace(tp_q_head_num=4, head_dim=576),
            backend.forward_metadata,
            torch.zeros(2, TOPK, dtype=torch.int32),
        )


def test_nothing_else_reads_its_tensors():
    """Only the method that we replace, and what copies metadata between a draft's backends, which are sglang's."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    readers, makers = set(), set()
    for base in DeepseekSparseAttnBackend.__mro__[:-1]:
        for name, method in vars(base).items():
            if not inspect.isfunction(method):
                continue
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
                if not isinstance(node, ast.Attribute):
                    continue
                if node.attr == "_compute_flashmla_metadata":
                    makers.add(name)
                inner = node.value
                if isinstance(inner, ast.Attribute) and inner.attr == "flashmla_metadata":
                    readers.add((name, node.attr))
    assert readers == {
        ("_forward_flashmla_kv", "flashmla_metadata"),
        ("_forward_flashmla_kv", "num_splits"),
        ("_copy_base_replay_buffers", "flashmla_metadata"),
        ("_copy_base_replay_buffers", "num_splits"),
        ("_copy_base_replay_buffers", "slice"),
        ("_apply_cuda_graph_metadata", "slice"),
    }
    assert makers == {
        "init_forward_metadata",
        "init_cuda_graph_state",
        "_build_forward_metadata_cuda_graph",
        "_apply_cuda_graph_metadata",
        "_precompute_decode_mode",
        "_precompute_target_verify_mode",
    }
