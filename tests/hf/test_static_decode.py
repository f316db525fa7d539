"""Decode steps in fixed buffers: what a CUDA graph replays, run eagerly here with the same tensors."""

import pytest
import torch

from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.hf.checkpoint import load_model
from nsa_dcp.hf.engine import Engine, Request
from nsa_dcp.hf.ranks import Ranks
from nsa_dcp.hf.static_decode import StaticDecode
from nsa_dcp.hf.step import Extend
from nsa_dcp.launcher import run_ranks
from nsa_dcp.testing.recorded_generation import generate_statically

PROMPTS = [[5, 6, 7], list(range(3, 133)), [9] * 70]


@pytest.mark.parametrize("name", ["tiny-glm-dsa", "tiny-deepseek-v32"])
@pytest.mark.parametrize("kv_cache_dtype, dtype", [("float32", "float32"), ("fp8_e4m3", "float64")])
@pytest.mark.parametrize("config", [DcpConfig(), DcpConfig(tp_size=2, dcp_size=2)], ids=["dcp1", "dcp2"])
def test_padded_steps_generate_what_unpadded_ones_do(name, kv_cache_dtype, dtype, config, tiny_checkpoint, unmodified):
    """Batches shrink as requests end; padding rows stand behind the real ones (sgl-project/sglang#15227)."""
    job = (tiny_checkpoint(name), dtype, config, CacheConfig(kv_cache_dtype, 2048), PROMPTS, 5)
    for outputs in run_ranks(generate_statically, config.tp_size, job):
        for prompt, output in zip(PROMPTS, outputs):
            assert output == unmodified(tiny_checkpoint(name), dtype, tuple(prompt), 5, kv_cache_dtype)[0]


@pytest.fixture
def engine(tiny_checkpoint):
    model = load_model(tiny_checkpoint("tiny-glm-dsa"), "float32", torch.device("cpu"))
    return Engine(model, Ranks(DcpConfig(), 0, None, None), CacheConfig("fp8_e4m3", 1024))


def test_padding_rows_write_nothing(engine):
    static = StaticDecode(engine, max_batch=4, max_context_len=100)
    request = Request(torch.tensor([5, 6, 7]))
    assert engine.admit(request, 4)
    engine.forward([Extend(request.prompt_ids, 0, request.pages)])
    assert static.forward([Extend(torch.tensor([8]), 3, request.pages)]).shape[0] == 1
    assert engine.attention.latents.count_rows() == 4
    assert engine.attention.index_keys.count_tokens() == 4


def test_a_stale_entry_of_a_longer_batch_is_not_seen(engine):
    """After a step of three requests, a step of one must not depend on what the others left in the buffers."""
    static = StaticDecode(engine, max_batch=3, max_context_len=200)
    requests = [Request(torch.tensor(prompt)) for prompt in PROMPTS]
    for request in requests:
        assert engine.admit(request, 4)
        engine.forward([Extend(request.prompt_ids, 0, request.pages)])
    decode = [Extend(torch.tensor([8]), len(request.prompt_ids), request.pages) for request in requests]
    alone = static.forward(decode[:1]).clone()
    static.forward(decode)
    assert torch.equal(static.forward(decode[:1]), alone)


def test_what_does_not_fit_is_told(engine):
    static = StaticDecode(engine, max_batch=2, max_context_len=100)
    token = torch.tensor([8])
    assert static.fits([Extend(token, 99, [1, 2])] * 2)
    assert not static.fits([Extend(token, 100, [1, 2])])
    assert not static.fits([Extend(token, 9, [1])] * 3)
    assert not static.fits([Extend(torch.tensor([8, 9]), 9, [1])])
    with pytest.raises(ValueError, match="at most 2 single tokens in contexts of at most 100, got"):
        static.forward([Extend(token, 100, [1, 2])])
