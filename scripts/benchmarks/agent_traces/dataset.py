"""Multi-turn agent traces in the ShareGPT form: `{"conversations": [{"from": "human" | "gpt", "value": ...}, ...]}`.

A row is one session. Its call K resends the first 2K - 1 turns, as recorded, so that every call's input is known
beforehand and does not depend on what the server answered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True)
class Session:
    """One recorded conversation.

    Args:
        name: where it stands in the file.
        system: the system message; empty for none.
        turns: texts, alternating user and assistant, the user first.
    """

    name: str
    system: str
    turns: tuple[str, ...]

    @property
    def num_calls(self) -> int:
        """Calls that the session makes: one per user turn."""
        return (len(self.turns) + 1) // 2

    def messages(self, call: int) -> list[dict[str, str]]:
        """Chat messages of call 1, 2, ...: the first `2 * call - 1` turns. ValueError: there is no such call."""
        if not 1 <= call <= self.num_calls:
            raise ValueError(f"call must be in [1, {self.num_calls}], got {call}")
        roles = ("user", "assistant")
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + [
            {"role": roles[number % 2], "content": text} for number, text in enumerate(self.turns[: 2 * call - 1])
        ]


@dataclass(frozen=True)
class Skipped:
    """A row that could not be read: where, and why."""

    where: str
    reason: str


def read_trace(path: Path) -> tuple[list[Session], list[Skipped]]:
    """Read a trace: a JSON list of rows, or one row a line.

    Returns:
        The sessions, and every row that could not be read with the reason.

    Raises:
        ValueError: the file cannot be read, or no row of it can.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"trace must be a readable file, got {str(path)!r}: {error.strerror}") from error
    rows, skipped = _rows_of_list(text) if text.lstrip().startswith("[") else _rows_of_lines(text)
    sessions = []
    for where, row in rows:
        session = _session(where, row)
        if isinstance(session, Session):
            sessions.append(session)
        else:
            skipped.append(Skipped(where, session))
    if not sessions:
        first = f"; {skipped[0].where}: {skipped[0].reason}" if skipped else ""
        raise ValueError(f"trace must hold at least one readable session, got {len(skipped)} unreadable rows{first}")
    return sessions, skipped


def _rows_of_lines(text: str) -> tuple[list[tuple[str, object]], list[Skipped]]:
    rows, skipped = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append((f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            skipped.append(Skipped(f"line {number}", f"not JSON: {error.msg}"))
    return rows, skipped


def _rows_of_list(text: str) -> tuple[list[tuple[str, object]], list[Skipped]]:
    """Row by row, so that a truncated download still gives the rows before the cut."""
    decoder, rows = json.JSONDecoder(), []
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            return rows, []
        where = f"row {len(rows) + 1}"
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            return rows, [Skipped(where, f"not JSON from here to the end of the file: {error.msg}")]
        rows.append((where, row))


def _session(where: str, row: object) -> Session | str:
    """A session, or why the row is none."""
    turns = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns:
        return "no list of conversations"
    system = ""
    if isinstance(turns[0], dict) and turns[0].get("from") == "system":
        system, turns = turns[0].get("value"), turns[1:]
        if not isinstance(system, str):
            return "the system turn has no text"
    texts = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            return f"turn {number} has no text"
        role, expected = _ROLES.get(turn.get("from")), ("user", "assistant")[(number - 1) % 2]
        if role != expected:
            return f"turn {number} is from {turn.get('from')!r}, not from the {expected}"
        texts.append(turn["value"])
    if not texts:
        return "no turn beside the system's"
    return Session(where, system, tuple(texts))
