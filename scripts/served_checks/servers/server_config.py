"""From a config, `tpN-dcpM-...`, to the command line of its server; ask_servers.py lists what may stand in one."""

import re
import sys
from pathlib import Path

from scripts.served_checks.servers import shared_gpu

DRAFT_TOKENS = 3
# Slots of all ranks together: fewer than all requests need, so that old ones are taken again, more than any one needs.
POOL_TOKENS = {False: 24576, True: 8192}


def parse_sizes(config: str) -> tuple[int, int]:
    """(tp_size, dcp_size) of `tpN-dcpM-...`. ValueError: it is not of that form."""
    found = re.match(r"tp(\d+)-dcp(\d+)(-|$)", config)
    if not found:
        raise ValueError(f"config must begin with tpN-dcpM, got {config!r}")
    return int(found[1]), int(found[2])


def server_command(model: Path, config: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a config's server, and what it adds to the environment."""
    tp_size, dcp_size = parse_sizes(config)
    options = set(config.split("-")[2:])
    bf16, retract = "bf16" in options, "retract" in options
    # A stock flashmla_kv packs a bfloat16 cache into FP8 in every call: without DCP, the bfloat16 kernel then.
    sparse = "flashmla_sparse" if bf16 and dcp_size == 1 else "flashmla_kv"
    flags = [
        f"--host 127.0.0.1 --port {port} --skip-tokenizer-init --skip-server-warmup --random-seed 1",
        f"--tp-size {tp_size} --dcp-size {dcp_size} --watchdog-timeout 300",
        f"--attention-backend nsa --dsa-prefill-backend {sparse} --dsa-decode-backend {sparse}",
        f"--kv-cache-dtype {'bfloat16' if bf16 else 'fp8_e4m3'} --page-size 64 --mem-fraction-static 0.3",
        f"--max-total-tokens {POOL_TOKENS[retract] // dcp_size} --max-running-requests 32 --chunked-prefill-size 2048",
        "--schedule-conservativeness 0.1 --cuda-graph-max-bs-decode 16 --enable-fp32-lm-head",
        # The same prefill everywhere.
        "--cuda-graph-backend-prefill disabled --enforce-disable-flashinfer-allreduce-fusion",
    ]
    if "gpus" not in options:
        # Ranks that share a GPU cannot map each other's memory.
        flags.append("--disable-custom-all-reduce")
    optional = {
        "nograph": "--cuda-graph-backend-decode disabled",
        "a2a": "--dcp-comm-backend a2a",
        "ag_rs": "--dcp-comm-backend ag_rs",
        "qrep": "--dcp-replicate-q-proj",
        "noqrep": "--no-dcp-replicate-q-proj",
        "cpi": f"--enable-prefill-cp --cp-strategy interleave --attn-cp-size {tp_size}",
        "cpz": f"--enable-prefill-cp --cp-strategy zigzag --attn-cp-size {tp_size}",
        "slice": "--enable-cp-decode-attn-tp",
        "mixed": "--enable-mixed-chunk",
        "triton": "--fp8-gemm-backend triton",
        "nextn": "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {DRAFT_TOKENS}",
    }
    flags += [flag for option, flag in optional.items() if option in options]
    numbered = {"dp": "--attn-dp-size", "pp": "--pp-size", "c": "--context-length", "ep": "--ep-size"}
    for option in options:
        if (found := re.fullmatch(r"([a-z]+)(\d+)", option)) and found[1] in numbered:
            flags.append(f"{numbered[found[1]]} {found[2]}")
    # Without DCP too, short prompts are attended to by the sparse kernels.
    environment = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
    # DeepGEMM compiles for the batches that come, not for all of 1 to 16,384 tokens before the first.
    environment["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] = "0"
    if "gpus" not in options:
        environment |= shared_gpu.ENVIRONMENT
    if retract:
        environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    if "stock" in options:
        # The plugins that are loaded, by name.
        environment["SGLANG_PLUGINS"] = "none" if "gpus" in options else "shared_gpu"
    words = " ".join(flags).split()
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *words], environment
