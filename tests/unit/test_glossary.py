"""Every word of a log line has its row in docs/glossary.md."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa_dcp.planning.capacity import TemporaryBuffers
from nsa_dcp.planning.held_memory import HeldMemory
from nsa_dcp.sglang_plugin.startup.startup_line import PREFIX, startup_line

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def explained() -> set[str]:
    """What the first cells of the glossary's rows name as code."""
    rows = [line for line in GLOSSARY.splitlines() if line.startswith("| ")]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


def keys(line: dict) -> set[str]:
    return set(line) | {inner for value in line.values() if isinstance(value, dict) for inner in keys(value)}


def numbers_for(kind):
    return kind(**dict.fromkeys(kind.__dataclass_fields__, 1))


def test_every_key_of_the_start_up_line_is_explained():
    import torch

    pool = SimpleNamespace(
        size=128,
        page_size=64,
        kv_buffer=[torch.zeros(192, 656, dtype=torch.uint8)],
        index_k_with_scale_buffer=[torch.zeros(6, 8448, dtype=torch.uint8)],
    )
    line = startup_line(
        mode="CP-DCP",
        group_ranks=[0, 1],
        gathered_heads=64,
        head_bucket=64,
        comm_backend="a2a",
        topk="exact",
        pool=pool,
        buffers=numbers_for(TemporaryBuffers),
        held=numbers_for(HeldMemory),
        cp_strategy="interleave",
    )
    assert sorted(keys(json.loads(line.removeprefix(PREFIX))) - explained()) == []


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("startup/agreement.py", "nsa-dcp needs the same on every rank, found"),
        ("startup/agreement.py", "nsa-dcp could not compare the settings of ranks"),
        ("admission/validation.py", "nsa-dcp cannot serve this command with --dcp-size"),
        ("resolution.py", "--kv-cache-dtype auto became"),
        ("startup/weight_updates.py", "online weight updates are not supported here"),
    ],
)
def test_what_ends_a_server_is_explained_in_the_words_that_are_logged(module, words):
    assert words in (ROOT / "nsa_dcp" / "sglang_plugin" / module).read_text(encoding="utf-8")
    assert words in GLOSSARY


@pytest.mark.parametrize("word", ["spread", "replicated", "sliced", "share", "piece", "part", "unit", "widened page"])
def test_words_of_sentences_are_explained(word):
    rows = [line.split(" | ")[0] for line in GLOSSARY.splitlines() if line.startswith("| ")]
    assert any(re.search(rf"\b{word}\b", row) for row in rows)
