#!/usr/bin/env bash
# make_venv.sh VENV REQUIREMENT   a virtual environment with this checkout installed in editable form.
#
# torch: one that $PYTHON can import already is kept. Otherwise a CPU build is looked for, so that a machine without a GPU
# does not download gigabytes of CUDA libraries: first among the builds pip can see, then on PyTorch's own index. With a
# GPU, or if neither has one, pip installs its default.
set -euo pipefail
venv=$1 requirement=$2 python=${PYTHON:-python3}
torch_cpu_version=2.13.0

"$python" - <<'PY' || { echo "nsa-dcp needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

options=()
if "$python" -c 'import torch' 2>/dev/null; then options+=(--system-site-packages); fi
"$python" -m venv "${options[@]}" "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --upgrade pip

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null && ! command -v nvidia-smi >/dev/null; then
  "${pip[@]}" "torch==$torch_cpu_version+cpu" 2>/dev/null \
    || "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "torch==$torch_cpu_version" 2>/dev/null \
    || echo "no CPU build of torch found; pip's default is installed" >&2
fi
"${pip[@]}" --editable "$requirement"
