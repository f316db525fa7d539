"""The words of a command line around a server's own arguments: its launcher, and the environment that it sets.

`python -m sglang.launch_server`, `sglang serve MODEL`, `python -m sglang.cli.main serve`, each behind whatever runs it:
`NAME=value`, `env`, `nohup`, `numactl`, `srun`, `docker run -e NAME=value IMAGE`, `bash -c '...'`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SERVE_MODULES = ("sglang.cli.main", "sglang.cli")
_CONTAINERS = ("docker", "podman", "nerdctl", "kubectl", "enroot")
_SHELLS = ("bash", "sh", "zsh", "dash", "ash")
# What ends a command in a script, and what sends its output elsewhere.
_ENDS = ("&&", "||", ";", "|", "&")
_REDIRECTION = re.compile(r"(\d*|&)>>?(&\d+|.*)|<.*")


@dataclass(frozen=True)
class LaunchLine:
    """A launch command, taken apart.

    Args:
        arguments: of the server.
        environment: what the server's environment holds, as far as the line and this process say.
        unread: words that set an environment which cannot be read here.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    unread: tuple[str, ...] = ()


def strip_launcher(words: Sequence[str]) -> list[str]:
    """The server's arguments of a command line. Errors: as `read_launch_line`."""
    return list(read_launch_line(words).arguments)


def read_launch_line(words: Sequence[str], base: Mapping[str, str] | None = None) -> LaunchLine:
    """Take a command line apart.

    Args:
        words: of the line.
        base: the environment that it runs in; None is this process's.

    ValueError: it names no launcher and does not begin with a flag, or serves something else than a language model.
    """
    words = list(words)
    base = os.environ if base is None else base
    found = _find_launcher(words)
    if found is not None:
        start, end, serves = found
        environment, unread = _read_environment(words[:start], base)
        arguments = words[end:]
        return LaunchLine(tuple(_serve_arguments(arguments) if serves else arguments), environment, unread)
    start = next((at for at, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    if start < len(words) and words[start].startswith("-"):
        return LaunchLine(tuple(words[start:]), *_read_environment(words[:start], base))
    script = _find_script(words)
    if script is not None:
        environment, unread = _read_environment(words[:script], base)
        inner = read_launch_line(_last_command(words[script]), environment)
        return LaunchLine(inner.arguments, inner.environment, (*unread, *inner.unread))
    if not words:
        return LaunchLine((), dict(base))
    raise ValueError(
        f"the command must begin with a flag, `python -m sglang.launch_server` or `sglang serve`, got {words[0]!r}"
    )


def _find_launcher(words: Sequence[str]) -> tuple[int, int, bool] | None:
    """Where a launcher begins and ends, and whether it is `sglang serve`."""
    for at, word in enumerate(words):
        module, more = (word[2:], 1) if word.startswith("-m") and len(word) > 2 else (None, 2)
        if word == "-m" and at + 1 < len(words):
            module = words[at + 1]
        if module == "sglang.launch_server" or word.endswith("sglang/launch_server.py"):
            return at, at + (1 if module is None else more), False
        following = words[at + more : at + more + 1]
        if module in _SERVE_MODULES and following == ["serve"]:
            return at, at + more + 1, True
        if PurePosixPath(word).name == "sglang" and words[at + 1 : at + 2] == ["serve"]:
            return at, at + 2, True
    return None


def _serve_arguments(arguments: Sequence[str]) -> list[str]:
    """What `sglang serve` hands to the server: its own `--model-type` taken out, a first positional word the model."""
    kept: list[str] = []
    kind = "auto"
    rest = iter(arguments)
    for word in rest:
        if word == "--model-type":
            kind = next(rest, "")
        elif word.startswith("--model-type="):
            kind = word.split("=", 1)[1]
        else:
            kept.append(word)
    if kind not in ("auto", "llm"):
        raise ValueError(f"--model-type must be llm for a server that nsa-dcp can judge, got {kind!r}")
    if kept and not kept[0].startswith("-"):
        kept.insert(0, "--model-path")
    elif "--config" in kept and not any(word.split("=")[0] in ("--model-path", "--model") for word in kept):
        raise ValueError("sglang serve wants the model on the command line, not in the file of --config")
    return kept


def _read_environment(before: Sequence[str], base: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment that the words before a launcher make of `base`."""
    programs = [PurePosixPath(word).name for word in before]
    contained = any(program in _CONTAINERS for program in programs)
    environment = {} if contained else dict(base)
    unread: list[str] = []
    # Assignments count at the beginning, after `env` or `export`, and as values of a container's -e.
    assigning, expected = True, False
    rest = iter(enumerate(before))
    for at, word in rest:
        program = programs[at]
        option, _, inline = word.partition("=")
        if contained and (word in ("-e", "--env") or option in ("--env",) or re.match(r"-e[A-Za-z_]", word)):
            value = inline if option == "--env" and inline else word[2:] if len(word) > 2 and word[1] == "e" else ""
            if word in ("-e", "--env"):
                value = next(rest, (0, ""))[1]
            _assign(environment, value)
        elif contained and option == "--env-file":
            unread.append(f"--env-file {inline or next(rest, (0, ''))[1]}")
        elif assigning and _ASSIGNMENT.fullmatch(word):
            _assign(environment, word)
        elif expected and word in ("-i", "-", "--ignore-environment"):
            environment.clear()
        elif expected and word in ("-u", "--unset"):
            environment.pop(next(rest, (0, ""))[1], None)
        elif expected and option == "--unset":
            environment.pop(inline, None)
        elif program in ("env", "export", *_ENDS):
            assigning, expected = True, program == "env"
        elif not (expected and word.startswith("-")):
            assigning = expected = False
    return environment, tuple(unread)


def _assign(environment: dict[str, str], word: str) -> None:
    found = _ASSIGNMENT.fullmatch(word)
    if found:
        environment[found[1]] = found[2]
    elif word in os.environ:
        # `-e NAME` hands on this process's value.
        environment[word] = os.environ[word]


def _find_script(words: Sequence[str]) -> int | None:
    """Where the words hold a script that launches a server: after a shell's `-c`, or a whole command in one word."""
    for at, word in enumerate(words):
        if (" " in word or "\n" in word) and (
            len(words) == 1 or any(PurePosixPath(before).name in _SHELLS for before in words[:at])
        ):
            try:
                inner = shlex.split(word, comments=True)
            except ValueError as error:
                raise ValueError(f"the command holds a script that cannot be read: {error}") from error
            if _find_launcher(inner) is not None:
                return at
    return None


def _last_command(script: str) -> list[str]:
    """The words of a script up to the end of the command that launches, without redirections."""
    lexer = shlex.shlex(script.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    words = list(lexer)
    launcher = _find_launcher(words)
    end = next((at for at in range(launcher[1], len(words)) if words[at] in _ENDS), len(words)) if launcher else None
    kept: list[str] = []
    rest = iter(words[:end])
    for word in rest:
        if _REDIRECTION.fullmatch(word):
            if word.endswith((">", "<")):
                next(rest, None)
        else:
            kept.append(word)
    return kept
