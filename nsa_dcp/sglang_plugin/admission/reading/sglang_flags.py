"""Which flags of sglang 0.5.23 a verdict may rest on without sglang's own word.

sglang has some 500 flags, and checks many of them against each other while it resolves them. nsa-dcp's rules judge
those that matter to DCP. Of the others, `INERT` are never a reason to refuse a DSA model with DCP on Hopper, whatever
they say (tests/sglang/admission/test_verdicts.py goes through sglang's resolution with them). A command with any other
flag is not called good here: only sglang can say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from nsa_dcp.sglang_plugin.admission.server_settings import ServerSettings

# Read by nsa-dcp beside the fields of `ServerSettings` that carry sglang's names.
_READ = frozenset(
    (
        "model_path",
        "json_model_override_args",
        "attention_backend",
        "enable_dp_attention",
        "cuda_graph_config",
        "cuda_graph_backend_prefill",
        "cuda_graph_backend_decode",
        "speculative_draft_model_path",
        "config",
    )
)
INERT = frozenset(
    [
        "abort_on_priority_when_disabled",
        "admin_api_key",
        "api_key",
        "base_gpu_id",
        "chat_template",
        "completion_template",
        "constrained_json_disable_any_whitespace",
        "crash_dump_folder",
        "cuda_graph_bs_decode",
        "cuda_graph_bs_prefill",
        "cuda_graph_max_bs_decode",
        "cuda_graph_max_bs_prefill",
        "decode_log_interval",
        "device",
        "dist_init_addr",
        "dist_timeout",
        "disable_custom_all_reduce",
        "disable_cuda_graph",
        "disable_decode_cuda_graph",
        "disable_overlap_schedule",
        "disable_prefill_cuda_graph",
        "disable_radix_cache",
        "disable_shared_experts_fusion",
        "download_dir",
        "enable_cache_report",
        "enable_fp32_lm_head",
        "enable_metrics",
        "enable_metrics_for_all_schedulers",
        "enable_mixed_chunk",
        "enable_nccl_nvls",
        "enable_p2p_check",
        "enable_request_time_stats_logging",
        "enforce_disable_flashinfer_allreduce_fusion",
        "ep_size",
        "fastapi_root_path",
        "file_storage_path",
        "gated_launch_port",
        "hf_chat_template_name",
        "host",
        "incremental_streaming_output",
        "log_level_http",
        "log_requests",
        "log_requests_level",
        "max_prefill_tokens",
        "max_queued_requests",
        "max_running_requests",
        "max_total_tokens",
        "mem_fraction_static",
        "nccl_port",
        "node_rank",
        "num_continuous_decode_steps",
        "port",
        "random_seed",
        "reasoning_parser",
        "revision",
        "schedule_conservativeness",
        "show_time_cost",
        "skip_server_warmup",
        "skip_tokenizer_init",
        "sleep_on_idle",
        "soft_watchdog_timeout",
        "stream_interval",
        "tokenizer_mode",
        "tokenizer_path",
        "tool_call_parser",
        "trust_remote_code",
        "warmups",
        "watchdog_timeout",
        "weight_version",
    ]
)
# Inert with these values, and looked at by sglang with others.
_INERT_VALUES: Mapping[str, tuple[object, ...]] = {
    "moe_a2a_backend": ("deepep",),
    "moe_runner_backend": ("triton", "deep_gemm"),
    "quantization": ("fp8", "w4afp8"),
    "load_format": ("auto", "dummy", "safetensors"),
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "schedule_policy": ("lpm", "fcfs"),
}
_JUDGED = frozenset(field.name for field in fields(ServerSettings)) - ServerSettings.DERIVED
# Variables of sglang that resolution does not refuse a DSA model for.
_INERT_VARIABLES = frozenset(
    ("SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_JIT_DEEPGEMM", "SGLANG_PP_LAYER_PARTITION", "SGLANG_PLUGINS")
)


def list_unjudged(given: Mapping[str, object], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Flags and variables on which only sglang can judge, as typed.

    Args:
        given: fields whose value is not sglang's default.
        environment: of the server.
    """
    flags = [
        f"--{field.replace('_', '-')}"
        for field, value in given.items()
        if (value not in _INERT_VALUES[field] if field in _INERT_VALUES else field not in _READ | _JUDGED | INERT)
    ]
    variables = [name for name in environment if name.startswith("SGLANG_") and name not in _INERT_VARIABLES]
    return (*flags, *sorted(variables))
