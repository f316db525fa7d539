"""Which sglang commands nsa-dcp can serve, and what to change about the others.

`find_problems` is the only place that refuses a command. It is asked twice while sglang resolves its arguments, as
typed and as resolved, once more in every scheduler, and by `nsa-dcp doctor`. Pure: neither torch nor sglang is
imported.
"""

from __future__ import annotations

from nsa_dcp.choices import COMM_BACKENDS
from nsa_dcp.planning.served_format import (
    ARCHITECTURES,
    HEAD_BUCKETS,
    KV_CACHE_DTYPES,
    KV_LORA_RANK,
    PAGE_SIZE,
    QK_ROPE_HEAD_DIM,
    SLICED_ARCHITECTURES,
)
from nsa_dcp.sglang_plugin.admission.advice import Change, advise, drop, use
from nsa_dcp.sglang_plugin.admission.rules.chunk_rules import find_chunk_problems
from nsa_dcp.sglang_plugin.admission.rules.feature_rules import find_feature_problems
from nsa_dcp.sglang_plugin.admission.rules.pipeline_rules import find_pipeline_problems
from nsa_dcp.sglang_plugin.admission.rules.stock_rules import find_dsa_refusals, find_size_problems, find_stock_refusals
from nsa_dcp.sglang_plugin.admission.rules.topology_rules import find_topology_problems
from nsa_dcp.sglang_plugin.admission.rules.weight_rules import find_weight_problems
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, Problem, ServerSettings

DSA_ATTENTION_BACKENDS = ("dsa", "nsa")
SPARSE_BACKEND = "flashmla_kv"
HOPPER = (9, 0)
SPECULATIVE_ALGORITHMS = ("EAGLE", "NEXTN")
_BACKEND_OF_A_PHASE = ("--prefill-attention-backend", "--decode-attention-backend")
_WITHOUT_DCP = advise(use("--dcp-size 1", said="serve this checkpoint with --dcp-size 1"))
# Algorithms are typed with the three numbers, because sglang takes all or none of them.
_DRAFTS = ("--speculative-num-steps 3", "--speculative-eagle-topk 1", "--speculative-num-draft-tokens 4")


def is_served_here(settings: ServerSettings, model: ModelFacts, capability: tuple[int, int] | None) -> bool:
    """Return whether nsa-dcp serves (or refuses) this command; otherwise sglang is left exactly as it is.

    That is DCP on a DSA model, on Hopper or with a flashmla_kv backend: a Blackwell server with its own backends is not
    ours.

    Args:
        settings: the server's arguments.
        model: the checkpoint's facts.
        capability: (major, minor) of the GPU; None without one.
    """
    if settings.dcp_size <= 1 or not model.is_dsa:
        return False
    return capability == HOPPER or SPARSE_BACKEND in (settings.dsa_prefill_backend, settings.dsa_decode_backend)


def find_problems(settings: ServerSettings, model: ModelFacts, capability: tuple[int, int] | None) -> list[Problem]:
    """Return every reason why this command cannot be served; empty when it can, or when it does not concern nsa-dcp.

    Args: as `is_served_here`.
    """
    if not is_served_here(settings, model, capability):
        return []
    sizes = find_size_problems(settings)
    topology = []
    if not sizes:
        topology = find_topology_problems(
            settings, model, HEAD_BUCKETS[-1], lambda changed: not find_chunk_problems(changed, model)
        )
    return [
        *sizes,
        *_hardware_problems(capability),
        *_model_problems(model),
        *topology,
        *([] if sizes or topology else find_chunk_problems(settings, model)),
        *_backend_problems(settings),
        *_cache_problems(settings),
        *_speculation_problems(settings),
        *find_feature_problems(settings),
        *([] if sizes else find_pipeline_problems(settings, model)),
        *_slice_problems(settings, model),
        *find_weight_problems(settings, model),
    ]


def find_typed_problems(
    settings: ServerSettings, model: ModelFacts, capability: tuple[int, int] | None
) -> list[Problem]:
    """Return every reason why a command as typed would not start: `find_problems`, and what sglang itself refuses.

    Args: as `is_served_here`, which holds.
    """
    problems = find_problems(settings, model, capability)
    if find_size_problems(settings):
        return problems
    return (problems or find_stock_refusals(settings)) + find_dsa_refusals(settings)


def describe_problems(problems: list[Problem], dcp_size: int) -> str:
    """Return one message for all problems of a command."""
    if len(problems) == 1:
        return f"nsa-dcp cannot serve this command with --dcp-size {dcp_size}: {problems[0]}"
    lines = [f"nsa-dcp cannot serve this command with --dcp-size {dcp_size}, for {len(problems)} reasons:"]
    return "\n".join(lines + [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)])


def _hardware_problems(capability: tuple[int, int] | None) -> list[Problem]:
    if capability in (None, HOPPER):
        return []
    return [
        Problem(
            f"a GPU of compute capability {capability[0]}.{capability[1]}",
            "FlashMLA's packed sparse kernel is built for Hopper (9.0)",
            advise(
                drop(
                    "--dsa-prefill-backend",
                    "--dsa-decode-backend",
                    said="run on H100, H200 or H20, or leave --dsa-prefill-backend and --dsa-decode-backend to sglang",
                )
            ),
        )
    ]


def _model_problems(model: ModelFacts) -> list[Problem]:
    problems = []
    if model.architecture not in ARCHITECTURES:
        problems.append(
            Problem(
                f"architecture {model.architecture or 'unknown'}",
                f"its attention has not been checked under DCP, only that of {' and '.join(ARCHITECTURES)}",
                _WITHOUT_DCP,
            )
        )
    if model.index_kpool > 1:
        problems.append(
            Problem(
                f"index_kpool {model.index_kpool}",
                "a pooled index key spans positions owned by different DCP ranks",
                _WITHOUT_DCP,
            )
        )
    if (model.kv_lora_rank, model.qk_rope_head_dim) != (KV_LORA_RANK, QK_ROPE_HEAD_DIM):
        problems.append(
            Problem(
                f"a latent of {model.kv_lora_rank} + {model.qk_rope_head_dim} values",
                f"the cache row and the kernels hold {KV_LORA_RANK} + {QK_ROPE_HEAD_DIM}",
                _WITHOUT_DCP,
            )
        )
    if model.index_topk <= 0 or model.index_topk % 64:
        problems.append(
            Problem(
                f"index_topk {model.index_topk}",
                "the kernel walks selections in blocks of 64",
                _WITHOUT_DCP,
            )
        )
    return problems


def _backend_problems(settings: ServerSettings) -> list[Problem]:
    problems = []
    for phase, backend in (
        ("prefill", settings.prefill_attention_backend),
        ("decode", settings.decode_attention_backend),
    ):
        if backend not in (None, *DSA_ATTENTION_BACKENDS):
            problems.append(
                Problem(
                    f"attention backend {backend} for {phase}",
                    "only the DSA backend reads a cache that DCP has spread",
                    advise(Change(("--attention-backend nsa",), _BACKEND_OF_A_PHASE)),
                )
            )
    for option, backend in (
        ("--dsa-prefill-backend", settings.dsa_prefill_backend),
        ("--dsa-decode-backend", settings.dsa_decode_backend),
    ):
        if backend not in (None, SPARSE_BACKEND):
            problems.append(
                Problem(
                    f"{option} {backend}",
                    "on Hopper only flashmla_kv returns what merging the ranks' results needs",
                    advise(use(f"{option} {SPARSE_BACKEND}"), drop(option, said="leave it out")),
                )
            )
    if settings.dcp_comm_backend not in (None, *COMM_BACKENDS):
        problems.append(
            Problem(
                f"--dcp-comm-backend {settings.dcp_comm_backend}",
                "FlashInfer's exchange needs Blackwell's multi-node NVLink",
                advise(*(use(f"--dcp-comm-backend {name}") for name in COMM_BACKENDS)),
            )
        )
    if settings.dcp_replicate_q_proj and settings.dcp_comm_backend == "ag_rs":
        problems.append(
            Problem(
                "--dcp-replicate-q-proj with --dcp-comm-backend ag_rs",
                "sglang replicates the query projection for the all-to-all merge alone",
                advise(use("--dcp-comm-backend a2a"), use("--no-dcp-replicate-q-proj")),
            )
        )
    if settings.prefill_cuda_graph not in (None, "disabled"):
        problems.append(
            Problem(
                f"--cuda-graph-backend-prefill {settings.prefill_cuda_graph}",
                "sglang cannot capture a prefill under DCP",
                advise(
                    Change(
                        ("--cuda-graph-backend-prefill disabled",),
                        ("--cuda-graph-config",),
                        said="leave it out, or use disabled",
                    ),
                    because="decode graphs stay on",
                ),
            )
        )
    return problems


def _cache_problems(settings: ServerSettings) -> list[Problem]:
    problems = []
    if settings.kv_cache_dtype not in ("auto", "bf16", *KV_CACHE_DTYPES):
        problems.append(
            Problem(
                f"--kv-cache-dtype {settings.kv_cache_dtype}",
                "the cache is either packed FP8 with a scale per 128 values, or bfloat16",
                advise(*(use(f"--kv-cache-dtype {name}") for name in KV_CACHE_DTYPES)),
            )
        )
    # A page below 1 is among the sizes.
    if settings.page_size not in (None, PAGE_SIZE) and settings.page_size > 0:
        problems.append(
            Problem(
                f"--page-size {settings.page_size}",
                f"the index-key cache and FlashMLA have pages of {PAGE_SIZE} tokens",
                advise(use(f"--page-size {PAGE_SIZE}"), drop("--page-size", said="leave it out")),
            )
        )
    return problems


def _speculation_problems(settings: ServerSettings) -> list[Problem]:
    problems = []
    algorithm = settings.speculative_algorithm
    if algorithm is not None and algorithm.upper() not in SPECULATIVE_ALGORITHMS:
        problems.append(
            Problem(
                f"--speculative-algorithm {algorithm}",
                "its draft has not been checked against a cache spread over DCP ranks",
                advise(*(use(f"--speculative-algorithm {name}", *_DRAFTS) for name in SPECULATIVE_ALGORITHMS)),
            )
        )
    # sglang looks at it without an algorithm as well.
    if settings.speculative_eagle_topk not in (None, 1) and settings.speculative_eagle_topk > 0:
        problems.append(
            Problem(
                f"--speculative-eagle-topk {settings.speculative_eagle_topk}",
                "accepting a branch moves cache rows, which sglang does by undivided slot",
                advise(use(*_DRAFTS) if algorithm is not None else drop("--speculative-eagle-topk", said="drop it")),
            )
        )
    return problems


def _slice_problems(settings: ServerSettings, model: ModelFacts) -> list[Problem]:
    """The decode slice without context parallelism, which does nothing there; with it `cp_validation` judges it."""
    if settings.enable_prefill_cp or not settings.enable_cp_decode_attn_tp:
        return []
    if model.architecture in SLICED_ARCHITECTURES:
        return []
    return [
        Problem(
            f"--enable-cp-decode-attn-tp with {model.architecture or 'an unknown architecture'}",
            f"sglang slices the attention weights of {' and '.join(SLICED_ARCHITECTURES)} alone",
            advise(
                drop("--enable-cp-decode-attn-tp", said="drop it"),
                because="it does nothing without --enable-prefill-cp",
            ),
        )
    ]
