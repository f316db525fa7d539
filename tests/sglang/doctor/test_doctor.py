"""Doctor with the real sglang 0.5.23: its own parser reads the command, and both parsers agree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_dcp.sglang_plugin.admission.reading import server_command
from nsa_dcp.sglang_plugin.doctor.doctor import judge_command, read_command
from tests.sglang.admission.test_feature_rules import COMMANDS

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[3]
COMMON = (
    "--model-path GLM-5.2 --quantization w4afp8 --disable-shared-experts-fusion --tp 8 --kv-cache-dtype fp8_e4m3 "
    "--page-size 64 --attention-backend nsa --dsa-decode-backend flashmla_kv --dsa-prefill-backend flashmla_kv"
)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("--dcp-size 8", id="tp-dcp"),
        pytest.param(
            "--decode-context-parallel-size 4 --dcp-comm-backend ag_rs --no-dcp-replicate-q-proj", id="aliases"
        ),
        pytest.param("--dcp-size 2 --dp-size 4 --enable-dp-attention", id="attention dp"),
        pytest.param("--dcp-size 2 --attention-data-parallel-size 4", id="attention dp by its own flag"),
        pytest.param(
            "--dcp-size 8 --attn-cp-size 8 --enable-prefill-cp --cp-strategy interleave --enable-cp-decode-attn-tp",
            id="cp",
        ),
        pytest.param("--dcp-size=8 --enable-hicache --enable-hisparse --enable-unified-memory", id="refused"),
        pytest.param("--dcp-size 8 --speculative-algorithm EAGLE --speculative-eagle-topk 4", id="speculation"),
        pytest.param(" ".join(["--dcp-size 8", *COMMANDS]), id="every feature"),
    ],
)
def test_both_parsers_read_the_same_settings(more):
    arguments = f"{COMMON} {more}".split()
    own = server_command.read_without_sglang(arguments)
    theirs = server_command.command_from_fields(server_command.read_with_sglang(arguments))
    assert own == theirs
    assert own.model_path == "GLM-5.2"


def test_doctor_reads_a_command_with_sglang_and_refuses_an_unknown_flag(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    words = f"python -m sglang.launch_server {COMMON} --dcp-size 8".split()
    command = read_command(words, use_sglang=True)
    assert not judge_command(command, server_command.preset_model_facts("glm-5.2"), "preset").problems
    with pytest.raises(ValueError, match="unrecognized arguments: --no-such-flag"):
        read_command([*words, "--no-such-flag"], use_sglang=True)


def test_the_plugin_probe_finds_what_register_puts_in_place():
    code = (
        "from nsa_dcp.sglang_plugin import plugin; from nsa_dcp.sglang_plugin.doctor import probe\n"
        "import json\n"
        "before = probe.probe_plugin()['missing']\n"
        "plugin.register()\n"
        "print(json.dumps([before, probe.probe_plugin()['missing']]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert after == []
    # Empty too when the package is installed here with its entry point.
    assert before in (
        [],
        [
            "attention backend nsa",
            "attention backend dsa",
            "hook handle_decode_context_parallelism",
            "hook handle_other_validations",
        ],
    )
