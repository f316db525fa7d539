"""Whole models with sharded index keys, against the unmodified transformers model and against one rank alone.

Every rank's index-key cache is poisoned before it serves: a key that a rank does not own, read anywhere, is NaN.
"""

from dataclasses import replace

import pytest

from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.launcher import run_ranks
from nsa_dcp.testing.recorded_generation import generate_recorded, generate_statically
from tests.hf.test_equivalence import (
    DEEPSEEK,
    GLM,
    SPLITS,
    THREE,
    check_against_unmodified,
    check_selections,
    check_shares,
    make_prompts,
    run,
)

SHARDED = {
    name: replace(SPLITS[name], index_keys="sharded")
    for name in (
        "dcp1",
        "tp-dcp2-a2a",
        "tp-dcp2-ag_rs",
        "tp4-dcp2-a2a",
        "tp-dcp4-ag_rs",
        "tp-dcp8-a2a",
        "cp-dcp2-interleave",
        "cp-dcp2-zigzag",
        "cp-dcp4-zigzag",
        "cp-dcp8-interleave",
        "cp-dcp8-zigzag",
    )
}
SHARDED_THREE = {name: replace(config, index_keys="sharded") for name, config in THREE.items()}
ROUNDED = ("tp-dcp2-a2a", "tp4-dcp2-a2a", "tp-dcp8-a2a", "cp-dcp2-zigzag", "cp-dcp8-interleave")


@pytest.mark.parametrize("name", [GLM, DEEPSEEK])
@pytest.mark.parametrize("split", SHARDED)
def test_float32_logits_and_tokens_equal_the_unmodified_model(name, split, tiny_checkpoint, unmodified):
    directory, config = tiny_checkpoint(name), SHARDED[split]
    results = run(directory, config)
    check_against_unmodified(results, directory, unmodified, "float32", "float32", tolerance=1e-4)
    check_shares(results, config)


@pytest.mark.parametrize("name", [GLM, DEEPSEEK])
@pytest.mark.parametrize("split", SHARDED_THREE)
def test_a_group_of_three_equals_the_unmodified_model(name, split, tiny_checkpoint, unmodified):
    directory = tiny_checkpoint(name, num_attention_heads=6, num_key_value_heads=6)
    results = run(directory, SHARDED_THREE[split])
    check_against_unmodified(results, directory, unmodified, "float32", "float32", tolerance=1e-4)
    check_shares(results, SHARDED_THREE[split])


@pytest.mark.parametrize("name", [GLM, DEEPSEEK])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("split", ROUNDED)
def test_rounding_caches_give_what_the_unmodified_model_computes_from_rounded_ones(
    name, split, kv_cache_dtype, tiny_checkpoint, unmodified
):
    directory, config = tiny_checkpoint(name), SHARDED[split]
    results = run(directory, config, cache=CacheConfig(kv_cache_dtype, 4096), dtype="float64")
    check_against_unmodified(results, directory, unmodified, "float64", kv_cache_dtype, tolerance=1e-4)
    check_shares(results, config)


@pytest.mark.parametrize("name", [GLM, DEEPSEEK])
@pytest.mark.parametrize("split", ["tp-dcp2-a2a", "cp-dcp2-zigzag"])
def test_every_row_of_every_layer_selects_what_one_rank_does(name, split, tiny_checkpoint):
    """Chunks that end on a page and beside one; each rank attends to its own part of a decode step's selection."""
    job = {
        "directory": tiny_checkpoint(name),
        "cache": CacheConfig("fp8_e4m3", 4096),
        "dtype": "float64",
        "prompts": make_prompts(),
        "max_new_tokens": 6,
    }
    ((alone,),) = run_ranks(generate_recorded, 1, ([{**job, "config": DcpConfig(), "chunked_prefill_size": 8192}],))
    config = SHARDED[split]
    jobs = [{**job, "config": config, "chunked_prefill_size": size} for size in (8192, 64, 100)]
    for results in zip(*run_ranks(generate_recorded, config.tp_size, (jobs,)), strict=True):
        assert results[0]["output_ids"] == alone["output_ids"]
        check_selections(list(results), alone["selections"], config)


@pytest.mark.parametrize("name", [GLM, DEEPSEEK])
def test_padded_decode_steps_generate_what_unpadded_ones_do(name, tiny_checkpoint, unmodified):
    """What a CUDA graph replays: padding rows see nothing, and their answer is dropped on every rank alike."""
    prompts, config = [[5, 6, 7], list(range(3, 133)), [9] * 70], SHARDED["tp-dcp2-a2a"]
    job = (tiny_checkpoint(name), "float64", config, CacheConfig("fp8_e4m3", 2048), prompts, 5)
    for outputs in run_ranks(generate_statically, config.tp_size, job):
        for prompt, output in zip(prompts, outputs):
            assert output == unmodified(tiny_checkpoint(name), "float64", tuple(prompt), 5, "fp8_e4m3")[0]
