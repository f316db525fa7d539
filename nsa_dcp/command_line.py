"""What users type for a data type and for a path.

A data type is `bfloat16`, as sglang spells it, or `bf16`. Whether a command will be able to write where it was
told to is asked before it does the work.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

_OTHER_SPELLINGS = {"bfloat16": "bf16", "bf16": "bfloat16"}


def dtype_argument(dtypes: Sequence[str]) -> Callable[[str], str]:
    """An argparse `type` that takes one of `dtypes`, in either spelling, and returns it as spelt in `dtypes`."""

    def read(text: str) -> str:
        dtype = text if text in dtypes else _OTHER_SPELLINGS.get(text, text)
        if dtype not in dtypes:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(_spellings(dtypes))}, got {text!r}")
        return dtype

    return read


def dtype_metavar(dtypes: Sequence[str]) -> str:
    """How a command's help shows the choice, every spelling of it: {a,b,c}."""
    return "{" + ",".join(_spellings(dtypes)) + "}"


def check_output_file(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written; nothing is created, and None is no file.

    Args:
        option: what the user typed before the path.

    ValueError: the path is a directory, its directory is missing, or either may not be written.
    """
    if path is None:
        return
    reason = ""
    if path.is_dir():
        reason = "that is a directory"
    elif not path.parent.is_dir():
        reason = f"there is no directory {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    if reason:
        raise ValueError(f"{option} must be a file that can be written, got {path}: {reason}")


def make_output_folder(option: str, path: Path) -> None:
    """Make a folder where there is none. ValueError: it cannot be made, or not be written to.

    Args:
        option: what the user typed before the path.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} must be a folder, or a place for one, got {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"{option} must be a folder that can be written, got {path}: permission denied")


def _spellings(dtypes: Sequence[str]) -> list[str]:
    return [*dtypes, *(other for other, dtype in _OTHER_SPELLINGS.items() if dtype in dtypes)]
