"""A server's wire: opened once, before anything is captured, and what happens to the server when it fails."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import torch

from nsa_dcp.sglang_plugin.compat import require
from nsa_dcp.sglang_plugin.startup.served_sizes import captured_requests, read_shape, read_sizes
from nsa_dcp.transport import VARIABLE, chosen_transport
from nsa_dcp.wire import FAULT_EXIT_CODE, PeerWire, WireLoad, open_wire

logger = logging.getLogger(__name__)

# Rows of a wire where no graph is captured, and the most of one: larger steps gain little, and take much memory.
_EAGER_ROWS, _MOST_ROWS = 256, 1024


def open_server_wire(model_runner: Any, parallel: Any) -> PeerWire | None:
    """Open the wire of this rank's DCP group where NSA_DCP_WIRE asks for one; every rank of a server must call it.

    Where it cannot be had, a line says why, and sglang's collectives serve.

    Args:
        model_runner: sglang's ModelRunner, its pools built.
        parallel: sglang's parallel context.

    Raises:
        ValueError: the variable says neither `peer` nor `nccl`.
        RuntimeError: peer memory does not carry what is sent, or queries are projected for all ranks' heads.
    """
    if chosen_transport() != "peer":
        return None
    require(not parallel.dcp_replicate_q_proj, "query projections that are not gathered", "--dcp-replicate-q-proj")
    load = WireLoad(count_rows(model_runner, parallel), read_shape(model_runner, parallel).gathered_heads)
    group = parallel.dcp_group
    wire = open_wire(group.device_group, torch.device(model_runner.device, model_runner.gpu_id), load, end_server)
    if isinstance(wire, str):
        logger.warning("nsa-dcp: %s=peer, but this server exchanges through NCCL: %s", VARIABLE, wire)
        return None
    return wire


def count_rows(model_runner: Any, parallel: Any) -> int:
    """Query tokens of the largest step that goes over the wire: the largest captured one. Args: as above."""
    sizes = read_sizes(model_runner, parallel)
    captured = min(captured_requests(model_runner), sizes.requests) * sizes.rows_per_request
    return min(captured or _EAGER_ROWS, _MOST_ROWS)


def end_server(sentence: str) -> None:
    """Say why, tell the server's main process as sglang's schedulers do when they fail, and end this one at once."""
    logger.error(sentence)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(FAULT_EXIT_CODE)
