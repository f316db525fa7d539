"""Tiny checkpoints, written once per session, and the unmodified models' answers."""

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nsa_dcp.cli import main
from nsa_dcp.hf.checkpoint import load_model
from nsa_dcp.hf.tiny import write_tiny_checkpoint
from nsa_dcp.hf.unmodified import generate_unmodified

# What several files use stands beside them.
sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_edits import Weights, write_json


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


@pytest.fixture
def copy(tiny_checkpoint, tmp_path):
    """A function to a copy of a tiny checkpoint, its weights or config edited."""

    def make(
        edit: Callable[[Weights], object] | None = None,
        name: str = "tiny-glm-dsa",
        into: str = "checkpoint",
        **fields: object,
    ) -> Path:
        directory = tmp_path / into
        shutil.copytree(tiny_checkpoint(name), directory)
        if edit:
            weights = load_file(directory / "model.safetensors")
            edit(weights)
            save_file(weights, directory / "model.safetensors", {"format": "pt"})
        write_json(directory / "config.json", **fields)
        return directory

    return make


@pytest.fixture
def generate(tmp_path, monkeypatch, capsys):
    """A function that runs `generate` without ranks; returns its status, its standard error, and whether ranks ran."""

    def run(directory: Path, *words: str) -> tuple[int, str, bool]:
        started = []

        def no_ranks(*_, **__):
            started.append(True)
            return [{"output_ids": [[1]], "usage": {}}]

        monkeypatch.setattr("nsa_dcp.launcher.run_ranks", no_ranks)
        (tmp_path / "prompts.json").write_text("[[5, 6, 7]]")
        status = main(["generate", "--model", str(directory), "--prompts", str(tmp_path / "prompts.json"), *words])
        return status, capsys.readouterr().err, bool(started)

    return run
