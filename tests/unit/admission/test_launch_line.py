"""What stands around a server's arguments: launchers, and the environment that a command line sets."""

import shlex

import pytest

from nsa_dcp.sglang_plugin.admission.reading.launch_line import read_launch_line

HOST = {"HOME": "/root", "A": "host"}
RUN = "python -m sglang.launch_server --tp 8"


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        (RUN, HOST),
        (f"A=1 B=2 {RUN}", HOST | {"A": "1", "B": "2"}),
        (f"env -u A C=3 numactl -N 0 {RUN}", {"HOME": "/root", "C": "3"}),
        (f"env -i A=1 {RUN}", {"A": "1"}),
        (f"nohup stdbuf -oL X=1 {RUN}", HOST),
        (f"docker run -e A=1 --env B=2 --env=C=3 -eD=4 -v E=5 IMAGE {RUN}", {"A": "1", "B": "2", "C": "3", "D": "4"}),
        (f"docker run -e A IMAGE {RUN}", {}),
        (f"bash -c 'export A=1 && {RUN} > log 2>&1 &'", HOST | {"A": "1"}),
        (f"docker run -e A=1 IMAGE bash -lc 'B=2 {RUN} | tee log'", {"A": "1", "B": "2"}),
        ("A=1 --tp 8", HOST | {"A": "1"}),
        ("python -msglang.launch_server --tp 8", HOST),
    ],
)
def test_the_environment_of_a_server_is_what_its_line_makes_of_the_hosts(line, environment):
    found = read_launch_line(shlex.split(line), HOST)
    assert (found.arguments, dict(found.environment)) == (("--tp", "8"), environment)


@pytest.mark.parametrize("launcher", ["sglang serve", "/usr/bin/sglang serve", "python -m sglang.cli.main serve"])
def test_sglang_serve_takes_the_model_as_its_first_word(launcher):
    assert read_launch_line([*launcher.split(), "GLM", "--tp", "8"], {}).arguments == (
        "--model-path",
        "GLM",
        "--tp",
        "8",
    )
    words = [*launcher.split(), "--model-type=llm", "--tp", "8"]
    assert read_launch_line(words, {}).arguments == ("--tp", "8")


def test_a_file_of_variables_is_said_to_be_unread():
    assert read_launch_line(shlex.split(f"docker run --env-file f IMAGE {RUN}"), {}).unread == ("--env-file f",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vllm serve", "must begin with"),
        ("sglang serve --model-type diffusion x", "--model-type must be llm"),
        ("sglang serve --config a.yaml", "wants the model on the command line"),
    ],
)
def test_what_serves_something_else_is_refused(line, message):
    with pytest.raises(ValueError, match=message):
        read_launch_line(line.split(), {})
