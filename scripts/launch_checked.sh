# Sourced by the serve_*.sh scripts, which set their parameters and the array MODE_FLAGS. Takes the script's own arguments:
#   --dry-run   print the command and stop; every other word is appended to it (the last of two equal flags wins).
# Either way `nsa-dcp doctor` judges the command first, and a command that it refuses is neither printed nor run.

COMMAND=(
  python3 -m sglang.launch_server
  --model-path "$MODEL"
  --quantization "$QUANTIZATION"
  --disable-shared-experts-fusion
  "${MODE_FLAGS[@]}"
  --kv-cache-dtype "$KV_CACHE_DTYPE"
  --reasoning-parser glm45
  --tool-call-parser glm47
  --chunked-prefill-size "$CHUNKED_PREFILL_SIZE"
  --max-running-requests "$MAX_RUNNING_REQUESTS"
  --page-size 64
  --mem-fraction-static "$MEM_FRACTION_STATIC"
  --trust-remote-code
  --attention-backend nsa
  --dsa-prefill-backend flashmla_kv
  --dsa-decode-backend flashmla_kv
  --host "$HOST"
  --port "$PORT"
)
dry_run=false
for word in "$@"; do
  if [[ $word == --dry-run ]]; then dry_run=true; else COMMAND+=("$word"); fi
done

if ! command -v nsa-dcp >/dev/null; then
  echo "${0##*/}: nsa-dcp is not on PATH: activate the environment that serves, or run: pip install '.[sglang]' in this checkout" >&2
  exit 127
fi

# Doctor judges the model that the command names in the end, from its config.json. One that is not on this machine is
# judged as the published one; the server then judges it again, once it has it.
# bash 5 tells the exit status of doctor apart: 1 the command would be refused, 2 it could not be read.
nsa-dcp doctor --command-only --dsa-only --preset-if-absent "$PRESET" -- "${COMMAND[@]}" >&2 || exit $?

if $dry_run; then
  printf '%q ' "${COMMAND[@]}"
  echo
  exit 0
fi
if ! "${COMMAND[0]}" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("sglang") is None)'; then
  echo "${0##*/}: ${COMMAND[0]} finds no sglang: activate the environment that serves, or run: pip install '.[sglang]' in this checkout" >&2
  exit 127
fi
exec "${COMMAND[@]}"
