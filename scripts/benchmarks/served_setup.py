"""How the server of a report was set up, in the step model's terms."""

from collections.abc import Mapping

from nsa_dcp.planning.steps.step_model import DecodeSetup
from scripts.served_checks.servers.server_config import parse_sizes


def setup_of(report: Mapping) -> tuple[str, DecodeSetup]:
    """The model's mode and setup of a benchmarks/servers report."""
    tp_size, dcp_size = parse_sizes(report["config"])
    options = set(report["config"].split("-")[2:])
    resolved = report.get("resolved", {})
    context_parallel = bool({"cpi", "cpz"} & options)
    mode = "tp" if dcp_size == 1 else "cp_dcp" if context_parallel else "tp_dcp"
    named = {"a2a", "ag_rs"} & options
    backend = named.pop() if named else resolved.get("dcp_comm_backend") or "a2a"
    return mode, DecodeSetup(
        tp_size=tp_size,
        dcp_size=dcp_size,
        comm_backend=backend,
        replicate_q_proj=resolved.get("dcp_replicate_q_proj"),
        cp_decode_attn_tp="slice" in options,
    )
