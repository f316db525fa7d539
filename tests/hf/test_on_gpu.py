"""The embedded engine on Hopper: real FlashMLA and DeepGEMM, NCCL ranks, decode steps in a CUDA graph.

Run with several ranks on one GPU (NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1) or with a GPU per rank.
"""

import pytest
import torch

from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.launcher import run_ranks
from nsa_dcp.testing.recorded_generation import generate_recorded, record_selections

MAX_NEW_TOKENS = 4
# (length, seed) of prompts whose every next token wins by more than bf16 arithmetic moves it: searched for on a CPU,
# where the best two logits are at least 0.25 standard deviations apart, with either cache.
PROMPTS = {
    "tiny-glm-dsa": [(5, 5015), (64, 64014), (65, 65000), (130, 130001), (300, 300000)],
    "tiny-deepseek-v32": [(5, 5008), (64, 64005), (65, 65006), (130, 130014), (300, 300020)],
}
# DeepGEMM scores with 32 or 64 index heads.
INDEXER = {"index_n_heads": 32}
pytestmark = pytest.mark.gpu


def make_prompts(name: str) -> list[list[int]]:
    return [
        torch.randint(3, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        for length, seed in PROMPTS[name]
    ]


def job(name: str, config: DcpConfig, kv_cache_dtype: str, graph: bool, chunk: int = 8192) -> dict:
    return {
        "config": config,
        "cache": CacheConfig(kv_cache_dtype, 8192),
        "dtype": "bf16",
        "device_type": "cuda",
        "prompts": make_prompts(name),
        "max_new_tokens": MAX_NEW_TOKENS,
        "chunked_prefill_size": chunk,
        "static_batch": len(PROMPTS[name]) + 1 if graph else None,
    }


def run(directory, config: DcpConfig, jobs: list[dict]) -> list[list[dict]]:
    """Every job's results by rank, in one world of ranks: starting one takes longer than running it."""
    results = run_ranks(generate_recorded, config.tp_size, (directory, jobs), "cuda", timeout_s=120)
    return [[rank[number] for rank in results] for number in range(len(jobs))]


@pytest.fixture(scope="module")
def alone(tiny_checkpoint):
    """What one rank generates eagerly, per model and cache."""
    known = {}

    def get(name: str, kv_cache_dtype: str) -> list[list[int]]:
        if name not in known:
            jobs = [job(name, DcpConfig(), kv, graph=False) for kv in ("fp8_e4m3", "bf16")]
            results = run(tiny_checkpoint(name, **INDEXER), DcpConfig(), jobs)
            known[name] = dict(zip(("fp8_e4m3", "bf16"), (result[0]["output_ids"] for result in results)))
        return known[name][kv_cache_dtype]

    return get


@pytest.mark.parametrize("name", PROMPTS)
def test_one_gpu_generates_what_the_unmodified_model_does_on_a_cpu(name, alone, tiny_checkpoint, unmodified):
    for kv_cache_dtype in ("fp8_e4m3", "bf16"):
        for prompt, output in zip(make_prompts(name), alone(name, kv_cache_dtype)):
            want, _ = unmodified(
                tiny_checkpoint(name, **INDEXER), "float32", tuple(prompt), MAX_NEW_TOKENS, kv_cache_dtype
            )
            assert output == want, f"{kv_cache_dtype}, prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("name", PROMPTS)
def test_selections_are_those_of_a_cpu_engine(name, tiny_checkpoint):
    """The same bf16 model on both: positions differ only where rounding moved a score across the cut."""
    jobs = (tiny_checkpoint(name, **INDEXER), "bf16", CacheConfig("fp8_e4m3", 8192), make_prompts(name))
    (on_gpu,) = run_ranks(record_selections, 1, (*jobs, "cuda"), "cuda")
    (on_cpu,) = run_ranks(record_selections, 1, (*jobs, "cpu"), "cpu")
    assert len(on_gpu) == len(on_cpu) > 0
    for call, (got, want) in enumerate(zip(on_gpu, on_cpu)):
        assert got.shape == want.shape
        assert torch.equal((got >= 0).sum(-1), (want >= 0).sum(-1)), f"call {call}: another number selected"
        common = sum(len(set(a) & set(b) - {-1}) for a, b in zip(got.tolist(), want.tolist()))
        share = common / max(1, int((want >= 0).sum()))
        print(f"{name} call {call}: {share:.4f} of {want.shape[0]} rows' selections in common")
        # Of unrelated scores, 64 of 300 positions would agree by a fifth.
        assert share > 0.93, f"call {call}"


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.multi_gpu(n)) for n in (2, 4, 8)])
def test_tokens_agree_across_ranks_modes_caches_graph_and_eager(name, num_ranks, tiny_checkpoint, alone):
    """Graphs are replayed with growing lengths, over batches that are padded, with selections that layers share."""
    tp = DcpConfig(tp_size=num_ranks, dcp_size=num_ranks)
    ag_rs = DcpConfig(tp_size=num_ranks, dcp_size=num_ranks, dcp_comm_backend="ag_rs", selection="replicated")
    cp = DcpConfig(tp_size=num_ranks, dcp_size=num_ranks, mode="cp")
    zigzag = DcpConfig(tp_size=num_ranks, dcp_size=num_ranks, mode="cp", cp_strategy="zigzag")
    jobs = [
        job(name, tp, "fp8_e4m3", graph=False),
        job(name, tp, "fp8_e4m3", graph=True),
        job(name, ag_rs, "fp8_e4m3", graph=True, chunk=100),
        job(name, tp, "bf16", graph=True),
        job(name, cp, "fp8_e4m3", graph=True),
        job(name, zigzag, "bf16", graph=False),
    ]
    for wanted, results in zip(jobs, run(tiny_checkpoint(name, **INDEXER), tp, jobs)):
        what = f"{wanted['config']}, {wanted['cache']}, static batch {wanted['static_batch']}"
        for result in results:
            assert result["output_ids"] == alone(name, wanted["cache"].kv_cache_dtype), what
        tokens = sum(len(prompt) + MAX_NEW_TOKENS - 1 for prompt in wanted["prompts"])
        assert sum(result["usage"]["latent_rows"] for result in results) == tokens
