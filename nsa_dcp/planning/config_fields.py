"""Fields of a checkpoint's `config.json`, read with their type: what is of another type is refused by the field's name.

A config is what somebody wrote or downloaded. Everything that reads one, the planner, doctor and the embedded engine,
reads it through these, so that none of them meets a value that it cannot compute with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

# Beyond what a float counts one by one nothing here is a size, and sums and products stay finite.
LARGEST_INTEGER = 2**53 - 1
# The deepest published model has some hundred; a tuple of layers has to fit in memory.
MOST_LAYERS = 10_000
_SHOWN_CHARACTERS = 80


def read_json_object(path: Path, subject: str = "config") -> dict[str, object]:
    """Read a JSON file that must hold an object.

    Args:
        path: the file.
        subject: what the file is called in an error.

    Raises:
        ValueError: it cannot be read, is not JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{subject} must be a readable file, got {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{subject} must be JSON, got {str(path)!r}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{subject} must be a JSON object, got {type(content).__name__} in {str(path)!r}")
    return content


def shown(value: object) -> str:
    """A value as it is written in an error: on one line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def printable(name: str) -> str:
    """A name out of a file as it is written in an error: what would break the line is escaped."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def positive_integer(
    config: Mapping[str, object], field: str, source: str, *, default: int | None = None, most: int = LARGEST_INTEGER
) -> int:
    """An integer of 1 to `most`. ValueError: it is not one. `default` stands for null and absent, where it is given."""
    value = config.get(field)
    if value is None and default is not None:
        return default
    if not _is_integer(value) or value < 1:
        raise ValueError(f"{field} must be a positive integer, got {shown(value)} ({source})")
    return _at_most(value, most, field, source)


def natural_integer(config: Mapping[str, object], field: str, source: str) -> int:
    """An integer of 0 or more, 0 where it is null or absent. ValueError: it is not one."""
    value = config.get(field)
    if value is None:
        return 0
    if not _is_integer(value) or value < 0:
        raise ValueError(f"{field} must be an integer of 0 or more, got {shown(value)} ({source})")
    return _at_most(value, LARGEST_INTEGER, field, source)


def first_architecture(config: Mapping[str, object], source: str) -> str:
    """The first name of `architectures`; empty where there is none. ValueError: it is not a list of names."""
    names = config.get("architectures")
    if names is None:
        return ""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of names, got {shown(names)} ({source})")
    return names[0] if names else ""


def language_fields(config: Mapping[str, object], field: str, source: str) -> Mapping[str, object]:
    """The fields of the language model: `config`, or its `text_config` where only a multimodal wrapper is around it.

    Args:
        config: fields of a `config.json`.
        field: one that the language model's fields have.
        source: where they come from.

    Raises:
        ValueError: `text_config` would be read, and is not an object.
    """
    nested = config.get("text_config")
    if field in config or nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise ValueError(f"text_config must be an object, got {shown(nested)} ({source})")
    return nested


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_most(value: int, most: int, field: str, source: str) -> int:
    if value > most:
        raise ValueError(f"{field} must be at most {most}, got {shown(value)} ({source})")
    return value
