"""NSA_DCP_PREFILL: which ways are served, in a server's environment and as doctor reads it off a command line."""

import dataclasses

import pytest

from nsa_dcp.sglang_plugin.admission.reading.launch_line import read_launch_line
from nsa_dcp.sglang_plugin.admission.reading.server_command import read_without_sglang
from nsa_dcp.sglang_plugin.admission.validation import find_problems
from tests.served_settings import CP_DCP, GLM, HOPPER, TP_DCP


@pytest.mark.parametrize("way", [None, "", "queries", "rows", "auto"])
def test_every_way_is_served_in_tp_dcp(way):
    assert find_problems(dataclasses.replace(TP_DCP, prefill_way=way), GLM, HOPPER) == []


@pytest.mark.parametrize("way", [None, "", "queries"])
def test_cp_dcp_goes_with_the_default(way):
    assert find_problems(dataclasses.replace(CP_DCP, prefill_way=way), GLM, HOPPER) == []


@pytest.mark.parametrize(
    ("settings", "way", "asked", "reason"),
    [
        (TP_DCP, "row", "NSA_DCP_PREFILL=row", "the ways are queries, rows, auto"),
        (TP_DCP, "ROWS", "NSA_DCP_PREFILL=ROWS", "the ways are queries, rows, auto"),
        (CP_DCP, "rows", "NSA_DCP_PREFILL=rows with --enable-prefill-cp", "every rank has rows of its own already"),
        (CP_DCP, "auto", "NSA_DCP_PREFILL=auto with --enable-prefill-cp", "the choice is TP-DCP's"),
    ],
)
def test_what_cannot_be_served_is_refused_and_unsetting_it_helps(settings, way, asked, reason):
    (problem,) = find_problems(dataclasses.replace(settings, prefill_way=way), GLM, HOPPER)
    assert problem.asked == asked
    assert reason in problem.reason
    (change,) = problem.instead.changes
    assert change.drop == ("NSA_DCP_PREFILL",)


def test_doctor_reads_it_off_the_line():
    words = ["NSA_DCP_PREFILL=auto", "python", "-m", "sglang.launch_server", "--model-path", "GLM-5.2"]
    line = read_launch_line(words, {})
    assert read_without_sglang(line.arguments, line.environment).settings.prefill_way == "auto"
    line = read_launch_line(words[1:], {})
    assert read_without_sglang(line.arguments, line.environment).settings.prefill_way is None
