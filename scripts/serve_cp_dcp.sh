#!/usr/bin/env bash
# Serve GLM-5.2 with CP-DCP: prompts are spread over CP_SIZE ranks by token, the cache over as many in decode.
#   scripts/serve_cp_dcp.sh [--dry-run] [more launch_server flags]
set -euo pipefail

# --- parameters ---------------------------------------------------------------
MODEL=GLM-5.2-W4AFP8   # a checkpoint directory, or a name that sglang can download
PRESET=glm-5.2         # what doctor judges by when the model is not a directory on this machine
QUANTIZATION=w4afp8
TP_SIZE=8
CP_SIZE=8              # context-parallel ranks, and as many DCP ranks
CP_STRATEGY=interleave # or zigzag
DCP_COMM_BACKEND=a2a   # or ag_rs
KV_CACHE_DTYPE=fp8_e4m3
CHUNKED_PREFILL_SIZE=8192
MAX_RUNNING_REQUESTS=64
MEM_FRACTION_STATIC=0.70
HOST=127.0.0.1         # loopback; put a proxy with authentication in front before you open it
PORT=30100
# ------------------------------------------------------------------------------

MODE_FLAGS=(
  --tp "$TP_SIZE"
  --attn-cp-size "$CP_SIZE"
  --enable-prefill-cp
  --cp-strategy "$CP_STRATEGY"
  --enable-cp-decode-attn-tp
  --dcp-size "$CP_SIZE"
  --dcp-comm-backend "$DCP_COMM_BACKEND"
)
source "$(dirname "${BASH_SOURCE[0]}")/launch_checked.sh" "$@"
