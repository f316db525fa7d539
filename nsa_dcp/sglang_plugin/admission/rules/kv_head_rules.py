"""DCP for models that cache keys and values by head (GQA, MHA): not served here yet, and mostly wrong in stock sglang.

sglang 0.5.23 widens the slots of every model under DCP, and of its attention backends on NVIDIA GPUs triton alone
divides them again. What is right there is left alone; what would answer with wrong tokens is refused. All of it was
read in sglang's source, not run. Part of `validation`, which asks `find_kv_head_problems`.
"""

from __future__ import annotations

from nsa_dcp.planning.kv_heads.sizes import smallest_useful_tp_size, useful_dcp_sizes
from nsa_dcp.sglang_plugin.admission.advice import Advice, Change, advise, drop, use
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, Problem, ServerSettings

DIVIDES_SLOTS = "triton"
# What sglang takes on Hopper for a model with KV heads where nothing was asked for.
_DEFAULT_BACKEND = "fa3"
# Models for which it takes triton instead.
TRITON_BY_DEFAULT = (
    "Gemma4ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
    "DiffusionGemmaForBlockDiffusion",
    "HrmTextForCausalLM",
)
# Their attention projects K and V for the whole DCP group, whatever the number of heads.
REPLICATES_KV_HEADS = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
# They write K and V inside RoPE where the cache is bfloat16, at slots that nobody has divided.
WRITES_IN_ROPE = (
    "Qwen3MoeForCausalLM",
    "BailingMoEForCausalLM",
    "BailingMoeForCausalLM",
    "BailingMoeV2ForCausalLM",
    "GptOssForCausalLM",
    "LLaDA2MoeModelLM",
    "MellumForCausalLM",
    "SDARForCausalLM",
    "SDARMoeForCausalLM",
)
# They have no latent and no plain KV heads either, and rules of their own in sglang.
OTHER_ATTENTION = (
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForCausalLMNextN",
    "DeepseekV4ForCausalLMDSpark",
)
_NOT_SERVED = "nsa-dcp does not serve models with KV heads yet, and stock sglang"
_WITHOUT_DCP = use("--dcp-size 1")
_BACKEND_OF_A_PHASE = ("--prefill-attention-backend", "--decode-attention-backend")
_WIDE_CACHES = ("auto", "bf16", "bfloat16")
_NARROW_MODELS = ("half", "float16", "float", "float32")


def has_kv_heads(settings: ServerSettings, model: ModelFacts, capability: tuple[int, int] | None) -> bool:
    """Whether these rules judge a command: DCP, on an NVIDIA GPU, for a model that caches K and V by head.

    Args: as `validation.is_served_here`.
    """
    return settings.dcp_size > 1 and model.has_kv_heads and capability is not None


def find_kv_head_problems(
    settings: ServerSettings, model: ModelFacts, capability: tuple[int, int] | None
) -> list[Problem]:
    """Return every reason why stock sglang would answer this command's requests with wrong tokens; empty when none.

    A backend that is not known counts as sglang's default on Hopper.

    Args: as `validation.is_served_here`. No size is below 1.
    """
    if not has_kv_heads(settings, model, capability):
        return []
    return [
        *_size_problems(settings, model),
        *_backend_problems(settings, model),
        *_write_problems(settings, model),
        *_speculation_problems(settings),
    ]


def _size_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    shared = settings.attn_dp_size * settings.attn_cp_size
    tp_size, heads = settings.tp_size // shared, model.num_key_value_heads
    if model.architecture in REPLICATES_KV_HEADS or not heads or settings.tp_size % shared:
        return []
    if tp_size % heads and heads % tp_size:
        return []  # sglang itself stops at such heads
    sizes = useful_dcp_sizes(tp_size, heads)
    if settings.dcp_size in sizes:
        return []
    asked = f"--tp-size {settings.tp_size} --dcp-size {settings.dcp_size} with {_count(heads)} of {_name(model)}"
    if sizes:
        reason = f"{_NOT_SERVED} would cache KV heads that the ranks of a DCP group do not share: a group must hold one"
        advice = advise(*(use(f"--dcp-size {size}") for size in sizes), because="it must divide tp / KV heads")
        return [Problem(asked, reason, advice)]
    wider = smallest_useful_tp_size(heads, model.num_attention_heads)
    reason = f"{_NOT_SERVED} would cache heads that a rank does not have; no KV head lies on two of {tp_size} ranks, "
    reason += "so nothing can be gained"
    because = f"from --tp-size {wider * shared} on, DCP would spread copies" if wider else ""
    return [Problem(asked, reason, advise(_WITHOUT_DCP, because=because))]


def _backend_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    phases = {"prefill": settings.prefill_attention_backend, "decode": settings.decode_attention_backend}
    if model.architecture in TRITON_BY_DEFAULT:
        phases = {phase: backend or DIVIDES_SLOTS for phase, backend in phases.items()}
    read: dict[str, list[str]] = {}
    for phase, backend in phases.items():
        if backend != DIVIDES_SLOTS:
            read.setdefault(backend or _default_backend(settings), []).append(phase)
    return [
        Problem(
            f"attention backend {backend} for {' and '.join(named)}, with {_name(model)}",
            f"{_NOT_SERVED}'s {backend} reads slots of a cache that DCP has spread as rows of one GPU: wrong tokens",
            advise(
                _WITHOUT_DCP,
                Change(
                    (f"--attention-backend {DIVIDES_SLOTS}",),
                    _BACKEND_OF_A_PHASE,
                    said=f"use --attention-backend {DIVIDES_SLOTS} for both phases, which sglang made for such a cache",
                ),
            ),
        )
        for backend, named in read.items()
    ]


def _write_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    wide = settings.kv_cache_dtype in _WIDE_CACHES
    if settings.kv_cache_dtype == "auto" and settings.dtype in _NARROW_MODELS:
        wide = False
    if model.architecture not in WRITES_IN_ROPE or not wide:
        return []
    return [
        Problem(
            f"--kv-cache-dtype {settings.kv_cache_dtype} with {_name(model)}",
            f"{_NOT_SERVED} writes K and V inside RoPE where the cache is bfloat16, at slots that it has not divided: "
            "wrong tokens",
            _advise_fp8(),
        )
    ]


def _speculation_problems(settings: ServerSettings) -> list[Problem]:
    if settings.speculative_algorithm is None:
        return []
    return [
        Problem(
            f"--speculative-algorithm {settings.speculative_algorithm} with DCP",
            f"{_NOT_SERVED}'s triton neither divides a verify step's slots nor takes its mask",
            advise(
                drop(
                    "--speculative-algorithm",
                    "--speculative-num-steps",
                    "--speculative-eagle-topk",
                    "--speculative-num-draft-tokens",
                    said="drop it and its numbers",
                ),
                _WITHOUT_DCP,
            ),
        )
    ]


def _default_backend(settings: ServerSettings) -> str:
    return "flashinfer" if (settings.speculative_eagle_topk or 1) > 1 else _DEFAULT_BACKEND


def _advise_fp8() -> Advice:
    return advise(use("--kv-cache-dtype fp8_e4m3"), _WITHOUT_DCP)


def _count(heads: int) -> str:
    return f"{heads} KV head{'s' if heads > 1 else ''}"


def _name(model: ModelFacts) -> str:
    return model.architecture or "this model"
