"""sglang's own metadata of decode and verify steps on a CPU, captured and refreshed as its graph runner does, or made
for one step; and a stand-in for a CUDA graph."""

from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

PAGE = 64
HOST_SYNCS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero)


class Graph(TorchDispatchMode):
    """Records the operations of a `with` block, and runs them again on the same memory.

    As in a CUDA graph, whatever Python decided is fixed, and reading a value on the host is an error.
    """

    def __init__(self):
        super().__init__()
        self.nodes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in HOST_SYNCS, f"{func} reads a value on the host"
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.nodes.append((func, args, kwargs, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.nodes:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                # A view and an in-place operation give the memory that they gave before.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RelayedGather:
    """An all-gather among ranks that run one after the other: in a first round every rank's part is kept, in a second
    all are handed out. A collective for `Graph`: not one of the operations that it is made of."""

    def __init__(self, world_size):
        self.world_size, self.parts = world_size, {}

    def rank(self, rank):
        def relay(output, part):
            assert output.is_contiguous()
            assert output.shape[0] == self.world_size * part.shape[0]
            self.parts[rank] = part.clone()
            output.copy_(torch.cat([self.parts.get(r, part) for r in range(self.world_size)]))

        def all_gather_into_tensor(output, part):
            graph = _get_current_dispatch_mode()
            with _disable_current_modes():
                relay(output, part)
            if graph is not None:
                graph.nodes.append((relay, (output, part), {}, None))

        return SimpleNamespace(
            world_size=self.world_size, rank_in_group=rank, all_gather_into_tensor=all_gather_into_tensor
        )


def make_metadata_backend(num_requests, max_len, topk, topk_backend, fused, backend_class=None, num_draft_tokens=None):
    """Return sglang's backend as far as metadata goes, its requests' pages dealt out at random.

    Args:
        num_requests: the most that a batch holds.
        max_len: the longest context.
        topk: width of a selection.
        topk_backend: sglang's DSATopKBackend.
        fused: whether the top-k kernel maps positions to slots.
        backend_class: ours, with flashmla_kv for decode; sglang's own if None, which would then plan on a GPU.
        num_draft_tokens: rows that a verify step has of each request; None without speculation.
    """
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    backend = object.__new__(backend_class or DeepseekSparseAttnBackend)
    width = -(-max_len // PAGE)
    pages = torch.randperm(num_requests * width, generator=torch.Generator().manual_seed(4)).view(num_requests, width)
    positions = torch.arange(width * PAGE)
    backend.req_to_token = (pages[:, positions // PAGE] * PAGE + positions % PAGE).to(torch.int32)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=backend.req_to_token)
    backend.device, backend.physical_page_size, backend.dsa_index_kpool = "cpu", PAGE, 1
    backend.dsa_index_topk, backend.dsa_topk_backend, backend.use_fused_topk = topk, topk_backend, fused
    backend.hisparse_coordinator = backend._kv_shard_pool = None
    backend.speculative_num_draft_tokens = num_draft_tokens
    backend.experimental_kpool_metadata_fusion = backend.use_mha = backend.enable_auto_select_prefill_impl = False
    backend.dsa_prefill_impl = "flashmla_kv"
    backend.dsa_decode_impl = "flashmla_kv" if backend_class else "another"
    backend._is_in_breakable_cuda_graph = backend._is_in_tc_piecewise_cuda_graph = lambda: False
    backend._get_device_sm, backend._is_blackwell = lambda: 90, lambda: False
    backend._memory_saver_adapter = SimpleNamespace(region=lambda **_: torch.no_grad())
    backend._arange_buf = torch.arange(num_requests + 1, dtype=torch.int32)
    backend._fused_decode_metadata, backend._fused_verify_metadata = fill_decode_metadata, fill_verify_metadata
    backend.dsa_kv_cache_store_fp8 = True
    backend.init_cuda_graph_state(num_requests, num_requests * (num_draft_tokens or 1))
    return backend


def fill_decode_metadata(
    seq_lens,
    req_pool_indices,
    req_to_token,
    cache_seqlens,
    cu_seqlens_k,
    page_table_1,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    real_page_table,
    bs,
    max_len,
    dsa_index_topk,
    physical_page_size,
):
    """sglang's kernel of the same purpose: it writes rows over their live prefix alone."""
    cache_seqlens.copy_(seq_lens)
    dsa_cache_seqlens.copy_(seq_lens.clamp(max=dsa_index_topk))
    for total, lengths in ((cu_seqlens_k, cache_seqlens), (dsa_cu_seqlens_k, dsa_cache_seqlens)):
        total[1:].copy_(lengths.cumsum(0))
    fill_page_tables(req_to_token, req_pool_indices, seq_lens, max_len, page_table_1, real_page_table)


def fill_verify_metadata(
    seq_lens,
    req_pool_indices,
    req_to_token,
    cache_seqlens,
    cu_seqlens_k,
    page_table_1,
    seqlens_expanded,
    dsa_cache_seqlens,
    dsa_cu_seqlens_k,
    real_page_table,
    bs,
    max_seqlen_k,
    dsa_index_topk,
    physical_page_size,
    next_n,
    paged_mqa_ctx_lens_2d,
):
    """sglang's kernel of the same purpose. Every row of a request has the whole request's pages."""
    assert paged_mqa_ctx_lens_2d is None
    cache_seqlens.copy_(seq_lens + next_n)
    seqlens_expanded.copy_(expand_lengths(torch.full((bs,), next_n), cache_seqlens, bs * next_n, next_n))
    dsa_cache_seqlens.copy_(seqlens_expanded.clamp(max=dsa_index_topk))
    for total, lengths in ((cu_seqlens_k, cache_seqlens), (dsa_cu_seqlens_k, dsa_cache_seqlens)):
        total[1:].copy_(lengths.cumsum(0))
    requests, lengths = (values.repeat_interleave(next_n) for values in (req_pool_indices, cache_seqlens))
    fill_page_tables(req_to_token, requests, lengths, max_seqlen_k, page_table_1, real_page_table)


def fill_page_tables(req_to_token, requests, lengths, max_len, page_table_1, real_page_table):
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        slots = req_to_token[request, : min(length, max_len)]
        if page_table_1 is not None:
            page_table_1[row, : len(slots)] = slots
        pages = slots[::PAGE] // PAGE
        real_page_table[row, : len(pages)] = pages


def expand_lengths(extend_seq_lens, seq_lens, total_len, max_q_len):
    """[total_len] int32, the context of each row of each request: sglang's `seqlens_expand_triton`."""
    ranges = [
        torch.arange(length - rows + 1, length + 1)
        for rows, length in zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
    ]
    expanded = torch.cat(ranges).to(torch.int32)
    assert (len(expanded), int(extend_seq_lens.max())) == (total_len, max_q_len)
    return expanded


def prepare_step(backend, requests, seq_lens, capturing=False, mode="DECODE", captured=True):
    """Have sglang make, or refresh, the metadata of a batch; return the indexer's.

    Args:
        backend: of `make_metadata_backend`.
        requests, seq_lens: [B] int64 and int32. A verify step's lengths are those before its own rows.
        capturing: the runner's flag while it captures.
        mode: DECODE or TARGET_VERIFY.
        captured: False for a step that runs without a graph, whose metadata are new.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(
        batch_size=len(seq_lens),
        req_pool_indices=requests,
        seq_lens=seq_lens,
        seq_lens_cpu=None,
        seq_lens_sum=None,
        global_num_tokens_cpu=None,
        forward_mode=ForwardMode[mode],
        spec_info=None,
    )
    if captured:
        backend.init_forward_metadata_out_graph(batch, in_capture=capturing)
    else:
        backend.init_forward_metadata(batch)
    return backend.get_indexer_metadata(0, batch)
