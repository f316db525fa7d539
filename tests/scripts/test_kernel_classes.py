"""A trace's kernels by class, and how much communication they hide, on synthetic traces."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.benchmarks.servers import kernel_classes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL all-reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL all-gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)", "NCCL reduce-scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "NCCL send and receive, all-to-all"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(...)", "custom all-reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>", "custom all-reduce"),
        ("_merge_packed_kernel", "partials: packed, merged"),
        ("_dcp_pack_a2a_send_kernel", "partials: packed, merged"),
        ("void deep_gemm::sm90_fp8_paged_mqa_logits<128u>(...)", "index scores"),
        ("fused_moe_kernel", "experts and routing"),
        ("void topkGatingSigmoid<float, 8>(...)", "experts and routing"),
        ("void topk_transform_decode_kernel(...)", "selection"),
        ("_select_kernel", "selection"),
        ("_localize_kernel", "localise and schedule"),
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<...>", "attention"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "matrix products"),
        ("_scatter_index_keys_kernel", "cache writes and quantisation"),
        ("void at::native::vectorized_elementwise_kernel<4>(...)", "other"),
    ],
)
def test_a_kernel_s_name_tells_its_class(name, expected):
    assert kernel_classes.classify(name) == expected


def kernel(name, start, duration):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration}


def test_communication_beside_a_kernel_is_hidden_and_alone_is_exposed():
    kernels = [
        kernel("nvjet_a", 0, 10),
        # 4 us beside the product, then 6 alone; 5 us without anything before the next product.
        kernel("ncclDevKernel_AllReduce_Sum", 6, 10),
        kernel("nvjet_b", 21, 9),
        kernel("cross_device_reduce_1stage", 22, 3),
    ]
    times, whole, idle = kernel_classes.sum_classes(kernels)
    assert (whole, idle) == (30, 5)
    assert (times["NCCL all-reduce"].total, times["NCCL all-reduce"].exposed) == (10, 6)
    assert (times["custom all-reduce"].total, times["custom all-reduce"].exposed) == (3, 0)
    assert times["matrix products"] == kernel_classes.ClassTime(2, 19, None)


def test_communication_does_not_hide_communication():
    kernels = [kernel("ncclDevKernel_AllGather", 0, 4), kernel("ncclDevKernel_SendRecv", 0, 4)]
    times, _, _ = kernel_classes.sum_classes(kernels)
    assert [one.exposed for one in times.values()] == [4, 4]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda s: (s[0], s[0] + s[1])), max_size=12)


@given(first=SPANS, second=SPANS)
def test_lengths_and_overlaps_are_those_of_sets_of_points(first, second):
    def points(spans):
        return {point for start, end in spans for point in range(start, end)}

    merged = [kernel_classes.merge_intervals(spans) for spans in (first, second)]
    assert kernel_classes.length_of(merged[0]) == len(points(first))
    assert kernel_classes.overlap(*merged) == len(points(first) & points(second))


def test_the_command_reports_each_rank_s_file(tmp_path):
    paths = []
    for rank in range(2):
        events = [kernel("nvjet_a", 0, 10), kernel("ncclDevKernel_AllGather", 10, 10 * (rank + 1))]
        paths.append(tmp_path / f"TP-{rank}.trace.json.gz")
        with gzip.open(paths[-1], "wt") as file:
            json.dump({"traceEvents": events}, file)
    command = [sys.executable, "-m", "scripts.benchmarks.servers.summarise_trace", *map(str, paths), "--steps", "2"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "TP-0.trace.json.gz" in text and "TP-1.trace.json.gz" in text
    assert "| NCCL all-gather | 0.5 | 5.0 | 50.0% | 5.0 | 0.0 |" in text
    assert "| NCCL all-gather | 0.5 | 10.0 | 66.7% | 10.0 | 0.0 |" in text


def test_a_trace_without_kernels_says_so():
    assert kernel_classes.format_classes([], 8) == ["no kernels"]
