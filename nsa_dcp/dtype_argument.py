"""Data types as typed on a command line: `bf16`, as here, or `bfloat16`, as sglang spells it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

_OTHER_SPELLINGS = {"bfloat16": "bf16"}


def dtype_argument(dtypes: Sequence[str]) -> Callable[[str], str]:
    """An argparse `type` that takes one of `dtypes`, in either spelling, and returns it as spelt in `dtypes`."""

    def read(text: str) -> str:
        dtype = _OTHER_SPELLINGS.get(text, text)
        if dtype not in dtypes:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(_spellings(dtypes))}, got {text!r}")
        return dtype

    return read


def dtype_metavar(dtypes: Sequence[str]) -> str:
    """How a command's help shows the choice, every spelling of it: {a,b,c}."""
    return "{" + ",".join(_spellings(dtypes)) + "}"


def _spellings(dtypes: Sequence[str]) -> list[str]:
    return [*dtypes, *(other for other, dtype in _OTHER_SPELLINGS.items() if dtype in dtypes)]
