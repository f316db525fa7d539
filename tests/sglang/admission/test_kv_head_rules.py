"""Models with KV heads under DCP: what stock sglang would answer wrongly is refused, and nothing else is touched."""

import json
import shlex

import pytest

from nsa_dcp.sglang_plugin.admission.reading.attention_family import facts_without_selection
from nsa_dcp.sglang_plugin.doctor import doctor
from tests import server_verdicts

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("registered", "on_hopper")]

_DENSE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CONFIGS = {
    "QWEN3": _DENSE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "QWEN3_MOE": _DENSE | _EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "LLAMA": _DENSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8},
    "DEEPSEEK_V3": _DENSE
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
    },
}
FLASHINFER = "python -m sglang.launch_server --model-path QWEN3 --tp 8 --dcp-size 2 --attention-backend flashinfer"
# Command -> None where it is left to sglang, else what each refusal says, in order.
COMMANDS = {
    "--model-path QWEN3 --tp 8": None,
    "--model-path QWEN3 --tp 8 --attention-backend fa3": None,
    "--model-path QWEN3 --tp 8 --dcp-size 2": ("attention backend fa3 for prefill and decode, with Qwen3ForCausalLM",),
    "--model-path QWEN3 --tp 8 --dcp-size 2 --attention-backend flashinfer": ("attention backend flashinfer",),
    "--model-path QWEN3 --tp 8 --dcp-size 2 --attention-backend triton": None,
    "--model-path QWEN3 --tp 8 --dcp-size 2 --decode-attention-backend triton": ("attention backend fa3 for prefill,",),
    "--model-path QWEN3 --tp 8 --dcp-size 2 --prefill-attention-backend triton --decode-attention-backend triton": None,
    "--model-path QWEN3 --tp 8 --dcp-size 4 --attention-backend triton": (
        "use --dcp-size 2: it must divide tp / KV heads",
    ),
    "--model-path QWEN3 --tp 8 --dcp-size 4": ("use --dcp-size 2", "attention backend fa3"),
    "--model-path QWEN3 --tp 8 --attn-dp-size 2 --dcp-size 2 --attention-backend triton": (
        "no KV head lies on two of 4 ranks, so nothing can be gained; use --dcp-size 1: from --tp-size 16 on",
    ),
    "--model-path QWEN3 --tp 16 --dp 2 --enable-dp-attention --dcp-size 2 --attention-backend triton": None,
    "--model-path QWEN3 --tp 16 --dcp-size 8 --attention-backend triton": ("use --dcp-size 2 or 4",),
    "--model-path LLAMA --tp 8 --dcp-size 2 --attention-backend triton": ("from --tp-size 16 on",),
    "--model-path LLAMA --tp 16 --dcp-size 2 --attention-backend triton": None,
    "--model-path QWEN3_MOE --tp 8 --dcp-size 2 --attention-backend triton": ("writes K and V inside RoPE",),
    "--model-path QWEN3_MOE --tp 8 --dcp-size 2 --attention-backend triton --kv-cache-dtype bf16": ("inside RoPE",),
    "--model-path QWEN3_MOE --tp 8 --dcp-size 2 --attention-backend triton --kv-cache-dtype fp8_e4m3": None,
    "--model-path QWEN3_MOE --tp 8 --dcp-size 2": ("attention backend fa3", "inside RoPE"),
    "--model-path QWEN3 --tp 8 --dcp-size 2 --attention-backend triton --speculative-algorithm NGRAM": (
        "--speculative-algorithm NGRAM with DCP",
    ),
    "--model-path DEEPSEEK_V3 --tp 8 --dcp-size 8": None,
    "--model-path DEEPSEEK_V3 --tp 8 --dcp-size 8 --attention-backend flashmla": None,
    "--model-path DEEPSEEK_V3 --tp 8 --dcp-size 8 --attention-backend flashinfer": None,
}


@pytest.fixture
def models(tmp_path, monkeypatch):
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def on_a_hopper_machine():
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_cuda=True, is_sm90=True, is_hopper_with_cuda_12_3=True):
        yield


@pytest.mark.usefixtures("models", "on_a_hopper_machine")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_server_and_doctor_refuse_the_same_commands_for_the_same_reasons(command):
    said = COMMANDS[command]
    words = shlex.split(f"python -m sglang.launch_server {command}")
    server = server_verdicts.by_server(words)
    verdict, _ = server_verdicts.by_doctor(words, with_sglang=False)
    if said is None:
        assert "nsa-dcp" not in server.why, server
        assert verdict.outcome == doctor.LEFT_TO_SGLANG, verdict
        return
    assert (server.outcome, verdict.outcome) == (doctor.REFUSED, doctor.REFUSED)
    for text in (server.why, verdict.why):
        assert "nsa-dcp does not serve models with KV heads yet" in text
        assert all(part in text for part in said), text
    assert len(said) == 1 or f"for {len(said)} reasons" in server.why


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_every_nvidia_gpu_is_judged(monkeypatch, capability):
    from nsa_dcp.sglang_plugin import resolution

    monkeypatch.setattr(resolution, "_gpu_capability", lambda: capability)
    words = shlex.split(
        "python -m sglang.launch_server --model-path QWEN3 --tp 8 --dcp-size 2 --attention-backend flashinfer"
    )
    assert "nsa-dcp cannot serve" in server_verdicts.by_server(words).why


@pytest.mark.usefixtures("models")
def test_what_is_no_nvidia_gpu_is_left_to_sglang(monkeypatch):
    from nsa_dcp.sglang_plugin import resolution

    monkeypatch.setattr(resolution, "_gpu_capability", lambda: None)
    words = shlex.split(
        "python -m sglang.launch_server --model-path QWEN3 --tp 8 --dcp-size 2 --attention-backend flashinfer"
    )
    assert "nsa-dcp" not in server_verdicts.by_server(words).why


@pytest.mark.usefixtures("models", "on_a_hopper_machine")
@pytest.mark.parametrize(
    "settings",
    [
        {"model_path": "QWEN3", "tp_size": 8},
        {"model_path": "QWEN3_MOE", "tp_size": 8, "attention_backend": "fa3"},
        {"model_path": "QWEN3", "tp_size": 8, "dcp_size": 2, "attention_backend": "triton"},
        {"model_path": "DEEPSEEK_V3", "tp_size": 8, "dcp_size": 8, "attention_backend": "flashmla"},
        {"model_path": "DEEPSEEK_V3", "tp_size": 8, "dcp_size": 2, "attention_backend": "flashinfer"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_what_is_left_to_sglang_resolves_exactly_as_without_us(monkeypatch, settings):
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.server_args import ServerArgs

    def declarations():
        server_args = ServerArgs(device="cuda", random_seed=1, **settings)
        server_args.resolve_once()
        return [(source, {k: repr(v) for k, v in fields.items()}) for source, fields in server_args._resolved_overrides]

    ours = declarations()
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    assert ours == declarations()


def test_the_architectures_are_those_of_sglangs_own_lists():
    """Read from its source, where it names them: who has a latent, and who writes K and V inside RoPE."""
    import ast
    import inspect
    import pkgutil
    from pathlib import Path

    import sglang.srt.models
    from sglang.srt.configs import model_config

    from nsa_dcp.sglang_plugin.admission.reading import attention_family
    from nsa_dcp.sglang_plugin.admission.rules import kv_head_rules

    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(model_config))):
        if isinstance(node, ast.If) and any(
            isinstance(line, ast.Assign) and ast.unparse(line).endswith("attention_arch = AttentionArch.MLA")
            for line in node.body
        ):
            found |= {
                part.value
                for part in ast.walk(node.test)
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value[:1].isupper()
            }
    ours = {*attention_family._LATENT, *attention_family._LATENT_IF_RANKED, *attention_family._LATENT_UNLESS}
    assert found == ours

    writers = set()
    for module in pkgutil.iter_modules(sglang.srt.models.__path__):
        path = Path(sglang.srt.models.__path__[0]) / f"{module.name}.py"
        if not path.exists() or module.name == "utils":
            continue
        source = path.read_text()
        if "enable_fused_set_kv_buffer(" in source:
            (entry,) = [
                node.value
                for node in ast.parse(source).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass"
            ]
            writers |= {name.id for name in ast.walk(entry) if isinstance(name, ast.Name)}
    assert writers == set(kv_head_rules.WRITES_IN_ROPE)
    assert {
        architecture
        for architecture in kv_head_rules.REPLICATES_KV_HEADS
        if not model_config.is_qwen3_5(type("Config", (), {"architectures": [architecture]})())
    } == set()


@pytest.mark.parametrize("name", CONFIGS)
def test_doctor_reads_the_heads_that_sglang_reads(tmp_path, name):
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    theirs = ModelConfig(str(tmp_path))
    ours = facts_without_selection(CONFIGS[name], CONFIGS[name]["architectures"][0])
    assert ours.has_kv_heads == (theirs.attention_arch == AttentionArch.MHA)
    if ours.has_kv_heads:
        assert ours.num_key_value_heads == theirs.get_total_num_kv_heads()
        assert ours.num_attention_heads == theirs.num_attention_heads
