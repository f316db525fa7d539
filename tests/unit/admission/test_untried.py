"""What no GPU has run is said where it is chosen, and nothing is said of what has."""

import dataclasses
import re
from pathlib import Path

import pytest

from nsa_dcp.sglang_plugin.admission.reading.launch_line import read_launch_line
from nsa_dcp.sglang_plugin.admission.reading.server_command import preset_model_facts, read_without_sglang
from nsa_dcp.sglang_plugin.admission.untried import list_untried
from nsa_dcp.sglang_plugin.doctor.doctor import judge_command
from tests.served_settings import CP_DCP, TP_DCP

SUPPORT = Path(__file__).parents[3] / "docs" / "support.md"


@pytest.mark.parametrize("settings", [TP_DCP, CP_DCP], ids=["tp-dcp", "cp-dcp"])
@pytest.mark.parametrize(
    "chosen", [{}, {"wire": ""}, {"wire": "nccl"}, {"prefill_way": ""}, {"prefill_way": "queries"}]
)
def test_the_defaults_by_any_spelling_were_run(settings, chosen):
    assert list_untried(dataclasses.replace(settings, **chosen)) == []


@pytest.mark.parametrize("choice", ["NSA_DCP_PREFILL=rows", "NSA_DCP_PREFILL=auto", "NSA_DCP_WIRE=peer"])
def test_doctor_says_what_was_not(choice):
    words = [
        choice,
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "GLM-5.2",
        "--tp-size",
        "8",
        "--dcp-size",
        "8",
    ]
    line = read_launch_line([*words, "--attention-backend", "nsa", "--kv-cache-dtype", "fp8_e4m3"], {})
    command = read_without_sglang(line.arguments, line.environment)
    verdict = judge_command(command, preset_model_facts("glm-5.2", {}), "preset glm-5.2")
    assert not verdict.problems
    (said,) = [note for note in verdict.notes if "has not run on a GPU yet" in note]
    assert said.startswith(choice)


@pytest.mark.parametrize("variable", ["NSA_DCP_PREFILL", "NSA_DCP_WIRE"])
def test_the_page_of_support_says_so_too(variable):
    """So that a choice which a GPU has run leaves both places at once."""
    rows = [row for row in SUPPORT.read_text(encoding="utf-8").splitlines() if variable in row]
    assert any(re.search(r"(no|not|never|neither)\b.*GPU", row) for row in rows), rows
