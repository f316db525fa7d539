#!/usr/bin/env bash
# Serve GLM-5.2 with TP-DCP: each request's cache is spread over DCP_SIZE GPUs, in prefill and in decode.
#   scripts/serve_tp_dcp.sh [--dry-run] [more launch_server flags]
set -euo pipefail

# --- parameters ---------------------------------------------------------------
MODEL=GLM-5.2-W4AFP8   # a checkpoint directory, or a name that sglang can download
PRESET=glm-5.2         # what doctor judges by when the model is not a directory on this machine
QUANTIZATION=w4afp8
TP_SIZE=8
DCP_SIZE=8
DCP_COMM_BACKEND=a2a   # or ag_rs
KV_CACHE_DTYPE=fp8_e4m3
CHUNKED_PREFILL_SIZE=8192
MAX_RUNNING_REQUESTS=64
MEM_FRACTION_STATIC=0.70
HOST=127.0.0.1         # loopback; put a proxy with authentication in front before you open it
PORT=30100
# ------------------------------------------------------------------------------

MODE_FLAGS=(--tp "$TP_SIZE" --dcp-size "$DCP_SIZE" --dcp-comm-backend "$DCP_COMM_BACKEND")
source "$(dirname "${BASH_SOURCE[0]}")/launch_checked.sh" "$@"
