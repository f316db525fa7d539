#!/usr/bin/env bash
# Serve GLM-5.2 with tensor parallelism alone: every GPU holds every request's cache.
#   scripts/serve_tp.sh [--dry-run] [more launch_server flags]
set -euo pipefail

# --- parameters ---------------------------------------------------------------
MODEL=GLM-5.2-W4AFP8   # a checkpoint directory, or a name that sglang can download
PRESET=glm-5.2         # what doctor judges by when the model is not a directory on this machine
QUANTIZATION=w4afp8
TP_SIZE=8
KV_CACHE_DTYPE=fp8_e4m3
CHUNKED_PREFILL_SIZE=8192
MAX_RUNNING_REQUESTS=64
MEM_FRACTION_STATIC=0.70
HOST=127.0.0.1         # loopback; put a proxy with authentication in front before you open it
PORT=30100
# ------------------------------------------------------------------------------

MODE_FLAGS=(--tp "$TP_SIZE")
source "$(dirname "${BASH_SOURCE[0]}")/launch_checked.sh" "$@"
