"""Tiny checkpoints, written once per session, and the unmodified models' answers."""

import functools

import pytest
import torch

from nsa_dcp.hf.checkpoint import load_model
from nsa_dcp.hf.tiny import write_tiny_checkpoint
from nsa_dcp.hf.unmodified import generate_unmodified


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A function from a tiny model's name (and overridden config fields) to its checkpoint directory."""
    cache_dir = tmp_path_factory.mktemp("checkpoints")
    return lambda name, **overrides: write_tiny_checkpoint(name, 0, cache_dir, **overrides)


@pytest.fixture(scope="session")
def unmodified():
    """A function to what the unmodified model generates: (output ids, [n, vocab] logits) per prompt, computed once."""
    models = functools.cache(lambda directory, dtype: load_model(directory, dtype, torch.device("cpu")))

    @functools.cache
    def generate(directory, dtype: str, prompt: tuple[int, ...], max_new_tokens: int, kv_cache_dtype: str):
        logits: list[torch.Tensor] = []
        output = generate_unmodified(
            models(directory, dtype),
            list(prompt),
            max_new_tokens,
            kv_cache_dtype=kv_cache_dtype,
            on_logits=lambda row: logits.append(row.clone()),
        )
        return output, torch.stack(logits)

    return generate
