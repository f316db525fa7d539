"""Features of sglang that do not go with a cache spread over DCP ranks, and why. Part of `validation.find_problems`."""

from __future__ import annotations

from nsa_dcp.choices import INDEX_KEYS, WIRE_VARIABLE, WIRES
from nsa_dcp.planning.index_key_choice import INDEX_KEYS_VARIABLE
from nsa_dcp.sglang_plugin.admission.advice import Advice, Change, advise, drop, use
from nsa_dcp.sglang_plugin.admission.server_settings import Problem, ServerSettings

_OFF = (None, False, 0, "", "null", "none")
_CHANGES_BLOCKS = "its block copies do not know which rank owns a slot"
_RETURNS_BY_SLOT = "its host buffer is indexed by slot, and sized for one rank's rows"
_BATCH_DEPENDENT = "how attention is split over a GPU's SMs, and so its rounding, depends on the batch"
_NO_METADATA = "sglang's indexer has no metadata in a breakable decode graph"
_ADAPTERS = "adapters of the projections that DCP gathers or slices were not checked"
# (field, flag, why it is refused). A flag with a value is shown with it.
_FEATURES = (
    ("enable_hisparse", "--enable-hisparse", "its host pool has no notion of DCP ownership"),
    (
        "enable_hierarchical_cache",
        "--enable-hierarchical-cache",
        "the host copy of the index keys is not translated for DCP",
    ),
    ("enable_lmcache", "--enable-lmcache", "LMCache does not translate DCP slots"),
    ("enable_flexkv", "--enable-flexkv", _CHANGES_BLOCKS),
    ("radix_cache_backend", "--radix-cache-backend", _CHANGES_BLOCKS),
    (
        "enable_unified_cache_external_linker",
        "--enable-unified-cache-external-linker",
        "it stores latents as if every rank had all of them",
    ),
    (
        "disaggregation_mode",
        "--disaggregation-mode",
        "the transfer of DSA caches between prefill and decode servers is not DCP-aware",
    ),
    (
        "enable_dsa_cache_layer_split",
        "--enable-dsa-cache-layer-split",
        "a cache that is split by layers has no DCP owners",
    ),
    ("enable_unified_memory", "--enable-unified-memory", "its pool resolves DCP slots in another way"),
    ("enable_return_routed_experts", "--enable-return-routed-experts", _RETURNS_BY_SLOT),
    ("enable_return_indexer_topk", "--enable-return-indexer-topk", _RETURNS_BY_SLOT),
    (
        "enable_two_batch_overlap",
        "--enable-two-batch-overlap",
        "two half-batches would interleave their collectives on the DCP group",
    ),
    ("enable_pdmux", "--enable-pdmux", "two streams would interleave their collectives on the DCP group"),
    ("elastic_ep_backend", "--elastic-ep-backend", "a rank that dies takes its share of every request's cache along"),
    (
        "enable_torch_compile",
        "--enable-torch-compile",
        "sglang's indexer has no path for it, and a trace would freeze what the backend keeps from layer to layer",
    ),
    ("debug_cuda_graph", "--debug-cuda-graph", _NO_METADATA),
    ("enable_deterministic_inference", "--enable-deterministic-inference", _BATCH_DEPENDENT),
    ("rl_on_policy_target", "--rl-on-policy-target", _BATCH_DEPENDENT),
    (
        "speculative_adaptive",
        "--speculative-adaptive",
        "it builds the attention backend anew for each number of drafts, which was not checked",
    ),
    (
        "enable_multi_layer_eagle",
        "--enable-multi-layer-eagle",
        "only the checkpoint's own draft layer was checked",
    ),
    ("cpu_offload_gb", "--cpu-offload-gb", "weights that are gathered from all ranks must lie on their GPUs"),
    ("enable_lora", "--enable-lora", _ADAPTERS),
    ("lora_paths", "--lora-paths", _ADAPTERS),
)


def find_feature_problems(settings: ServerSettings) -> list[Problem]:
    """Return a problem for each feature that a command asks for and DCP does not go with.

    Args:
        settings: the server's arguments.
    """
    problems = []
    for field, flag, reason in _FEATURES:
        value = getattr(settings, field)
        if value not in _OFF:
            shown = type(value) in (str, int)
            problems.append(Problem(f"{flag} {value}" if shown else flag, reason, _drop(flag)))
    if settings.decode_cuda_graph == "breakable":
        problems.append(
            Problem(
                "breakable decode graphs",
                _NO_METADATA,
                advise(
                    Change(("--cuda-graph-backend-decode full",), ("--cuda-graph-config",), said="use full ones"),
                    Change(("--cuda-graph-backend-decode disabled",), ("--cuda-graph-config",), said="none"),
                ),
            )
        )
    if settings.index_keys and settings.index_keys != INDEX_KEYS[0]:
        known = settings.index_keys in INDEX_KEYS
        problems.append(
            Problem(
                f"{INDEX_KEYS_VARIABLE}={settings.index_keys}",
                "servers do not shard index keys yet, nsa-dcp generate alone does"
                if known
                else f"it is none of {' and '.join(INDEX_KEYS)}",
                advise(drop(INDEX_KEYS_VARIABLE, said="unset it: every rank then holds every token's")),
            )
        )
    if settings.foreign_draft:
        problems.append(
            Problem(
                "--speculative-draft-model-path",
                "only the checkpoint's own draft layer was checked",
                advise(drop("--speculative-draft-model-path", said="leave it out")),
            )
        )
    if settings.dtype not in ("auto", "bfloat16"):
        problems.append(
            Problem(f"--dtype {settings.dtype}", "FlashMLA attends in bfloat16", advise(use("--dtype bfloat16")))
        )
    if settings.checkpoint_engine_wait_weights_before_ready and settings.copies_weights:
        problems.append(
            Problem(
                "--checkpoint-engine-wait-weights-before-ready",
                "weights that arrive later do not reach the copies that decode reads",
                advise(
                    drop("--checkpoint-engine-wait-weights-before-ready", said="drop it"),
                    Change(("--no-dcp-replicate-q-proj",), ("--enable-cp-decode-attn-tp",)),
                ),
            )
        )
    if settings.enable_memory_saver and not settings.enable_weights_cpu_backup and settings.copies_weights:
        problems.append(
            Problem(
                "--enable-memory-saver without --enable-weights-cpu-backup",
                "weights that were released come back undefined, and the update that would bring them is refused: "
                "it does not reach the copies that decode reads",
                advise(
                    Change(("--enable-weights-cpu-backup",), said="add --enable-weights-cpu-backup"),
                    Change(("--no-dcp-replicate-q-proj",), ("--enable-cp-decode-attn-tp",)),
                ),
            )
        )
    if settings.wire and settings.wire not in WIRES:
        problems.append(
            Problem(
                f"{WIRE_VARIABLE}={settings.wire}",
                f"it must be one of {', '.join(WIRES)}",
                advise(drop(WIRE_VARIABLE, said=f"unset {WIRE_VARIABLE}")),
            )
        )
    if settings.wire == "peer" and settings.dcp_replicate_q_proj:
        problems.append(
            Problem(
                f"--dcp-replicate-q-proj with {WIRE_VARIABLE}=peer",
                "queries are gathered through peer memory, and nothing would read the copies of their projection",
                advise(drop("--dcp-replicate-q-proj", said="drop it")),
            )
        )
    return problems


def _drop(flag: str) -> Advice:
    return advise(drop(flag, said="drop it"), use("--dcp-size 1", said="serve with --dcp-size 1"))
