"""Launch commands to be judged: published ones, hand-written ones of every kind, and any number drawn at random."""

import json
import random
import re
import shlex
from pathlib import Path

PUBLISHED = Path(__file__).with_name("published_commands.txt")
_MODEL = re.compile(r"(--model(?:-path)?)[ =](\S+)")
P = "python -m sglang.launch_server --model-path GLM"
B = f"{P} --tp 8 --dcp-size 8"
F = f"{B} --kv-cache-dtype fp8_e4m3"
CP = f"{F} --enable-prefill-cp --cp-strategy interleave"
SP = "SGLANG_PP_LAYER_PARTITION"
# GLM has 8 layers of which 0, 1 and 5 select, DS 8 layers which all do, QWEN is no DSA model.
HAND_WRITTEN = [
    # Launchers and the environment.
    "sglang serve GLM --tp 8 --dcp-size 8",
    "sglang serve --tp 8 --dcp-size 8 --model GLM",
    "sglang serve GLM --model-type llm --tp 8 --dcp-size 8 --enable-hisparse",
    "python -m sglang.cli.main serve GLM --tp 8 --dcp-size 8",
    "python -m sglang.launch_server GLM --tp 8 --dcp-size 8",
    f"env -u A NCCL_DEBUG=INFO nohup numactl -N 0 {B}",
    f"{P} --tp 8 --dcp-size 8 --pp-size 2",
    f"{SP}=5,3 {P} --tp 8 --dcp-size 8 --pp-size 2",
    f"{SP}=4,4 {P} --tp 8 --dcp-size 8 --pp-size 2",
    f"{SP}=5,4 {P} --tp 8 --dcp-size 8 --pp-size 2",
    f"env {SP}=5,3 {P} --tp 8 --dcp-size 8 --pp-size 2",
    f"docker run --gpus all -e {SP}=5,3 -v /a=b:/c IMAGE {P} --tp 8 --dcp-size 8 --pp-size 2",
    f"docker run --env={SP}=5,3 IMAGE bash -c '{P} --tp 8 --dcp-size 8 --pp-size 2 > log 2>&1'",
    f"bash -c 'export {SP}=5,3 && {P} --tp 8 --dcp-size 8 --pp-size 2 | tee log'",
    f"SGLANG_ENABLE_PP_SPEC=1 {B}",
    # Abbreviations, foreign flags, values out of choice, missing values.
    f"{P} --tp 8 --decode-context-parallel 8",
    f"{P} --tensor-parallel 8 --dcp-s 8 --kv-cache-dt fp8_e4m3",
    f"{P} --tp 8 --dcp_size 8",
    f"{B} --nsa-decode-backend flashmla_kv",
    f"{B} --no-such-flag",
    f"{B} --cuda-graph-max-bs 64",
    f"{B} --kv-cache-dtype fp8",
    f"{B} --dsa-decode-backend fa4",
    f"{B} --dcp-comm-backend nccl",
    f"{B} --cuda-graph-backend-prefill tc_piecewise",
    f"{B} --page-size",
    f"{B} --page-size x",
    f"{B} --max-total-tokens 128k",
    f"{B} --max-total-tokens 1.5Ki",
    f"{B} --enable-hisparse=1",
    f"{P} --tp 8 --tp 4 --dcp-size=8 --dcp-size 4",
    # Files and JSON.
    "python -m sglang.launch_server --config SERVER.yaml",
    "python -m sglang.launch_server --config SERVER.yaml --dcp-size 4",
    "python -m sglang.launch_server --config SERVER.yaml --enable-hisparse",
    "python -m sglang.launch_server --config HISPARSE.yaml",
    "python -m sglang.launch_server --config OLD.yaml",
    f"{B} --config missing.yaml",
    f"{B} --config=SERVER.yaml",
    "sglang serve --config SERVER.yaml",
    f'{F} --cuda-graph-config \'{{"prefill":{{"backend":"full"}}}}\'',
    f'{F} --cuda-graph-config \'{{"decode":{{"backend":"breakable"}}}}\'',
    f'{F} --cuda-graph-backend-decode breakable --cuda-graph-config \'{{"decode":{{"backend":"full"}}}}\'',
    f"{F} --cuda-graph-config '{{\"verify\":{{}}}}'",
    f"{F} --cuda-graph-config '[1]'",
    f"{F} --json-model-override-args '{{\"index_topk_freq\": 4}}' --pp-size 2",
    f'{F} --json-model-override-args \'{{"indexer_types": ["full", "shared", "full"]}}\'',
    "python -m sglang.launch_server --model DS --tp 8 --dcp-size 8 --pp-size 2 --json-model-override-args "
    "'{\"index_topk_freq\": 4}'",
    "python -m sglang.launch_server --model DS --tp 8 --dcp-size 8 --pp-size 2 --json-model-override-args "
    '\'{"index_topk_pattern": "FSSSFFFF"}\'',
    "python -m sglang.launch_server --model DS --tp 8 --dcp-size 8 --json-model-override-args '{\"index_topk\": 0}'",
    "python -m sglang.launch_server --model DS --tp 8 --dcp-size 8 --json-model-override-args '{\"index_topk\": null}'",
    f"{F} --json-model-override-args '{{\"num_attention_heads\": 60}}'",
    f"{F} --json-model-override-args '[]'",
    f"{F} --json-model-override-args nonsense",
    f"{F} --lora-paths a=b",
    f"{F} --lora-paths",
    f'{F} --lora-paths \'{{"lora_name": "a"}}\'',
    # Models.
    "python -m sglang.launch_server --model QWEN --tp 8 --dcp-size 8",
    "python -m sglang.launch_server --model NO_TOPK --tp 8 --dcp-size 8",
    "python -m sglang.launch_server --model ZERO_TOPK --tp 8 --dcp-size 8",
    "python -m sglang.launch_server --model LONG_PATTERN --tp 8 --dcp-size 8",
    "python -m sglang.launch_server --model SHORT_PATTERN --tp 8 --dcp-size 8 --pp-size 2",
    # Speculation.
    *(
        f"{F} {more}"
        for more in (
            "--speculative-algorithm EAGLE",
            "--speculative-algorithm EAGLE --speculative-eagle-topk 1",
            "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4",
            "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1",
            "--speculative-algorithm NEXTN --speculative-num-draft-tokens 4",
            "--speculative-algorithm nextn --speculative-num-steps 1 --speculative-eagle-topk 1",
            "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1",
            "--speculative-algorithm NGRAM",
            "--speculative-eagle-topk 4",
            "--speculative-num-steps 3",
            "--speculative-algorithm EAGLE --speculative-draft-model-path GLM/",
            "--speculative-algorithm EAGLE --speculative-draft-model-path DS",
        )
    ),
    # Backends, caches, chunks.
    f"{F} --decode-attention-backend nsa",
    f"{F} --prefill-attention-backend dsa",
    f"{F} --prefill-attention-backend dsa --decode-attention-backend nsa",
    f"{F} --attention-backend nsa --decode-attention-backend fa3",
    f"{F} --page-size 1",
    f"{F} --page-size 128",
    f"{F} --page-size 0",
    f"{F} --dsa-prefill-backend flashmla_auto",
    f"{B} --dsa-prefill-backend flashmla_auto",
    f"{F} --chunked-prefill-size 10000",
    f"{F} --chunked-prefill-size 8192",
    f"{P} --tp 8 --dcp-size 2 --attn-dp-size 4 --chunked-prefill-size 10240",
    f"{P} --tp 8 --dcp-size 2 --attn-dp-size 4 --chunked-prefill-size 32000",
    f"{F} --checkpoint-engine-wait-weights-before-ready",
    f"{F} --checkpoint-engine-wait-weights-before-ready --no-dcp-replicate-q-proj",
    f"{F} --checkpoint-engine-wait-weights-before-ready --dcp-comm-backend ag_rs",
    f"{F} --dcp-replicate-q-proj",
    f"{F} --enable-memory-saver",
    f"{F} --enable-memory-saver --enable-weights-cpu-backup",
    f"{F} --enable-memory-saver --dcp-comm-backend ag_rs",
    # Sizes.
    f"{CP} --attn-cp-size 8",
    f"{P} --tp 16 --dcp-size 16 --nnodes 2 --node-rank 0",
    f"{P} --tp 16 --dcp-size 16 --enable-prefill-cp --cp-strategy interleave --nnodes 2",
    f"{P} --tp 8 --dp 2 --dcp-size 4 --enable-prefill-cp --cp-strategy interleave --grammar-backend none",
    f"{P} --tp 8 --dp 2 --dcp-size 4 --enable-dp-attention",
    f"{F} --nnodes 3",
    f"{F} --dp-size 2",
    f"{F} --dp-size 2 --nnodes 2",
    f"{F} --moe-dense-tp-size 4",
    f"{F} --served-model-name a:b",
    f"{F} --tp 6 --dcp-size 2",
]


def published():
    """(name, words) of the published commands, each as it is, with DCP over all its ranks, and with --dcp-size 2."""
    for block in PUBLISHED.read_text(encoding="utf-8").split("\n\n")[1:]:
        head, command = block.strip().split("\n")
        name, model, _ = (part.strip() for part in head.split("|"))
        command = _MODEL.sub(lambda found: f"{found[1]} {model.upper()}", command)  # noqa: B023
        yield name, shlex.split(command)
        if "--dcp-size" not in command:
            tp_size = re.search(r"--(?:tp|tp-size|tensor-parallel-size)[ =](\d+)", command)[1]
            yield f"{name}+dcp", [*shlex.split(command), "--dcp-size", tp_size]
            yield f"{name}+dcp2", [*shlex.split(command), "--dcp-size", "2"]


def hand_written():
    """The words of each hand-written command."""
    return [shlex.split(command) for command in HAND_WRITTEN]


_INERT = [
    "--host 0.0.0.0",
    "--port 30001",
    "--trust-remote-code",
    "--mem-fraction-static 0.8",
    "--max-running-requests 64",
    "--reasoning-parser glm45",
    "--tool-call-parser glm47",
    "--served-model-name glm",
    "--max-total-tokens 100k",
    "--cuda-graph-max-bs-decode 16",
    "--cuda-graph-bs-decode 1 2 4",
    "--disable-cuda-graph",
    "--disable-radix-cache",
    "--ep 8",
    "--enable-metrics",
    "--watchdog-timeout 300",
    "--random-seed 1",
    "--log-level debug",
    "--quantization fp8",
    "--disable-shared-experts-fusion",
    "--moe-a2a-backend deepep",
    "--max-prefill-tokens 16384",
    "--enable-mixed-chunk",
    "--schedule-policy lpm",
    "--skip-server-warmup",
    "--stream-interval 4",
    "--disable-overlap-schedule",
    "--load-format dummy",
]
_OF_DCP = [
    "--page-size 1",
    "--page-size 64",
    "--page-size 128",
    "--dsa-decode-backend flashmla_kv",
    "--dsa-prefill-backend flashmla_kv",
    "--dsa-prefill-backend flashmla_auto",
    "--dsa-decode-backend fa3",
    "--dsa-prefill-backend flashmla_sparse",
    "--attention-backend nsa",
    "--attention-backend dsa",
    "--decode-attention-backend nsa",
    "--prefill-attention-backend dsa",
    "--attention-backend flashinfer",
    "--dcp-comm-backend a2a",
    "--dcp-comm-backend ag_rs",
    "--dcp-comm-backend fi_a2a",
    "--dcp-replicate-q-proj",
    "--no-dcp-replicate-q-proj",
    "--enable-cp-decode-attn-tp",
    "--grammar-backend none",
    "--grammar-backend xgrammar",
    "--chunked-prefill-size 8192",
    "--chunked-prefill-size 4100",
    "--chunked-prefill-size 16384",
    "--speculative-algorithm EAGLE",
    "--speculative-algorithm NEXTN",
    "--speculative-eagle-topk 1",
    "--speculative-num-steps 2",
    "--speculative-num-draft-tokens 3",
    "--speculative-eagle-topk 2",
    "--enable-hisparse",
    "--enable-lora",
    "--dtype bfloat16",
    "--dtype half",
    "--cuda-graph-backend-prefill disabled",
    "--cuda-graph-backend-decode full",
    "--debug-cuda-graph",
    "--checkpoint-engine-wait-weights-before-ready",
    "--moe-dense-tp-size 1",
    "--moe-dense-tp-size 8",
    "--nnodes 2",
    "--enable-hierarchical-cache",
    "--dsa-topk-backend torch",
    "--dsa-topk-backend flashinfer",
    "--pp-async-batch-depth 1",
    "--enable-two-batch-overlap",
    "--enable-torch-compile",
    "--cpu-offload-gb 2",
    "--enable-dynamic-chunking",
]
_UNJUDGED = [
    "--context-length 4096",
    "--enable-eplb",
    "--min-free-slots-delay 3",
    "--enable-nan-detection",
]
_SPELLINGS = {
    "--tp": ("--tp", "--tp-size", "--tensor-parallel-size", "--tensor-parallel"),
    "--dcp-size": ("--dcp-size", "--decode-context-parallel-size", "--decode-context", "--dcp-si"),
    "--attn-dp-size": ("--attn-dp-size", "--attention-data-parallel-size", "--attn-dp"),
    "--pp-size": ("--pp-size", "--pp", "--pipeline-parallel-size"),
    "--kv-cache-dtype": ("--kv-cache-dtype", "--kv-cache-d"),
}


def draw(seed, number):
    """`number` command lines, the same for the same seed."""
    chance = random.Random(seed)
    return [_draw_one(chance) for _ in range(number)]


def _draw_one(chance):
    tp_size = chance.choice((1, 2, 4, 8, 8, 8, 8, 16, 6))
    dcp_size = chance.choice((tp_size, tp_size, tp_size, max(tp_size // 2, 1), 2, 4, 8, 3))
    flags = [f"--tp {tp_size}", f"--dcp-size {dcp_size}"]
    if chance.random() < 0.6:
        flags.append(f"--kv-cache-dtype {chance.choice(('fp8_e4m3', 'fp8_e4m3', 'bfloat16', 'auto', 'fp8_e5m2'))}")
    kind = chance.random()
    if kind < 0.15:
        flags.append(f"--attn-dp-size {chance.choice((1, 2, 4))}")
    elif kind < 0.25:
        flags += [f"--dp-size {chance.choice((1, 2, 4))}", *chance.choice(([], ["--enable-dp-attention"]))]
    if chance.random() < 0.25:
        flags += ["--enable-prefill-cp", f"--cp-strategy {chance.choice(('interleave', 'interleave', 'zigzag'))}"]
        flags += chance.choice(([], [f"--attn-cp-size {chance.choice((tp_size, dcp_size, 2))}"]))
    if chance.random() < 0.12:
        flags.append(f"--pp-size {chance.choice((1, 2, 2, 3))}")
    if chance.random() < 0.2:
        flags += ["--speculative-algorithm EAGLE", "--speculative-num-steps 3", "--speculative-eagle-topk 1"]
    flags += chance.sample(_INERT, chance.choice((0, 1, 3, 6)))
    flags += chance.sample(_OF_DCP, chance.choice((0, 0, 1, 1, 2, 3)))
    if chance.random() < 0.05:
        flags.append(chance.choice(_UNJUDGED))
    if chance.random() < 0.05:
        overrides = json.dumps({"index_topk_freq": chance.choice((1, 2, 4))})
        flags.append(f"--json-model-override-args {shlex.quote(overrides)}")
    chance.shuffle(flags)
    words = []
    for flag in flags:
        name, *values = shlex.split(flag)
        name = chance.choice(_SPELLINGS.get(name, (name,)))
        words += [f"{name}={values[0]}"] if len(values) == 1 and chance.random() < 0.3 else [name, *values]
    model = chance.choice(("GLM", "GLM", "DS"))
    launcher = chance.choice(
        (
            ["python", "-m", "sglang.launch_server", "--model-path", model],
            ["NCCL_DEBUG=INFO", "python3", "-m", "sglang.launch_server", "--model", model],
            ["sglang", "serve", model],
            ["env", f"{SP}={chance.choice(('5,3', '4,4'))}", "sglang", "serve", "--model", model],
        )
    )
    return [*launcher, *words]
