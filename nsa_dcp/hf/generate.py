"""What `nsa-dcp generate` does: refusals before a rank starts, generation on every rank, the comparison."""

import argparse
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_dcp.command_line import check_output_file
from nsa_dcp.config import CacheConfig, DcpConfig
from nsa_dcp.kv_heads.config import KvHeadShape
from nsa_dcp.layout import pages_for, widened_page_size

_PROGRESS_EVERY_S = 2.0
_LONGEST_TIMEOUT_S = 86400.0
_NOT_FINITE_ADVICE = "; the weights are finite, so some value inside the model overflows its dtype or divides by zero"


@dataclass(frozen=True)
class GenerateJob:
    """What every rank is told."""

    directory: Path
    dtype: str
    device: str
    config: DcpConfig
    cache: CacheConfig
    prompts: list[list[int]]
    max_new_tokens: int
    chunked_prefill_size: int
    eos_ids: frozenset[int]
    cuda_graph: bool = False
    timeout_s: float = 600.0


def run_generate(args: argparse.Namespace) -> int:
    """Run the subcommand. Returns its exit status: 0, or 1 where `--check` found a difference.

    Raises:
        ValueError, NotImplementedError, RuntimeError: refused or failed; the message says why.
    """
    from nsa_dcp.hf.checkpoint import open_checkpoint, resolve_checkpoint
    from nsa_dcp.launcher import run_ranks

    config = DcpConfig(
        tp_size=args.dcp_size if args.tp_size is None else args.tp_size,
        dcp_size=args.dcp_size,
        mode=args.mode,
        cp_strategy=args.cp_strategy,
        dcp_comm_backend=args.dcp_comm_backend,
        selection=args.index_selection,
        prefill=args.prefill,
        index_keys=args.index_keys,
    )
    for name in ("max_new_tokens", "chunked_prefill_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")
    if not -(2**63) <= args.seed < 2**63:
        raise ValueError(f"seed must be an integer of 64 bits, got {args.seed}")
    if not 0 < args.timeout <= _LONGEST_TIMEOUT_S:
        raise ValueError(f"timeout must be above 0 and at most {_LONGEST_TIMEOUT_S:g}, got {args.timeout:g}")
    if args.device == "cuda":
        _check_served_on_cuda(args.kv_cache_dtype, args.dtype)
    check_output_file("--json", args.json)
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeError(
            "generate needs transformers, found none: pip install 'nsa-dcp[hf]', or from a checkout: "
            "pip install '.[hf]'"
        )
    written = read_prompts(args.prompts)
    directory = resolve_checkpoint(args.model, args.seed)
    checkpoint = open_checkpoint(directory)
    checkpoint.shape.check_split(config)
    if args.device == "cuda" and isinstance(checkpoint.shape, KvHeadShape):
        raise NotImplementedError("device must be cpu for models with KV heads, whose attention has no kernel yet")
    prompts = tokenize_prompts(written, directory, checkpoint.vocab_size)
    check_lengths(prompts, args.max_new_tokens, checkpoint.context_length)
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if args.device == "cuda" else "float32" if args.kv_cache_dtype == "float32" else "float64"
    checkpoint.check_values(dtype)
    pool = _tokens_at_once(prompts, args, config) if args.max_total_tokens is None else args.max_total_tokens
    job = GenerateJob(
        directory=directory,
        dtype=dtype,
        device=args.device,
        config=config,
        cache=CacheConfig(args.kv_cache_dtype, pool),
        prompts=prompts,
        max_new_tokens=args.max_new_tokens,
        # What exceeds all prompts changes nothing, and need not fit a tensor's index.
        chunked_prefill_size=min(args.chunked_prefill_size, sum(map(len, prompts))),
        eos_ids=frozenset() if args.ignore_eos else checkpoint.eos_ids,
        cuda_graph=args.device == "cuda" and not args.disable_cuda_graph,
        timeout_s=args.timeout,
    )
    started = time.perf_counter()
    ranks = run_ranks(generate_on_rank, config.tp_size, (job,), args.device, args.timeout, on_message=_Progress().show)
    outputs = ranks[0]["output_ids"]
    not_finite = ranks[0].get("not_finite", {})
    if not_finite and not args.check:
        raise RuntimeError(f"{_describe_not_finite(not_finite)}, so its tokens would mean nothing{_NOT_FINITE_ADVICE}")
    difference = check_job(job, outputs, not_finite) if args.check else None
    report = {
        "model": args.model,
        "mode": config.mode,
        "tp_size": config.tp_size,
        "dcp_size": config.dcp_size,
        "cp_strategy": config.cp_strategy if config.mode == "cp" else None,
        "dcp_comm_backend": config.dcp_comm_backend,
        "index_selection": config.selection,
        "prefill": config.prefill,
        "index_keys": config.index_keys,
        "kv_cache_dtype": args.kv_cache_dtype,
        "dtype": dtype,
        "device": args.device,
        "cuda_graph": job.cuda_graph,
        "seconds": round(time.perf_counter() - started, 3),
        "prompts": [{"prompt_tokens": len(prompt), "output_ids": output} for prompt, output in zip(prompts, outputs)],
        "ranks": [rank["usage"] for rank in ranks],
        "check": None if not args.check else {"identical": difference is None, "first_difference": difference},
    }
    text = json.dumps(report, indent=2)
    if args.json:
        _write(args.json, text)
    else:
        print(text)
    if difference:
        print(f"nsa-dcp generate: the unmodified model differs: {difference}", file=sys.stderr)
        return 1
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise RuntimeError(f"--json needs a file that can be written, found {path}: {error.strerror}") from error


def generate_on_rank(rank: int, send: Callable[[object], None], job: GenerateJob) -> dict:
    """Load the model, generate, measure the caches. Runs in a rank's process."""
    import torch

    from nsa_dcp.hf.checkpoint import load_model
    from nsa_dcp.hf.engine import Engine, Request, model_shape
    from nsa_dcp.hf.ranks import join_groups, lay_wire
    from nsa_dcp.hf.static_decode import StaticDecode

    device = torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
    model = load_model(job.directory, job.dtype, device)
    ranks = join_groups(job.config, rank, job.timeout_s)
    ranks = lay_wire(ranks, model_shape(model).num_attention_heads, len(job.prompts), device)
    engine = Engine(model, ranks, job.cache)
    run_decode = None
    if job.cuda_graph:
        longest = max(len(prompt) for prompt in job.prompts) + job.max_new_tokens - 1
        run_decode = StaticDecode(engine, len(job.prompts), longest).forward
    not_finite: dict[int, int] = {}

    def look_at(request: Request, logits: torch.Tensor) -> None:
        if not logits.isfinite().all():
            not_finite.setdefault(request.number, len(request.output_ids))

    output_ids = engine.generate(
        job.prompts,
        job.max_new_tokens,
        job.chunked_prefill_size,
        job.eos_ids,
        on_progress=(lambda *numbers: send(numbers)) if rank == 0 else None,
        on_logits=look_at,
        run_decode=run_decode,
    )
    return {"output_ids": output_ids, "usage": engine.usage(), "not_finite": not_finite}


def check_job(job: GenerateJob, outputs: list[list[int]], not_finite: dict[int, int]) -> str | None:
    """Compare with the unmodified model.

    Args:
        job: what was run.
        outputs: generated ids of each prompt.
        not_finite: prompt number -> generated token whose logits were not finite first.

    Returns:
        The first difference in words, or None.

    Raises:
        RuntimeError: the unmodified model's logits are not finite, so that there is nothing to compare with.
    """
    import torch

    from nsa_dcp.hf.checkpoint import load_model
    from nsa_dcp.hf.unmodified import generate_unmodified

    model = load_model(job.directory, job.dtype, torch.device(job.device))
    for number, (prompt, output) in enumerate(zip(job.prompts, outputs)):
        finite: list[bool] = []
        expected = generate_unmodified(
            model,
            prompt,
            job.max_new_tokens,
            job.eos_ids,
            kv_cache_dtype=job.cache.kv_cache_dtype,
            on_logits=functools.partial(_note_finite, finite),
        )
        if not all(finite):
            theirs = _describe_not_finite({number: finite.index(False)})
            ours = "nor are nsa-dcp's" if number in not_finite else "nsa-dcp's are"
            raise RuntimeError(
                f"of the unmodified model {theirs}, {ours}: there is nothing to compare with{_NOT_FINITE_ADVICE}"
            )
        if number in not_finite:
            return f"{_describe_not_finite({number: not_finite[number]})}, the unmodified model's are"
        difference = first_difference(output, expected)
        if difference:
            return f"prompt {number} ({len(prompt)} tokens): {difference}"
    return None


def _describe_not_finite(not_finite: dict[int, int]) -> str:
    number = min(not_finite)
    return f"the logits of generated token {not_finite[number]} of prompt {number} are not finite"


def first_difference(output: list[int], expected: list[int]) -> str | None:
    """Say where two generations part, or None."""
    for place, (got, want) in enumerate(zip(output, expected)):
        if got != want:
            return f"generated token {place} is {got}, the unmodified model's is {want}"
    if len(output) != len(expected):
        return f"{len(output)} tokens generated, {len(expected)} by the unmodified model"
    return None


def _note_finite(finite: list[bool], logits: Any) -> None:
    finite.append(bool(logits.isfinite().all()))


def read_prompts(path: Path) -> list[str | list[int]]:
    """Read a prompts file.

    Raises:
        ValueError: it is not a non-empty JSON list of non-empty strings and lists of token ids.
    """
    try:
        prompts = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"prompts must be a readable file, got {path} ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"prompts must be a JSON file, got {path} ({error})") from None
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(f"prompts must be a non-empty JSON list, got {type(prompts).__name__} in {path}")
    for number, prompt in enumerate(prompts):
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not (isinstance(prompt, str) or is_ids) or not prompt:
            raise ValueError(
                "prompts must each be a non-empty string or list of token ids, got "
                f"{str(prompt)[:60]!r} as number {number}"
            )
        # JSON can spell half a character, which no tokenizer takes.
        if isinstance(prompt, str) and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(f"prompts must be Unicode text, got a lone surrogate in number {number}")
    return prompts


def tokenize_prompts(prompts: list[str | list[int]], directory: Path, vocab_size: int) -> list[list[int]]:
    """Turn strings into token ids with the checkpoint's tokenizer.

    Raises:
        ValueError: there is a string and no tokenizer, a string without tokens, or an id outside the vocabulary.
    """
    if any(isinstance(prompt, str) for prompt in prompts):
        from nsa_dcp.hf.checkpoint import load_tokenizer

        tokenizer = load_tokenizer(directory)
        tokenized = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    else:
        tokenized = [prompt for prompt in prompts if not isinstance(prompt, str)]
    for number, prompt in enumerate(tokenized):
        if not prompt:
            raise ValueError(f"prompts must each have a token, got none in number {number}")
        if not all(0 <= token < vocab_size for token in prompt):
            outside = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"prompts must hold token ids in [0, {vocab_size}), got {outside} in number {number}")
    return tokenized


def check_lengths(prompts: list[list[int]], max_new_tokens: int, context_length: int | None) -> None:
    """Refuse prompts that lead past the positions that the model was made for.

    Args:
        prompts: token ids.
        max_new_tokens: per prompt; the last of them is never cached.
        context_length: positions; None where the checkpoint does not say.

    Raises:
        ValueError: one does.
    """
    for number, prompt in enumerate(prompts):
        if context_length is not None and len(prompt) + max_new_tokens - 1 > context_length:
            raise ValueError(
                f"prompts must fit the model's context of {context_length} tokens, got {len(prompt)} tokens and up to "
                f"{max_new_tokens} new ones in number {number}"
            )


def _check_served_on_cuda(kv_cache_dtype: str, dtype: str) -> None:
    if kv_cache_dtype == "float32":
        raise NotImplementedError(
            "kv_cache_dtype must be bfloat16 or fp8_e4m3 on cuda, the rows that FlashMLA reads, got float32"
        )
    if dtype == "float64":
        raise NotImplementedError("dtype must be bfloat16 or float32 on cuda, got float64")


def _tokens_at_once(prompts: list[list[int]], args: argparse.Namespace, config: DcpConfig) -> int:
    pages = sum(pages_for(len(prompt) + args.max_new_tokens - 1, config.dcp_size) for prompt in prompts)
    return pages * widened_page_size(config.dcp_size)


class _Progress:
    """Lines on standard error while a long run goes on; a short one stays quiet."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def show(self, numbers: tuple[int, int, int]) -> None:
        if time.monotonic() - self._last < _PROGRESS_EVERY_S:
            return
        self._last = time.monotonic()
        cached, prompt_tokens, generated = numbers
        print(f"prompt tokens {cached}/{prompt_tokens}, generated {generated}", file=sys.stderr, flush=True)
