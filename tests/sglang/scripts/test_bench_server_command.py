"""What bench_server starts, judged by the real sglang: the mid-size model, the commands, the weights' initialiser."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.sglang


@pytest.fixture
def mid_size(tmp_path):
    from scripts.benchmarks.servers.mid_size_model import mid_size_config

    config = mid_size_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, config


@pytest.mark.usefixtures("registered", "on_hopper")
@pytest.mark.parametrize(
    "config",
    [
        "tp1-dcp1",
        "tp2-dcp1",
        "tp2-dcp2-a2a",
        "tp2-dcp2-ag_rs-nocar",
        "tp2-dcp2-cpi-slice",
        "tp8-dcp4-a2a-shared",
    ],
)
def test_sglang_accepts_the_command_and_the_model(parse_server_args, mid_size, config):
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig, dsa_layer_skips_topk, is_deepseek_dsa

    from nsa_dcp.planning.dimensions import read_config
    from scripts.benchmarks.servers.cases import bench_command, pool_rows
    from scripts.served_checks.servers.server_config import parse_sizes

    folder, fields = mid_size
    tp_size, dcp_size = parse_sizes(config)
    rows = pool_rows(read_config(folder), tp_size, dcp_size, 5.5)
    command, _ = bench_command(folder, config, 31000, rows, [1, 64])
    server_args = parse_server_args([*command[3:], "--device", "cuda"])
    server_args.resolve_once()
    view = resolving_view(server_args)
    assert (view.dcp_size, view.max_total_tokens, view.load_format) == (dcp_size, rows, "dummy")
    assert (view.dsa_prefill_backend, view.dsa_decode_backend) == ("flashmla_kv", "flashmla_kv")
    assert view.cuda_graph_config.decode.bs == [1, 64]
    assert view.disable_custom_all_reduce == ("nocar" in config or "shared" in config)
    assert (view.chunked_prefill_size, view.max_running_requests, view.decode_log_interval) == (8192, 64, 10)
    model = ModelConfig.from_server_args(server_args)
    assert is_deepseek_dsa(model.hf_config)
    assert (model.num_attention_heads, model.num_hidden_layers) == (64, fields["num_hidden_layers"])
    skipped = [dsa_layer_skips_topk(model.hf_config, layer) for layer in range(fields["num_hidden_layers"])]
    assert skipped == [kind == "shared" for kind in fields["indexer_types"]]


PROGRAM = """
import multiprocessing, sys
def load():
    from sglang.srt.plugins import load_plugins
    load_plugins()
    if multiprocessing.parent_process() is None:
        return print("launcher", "sglang.srt.model_loader" in sys.modules)
    import torch
    from sglang.srt.model_loader import loader
    model = torch.nn.Linear(512, 256)
    loader.initialize_dummy_weights(model)
    print("rank", round(model.weight.std().item(), 3), flush=True)
if __name__ == "__main__":
    load()
    rank = multiprocessing.get_context("spawn").Process(target=load)
    rank.start()
    rank.join()
"""


def test_the_ranks_fill_in_random_weights_and_the_launcher_imports_no_model(tmp_path):
    from scripts.served_checks.servers import server_process

    server_process.write_entry_points(tmp_path, random_weights="scripts.benchmarks.servers.random_weights:register")
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [tmp_path, ROOT])),
        "SGLANG_PLUGINS": "random_weights",
    }
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.split("\n")[:2] == ["launcher False", "rank 0.044"]
