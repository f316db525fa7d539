"""sglang 0.5.23's command-line grammar, where sglang itself is not installed.

`launch_flags.json` holds every flag of sglang's own parser: spellings, kind, type, choices and default. Where sglang is
installed, `python -m nsa_dcp.sglang_plugin.admission.reading.launch_parser` writes it, and a test compares it with
sglang's parser. `build_parser` makes an argparse parser of it, so that abbreviations, unknown flags, values out of
choice and missing values are what they are to sglang. Imports neither torch nor sglang.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

TABLE = Path(__file__).with_name("launch_flags.json")
# Kinds of flag, by the name of sglang's action.
_KINDS = {
    "_StoreAction": "value",
    "_StoreTrueAction": "switch",
    "DeprecatedStoreTrueAction": "old switch",
    "DeprecatedStoreConstAction": "old value",
    "BooleanOptionalAction": "on or off",
    "LoRAPathAction": "adapters",
    "_HelpAction": "help",
}
_GRAPH_PHASES = ("decode", "prefill")
_GRAPH_KEYS = {
    "decode": ("backend", "max_bs", "bs"),
    "prefill": (
        "backend",
        "max_bs",
        "bs",
        "max_context_size",
        "full_prefill_max_req",
        "full_prefill_prefix_chunk_tokens",
        "max_seq_len",
    ),
}
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class LaunchParser(argparse.ArgumentParser):
    """sglang's parser, which raises ValueError where that one prints its usage and ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_table() -> list[dict[str, Any]]:
    """Every flag of sglang 0.5.23; keys as in `describe_parser`."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def describe_parser(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """What `build_parser` needs of sglang's own parser, one entry a flag, as plain data.

    KeyError: an action of a kind that sglang 0.5.23 does not have.
    """
    flags = []
    for action in parser._actions:
        kind = _KINDS[type(action).__name__]
        names = [name for name in action.option_strings if kind != "on or off" or not name.startswith("--no-")]
        entry = {
            "flags": names,
            "field": action.dest,
            "kind": kind,
            "type": getattr(action.type, "__name__", None),
            "nargs": action.nargs if kind in ("value", "adapters") else None,
            "choices": sorted(action.choices, key=str) if action.choices else None,
            "const": getattr(action, "const_value", action.const) if kind in ("value", "old value") else None,
            "default": None if kind == "help" else action.default,
            "required": action.required or None,
        }
        flags.append({key: value for key, value in entry.items() if value is not None})
    return flags


def build_parser(table: Sequence[Mapping[str, Any]] | None = None) -> LaunchParser:
    """A parser with sglang's grammar, from `table` or from the one of sglang 0.5.23."""
    parser = LaunchParser(prog="sglang serve", add_help=False)
    for entry in read_table() if table is None else table:
        kind, options = entry["kind"], {"dest": entry["field"], "default": entry.get("default")}
        if kind == "help":
            parser.add_argument(*entry["flags"], action=_AskedForHelp, nargs=0, dest="help", default=argparse.SUPPRESS)
            continue
        if kind == "on or off":
            parser.add_argument(*entry["flags"], action=argparse.BooleanOptionalAction, **options)
            continue
        if kind in ("switch", "old switch"):
            action = "store_true" if kind == "switch" else _OldSwitch
            parser.add_argument(*entry["flags"], action=action, **options)
            continue
        options["type"] = _TYPES[entry.get("type")]
        options.update({key: entry[key] for key in ("nargs", "choices", "required") if key in entry})
        if kind == "old value":
            options["action"] = _OldValue
            options["stored"] = entry["const"]
        elif kind == "adapters":
            options["action"] = _Adapters
        elif "const" in entry:
            options["const"] = entry["const"]
        parser.add_argument(*entry["flags"], **options)
    return parser


class _AskedForHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error("it asks for help, and starts no server")


class _OldSwitch(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, default: object) -> None:
        super().__init__(option_strings, dest, nargs=0, const=True, default=default)

    def __call__(self, parser: object, namespace: argparse.Namespace, *_: object) -> None:
        setattr(namespace, self.dest, self.const)


class _OldValue(argparse.Action):
    """A flag of one choice that stores another value."""

    def __init__(self, *names: Any, stored: object, **options: Any) -> None:
        super().__init__(*names, **options)
        self._stored = stored

    def __call__(self, parser: object, namespace: argparse.Namespace, *_: object) -> None:
        setattr(namespace, self.dest, self._stored)


class _Adapters(argparse.Action):
    """LoRA adapters: paths, `name=path`, or JSON objects that name both."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        *_: object,
    ) -> None:
        adapters: list[object] = []
        for value in map(str.strip, values or ()):
            adapter: Any = value
            if value.startswith("{") and value.endswith("}"):
                try:
                    adapter = json.loads(value)
                except json.JSONDecodeError as error:
                    parser.error(f"argument --lora-paths: {value!r} is not JSON: {error}")
                if not {"lora_path", "lora_name"} <= set(adapter):
                    parser.error(f"argument --lora-paths: {value!r} must hold lora_path and lora_name")
            adapters.append(adapter)
        setattr(namespace, self.dest, adapters)


def _nullable_text(text: str) -> str | None:
    return None if text in ("", "None") else text


def _count(text: str) -> int:
    """A whole number, or one with a decimal or binary unit: 1k, 25.6k, 1Ki."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    if not found:
        return int(text)
    number, unit = found.groups()
    if "." in number and unit.endswith("i"):
        raise ValueError(f"{text} has a fraction of a binary unit")
    return int(Decimal(number) * _UNITS[unit])


def _graph_backend(text: str | None) -> str | None:
    if text == "tc_piecewise":
        raise argparse.ArgumentTypeError("tc_piecewise was removed; select breakable, full or disabled")
    return text


def _graph_config(text: str) -> dict[str, dict[str, Any]]:
    phases = json.loads(text)
    if not isinstance(phases, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {type(phases).__name__}")
    for phase, settings in phases.items():
        if phase not in _GRAPH_PHASES or not isinstance(settings, dict):
            raise argparse.ArgumentTypeError(f"must hold an object for {' or '.join(_GRAPH_PHASES)}, got {phase!r}")
        _graph_backend(settings.get("backend"))
        unknown = [key for key in settings if key not in _GRAPH_KEYS[phase]]
        if unknown:
            raise argparse.ArgumentTypeError(f"{phase} has no {unknown[0]!r}, only {', '.join(_GRAPH_KEYS[phase])}")
    return phases


# By the names of sglang's functions.
_TYPES: dict[str | None, Callable[[str], Any] | None] = {
    None: None,
    "str": str,
    "int": int,
    "float": float,
    "loads": json.loads,
    "json_list_type": json.loads,
    "nullable_str": _nullable_text,
    "human_readable_int": _count,
    "parse_cuda_graph_backend_arg": _graph_backend,
    "parse_cuda_graph_config_arg": _graph_config,
}


def main() -> int:
    """Write `launch_flags.json` from the parser of the sglang that is installed."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    lines = ",\n".join(json.dumps(flag) for flag in describe_parser(parser))
    TABLE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
