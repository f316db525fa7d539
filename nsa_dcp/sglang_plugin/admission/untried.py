"""What can be chosen before a GPU has run it: served, tested on a CPU, and said aloud wherever it is chosen."""

from __future__ import annotations

from nsa_dcp.choices import WIRE_VARIABLE
from nsa_dcp.sglang_plugin.admission.server_settings import PREFILL_VARIABLE, ServerSettings


def list_untried(settings: ServerSettings) -> list[str]:
    """Choices of a command that were never run on a GPU, a sentence each; their docs are rows of docs/support.md.

    Args:
        settings: as in `validation.find_problems`, which found none.
    """
    chosen = []
    if (settings.prefill_way or "queries") != "queries":
        chosen.append(f"{PREFILL_VARIABLE}={settings.prefill_way}")
    if settings.wire == "peer":
        chosen.append(f"{WIRE_VARIABLE}=peer")
    return [
        f"{choice} has not run on a GPU yet: compare its answers with those of a server without it first"
        for choice in chosen
    ]
