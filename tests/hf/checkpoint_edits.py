"""Editing a copy of a checkpoint, and what is said about it."""

import json
from pathlib import Path

import torch

Weights = dict[str, torch.Tensor]


def write_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def check_refused(answer: tuple[int, str, bool], *parts: str) -> None:
    status, error, started = answer
    assert (status, started) == (2, False), error
    assert error.startswith("nsa-dcp generate: ") and error.count("\n") == 1, error
    for part in parts:
        assert part in error
