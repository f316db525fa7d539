"""What a refusal advises: a sentence, and the same as changes that a program can make to the command.

The sentence is made of the changes, so that the two cannot say different things.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One change of a command.

    Args:
        use: words to use, each `--flag value`, `--switch`, or `NAME=value` for the environment. A flag that the command
            has already is replaced.
        drop: flags to drop with their values, or names of the environment to unset.
        said: the change in words where the flag's name would be repeated, as in "drop it".
    """

    use: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    said: str = ""

    def __str__(self) -> str:
        if self.said:
            return self.said
        verb = "use" if any(word.startswith("-") for word in self.use) else "set"
        parts = [f"{verb} {' '.join(self.use)}"] if self.use else []
        parts += [f"drop {' and '.join(self.drop)}"] if self.drop else []
        return " and ".join(parts)


class Advice(str):
    """A sentence; `changes` are its alternatives, any one of which is enough for the reason at hand."""

    changes: tuple[Change, ...] = ()


def use(*words: str, said: str = "") -> Change:
    """Use these words together."""
    return Change(use=words, said=said)


def drop(*flags: str, said: str = "") -> Change:
    """Drop these flags together."""
    return Change(drop=flags, said=said)


def advise(*changes: Change, because: str = "") -> Advice:
    """One of these changes. `because` is said after them.

    ValueError: there is no change.
    """
    if not changes:
        raise ValueError("advice must hold a change, got none")
    advice = Advice(_sentence(changes) + (f": {because}" if because else ""))
    advice.changes = changes
    return advice


def _sentence(changes: Sequence[Change]) -> str:
    if len(changes) == 2 and not any(change.use or change.said for change in changes):
        return f"drop one of the two, {' or '.join(' and '.join(change.drop) for change in changes)}"
    if len(changes) > 1 and not any(change.drop or change.said for change in changes):
        # Words that differ in one value are said once: --dcp-size 2 or 4.
        columns = list(zip(*(change.use for change in changes), strict=False))
        differing = [at for at, words in enumerate(columns) if len(set(words)) > 1]
        same_length = len({len(change.use) for change in changes}) == 1
        flags = {word.split(" ")[0] for word in columns[differing[0]]} if differing else set()
        if same_length and len(differing) == 1 and len(flags) == 1:
            values = [word.split(" ", 1)[1] for word in columns[differing[0]]]
            words = list(changes[0].use)
            words[differing[0]] = f"{flags.pop()} {' or '.join(values)}"
            return f"use {' '.join(words)}"
    return ", or ".join(map(str, changes))
