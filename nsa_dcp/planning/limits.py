"""Where a served step multiplies in 32 bits, and what is done about each product: the one table of those limits.

DCP feeds sglang's kernels more than stock sglang does: the heads of a whole group, dcp_size times the tokens of a pool.
A product of such sizes that a kernel keeps in an int wraps, and what is then read or written lies 4 GiB away, in memory
that is mapped as a rule: tokens are wrong and nobody is told. `LIMITS` has a row for every such product of sglang
0.5.23 and of the libraries that it calls, as its source computes it. Refusals, plans and documents take their numbers
from here.

Not in the table, because their offsets have 64 bits: sglang's cache writes (`set_mla_kv_buffer.cuh`, the Triton
writer's rows), its quantiser and index-key writes, the request table and the page tables of decode (int64 requests),
top-k (`topk_v2.cuh`, int64 strides), DeepGEMM's scores and TMA pages, FlashMLA's cache rows and bf16 output (TMA),
cuBLAS's batched products, and every kernel of `nsa_dcp_kernels`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from nsa_dcp.planning.served_format import (
    HEAD_BUCKETS,
    INDEX_HEAD_DIM,
    INDEX_PAGE_BYTES,
    KV_LORA_RANK,
    LATENT_DIM,
    MOST_SMS,
    PAGE_SIZE,
    padded_heads,
)

INT32_MAX = 2**31 - 1
# Of a token and head in sglang's exchange, in units of bfloat16: the result and a float32 log-sum-exp.
_PARTIAL_VALUES = KV_LORA_RANK + 2


class Answer(enum.Enum):
    """What is done about a limit."""

    REMOVED = "removed: nsa-dcp runs a kernel or a call without it"
    REFUSED = "refused: a command or a server that would pass it does not start"
    NOT_REACHED = "not reached: another limit, or memory, ends first"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a server multiplies. Sizes that a question does not touch may stay 0.

    Args:
        rows: query tokens of one prefill forward of an attention-DP shard, before context parallelism spreads them.
        local_heads: query heads of one rank's projections: all of them under context parallelism.
        attended_heads: query heads of an attention call: those of the DCP group, gathered.
        dcp_size: ranks of the DCP group.
        shards: attention-DP shards, whose rows MLPs and experts gather.
        spread: context parallelism in prefill.
        zigzag: its strategy; a batch with one short request is then not spread at all.
        draft: speculation, whose draft runs sglang's own backend.
        hidden_size, index_heads, index_topk, q_lora_rank: of the model.
        pool_tokens: slots of the widened pool without the reserved page.
        context: columns of the request table.
        requests: the most that run in one step.
        rows_per_request: rows of a request in a decode or verify step: the tokens that it verifies.
        unfused_topk: SGLANG_DSA_FUSE_TOPK=0.
    """

    rows: int = 0
    local_heads: int = 0
    attended_heads: int = 0
    dcp_size: int = 1
    shards: int = 1
    spread: bool = False
    zigzag: bool = False
    draft: bool = False
    hidden_size: int = 0
    index_heads: int = 0
    index_topk: int = 2048
    q_lora_rank: int = 0
    pool_tokens: int = 0
    context: int = 0
    requests: int = 0
    rows_per_request: int = 1
    unfused_topk: bool = False

    @property
    def rank_rows(self) -> int:
        """Rows of a chunk that one rank works on where the chunk is spread; all of them otherwise."""
        return -(-self.rows // self.dcp_size) if self.spread else self.rows

    @property
    def unspread_rows(self) -> int:
        """Rows of the largest chunk that every rank works on: a spread chunk of interleave has fewer than ranks."""
        return min(self.rows, self.dcp_size - 1) if self.spread and not self.zigzag else self.rows

    @property
    def step_rows(self) -> int:
        """Rows of the largest decode or verify step."""
        return self.requests * self.rows_per_request

    @property
    def pages(self) -> int:
        """Pages of index keys of a layer, the reserved one of each rank included."""
        return self.pool_tokens // PAGE_SIZE + self.dcp_size


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One product that a kernel computes in 32 bits.

    Args:
        name: what breaks, in a few words.
        kernel: whose it is.
        source: file and expression; sglang's files are relative to its package.
        size: the field of `Sizes` that is asked to be smaller.
        product: the largest value of the expression for given sizes; 0 where the kernel does not run.
        ceiling: the largest value that is right.
        answer: what is done.
        how: where that is done, or what ends first.
    """

    name: str
    kernel: str
    source: str
    size: str
    product: Callable[[Sizes], int]
    answer: Answer
    how: str
    ceiling: int = INT32_MAX

    def holds(self, sizes: Sizes) -> bool:
        """Whether the kernel is right for these sizes."""
        return self.product(sizes) <= self.ceiling

    def most(self, sizes: Sizes) -> int | None:
        """The largest value of the bounding size for which the kernel is right; None where nothing bounds it.

        Args:
            sizes: all the other sizes; the value of the bounding one does not count.
        """

        def holds_at(value: int) -> bool:
            bounding: dict[str, Any] = {self.size: value}
            return self.holds(replace(sizes, **bounding))

        return _largest(holds_at)


def _draft_rows(sizes: Sizes) -> int:
    return sizes.rank_rows if sizes.draft else 0


def _split_results(sizes: Sizes) -> int:
    bucket = padded_heads(sizes.local_heads)
    rows = _draft_rows(sizes)
    return (rows + MOST_SMS // (bucket // HEAD_BUCKETS[0])) * bucket * KV_LORA_RANK if rows else 0


LIMITS = (
    Limit(
        name="query concatenation",
        kernel="concat_mla_absorb_q_kernel",
        source="kernels/jit/csrc/elementwise/concat_mla.cuh: idx_1 * a_stride_1, int; the stride is rows * 576 after a "
        "gather of heads, rows * 512 after the absorbed projection",
        size="rows",
        product=lambda s: (
            (s.attended_heads - 1) * max(s.rank_rows, s.unspread_rows) * KV_LORA_RANK
            if s.spread
            else (s.attended_heads - 1) * s.rows * LATENT_DIM
        ),
        answer=Answer.REMOVED,
        how="sglang_plugin/attention/query_layout.py joins the two parts by torch past it",
    ),
    Limit(
        name="query concatenation of a draft",
        kernel="concat_mla_absorb_q_kernel",
        source="as above, in sglang's own backend: this rank's heads, a stride of rows * 512",
        size="rows",
        product=lambda s: max(s.local_heads - 1, 0) * _draft_rows(s) * KV_LORA_RANK,
        answer=Answer.REFUSED,
        how="sglang_plugin/admission/rules/chunk_rules.py",
    ),
    Limit(
        name="merge of the ranks' results",
        kernel="_dcp_lse_combine_kernel",
        source="kernels/ops/attention/dcp_kernels.py: i * recv_output_stride_N, a stride of rows * heads * 514",
        size="rows",
        product=lambda s: (s.dcp_size - 1) * s.rows * (s.attended_heads // s.dcp_size) * _PARTIAL_VALUES,
        answer=Answer.REFUSED,
        # One row past it triton 3.8's code was right all the same (H200, 2026-12-01): the compiler may widen, or not.
        how="sglang_plugin/admission/rules/chunk_rules.py; asked of ag_rs and interleave too, which have no lower one",
    ),
    Limit(
        name="log-sum-exps of the ag_rs merge",
        kernel="_correct_attn_cp_out_kernel",
        source="kernels/ops/attention/dcp_kernels.py: num_n_offsets * lses_stride_N + b_i32 * lses_stride_B + h_i32",
        size="rows",
        product=lambda s: s.dcp_size * s.rows * s.attended_heads,
        answer=Answer.NOT_REACHED,
        how="514 / dcp_size times past the merge",
    ),
    Limit(
        name="split results of a draft's attention",
        kernel="FlashMLA's splitkv_mla and combine",
        source="FlashMLA 9241ae3, csrc/params.h: int stride_o_accum_split; split_idx * stride_o_accum_split, and "
        "batch_idx * stride_o_b with fewer rows to spare",
        size="rows",
        product=_split_results,
        answer=Answer.REFUSED,
        how="sglang_plugin/admission/rules/chunk_rules.py; our own launches have at most 264 rows",
    ),
    Limit(
        name="hidden states",
        kernel="norms, activations and quantisers outside DCP",
        source="row * hidden_size in an int, in several kernels; experts get the rows of every attention-DP shard",
        size="rows",
        product=lambda s: s.rows * s.shards * s.hidden_size,
        answer=Answer.REFUSED,
        how="sglang_plugin/admission/rules/chunk_rules.py",
    ),
    Limit(
        name="quantised index queries",
        kernel="_act_quant_kernel",
        source="kernels/ops/quantization/act_quant_triton.py: rows[:, None] * N, rows and heads flattened (CP-DCP)",
        size="rows",
        product=lambda s: max(s.rank_rows, s.unspread_rows) * s.index_heads * INDEX_HEAD_DIM if s.spread else 0,
        answer=Answer.NOT_REACHED,
        how="past the merge",
    ),
    Limit(
        name="selections of a chunk",
        kernel="FlashMLA's bf16 kernel; transform_index_page_table_prefill_kernel",
        source="FlashMLA, sm90/prefill/sparse/phase1.cuh: s_q_idx * params.stride_indices_s_q; "
        "kernels/ops/attention/dsa/transform_index.py: token_indices * topk_indices_stride_0",
        size="rows",
        product=lambda s: s.rows * s.index_topk,
        answer=Answer.NOT_REACHED,
        how="past the merge, and past the hidden states",
    ),
    Limit(
        name="latents that are written",
        kernel="set_mla_kv_buffer_kernel",
        source="kernels/ops/kvcache/mla_buffer.py: pid_loc * nope_stride, a slice of the fused down-projection",
        size="rows",
        product=lambda s: s.rows * (s.q_lora_rank + LATENT_DIM),
        answer=Answer.NOT_REACHED,
        how="past the hidden states; on Hopper the writer is set_mla_kv_buffer.cuh, int64",
    ),
    Limit(
        name="index-key gather, pages",
        kernel="_get_k_and_s_triton_kernel",
        source="kernels/ops/kvcache/dsa_index_k_cache.py: page_index * buf_numel_per_page + "
        "s_src_token_offset, int32 pages",
        size="pool_tokens",
        product=lambda s: s.pages * INDEX_PAGE_BYTES - 4,
        answer=Answer.REMOVED,
        how="sglang_plugin/selection/index_key_gather.py: gather_index_pages, 64-bit offsets",
    ),
    Limit(
        name="index-key gather, blocks of a context",
        kernel="_get_k_and_s_triton_kernel",
        source="kernels/ops/kvcache/dsa_index_k_cache.py: grid axis 1, (max_seq_len + 255) // 256",
        size="context",
        product=lambda s: -(-s.context // 256),
        ceiling=65_535,
        answer=Answer.REMOVED,
        how="sglang_plugin/selection/index_key_gather.py: blocks lie on axis 0",
    ),
    Limit(
        name="slots",
        kernel="the request table, selections, page tables",
        source="mem_cache/memory_pool.py: ReqToTokenPool.req_to_token, torch.int32",
        size="pool_tokens",
        product=lambda s: s.pages * PAGE_SIZE - 1,
        answer=Answer.REFUSED,
        how="sglang_plugin/admission/rules/pool_limits.py; plan shows the cap",
    ),
    Limit(
        name="page table of an unfused selection",
        kernel="transform_index_page_table_decode_kernel",
        source="kernels/ops/attention/dsa/transform_index.py: req_id * page_table_row_stride, SGLANG_DSA_FUSE_TOPK=0",
        size="requests",
        product=lambda s: max(s.step_rows - 1, 0) * s.context if s.unfused_topk else 0,
        answer=Answer.REFUSED,
        how="sglang_plugin/admission/rules/pool_limits.py",
    ),
    Limit(
        name="page tables of speculation's graphs",
        kernel="fused_metadata_copy_kernel",
        source="kernels/jit/csrc/elementwise/fused_metadata_copy.cuh: int page_table_elements = page_indices_rows * "
        "max_seqlen_k; row * page_table_1_stride",
        size="requests",
        product=lambda s: s.step_rows * s.context if s.draft else 0,
        ceiling=INT32_MAX - 1024 * 256,  # `i += total_threads` must not pass it either
        answer=Answer.REFUSED,
        how="sglang_plugin/admission/rules/pool_limits.py",
    ),
    Limit(
        name="sums of lengths",
        kernel="_fused_dsa_decode_metadata_kernel",
        source="kernels/ops/attention/dsa/metadata.py: tl.cumsum(seq_i32), cu_seqlens_k",
        size="requests",
        product=lambda s: s.requests * s.context,
        answer=Answer.NOT_REACHED,
        how="flashmla_kv reads no cu_seqlens_k; in prefill the gathered keys, 132 bytes each, end first",
    ),
    Limit(
        name="rows of the scoring kernel's schedule",
        kernel="DeepGEMM's paged_mqa_logits metadata",
        source="DeepGEMM, smxx_paged_mqa_logits_metadata: a length of each row in 227 KiB of shared memory",
        size="requests",
        product=lambda s: s.step_rows,
        ceiling=58_112,
        answer=Answer.NOT_REACHED,
        how="requests times drafts, and sglang runs at most 4,096 requests by default; past it the launch fails",
    ),
)


def limits_of(size: str, *answers: Answer) -> tuple[Limit, ...]:
    """Rows of the table that a size bounds, with one of the given answers."""
    return tuple(limit for limit in LIMITS if limit.size == size and limit.answer in answers)


def tightest(limits: Iterable[Limit], sizes: Sizes) -> tuple[int, Limit] | None:
    """The smallest bound among limits on one size, and whose it is; None where nothing bounds it."""
    bounds = [(most, limit) for limit in limits if (most := limit.most(sizes)) is not None]
    return min(bounds, key=lambda bound: bound[0]) if bounds else None


def largest_chunk(sizes: Sizes) -> tuple[int, Limit] | None:
    """The most rows that one prefill forward may have, and what ends there; `sizes.rows` does not count."""
    return tightest(limits_of("rows", Answer.REFUSED), sizes)


def most_requests(sizes: Sizes) -> tuple[int, Limit] | None:
    """The most requests that one step may have, and what ends there; `sizes.requests` does not count."""
    return tightest(limits_of("requests", Answer.REFUSED), sizes)


def largest_pool(dcp_size: int) -> tuple[int, Limit]:
    """The most tokens that a pool of `dcp_size` ranks may hold, whole pages of each, and what ends there."""
    bound = tightest(limits_of("pool_tokens", Answer.REFUSED), Sizes(dcp_size=dcp_size))
    if bound is None:
        raise AssertionError("a pool's slots are numbered in 32 bits, so something bounds them")
    most, limit = bound
    step = PAGE_SIZE * dcp_size
    return most // step * step, limit


def _largest(holds: Callable[[int], bool], unbounded: int = 1 << 40) -> int | None:
    """The largest value that holds, of a condition that ends once; None where it does not end below `unbounded`."""
    if holds(unbounded):
        return None
    low, high = 0, unbounded
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
