"""Models with KV heads under every useful split, against the unmodified transformers model; caches of NaN elsewhere.

float32: same tokens, logits within 1e-4 at every step. Rounding caches: arithmetic in float64, same tokens, logits
within 1e-9 of a model whose cache rounds the same way; 1e-5 where the model's own router rounds to float32, since a
difference in the last bit there may turn the rounding of a cached value.
"""

import pytest
import torch

from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.hf.tiny import KV_HEAD_NAMES
from nsa_dcp.launcher import run_ranks
from nsa_dcp.testing.kv_head_generation import KvHeadRun, forward_recorded, generate_poisoned

# Shorter than any group, around a page and a widened page, over several.
PROMPT_LENS = (1, 2, 3, 64, 65, 257)
NEW = 3
ROUTES_IN_FLOAT32 = ("tiny-glm4-moe", "tiny-minimax-m2")
# The tiny models have 2 KV heads: what is useful at each tp.
SPLITS = {
    "tp1": DcpConfig(),
    "tp2": DcpConfig(tp_size=2),
    "tp4": DcpConfig(tp_size=4),
    "tp4-dcp2-a2a": DcpConfig(tp_size=4, dcp_size=2),
    "tp8-dcp2-ag_rs": DcpConfig(tp_size=8, dcp_size=2, dcp_comm_backend="ag_rs"),
    "tp8-dcp4-a2a": DcpConfig(tp_size=8, dcp_size=4),
}
# With one KV head all ranks are one group; three ranks are no power of two.
ONE_HEAD = {
    "tp2-dcp2-ag_rs": (16, DcpConfig(tp_size=2, dcp_size=2, dcp_comm_backend="ag_rs")),
    "tp3-dcp3-a2a": (12, DcpConfig(tp_size=3, dcp_size=3)),
    "tp8-dcp8-a2a": (16, DcpConfig(tp_size=8, dcp_size=8)),
}


def make_prompts(lens=PROMPT_LENS):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 1024, (n,), generator=generator).tolist() for n in lens]


def check(results, run, unmodified, kv_cache_dtype, tolerance):
    for prompt, output, logits in zip(run.prompts, results[0]["output_ids"], results[0]["logits"]):
        want, want_logits = unmodified(run.directory, run.dtype, tuple(prompt), run.max_new_tokens, kv_cache_dtype)
        assert output == want, f"prompt of {len(prompt)} tokens"
        assert (logits - want_logits).abs().max() <= tolerance * want_logits.abs().max()
    for result in results:
        assert result["output_ids"] == results[0]["output_ids"]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(result["logits"], results[0]["logits"]))


def check_rows(results, run):
    """Each rank holds the rows of its own tokens and no others, in every layer; told with plain integers."""
    dcp_size = run.config.dcp_size
    for rank, result in enumerate(results):
        owned = set()
        for pages, tokens in zip(result["pages"], result["tokens"]):
            for position in range(tokens):
                slot = pages[position // (64 * dcp_size)] * 64 * dcp_size + position % (64 * dcp_size)
                if slot % dcp_size == rank % dcp_size:
                    owned.add(slot // dcp_size)
        assert all(written == owned for written in result["written"])
        assert result["usage"]["kv_rows"] == len(owned)


# Every model under a group of two and of four, one under everything.
CASES = [(name, split) for name in KV_HEAD_NAMES for split in ("tp4-dcp2-a2a", "tp8-dcp4-a2a")]
CASES += [("tiny-qwen3-moe", split) for split in SPLITS if ("tiny-qwen3-moe", split) not in CASES]


def poisoned_run(directory, config, chunk, kv_cache_dtype="float32", dtype="float32", **more):
    cache = CacheConfig(kv_cache_dtype, 4096)
    return KvHeadRun(directory, config, cache, dtype, make_prompts(), NEW, chunk, **more)


@pytest.mark.parametrize(("name", "split"), CASES)
def test_float32_tokens_and_logits_equal_the_unmodified_models(name, split, tiny_checkpoint, unmodified):
    """All prompts at once, and in chunks of 48 tokens, where a chunk holds the ends and beginnings of several."""
    config = SPLITS[split]
    runs = [poisoned_run(tiny_checkpoint(name), config, chunk) for chunk in (8192, 48)]
    for results, run in zip(zip(*run_ranks(generate_poisoned, config.tp_size, (runs,))), runs):
        check(results, run, unmodified, "float32", 1e-4)
        check_rows(results, run)


@pytest.mark.parametrize("name", KV_HEAD_NAMES)
def test_a_rounding_cache_rounds_each_value_once_however_the_work_is_split(name, tiny_checkpoint, unmodified):
    config = SPLITS["tp4-dcp2-a2a"]
    caches = [("bfloat16", 8192), ("bfloat16", 48), ("fp8_e4m3", 8192), ("fp8_e4m3", 48)]
    runs = [poisoned_run(tiny_checkpoint(name), config, chunk, dtype, "float64") for dtype, chunk in caches]
    for results, run in zip(zip(*run_ranks(generate_poisoned, config.tp_size, (runs,))), runs):
        check(results, run, unmodified, run.cache.kv_cache_dtype, 1e-5 if name in ROUTES_IN_FLOAT32 else 1e-9)
        check_rows(results, run)


@pytest.mark.parametrize("split", ONE_HEAD)
def test_one_kv_head_over_all_ranks(split, tiny_checkpoint, unmodified):
    heads, config = ONE_HEAD[split]
    directory = tiny_checkpoint("tiny-llama", num_key_value_heads=1, num_attention_heads=heads, hidden_size=16 * heads)
    run = poisoned_run(directory, config, 100)
    results = [ranks[0] for ranks in run_ranks(generate_poisoned, config.tp_size, ([run],))]
    check(results, run, unmodified, "float32", 1e-4)
    check_rows(results, run)


def test_a_model_with_a_kv_head_for_every_query_head_runs_without_dcp(tiny_checkpoint, unmodified):
    """MHA: nothing is copied, so nothing can be spread, and tensor parallelism alone must still be right."""
    directory = tiny_checkpoint("tiny-qwen3", num_key_value_heads=16)
    run = poisoned_run(directory, DcpConfig(tp_size=4), 48)
    check([ranks[0] for ranks in run_ranks(generate_poisoned, 4, ([run],))], run, unmodified, "float32", 1e-4)


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-minimax-m2"])
def test_steps_of_every_shape_continue_what_is_cached(name, tiny_checkpoint, unmodified):
    """Prefixes of 0 beside others, verify-like rows, one token beside a chunk, ranks that own nothing of a request."""
    prompts = make_prompts((150, 9, 70))
    steps = [{0: 1}, {0: 70, 1: 1}, {0: 1, 1: 4, 2: 1}, {1: 1, 2: 60}, {0: 5, 2: 5}, {0: 60, 1: 3}, {0: 13, 2: 4}]
    config = SPLITS["tp8-dcp4-a2a"]
    run = KvHeadRun(tiny_checkpoint(name), config, CacheConfig("float32", 2048), "float32", prompts, steps=steps)
    for (logits,) in run_ranks(forward_recorded, config.tp_size, ([run],)):
        for number, prompt in enumerate(prompts):
            ends = torch.tensor([step[number] for step in steps if number in step]).cumsum(0).tolist()
            assert ends[-1] == len(prompt)
            for end, row in zip(ends, logits[number]):
                want = unmodified(run.directory, "float32", tuple(prompt[:end]), 1, "float32")[1][0]
                assert (row - want).abs().max() <= 1e-4 * want.abs().max()


def test_padded_decode_steps_generate_what_unpadded_ones_do(tiny_checkpoint, unmodified):
    """Rows of a context of 0 tokens stand behind the real ones, and write nothing."""
    config = SPLITS["tp4-dcp2-a2a"]
    directory = tiny_checkpoint("tiny-qwen3")
    run = poisoned_run(directory, config, 8192, static_batch=len(PROMPT_LENS) + 3)
    results = [ranks[0] for ranks in run_ranks(generate_poisoned, config.tp_size, ([run],))]
    check(results, run, unmodified, "float32", 1e-4)
    check_rows(results, run)


def test_a_cached_prefix_is_shared_by_a_second_request(tiny_checkpoint, unmodified):
    """As a prefix cache does: the second request's page table begins with the first one's whole page."""
    from nsa_dcp.hf.checkpoint import load_model
    from nsa_dcp.hf.engine import Engine, Request
    from nsa_dcp.hf.ranks import Ranks
    from nsa_dcp.hf.step import Extend

    directory = tiny_checkpoint("tiny-glm4-moe")
    model = load_model(directory, "float32", torch.device("cpu"))
    engine = Engine(model, Ranks(DcpConfig(), 0, None, None), CacheConfig("float32", 1024))
    (prompt, tail) = make_prompts((80, 10))
    first, second = Request(torch.tensor(prompt)), Request(torch.tensor(prompt[:64] + tail))
    for request in (first, second):
        assert engine.admit(request, 1)
    engine.forward([Extend(first.prompt_ids, 0, first.pages)])
    pages = [first.pages[0], *second.pages[1:]]
    (row,) = engine.forward([Extend(second.prompt_ids[64:], 64, pages)])
    want = unmodified(directory, "float32", tuple(prompt[:64] + tail), 1, "float32")[1][0]
    assert (row - want).abs().max() <= 1e-4 * want.abs().max()


class TestRefusals:
    """One sentence and exit status 2, before a rank starts."""

    def refused(self, generate, directory, *words):
        status, error, started = generate(directory, *words)
        assert (status, started) == (2, False), error
        assert error.count("\n") == 1
        return error

    def test_sizes_that_gain_nothing(self, generate, tiny_checkpoint):
        error = self.refused(generate, tiny_checkpoint("tiny-qwen3"), "--tp-size", "2", "--dcp-size", "2")
        assert "nothing is gained there, got dcp_size 2 with 2 KV heads on 2 ranks; from tp_size 4 on" in error
        error = self.refused(generate, tiny_checkpoint("tiny-qwen3"), "--tp-size", "8", "--dcp-size", "8")
        assert "so that a DCP group holds one KV head" in error and "2, 4 would work" in error

    def test_token_sharded_prompts(self, generate, tiny_checkpoint):
        words = ("--tp-size", "4", "--dcp-size", "4", "--mode", "cp")
        assert "mode must be tp for models with KV heads" in self.refused(
            generate, tiny_checkpoint("tiny-llama"), *words
        )

    def test_a_gpu(self, generate, tiny_checkpoint):
        words = ("--device", "cuda", "--kv-cache-dtype", "bfloat16")
        assert "device must be cpu for models with KV heads" in self.refused(
            generate, tiny_checkpoint("tiny-llama"), *words
        )

    @pytest.mark.parametrize(
        ("name", "change", "said"),
        [
            ("tiny-qwen3", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, "sliding"),
            ("tiny-qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
            ("tiny-llama", {"sliding_window": 64}, "sliding_window must be null"),
            ("tiny-qwen3", {"num_key_value_heads": 3}, "must divide the number of heads"),
            (
                "tiny-llama",
                {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
                "rope_type",
            ),
            ("tiny-llama", {"quantization_config": {"quant_method": "fp8"}}, "not quantised"),
            ("tiny-llama", {"vocab_size": 2000}, "must have shape"),
            ("tiny-glm4-moe", {"n_routed_experts": 4}, "must have shape"),
        ],
    )
    def test_a_checkpoint_that_is_not_what_is_served(self, generate, copy, name, change, said):
        assert said in self.refused(generate, copy(name=name, **change))

    def test_weights_that_are_missing_or_not_finite(self, generate, copy):
        lacking = copy(lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"), name="tiny-llama")
        assert "got none of model.layers.1.self_attn.k_proj.weight" in self.refused(generate, lacking)

        def spoil(weights):
            weights["model.layers.0.self_attn.v_proj.weight"][0, 0] = float("nan")

        assert "NaN or infinity" in self.refused(generate, copy(spoil, name="tiny-llama", into="spoiled"))

    @pytest.mark.parametrize("argument", ["sliding_window", "softcap", "s_aux"])
    def test_attention_that_is_weighed_in_another_way(self, argument):
        """Whatever architecture it came from: the function itself refuses what it does not compute."""
        from types import SimpleNamespace

        from nsa_dcp.hf.families.kv_heads import _attend

        q = torch.zeros(1, 2, 3, 8)
        with pytest.raises(NotImplementedError, match=f"got {argument} in layer 4"):
            _attend(SimpleNamespace(layer_idx=4), q, q, q, None, scaling=1.0, step=None, **{argument: torch.ones(2)})
        with pytest.raises(NotImplementedError, match="got a mask in layer 4"):
            _attend(SimpleNamespace(layer_idx=4), q, q, q, torch.zeros(1), scaling=1.0, step=None)
