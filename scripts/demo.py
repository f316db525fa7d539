"""Tiny models on a long text, under every split, against the unmodified transformers model: one table.

Both DSA models under everything, and one model with KV heads, which the embedded engine alone runs.

Exits with status 1 if any token differs.
"""

import sys
import time
from pathlib import Path

import torch

from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.hf.checkpoint import load_model, load_tokenizer, open_checkpoint, resolve_checkpoint
from nsa_dcp.hf.generate import GenerateJob, first_difference, generate_on_rank
from nsa_dcp.hf.tiny import NAMES
from nsa_dcp.hf.unmodified import generate_unmodified
from nsa_dcp.launcher import run_ranks

LONG_TEXT = Path(__file__).parent.parent / "LICENSE"
SHORT_TEXTS = ["Licensed under the Apache License, Version 2.0", "WITHOUT WARRANTIES", "a"]
MAX_NEW_TOKENS = 8
SPLITS = {
    "TP-DCP 2": DcpConfig(tp_size=2, dcp_size=2),
    "TP-DCP 4": DcpConfig(tp_size=4, dcp_size=4),
    "TP-DCP 4 sharded keys": DcpConfig(tp_size=4, dcp_size=4, index_keys="sharded"),
    "CP-DCP 4 interleave": DcpConfig(tp_size=4, dcp_size=4, mode="cp"),
    "CP-DCP 4 zigzag": DcpConfig(tp_size=4, dcp_size=4, mode="cp", cp_strategy="zigzag"),
}
KV_HEAD_MODEL = "tiny-qwen3-moe"
KV_HEAD_SPLITS = {"TP-DCP 2 of tp 4": DcpConfig(tp_size=4, dcp_size=2)}
# With a rounding cache the arithmetic is float64, so that a byte never depends on the order of a sum.
CACHES = {"float32": "float32", "fp8_e4m3": "float64"}


def main() -> int:
    """Print the table. Returns the exit status."""
    print(f"{'model':<18}{'cache':<10}{'split':<23}{'tokens':<12}{'cached KiB per rank':<26}{'seconds':>7}")
    all_identical = True
    for name in (*NAMES, KV_HEAD_MODEL):
        directory = resolve_checkpoint(name, seed=0)
        tokenizer = load_tokenizer(directory)
        prompts = [tokenizer.encode(text) for text in [LONG_TEXT.read_text(), *SHORT_TEXTS]]
        eos_ids = open_checkpoint(directory).eos_ids
        for kv_cache_dtype, dtype in CACHES.items():
            started = time.perf_counter()
            model = load_model(directory, dtype, torch.device("cpu"))
            expected = [generate_unmodified(model, ids, MAX_NEW_TOKENS, eos_ids, kv_cache_dtype) for ids in prompts]
            _print_row(name, kv_cache_dtype, "unmodified", "", "", time.perf_counter() - started)
            for split, config in (SPLITS if name in NAMES else KV_HEAD_SPLITS).items():
                started = time.perf_counter()
                pool = sum(len(ids) + MAX_NEW_TOKENS for ids in prompts) + len(prompts) * 64 * config.dcp_size
                job = GenerateJob(
                    directory=directory,
                    dtype=dtype,
                    device="cpu",
                    config=config,
                    cache=CacheConfig(kv_cache_dtype, pool),
                    prompts=prompts,
                    max_new_tokens=MAX_NEW_TOKENS,
                    chunked_prefill_size=1024,
                    eos_ids=eos_ids,
                )
                ranks = run_ranks(generate_on_rank, config.tp_size, (job,))
                differences = [first_difference(*pair) for pair in zip(ranks[0]["output_ids"], expected)]
                identical = not any(differences)
                all_identical &= identical
                held = "latent_bytes" if name in NAMES else "kv_bytes"
                cached = " ".join(f"{rank['usage'][held] / 1024:.0f}" for rank in ranks)
                verdict = "identical" if identical else "DIFFERENT"
                _print_row(name, kv_cache_dtype, split, verdict, cached, time.perf_counter() - started)
                for number, difference in enumerate(differences):
                    if difference:
                        print(f"    prompt {number}: {difference}")
    print(f"prompts of {', '.join(str(len(ids)) for ids in prompts)} tokens, {MAX_NEW_TOKENS} new tokens each")
    return 0 if all_identical else 1


def _print_row(name: str, cache: str, split: str, verdict: str, cached: str, seconds: float) -> None:
    print(f"{name:<18}{cache:<10}{split:<23}{verdict:<12}{cached:<26}{seconds:>7.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
