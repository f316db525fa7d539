"""The embedded engine on Hopper: real FlashMLA and DeepGEMM, NCCL ranks, decode steps in a CUDA graph.

Run with several ranks on one GPU (NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1) or with a GPU per rank.
"""

from dataclasses import replace

import pytest
import torch

from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.launcher import run_ranks
from nsa_dcp.testing.recorded_generation import generate_recorded, record_selections

MAX_NEW_TOKENS = 4
# (length, seed) of prompts whose every next token wins by more than bf16 arithmetic moves it: searched for on a CPU,
# where the best two logits are at least 0.5 standard deviations apart, with either cache.
PROMPTS = {
    "tiny-glm-dsa": [(5, 5015), (64, 64024), (65, 65001), (130, 130027), (300, 300000)],
    "tiny-deepseek-v32": [(5, 5027), (64, 64015), (65, 65017), (130, 130020), (300, 300084)],
}
# DeepGEMM scores with 32 or 64 index heads.
INDEXER = {"index_n_heads": 32}
pytestmark = pytest.mark.gpu


def make_prompts(name: str) -> list[list[int]]:
    return [
        torch.randint(3, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        for length, seed in PROMPTS[name]
    ]


def job(
    directory, name: str, config: DcpConfig, kv_cache_dtype: str, graph: bool, dtype: str = "float32", chunk: int = 8192
) -> dict:
    return {
        "directory": directory,
        "config": config,
        "cache": CacheConfig(kv_cache_dtype, 8192),
        "dtype": dtype,
        "device_type": "cuda",
        "prompts": make_prompts(name),
        "max_new_tokens": MAX_NEW_TOKENS,
        "chunked_prefill_size": chunk,
        "static_batch": len(PROMPTS[name]) + 1 if graph else None,
    }


def run(num_ranks: int, jobs: list[dict]) -> list[list[dict]]:
    """Every job's results by rank, in one world of ranks: starting one takes longer than running it."""
    results = run_ranks(generate_recorded, num_ranks, (jobs,), "cuda", timeout_s=900)
    return [[rank[number] for rank in results] for number in range(len(jobs))]


@pytest.fixture(scope="module")
def directories(tiny_checkpoint):
    return {name: tiny_checkpoint(name, **INDEXER) for name in PROMPTS}


@pytest.fixture(scope="module")
def alone(directories):
    """What one rank does eagerly in float32 arithmetic, by model and cache."""
    keys = [(name, kv) for name in PROMPTS for kv in ("fp8_e4m3", "bfloat16")]
    jobs = [job(directories[name], name, DcpConfig(), kv, graph=False) for name, kv in keys]
    return {key: results[0] for key, results in zip(keys, run(1, jobs))}


def find_differences(what: str, prompts: list[list[int]], got: dict, want: dict) -> list[str]:
    """One line per prompt whose tokens differ, with the logits of the two tokens where they part."""
    lines = []
    for number, (a, b) in enumerate(zip(got["output_ids"], want["output_ids"])):
        if a != b:
            at = next(i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1])
            logits = want["logits"][number][at].float()
            gap = (logits[b[at]] - logits[a[at]]) / logits.std()
            where = f"{what}: prompt of {len(prompts[number])} tokens, token {at}"
            lines.append(f"{where}: {a[at]} for {b[at]}, {gap:.3f} standard deviations apart")
    return lines


def test_one_gpu_generates_what_the_unmodified_model_does_on_a_cpu(alone, directories, unmodified):
    differences = []
    for name in PROMPTS:
        for kv_cache_dtype in ("fp8_e4m3", "bfloat16"):
            got = alone[name, kv_cache_dtype]
            wanted = [
                unmodified(directories[name], "float32", tuple(prompt), MAX_NEW_TOKENS, kv_cache_dtype)
                for prompt in make_prompts(name)
            ]
            want = {"output_ids": [ids for ids, _ in wanted], "logits": [logits for _, logits in wanted]}
            differences += find_differences(f"{name} {kv_cache_dtype}", make_prompts(name), got, want)
    assert not differences, "\n".join(differences)


def test_selections_are_those_of_a_cpu_engine(directories):
    """Positions differ only where rounding, of DeepGEMM's FP8 queries first of all, moved a score across the cut."""
    cache = CacheConfig("fp8_e4m3", 8192)
    for name in PROMPTS:
        recorded = {}
        for device in ("cuda", "cpu"):
            args = (directories[name], "float32", cache, make_prompts(name), device)
            (recorded[device],) = run_ranks(record_selections, 1, args, device)
        assert len(recorded["cuda"]) == len(recorded["cpu"]) > 0
        for call, (got, want) in enumerate(zip(recorded["cuda"], recorded["cpu"])):
            assert got.shape == want.shape
            assert torch.equal((got >= 0).sum(-1), (want >= 0).sum(-1)), f"call {call}: another number selected"
            common = sum(len(set(a) & set(b) - {-1}) for a, b in zip(got.tolist(), want.tolist()))
            share = common / int((want >= 0).sum())
            print(f"{name}, indexer {call}: {share:.4f} of {want.shape[0]} rows' selections in common")
            # Of unrelated scores, 64 of 300 positions would agree by a fifth.
            assert share > 0.9, f"{name}, indexer {call}"


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.multi_gpu(n)) for n in (2, 4, 8)])
def test_tokens_agree_across_ranks_modes_caches_graph_and_eager(num_ranks, directories, alone):
    """Graphs are replayed with growing lengths, over batches that are padded, with selections that layers share."""
    tp = DcpConfig(tp_size=num_ranks, dcp_size=num_ranks)
    ag_rs = DcpConfig(tp_size=num_ranks, dcp_size=num_ranks, dcp_comm_backend="ag_rs", selection="replicated")
    cp = DcpConfig(tp_size=num_ranks, dcp_size=num_ranks, mode="cp")
    zigzag = DcpConfig(tp_size=num_ranks, dcp_size=num_ranks, mode="cp", cp_strategy="zigzag")
    sharded_tp, sharded_zigzag = (replace(config, index_keys="sharded") for config in (tp, zigzag))
    splits = [
        ("tp eager", tp, "fp8_e4m3", False, "float32", 8192),
        ("tp graph", tp, "fp8_e4m3", True, "float32", 8192),
        ("tp ag_rs graph, small chunks", ag_rs, "fp8_e4m3", True, "float32", 100),
        ("tp graph, bf16 cache", tp, "bfloat16", True, "float32", 8192),
        ("cp interleave graph", cp, "fp8_e4m3", True, "float32", 8192),
        ("cp zigzag eager, bf16 cache", zigzag, "bfloat16", False, "float32", 8192),
        ("sharded index keys, tp eager", sharded_tp, "fp8_e4m3", False, "float32", 100),
        ("sharded index keys, tp graph", sharded_tp, "fp8_e4m3", True, "float32", 8192),
        ("sharded index keys, cp zigzag graph, bf16 cache", sharded_zigzag, "bfloat16", True, "float32", 8192),
        ("bf16 arithmetic, tp eager", tp, "fp8_e4m3", False, "bfloat16", 8192),
        ("bf16 arithmetic, tp graph", tp, "fp8_e4m3", True, "bfloat16", 8192),
    ]
    named = [(name, split) for name in PROMPTS for split in splits]
    jobs = [job(directories[name], name, *split[1:]) for name, split in named]
    differences, eager_bf16 = [], {}
    for (name, split), wanted, results in zip(named, jobs, run(num_ranks, jobs)):
        what = f"{name}, {split[0]}"
        want = alone[name, split[2]]
        if split[4] == "bfloat16":
            # bf16 arithmetic may part from one rank's; a graph's replay must not part from the eager step.
            want = eager_bf16.setdefault(name, results[0])
        differences += find_differences(what, wanted["prompts"], results[0], want)
        for result in results:
            assert result["output_ids"] == results[0]["output_ids"], f"{what}: ranks disagree"
        tokens = sum(len(prompt) + MAX_NEW_TOKENS - 1 for prompt in wanted["prompts"])
        assert sum(result["usage"]["latent_rows"] for result in results) == tokens, what
    assert not differences, "\n".join(differences)
