"""The start-up line is JSON after a fixed prefix, and counts the pool that is there."""

import json
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.planning.capacity import bytes_per_token, temporary_buffers
from nsa_dcp.planning.dimensions import preset_dims
from nsa_dcp.planning.held_memory import held_memory
from nsa_dcp.planning.limits import Sizes
from nsa_dcp.sglang_plugin.startup.startup_line import PREFIX, pool_facts, startup_line

GLM = preset_dims("glm-5.2")
HELD = held_memory(Sizes(requests=64, context=131_076, rows=8192, attended_heads=64), longest=131_072)


def make_pool(rows, dcp_size, row_bytes=656):
    """Meta tensors of the sizes that sglang builds for GLM-5.2."""
    pages = [(rows + 64) * dcp_size // 64 if layer in GLM.indexer_layers else 0 for layer in range(78)]
    return SimpleNamespace(
        size=rows,
        page_size=64,
        kv_buffer=[torch.empty(rows + 64, 1, row_bytes, dtype=torch.uint8, device="meta")] * 78,
        index_k_with_scale_buffer=[torch.empty(count, 64 * 132, dtype=torch.uint8, device="meta") for count in pages],
    )


@pytest.mark.parametrize("dcp_size", [1, 2, 8])
def test_bytes_per_token_of_the_pool_are_the_planned_ones(dcp_size):
    facts = pool_facts(make_pool(640, dcp_size), dcp_size)
    planned = bytes_per_token(GLM, "fp8_e4m3", dcp_size)
    assert facts["latent_bytes_per_token"] == planned.latent
    assert facts["index_key_bytes_per_token"] == planned.index_keys
    assert (facts["rows_per_gpu"], facts["tokens"]) == (640, 640 * dcp_size)


def test_the_line_states_mode_group_kernel_bytes_and_budgets():
    buffers = temporary_buffers(GLM, "fp8_e4m3", 8, local_heads=8, rows=8192, context=131072, pool_rows=704)
    line = startup_line(
        mode="TP-DCP",
        group_ranks=range(8),
        gathered_heads=64,
        head_bucket=64,
        comm_backend="a2a",
        pool=make_pool(640, 8),
        buffers=buffers,
        held=HELD,
        topk="exact",
    )
    assert line.startswith(PREFIX) and "\n" not in line
    facts = json.loads(line.removeprefix(PREFIX))
    assert (facts["mode"], facts["dcp_size"], facts["dcp_group"]) == ("TP-DCP", 8, list(range(8)))
    assert facts["topk"] == "exact"
    assert (facts["heads"], facts["head_bucket"], facts["dcp_comm_backend"]) == (64, 64, "a2a")
    assert facts["prefix_unit_tokens"] == 64 * 8
    assert (facts["latent_bytes_per_token"], facts["index_key_bytes_per_token"]) == (6396, 2772)
    assert facts["buffer_budget_bytes"]["page_gather"] == 131072 * 656
    assert facts["held_bytes"] == HELD.as_bytes()
    assert facts["held_bytes"]["request_table"] == 65 * 131_076 * 4
    # 1,024 query tokens over the gathered rows.
    assert facts["buffer_budget_bytes"]["dequantised"] == 131072 * 1152


def test_an_empty_group_is_refused():
    with pytest.raises(ValueError, match="group_ranks must hold at least this rank"):
        startup_line(
            mode="TP-DCP",
            group_ranks=[],
            gathered_heads=64,
            head_bucket=64,
            comm_backend="a2a",
            pool=make_pool(64, 1),
            buffers=temporary_buffers(GLM, "fp8_e4m3", 1, local_heads=8, rows=1, context=1, pool_rows=64),
            held=HELD,
            topk="exact",
        )
