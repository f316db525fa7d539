"""What a command's NSA_DCP_WIRE is held to, and what doctor says of it."""

import pytest

from nsa_dcp.cli import main
from nsa_dcp.sglang_plugin.admission.rules.feature_rules import find_feature_problems
from nsa_dcp.sglang_plugin.admission.server_settings import ServerSettings

SERVER = ["--tp", "8", "--dcp-size", "8", "--kv-cache-dtype", "fp8_e4m3", "--attention-backend", "nsa"]
LAUNCH = ["python", "-m", "sglang.launch_server", *SERVER]


def problems(**settings):
    return [str(problem) for problem in find_feature_problems(ServerSettings(tp_size=8, dcp_size=8, **settings))]


@pytest.mark.parametrize("wire", [None, "", "nccl", "peer"])
def test_what_there_is_can_be_chosen(wire):
    assert problems(wire=wire) == []
    assert problems(wire=wire, dcp_replicate_q_proj=False) == []


def test_a_wire_that_there_is_not_is_refused():
    assert problems(wire="nvlink") == ["NSA_DCP_WIRE=nvlink: it must be one of nccl, peer; unset NSA_DCP_WIRE."]


def test_replicated_query_projections_are_refused_over_peer_memory_alone():
    assert problems(wire="nccl", dcp_replicate_q_proj=True) == []
    (told,) = problems(wire="peer", dcp_replicate_q_proj=True)
    assert told.startswith("--dcp-replicate-q-proj with NSA_DCP_WIRE=peer: queries are gathered through peer memory")


def test_doctor_reads_the_variable_where_the_command_sets_it(capsys, monkeypatch):
    monkeypatch.delenv("NSA_DCP_WIRE", raising=False)
    doctor = ["doctor", "--command-only", "--no-imports", "--preset", "glm-5.2", "--"]

    def ask(*words):
        status = main([*doctor, *words])
        return status, capsys.readouterr().out

    status, told = ask(*LAUNCH)
    assert status == 0 and "merge: a2a\n" in told
    status, told = ask("env", "NSA_DCP_WIRE=peer", *LAUNCH)
    assert status == 0 and "merge: a2a, over peer memory where it can be mapped (NSA_DCP_WIRE=peer)" in told
    status, told = ask("env", "NSA_DCP_WIRE=nvlink", *LAUNCH)
    assert status == 1 and "NSA_DCP_WIRE=nvlink: it must be one of nccl, peer" in told
