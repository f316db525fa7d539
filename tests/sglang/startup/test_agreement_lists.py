"""Every switch that decides a selection or a collective is compared between ranks, or it stands here why not."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from nsa_dcp.choices import WIRE_VARIABLE
from nsa_dcp.planning.index_key_choice import INDEX_KEYS_VARIABLE
from nsa_dcp.sglang_plugin.admission.server_settings import PREFILL_VARIABLE
from nsa_dcp.sglang_plugin.startup import agreement

ROOT = Path(__file__).parents[3]

# --- our own code ---------------------------------------------------------------------------------------------------

# Variables that our servers read and ranks may have otherwise.
OUR_LOCAL_VARIABLES = {
    "SGLANG_PLUGINS": "which plugins are loaded: without ours a rank does not come to compare",
    "SGLANG_PP_LAYER_PARTITION": "compared as ServerSettings.pp_layer_partition",
    "NCCL_MULTI_RANK_GPU_ENABLE": "the embedded engine",
}
# Numbers in the code that selects, attends and exchanges, and in what a rank decides alone.
OUR_LOCAL_CONSTANTS = {
    "cp_prefill:_MERGED_ROWS": "rows of one rank's results that are merged at once",
    "backend:LOG2_E": "the base that the installed sglang merges in",
}
# Where several ranks must come to one decision, under today's or tomorrow's folders.
DECIDING_MODULES = re.compile(r"(row_split|selection|backend|cp_|decode_page_table|startup|patches)")


def plugin_sources():
    return sorted((ROOT / "nsa_dcp" / "sglang_plugin").rglob("*.py"))


def served_sources():
    """What a server runs of ours: not the embedded engine, not the test kit."""
    paths = [*(ROOT / "nsa_dcp").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    return [path for path in sorted(paths) if not {"hf", "testing"} & set(path.parts)]


def strings_of(path):
    """Every string constant of a module's code, so that a name reaches `os.environ` by no way that is not seen."""
    tree = ast.parse(path.read_text())
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def variables_read(path):
    """Environment variables that a module reads: by name, or by a constant of any module that holds the name."""
    source = path.read_text()
    if not re.search(r"environ|getenv|envs\.", source):
        return set()
    tree, names = ast.parse(source), set()
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript, ast.Attribute)) else ""
        found = re.match(r"(?:os\.)?(?:environ\.get|getenv|environ)[(\[]\s*(['\"]?)(\w+)\1", text)
        if found and not (isinstance(node, ast.Call) and text.startswith("os.environ.setdefault")):
            names.add(found[2] if found[1] else f"${found[2]}")
        registered = re.fullmatch(r"envs\.([A-Z][A-Z0-9_]*)", text)
        if registered:
            names.add(registered[1])
    return names


def test_every_variable_that_our_servers_read_is_compared_or_explained():
    known = set(OUR_LOCAL_VARIABLES) | {name for name, _ in agreement.OWN_VARIABLES} | set(agreement.SGLANG_VARIABLES)
    # By a name that holds the name: PARTITION_VARIABLE is in the list above, the others are `agreement`'s own lists.
    assert {INDEX_KEYS_VARIABLE, PREFILL_VARIABLE, WIRE_VARIABLE} <= known
    # "$word" is a variable that a command line names, which doctor looks up; no server does.
    known |= {"$PARTITION_VARIABLE", "$INDEX_KEYS_VARIABLE", "$PREFILL_VARIABLE", "$WIRE_VARIABLE", "$name", "$word"}
    unknown = {
        str(path.relative_to(ROOT)): sorted(variables_read(path) - known)
        for path in served_sources()
        if variables_read(path) - known
    }
    assert unknown == {}


def test_every_variable_of_our_own_is_in_the_list():
    """However it is read: a string NSA_DCP_... anywhere in the code is one."""
    listed = {name for name, _ in agreement.OWN_VARIABLES}
    named = {
        name
        for path in served_sources()
        for text in strings_of(path)
        for name in re.findall(r"\bNSA_DCP_[A-Z_]+", text)
    }
    assert named == listed


def test_every_number_that_ranks_could_decide_by_is_compared_or_explained():
    unknown = []
    for path in plugin_sources():
        # Judging a command ends in a refusal or in nothing: ranks do not go different ways by it.
        if not DECIDING_MODULES.search(path.stem) or "admission" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            (target, *_) = node.targets if isinstance(node, ast.Assign) else [node.target]
            numbers = [
                part
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and type(part.value) in (int, float)
            ]
            computed = any(isinstance(part, ast.Call) for part in ast.walk(node.value))
            name = f"{path.stem}:{getattr(target, 'id', '')}"
            if (numbers or computed) and target.id.isupper() and name not in OUR_LOCAL_CONSTANTS:
                unknown.append(name)
    assert {name for name in unknown if not any(known.endswith(name) for known in agreement.CONSTANTS)} == set()


@pytest.mark.sglang
def test_what_is_listed_exists():
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path="dummy", device="cpu")
    assert [name for name in agreement.ARGUMENTS if not hasattr(server_args, name)] == []
    assert all(agreement._read_constant(constant) is not None for constant in agreement.CONSTANTS)
    for names in (agreement.ARGUMENTS, agreement.SGLANG_VARIABLES, agreement.CONSTANTS):
        assert len(set(names)) == len(names)


# --- sglang's code --------------------------------------------------------------------------------------------------

# What selects, attends under DCP and CP, and chooses collectives, in the release that compat.py names.
SGLANG_SOURCES = (
    "srt/layers/attention/dsa/dsa_indexer.py",
    "srt/layers/attention/dsa/dsa_indexer_metadata.py",
    "srt/layers/attention/dsa/dsa_metadata_manager.py",
    "srt/layers/attention/dsa/dsa_topk_backend.py",
    "srt/layers/attention/dsa/dsa_dcp.py",
    "srt/layers/attention/dsa/paged_mqa_logits_backend.py",
    "srt/layers/attention/dsa/utils.py",
    "srt/layers/attention/dsa_backend.py",
    "srt/layers/attention/mqa_logits_utils.py",
    "srt/layers/cp",
    "srt/layers/dcp",
    "srt/layers/dp_attention.py",
    "srt/models/deepseek_common/attention_forward_methods/forward_mla.py",
    "srt/models/deepseek_common/moe_transport.py",
    "srt/models/deepseek_v2.py",
    "srt/distributed/parallel_state.py",
    "srt/distributed/device_communicators/custom_all_reduce.py",
    "srt/distributed/device_communicators/custom_all_reduce_v2.py",
    "srt/distributed/device_communicators/pcie_ipc_ar.py",
    "srt/distributed/device_communicators/pynccl.py",
    "srt/distributed/device_communicators/torch_symm_mem.py",
    "kernels/ops/attention/dcp_kernels.py",
    "kernels/ops/attention/dsv4/topk.py",
    "kernels/ops/attention/dsa",
)
_OTHER_HARDWARE = "AMD, Ascend or Blackwell alone, which are not served"
_OTHER_BACKEND = "a backend other than flashmla_kv, which is refused"
_OWN_RANK = "what one rank does with its own rows and memory"
SGLANG_LOCAL_VARIABLES = {
    **dict.fromkeys(
        (
            "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS",
            "DEEPEP_HCCL_BUFFSIZE",
            "HCCL_BUFFSIZE",
            "SGLANG_AITER_CAPTURE_COPY_IN",
            "SGLANG_BLACKWELL_OVERLAP_SHARED_EXPERTS_OUTSIDE_SBO",
            "SGLANG_DISABLE_AITER_FUSED_FP8_DSA_INDEXER",
            "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE",
            "SGLANG_HIP_SHARED_ACT_MXFP8",
            "SGLANG_NPU_USE_MULTI_STREAM",
            "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN",
            "SGLANG_ROCM_USE_MULTI_STREAM",
            "SGLANG_USE_AITER",
            "SGLANG_USE_AITER_AG",
            "SGLANG_USE_AITER_AR",
            "SGLANG_USE_ROCM700A",
        ),
        _OTHER_HARDWARE,
    ),
    **dict.fromkeys(
        (
            "SGLANG_ENABLE_DSA_Q8KV8_BORN_FP8_Q",
            "SGLANG_ENABLE_DSA_Q8KV8_KV_CAT_FUSION",
            "SGLANG_ENABLE_DSA_Q8KV8_QPREP_OVERLAP",
            "SGLANG_ENABLE_DSA_Q8KV8_TOPK_LENGTH",
            "SGLANG_FLASHINFER_WORKSPACE_SIZE",
            "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
            "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
            "SGLANG_EXPERIMENTAL_DSA_KPOOL_METADATA_FUSION",
            "SGLANG_EXPERIMENTAL_LORA_OPTI",
            "SGLANG_OPT_USE_INKLING_CUSTOM_AR",
            "SGLANG_OPT_USE_INKLING_FUSED_AR_SCONV",
        ),
        _OTHER_BACKEND,
    ),
    **dict.fromkeys(
        (
            "SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION",
            "SGLANG_ENABLE_PCG_DSV2_DUAL_STREAM",
            "SGLANG_OPT_MOE_QUANT_ONCE",
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
            "SGLANG_OPT_BF16_FP32_GEMM_ALGO",
        ),
        _OWN_RANK,
    ),
    **dict.fromkeys(
        (
            "LOCAL_RANK",
            "LOCAL_SIZE",
            "MASTER_ADDR",
            "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS",
            "SGLANG_TCP_STORE_PORT",
        ),
        "where a rank runs, and where ranks meet",
    ),
}


@pytest.mark.sglang
def test_every_variable_that_sglang_selects_or_communicates_by_is_compared_or_explained():
    package = Path(importlib.util.find_spec("sglang").origin).parent
    read = {}
    for name in SGLANG_SOURCES:
        path = package / name
        assert path.exists(), name
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found = re.findall(
                r"\benvs\.([A-Z][A-Z0-9_]+)|env_var\(\s*\"(\w+)\"|(?:environ\.get\(|environ\[|getenv\()\s*\"(\w+)\"",
                source.read_text(),
            )
            for names in found:
                read.setdefault("".join(names), set()).add(source.name)
    known = set(agreement.SGLANG_VARIABLES) | set(SGLANG_LOCAL_VARIABLES)
    assert {name: sorted(files) for name, files in read.items() if name not in known} == {}
    assert {"SGLANG_DSA_FUSE_TOPK", "SGLANG_OPT_USE_TOPK_V2", "SGLANG_DSA_TOPK_BROADCAST"} <= set(read)
    assert not set(agreement.SGLANG_VARIABLES) & set(SGLANG_LOCAL_VARIABLES)
