#!/usr/bin/env bash
# Score running servers on GSM8K with sglang's own runner (sglang.test.run_eval) and set them side by side.
#   scripts/eval_gsm8k.sh [--dry-run] --server NAME=URL [--server NAME=URL ...]
# Two servers of a large model seldom fit one node: run this once for each, with one OUT. The first server in OUT is what
# the others are compared with:
#   scripts/eval_gsm8k.sh --server tp=http://127.0.0.1:30100        (then stop it, start scripts/serve_tp_dcp.sh)
#   scripts/eval_gsm8k.sh --server tp_dcp=http://127.0.0.1:30100
set -euo pipefail

# --- parameters ---------------------------------------------------------------
OUT=gsm8k.json         # results by server name; a name that is scored again is replaced
QUESTIONS=200          # the standard error of 200 questions is about 1.5 points; all are 1314
THREADS=64
DATA=                  # a local GSM8K test.jsonl; empty: the runner downloads it
# ------------------------------------------------------------------------------

usage() {
  echo "eval_gsm8k: $1" >&2
  exit 2
}

dry_run=false
servers=()
while (($#)); do
  case $1 in
    --dry-run) dry_run=true ;;
    --server | --out | --questions | --threads | --data)
      (($# > 1)) || usage "$1 must have a value, got none"
      case $1 in
        --server) servers+=("$2") ;;
        --out) OUT=$2 ;;
        --questions) QUESTIONS=$2 ;;
        --threads) THREADS=$2 ;;
        --data) DATA=$2 ;;
      esac
      shift
      ;;
    *) usage "the arguments are --dry-run, --server, --out, --questions, --threads and --data, got $1" ;;
  esac
  shift
done
((${#servers[@]})) || usage "--server NAME=URL must be given at least once, got none"
[[ $QUESTIONS =~ ^[1-9][0-9]*$ ]] || usage "--questions must be a positive integer, got $QUESTIONS"
[[ $THREADS =~ ^[1-9][0-9]*$ ]] || usage "--threads must be a positive integer, got $THREADS"
[[ ! -d $OUT && -d $(dirname "$OUT") && (-w $OUT || ! -e $OUT && -w $(dirname "$OUT")) ]] \
  || usage "--out must be a file that can be written, got $OUT"
[[ -z $DATA || -f $DATA ]] || usage "--data must be a file, got $DATA"
for server in "${servers[@]}"; do
  [[ $server =~ ^[A-Za-z0-9_.-]+=https?://[^/]+ ]] || usage "--server must be NAME=http://host:port, got $server"
done

report="$(dirname "${BASH_SOURCE[0]}")/gsm8k_report.py"
for server in "${servers[@]}"; do
  name=${server%%=*} url=${server#*=}
  command=(
    python3 -m sglang.test.run_eval --eval-name gsm8k --api completion --base-url "${url%/}"
    --num-examples "$QUESTIONS" --num-threads "$THREADS" --max-tokens 512
  )
  if [[ -n $DATA ]]; then command+=(--gsm8k-data-path "$DATA"); fi
  if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
    continue
  fi
  # The runner counts a failed request as a wrong answer, so a dead server would score 0 without a word.
  python3 "$report" ping "$url"
  python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("sglang") is None)' \
    || usage "python3 finds no sglang, whose runner asks the questions: pip install sglang, or activate its environment"
  log=$(mktemp)
  "${command[@]}" 2>&1 | tee "$log" >&2
  python3 "$report" ping "$url"
  metrics=$(sed -n 's/^Writing results to //p' "$log" | tail -1)
  python3 "$report" add --out "$OUT" --name "$name" --url "$url" --questions "$QUESTIONS" --metrics "$metrics"
  rm -f "$log"
done
$dry_run || python3 "$report" show --out "$OUT"
