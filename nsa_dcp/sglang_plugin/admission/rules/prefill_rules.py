"""Ways of prefill (NSA_DCP_PREFILL) that can be served, and what to set instead. Part of `validation.find_problems`."""

from __future__ import annotations

from nsa_dcp.choices import PREFILL_WAYS, WIRE_VARIABLE
from nsa_dcp.sglang_plugin.admission.advice import advise, drop
from nsa_dcp.sglang_plugin.admission.server_settings import PREFILL_VARIABLE, Problem, ServerSettings

_UNSET = advise(drop(PREFILL_VARIABLE, said="unset it"))


def find_prefill_problems(settings: ServerSettings) -> list[Problem]:
    """Return why a way of prefill cannot be served; empty when it can, or when none is asked for.

    Args:
        settings: as in `validation.find_problems`.
    """
    asked = settings.prefill_way
    if not asked:
        return []
    if asked not in PREFILL_WAYS:
        return [Problem(f"{PREFILL_VARIABLE}={asked}", f"the ways are {', '.join(PREFILL_WAYS)}", _UNSET)]
    if settings.enable_prefill_cp and asked != "queries":
        reason = "with prefill context parallelism every rank has rows of its own already; the choice is TP-DCP's"
        return [Problem(f"{PREFILL_VARIABLE}={asked} with --enable-prefill-cp", reason, _UNSET)]
    if settings.wire == "peer" and asked != "queries":
        # One backend tells the layers so for good, the other in each forward.
        reason = "either tells sglang's layers otherwise who gathers heads"
        advice = advise(
            drop(WIRE_VARIABLE, said=f"unset {WIRE_VARIABLE}"), drop(PREFILL_VARIABLE, said=f"unset {PREFILL_VARIABLE}")
        )
        return [Problem(f"{PREFILL_VARIABLE}={asked} with {WIRE_VARIABLE}=peer", reason, advice)]
    return []
