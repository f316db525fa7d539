"""Features that do not go with DCP are refused by their flag, by the rules alone and by a real sglang's resolution."""

import dataclasses

import pytest

from nsa_dcp.sglang_plugin.admission.reading.launch_line import read_launch_line
from nsa_dcp.sglang_plugin.admission.reading.server_command import read_without_sglang
from nsa_dcp.sglang_plugin.admission.server_settings import ServerSettings
from nsa_dcp.sglang_plugin.admission.validation import find_problems
from tests.served_settings import CP_DCP, GLM, HOPPER, TP_DCP

# As typed, and the part of it that a refusal begins with.
COMMANDS = {
    "--enable-hisparse": "--enable-hisparse",
    "--enable-hierarchical-cache": "--enable-hierarchical-cache",
    "--enable-lmcache": "--enable-lmcache",
    "--enable-flexkv": "--enable-flexkv",
    "--radix-cache-backend flexkv": "--radix-cache-backend flexkv",
    "--enable-unified-cache-external-linker": "--enable-unified-cache-external-linker",
    "--disaggregation-mode decode": "--disaggregation-mode decode",
    "--enable-unified-memory": "--enable-unified-memory",
    "--enable-return-routed-experts": "--enable-return-routed-experts",
    "--enable-return-indexer-topk": "--enable-return-indexer-topk",
    "--enable-two-batch-overlap": "--enable-two-batch-overlap",
    "--enable-pdmux": "--enable-pdmux",
    "--elastic-ep-backend mooncake": "--elastic-ep-backend mooncake",
    "--enable-torch-compile": "--enable-torch-compile",
    "--debug-cuda-graph": "--debug-cuda-graph",
    "--cuda-graph-backend-decode breakable": "breakable decode graphs",
    "--enable-deterministic-inference": "--enable-deterministic-inference",
    "--rl-on-policy-target fsdp": "--rl-on-policy-target fsdp",
    "--speculative-adaptive": "--speculative-adaptive",
    "--enable-multi-layer-eagle": "--enable-multi-layer-eagle",
    "--speculative-draft-model-path other": "--speculative-draft-model-path",
    "--cpu-offload-gb 4": "--cpu-offload-gb 4",
    "--dtype float16": "--dtype float16",
    "--enable-lora": "--enable-lora",
}
SERVED = [
    "--elastic-ep-backend none",
    "--cuda-graph-backend-decode disabled",
    "--cuda-graph-backend-decode full",
    "--dtype bfloat16",
    "--dsa-topk-backend torch",
    "--speculative-draft-model-path . --model-path .",
    "--checkpoint-engine-wait-weights-before-ready --no-dcp-replicate-q-proj",
]


def read(text: str) -> ServerSettings:
    """TP_DCP with what the flags change."""
    read, unchanged = (read_without_sglang(words.split()).settings for words in (text, ""))
    changes = {
        field.name: getattr(read, field.name)
        for field in dataclasses.fields(read)
        if getattr(read, field.name) != getattr(unchanged, field.name)
    }
    assert changes or text in SERVED
    return dataclasses.replace(TP_DCP, **changes)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_feature_that_does_not_go_with_dcp_is_refused_by_its_flag(command):
    (problem,) = find_problems(read(command), GLM, HOPPER)
    assert problem.asked == COMMANDS[command]
    assert problem.reason
    assert problem.instead
    assert find_problems(dataclasses.replace(read(command), dcp_size=1), GLM, HOPPER) == []


@pytest.mark.parametrize("command", SERVED)
def test_what_a_flag_may_say_is_served(command):
    assert find_problems(read(command), GLM, HOPPER) == []


@pytest.mark.parametrize("copies", [{"dcp_replicate_q_proj": True}, {"enable_cp_decode_attn_tp": True}])
def test_weights_that_come_later_are_refused_where_decode_reads_copies(copies):
    base = CP_DCP if "enable_cp_decode_attn_tp" in copies else TP_DCP
    settings = dataclasses.replace(base, checkpoint_engine_wait_weights_before_ready=True, **copies)
    (problem,) = find_problems(settings, GLM, HOPPER)
    assert problem.asked == "--checkpoint-engine-wait-weights-before-ready"


SAVER, BACKUP = "--enable-memory-saver", "--enable-weights-cpu-backup"


@pytest.mark.parametrize("copies", [{"dcp_replicate_q_proj": True}, {"enable_cp_decode_attn_tp": True}])
def test_weights_that_would_come_back_undefined_are_refused_where_no_update_can_bring_them(copies):
    """Without a backup released weights are undefined until an update, which is refused where decode reads copies."""
    base = CP_DCP if "enable_cp_decode_attn_tp" in copies else TP_DCP
    settings = dataclasses.replace(base, enable_memory_saver=True, **copies)
    (problem,) = find_problems(settings, GLM, HOPPER)
    assert problem.asked == f"{SAVER} without {BACKUP}"
    assert find_problems(dataclasses.replace(settings, enable_weights_cpu_backup=True), GLM, HOPPER) == []
    none = dataclasses.replace(settings, dcp_replicate_q_proj=False, enable_cp_decode_attn_tp=False)
    assert find_problems(none, GLM, HOPPER) == []
    assert find_problems(dataclasses.replace(settings, dcp_size=1), GLM, HOPPER) == []


def test_both_flags_of_the_memory_saver_are_read_without_sglang():
    read_saver = read_without_sglang(["--dcp-size", "8", SAVER]).settings
    assert (read_saver.enable_memory_saver, read_saver.enable_weights_cpu_backup) == (True, False)
    read_both = read_without_sglang(["--dcp-size", "8", SAVER, BACKUP]).settings
    assert (read_both.enable_memory_saver, read_both.enable_weights_cpu_backup) == (True, True)


@pytest.mark.sglang
@pytest.mark.usefixtures("registered", "on_hopper")
@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (f"{SAVER} --dcp-comm-backend a2a", True),
        (f"{SAVER} --dcp-comm-backend a2a --enable-draft-weights-cpu-backup", True),
        (f"{SAVER} --dcp-comm-backend a2a {BACKUP}", False),
        (f"{SAVER} --dcp-comm-backend a2a --no-dcp-replicate-q-proj", False),
        (f"{SAVER} --dcp-comm-backend ag_rs", False),
        (BACKUP, False),
    ],
)
def test_sglangs_own_resolution_refuses_released_weights_without_a_backup(
    flags, refused, model_path, parse_server_args
):
    base = f"--model-path {model_path()} --device cuda --tp-size 8 --dcp-size 8 --attention-backend nsa"
    server_args = parse_server_args([*base.split(), "--kv-cache-dtype", "fp8_e4m3", *flags.split()])
    if refused:
        with pytest.raises(ValueError, match=f"{SAVER} without {BACKUP}: weights that were released"):
            server_args.resolve_once()
    else:
        server_args.resolve_once()


INDEX_KEYS = "NSA_DCP_INDEX_KEYS"


@pytest.mark.parametrize("words", [[f"{INDEX_KEYS}=sharded"], ["env", f"{INDEX_KEYS}=sharded"]], ids=" ".join)
def test_sharded_index_keys_are_not_served_yet_and_doctor_says_so(words):
    """Taken for replicated ones, a server would hold fewer tokens than was planned."""
    command = [*words, "sglang", "serve", "--model", "m", "--tp", "8", "--dcp-size", "8"]
    line = read_launch_line(command)
    assert read_without_sglang(line.arguments, line.environment).settings.index_keys == "sharded"
    (problem,) = find_problems(dataclasses.replace(TP_DCP, index_keys="sharded"), GLM, HOPPER)
    assert problem.asked == f"{INDEX_KEYS}=sharded" and "servers do not shard index keys yet" in problem.reason
    (change,) = problem.instead.changes
    assert change.drop == (INDEX_KEYS,)
    assert find_problems(dataclasses.replace(TP_DCP, index_keys="sharded", dcp_size=1), GLM, HOPPER) == []


def test_index_keys_that_are_replicated_as_ever_are_served_and_a_misspelt_choice_is_not():
    for value in (None, "", "replicated"):
        assert find_problems(dataclasses.replace(TP_DCP, index_keys=value), GLM, HOPPER) == []
    (problem,) = find_problems(dataclasses.replace(TP_DCP, index_keys="shared"), GLM, HOPPER)
    assert problem.reason == "it is none of replicated and sharded"


@pytest.mark.sglang
@pytest.mark.usefixtures("registered", "on_hopper")
@pytest.mark.parametrize(("value", "refused"), [("sharded", True), ("replicated", False), ("", False)])
def test_sglangs_own_resolution_refuses_sharded_index_keys(value, refused, model_path, parse_server_args, monkeypatch):
    monkeypatch.setenv(INDEX_KEYS, value)
    base = f"--model-path {model_path()} --device cuda --tp-size 8 --dcp-size 8 --attention-backend nsa"
    server_args = parse_server_args([*base.split(), "--kv-cache-dtype", "fp8_e4m3"])
    if refused:
        with pytest.raises(ValueError, match=f"{INDEX_KEYS}=sharded: servers do not shard index keys yet"):
            server_args.resolve_once()
    else:
        server_args.resolve_once()


def test_flashinfers_selection_is_refused_with_zigzag_alone():
    for strategy, problems in (("interleave", 0), ("zigzag", 1)):
        settings = dataclasses.replace(CP_DCP, cp_strategy=strategy, dsa_topk_backend="flashinfer")
        assert len(find_problems(settings, GLM, HOPPER)) == problems
    assert find_problems(dataclasses.replace(TP_DCP, dsa_topk_backend="flashinfer"), GLM, HOPPER) == []


@pytest.mark.sglang
@pytest.mark.usefixtures("registered", "on_hopper")
@pytest.mark.parametrize(
    "command", [*COMMANDS, "--lora-paths a=b", '--cuda-graph-config {"decode":{"backend":"breakable"}}']
)
def test_sglang_hands_the_feature_to_our_refusal(command, model_path, parse_server_args):
    base = f"--model-path {model_path()} --device cuda --tp-size 8 --dcp-size 8 --attention-backend nsa"
    server_args = parse_server_args([*base.split(), "--kv-cache-dtype", "fp8_e4m3", *command.split()])
    with pytest.raises(ValueError, match="nsa-dcp cannot serve this command") as refused:
        server_args.resolve_once()
    assert COMMANDS.get(command, command.split()[0].replace("--cuda-graph-config", "breakable")) in str(refused.value)
