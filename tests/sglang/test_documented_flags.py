"""The launch_server flags that documents and scripts use exist in sglang 0.5.23."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]


@pytest.fixture
def parser():
    from sglang.srt.server_args import ServerArgs

    built = argparse.ArgumentParser()
    ServerArgs.add_cli_args(built)
    return built


def test_every_documented_flag_is_one_that_sglang_takes(parser):
    spec = importlib.util.spec_from_file_location("docs_commands", ROOT / "tests" / "test_docs_commands.py")
    documented = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(documented)
    known = set(parser._option_string_actions) | {"--tp"}  # the abbreviation of --tp-size that sglang's users type
    assert sorted(documented.SERVER_FLAGS - known) == []


@pytest.mark.parametrize("script", ["serve_tp.sh", "serve_tp_dcp.sh", "serve_cp_dcp.sh"])
def test_sglang_reads_the_command_of_every_serve_script(parser, script):
    text, body = ((ROOT / "scripts" / name).read_text() for name in (script, "launch_checked.sh"))
    parameters = dict(re.findall(r"^([A-Z_]+)=([^\s(]+)", text, re.MULTILINE))
    own = re.search(r"MODE_FLAGS=\((.*?)\)", text, re.DOTALL).group(1)
    command = re.search(r"COMMAND=\((.*?)\n\)", body, re.DOTALL).group(1)
    words = command.replace('"${MODE_FLAGS[@]}"', own).split()[3:]
    arguments = [parameters[word.strip('"$')] if word.startswith('"$') else word for word in words]
    read = parser.parse_args(arguments)
    assert (read.tp_size, read.page_size, read.attention_backend) == (8, 64, "nsa")
