"""`--config FILE` of a launch command: sglang puts the file's flags before the command line's, which win."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def merge_config_file(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments with those of their `--config` file before them, as sglang 0.5.23 merges them.

    Args:
        parser: from `launch_parser.build_parser`.
        arguments: of the server. Only the word `--config` counts, as for sglang: `--config=FILE` is read by nobody.

    ValueError: the file cannot be read or holds what sglang does not take from one.
    """
    arguments = list(arguments)
    if "--config" not in arguments:
        return arguments
    at = arguments.index("--config")
    if arguments.count("--config") > 1:
        raise ValueError("--config must be given once, got it twice")
    if at + 1 == len(arguments):
        raise ValueError("--config must name a file, got nothing")
    return [*_read_flags(parser, arguments[at + 1]), *arguments[:at], *arguments[at + 2 :]]


def _read_flags(parser: argparse.ArgumentParser, name: str) -> list[str]:
    try:
        import yaml
    except ImportError:
        raise ValueError("--config is read with PyYAML: pip install pyyaml") from None

    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"--config must be a .yaml or .yml file, got {name!r}")
    if not path.is_file():
        raise ValueError(f"--config must be a file on this machine, got {name!r}")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"--config must be YAML, got {name!r}: {' '.join(str(error).split())}") from error
    if not isinstance(settings or {}, dict):
        raise ValueError(f"--config must hold a mapping of flags to values, got {type(settings).__name__} in {name!r}")
    switches, refused = _kinds_of_flag(parser)
    flags: list[str] = []
    for key, value in (settings or {}).items():
        if not isinstance(key, str):
            raise ValueError(f"--config must hold names of flags, got {key!r} in {name!r}")
        field = key.replace("-", "_")
        if field in refused:
            raise ValueError(f"--config cannot hold {key}, which sglang takes from the command line alone")
        if isinstance(value, bool):
            flags += ([f"--{key}"] if value else []) if field in switches else [f"--{key}", str(value).lower()]
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)] if value else []
        else:
            flags += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _kinds_of_flag(parser: argparse.ArgumentParser) -> tuple[set[str], set[str]]:
    """Keys of plain switches, and keys of what sglang takes from no file: switches with a `--no-` form, old ones."""
    switches: set[str] = set()
    others: set[str] = set()
    refused: set[str] = set()
    for action in parser._actions:
        keys = {action.dest, *(name[2:].replace("-", "_") for name in action.option_strings if name.startswith("--"))}
        if isinstance(action, argparse._StoreTrueAction):
            switches |= keys
        elif isinstance(action, argparse._StoreAction) or action.nargs is None:
            others |= keys
        elif not {"--config", "--help"} & set(action.option_strings):
            refused |= keys
    return switches, refused - switches - others
