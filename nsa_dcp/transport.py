"""Which way a group's exchanges go, as a user chooses it. No torch: commands are judged by it too."""

import os
from collections.abc import Mapping

from nsa_dcp.choices import WIRES

VARIABLE, DEFAULT_WIRE = "NSA_DCP_WIRE", "nccl"


def chosen_transport(environ: Mapping[str, str] = os.environ) -> str:
    """`peer`, kernels over memory that ranks map into each other; or `nccl`, collectives. As NSA_DCP_WIRE says.

    Raises:
        ValueError: it says something else.
    """
    value = environ.get("NSA_DCP_WIRE") or DEFAULT_WIRE
    if value not in WIRES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(WIRES)}, got {value!r}")
    return value
