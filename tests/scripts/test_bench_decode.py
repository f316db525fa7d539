"""bench_decode: which layers select, what ranks receive, where caches lie, what the table says, what failures cost."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_dcp.indexer import select_positions
from nsa_dcp.planning.dimensions import preset_dims
from nsa_dcp_kernels import LocalSelection, _flash_mla, attend_sparse
from scripts.benchmarks.decode_step import bench as bench_decode
from scripts.benchmarks.decode_step.cases import (
    INDEX_PAGE_BYTES,
    LATENT_PAGE_BYTES,
    DecodeCase,
    list_cases,
    local_heads,
    parts_of,
    physical_pages,
    received_bytes,
    received_per_step,
    selection_of_layers,
    sum_layers,
    sum_model,
    window_starts,
)
from scripts.benchmarks.decode_step.rank import RankSettings
from scripts.benchmarks.decode_step.report import format_report
from scripts.benchmarks.decode_step.step import SETS, DecodeCaches, RankStep

GLM, DEEPSEEK = preset_dims("glm-5.2"), preset_dims("deepseek-v3.2")
# The last layer that owns an indexer shares its selection with two more.
TINY = replace(
    GLM, num_hidden_layers=SETS + 2, indexer_layers=tuple(range(SETS)), index_topk=64, index_n_heads=4, name="tiny"
)
# Seconds since the epoch: the year 2065, which an alarm can be set to.
FOREVER = 3_000_000_000


@pytest.fixture
def on_cpu(monkeypatch):
    """FlashMLA's launches by the reference, so that a step runs without a GPU."""
    monkeypatch.setattr(_flash_mla, "count_sms", lambda device: 132)
    monkeypatch.setattr(
        _flash_mla, "launch_packed", lambda q, kv_rows, rows, scale, meta: attend_sparse(q, kv_rows, rows, None, scale)
    )


def draw_step(dcp_size: int, batch: int = 3, row_split: bool = True) -> RankStep:
    case = DecodeCase("glm-5.2", dcp_size, batch, 100)
    caches = DecodeCaches(TINY.num_hidden_layers * case.latent_pages, SETS * case.index_pages, "cpu")
    return RankStep(case, TINY, caches, 1 << 30, row_split, with_indexer=True)


def fake_result(case: DecodeCase, us: float, communication: str, **changes: object) -> dict[str, object]:
    names = [part.name for part in parts_of(case.dcp_size, True)]
    parts = {name: {"us": 10.0 + at, "low": 9.0, "high": 11.0} for at, name in enumerate(names)}
    result = {
        "communication": communication,
        "parts": parts,
        "layer_us": sum_layers({name: part["us"] for name, part in parts.items()}),
        "model": {"us": us, "low": us - 1, "high": us + 1},
        "received_bytes_per_layer": received_bytes(case, GLM, True),
        "received_bytes_per_step": received_per_step(received_bytes(case, GLM, True), GLM),
        "latent_memory_share": 1.0,
        "index_memory_share": 1.0,
    }
    return result | changes


def test_glm_layers_share_selections_in_fours_and_deepseek_layers_do_not():
    numbers = selection_of_layers(GLM)
    assert len(numbers) == 78 and numbers[-1] == 20
    assert numbers[:11] == (0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4)
    assert selection_of_layers(DEEPSEEK) == tuple(range(61))
    assert (local_heads(GLM), local_heads(DEEPSEEK)) == (8, 16)
    assert (GLM.index_n_heads, DEEPSEEK.index_n_heads) == (32, 64)


def test_model_is_the_sum_of_its_selecting_and_its_sharing_layers():
    layers = sum_layers({"write latent": 1, "write key": 2, "select": 4, "slots": 8, "attend": 16})
    assert layers == {"selecting": 31, "sharing": 17}
    assert sum_model(layers, GLM) == 21 * 31 + 57 * 17
    assert sum_model(layers, DEEPSEEK) == 61 * 31


def test_parts_of_a_tp_rank_leave_out_dcp_and_parts_without_indexer_leave_out_scoring():
    def names(dcp_size: int, with_indexer: bool) -> list[str]:
        return [part.name for part in parts_of(dcp_size, with_indexer)]

    assert names(1, True) == ["write latent", "write key", "select", "slots", "attend"]
    assert names(8, False) == ["write latent", "slots", "localise", "gather q", "attend", "merge"]
    assert len(names(8, True)) == 8


def test_every_case_has_a_tp_rank_to_compare_with():
    cases = list_cases(["glm-5.2"], [8, 2], [1, 64], [4096])
    assert len(cases) == len(set(cases)) == 6
    for case in cases:
        assert replace(case, dcp_size=1) in cases


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (([3], [1], [4096]), "dcp_size must divide tp_size"),
        (([8], [0], [4096]), "batches must be at least 1, got 0"),
        (([8], [1], [-5]), "contexts must be at least 1, got -5"),
    ],
    ids=["dcp", "batch", "context"],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        list_cases(["glm-5.2"], *sizes)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("dcp_size", [2, 4, 8])
def test_received_bytes_are_those_of_the_other_ranks_messages(on_cpu, dcp_size, batch):
    step = draw_step(dcp_size, batch)
    received = received_bytes(step.case, TINY, row_split=True)
    assert received["gather q"] == step.received_q[0][1:].nbytes
    assert received["merge"] == step.received_partials[0][1:].nbytes
    assert received["select"] == step.received_positions[0][1:].nbytes
    assert received_bytes(step.case, TINY, row_split=False)["select"] == 0


def test_a_tp_rank_receives_nothing_and_a_step_receives_from_every_layer():
    assert set(received_bytes(DecodeCase("glm-5.2", 1, 64, 4096), GLM, True).values()) == {0}
    received = {"gather q": 5, "merge": 7, "select": 11}
    assert received_per_step(received, GLM) == 78 * 12 + 21 * 11


def test_caches_have_the_size_of_batch_and_context():
    # 4,097 tokens over 8 ranks: 9 widened pages of 512 slots, one page of 64 rows each.
    case = DecodeCase("glm-5.2", 8, 5, 4097)
    assert (case.latent_pages, case.index_pages) == (45, 360)
    assert (LATENT_PAGE_BYTES, INDEX_PAGE_BYTES) == (64 * 656, 64 * 132)


@given(st.integers(1, 80), st.integers(1, 1000), st.integers(1, 100_000))
def test_layers_caches_lie_within_memory_and_apart_while_it_lasts(num_layers, layer_pages, budget):
    if budget < layer_pages:
        with pytest.raises(ValueError, match="--cache-gib"):
            physical_pages(num_layers, layer_pages, 1, budget)
        return
    pages = physical_pages(num_layers, layer_pages, 1, budget)
    starts = window_starts(num_layers, layer_pages, pages)
    assert len(starts) == num_layers and starts[0] == 0
    assert pages <= budget and starts[-1] + layer_pages <= pages
    if budget >= num_layers * layer_pages:
        assert starts == [layer * layer_pages for layer in range(num_layers)]
    elif pages - layer_pages >= num_layers - 1:
        assert len(set(starts)) == num_layers


@pytest.mark.parametrize("dcp_size", [1, 2, 8])
def test_model_step_selects_where_a_layer_owns_an_indexer_and_attends_everywhere(on_cpu, monkeypatch, dcp_size):
    step = draw_step(dcp_size)
    selected, attended, merged, kept = [], [], [], []
    select, attend, merge = step.select, step.attend, step.merge

    def record_attend(layer, q, selection):
        assert q.shape == (3, 8 * dcp_size, 576)
        assert isinstance(selection, torch.Tensor if dcp_size == 1 else LocalSelection)
        attended.append((layer, id(selection)))
        kept.append(selection)  # so that no later one has its id
        return attend(layer, q, selection)

    monkeypatch.setattr(step, "select", lambda number: selected.append(number) or select(number))
    monkeypatch.setattr(step, "attend", record_attend)
    monkeypatch.setattr(step, "merge", lambda layer, *partial: merged.append(layer) or merge(layer, *partial))
    step.run_model()
    layers = list(range(TINY.num_hidden_layers))
    assert selected == list(TINY.indexer_layers)
    assert [layer for layer, _ in attended] == layers
    assert merged == (layers if dcp_size > 1 else [])
    # The last three layers share a selection, and the plan in it; no two others do.
    assert len({selection for _, selection in attended}) == SETS
    assert len({selection for _, selection in attended[-3:]}) == 1
    assert len({step.latents[layer].data_ptr() for layer in layers}) == len(layers)


@pytest.mark.parametrize("row_split", [True, False], ids=["row_split", "replicated"])
def test_selected_rows_are_those_of_scoring_every_row_where_this_rank_scores(on_cpu, row_split):
    step = draw_step(2, batch=5, row_split=row_split)
    every_row = select_positions(*step._scored(3, step.index_keys[3], slice(None)))
    selected = step.select(3)
    assert selected.shape == (5, 64) and selected.dtype == torch.int32
    mine = slice(0, None, 2) if row_split else slice(None)
    torch.testing.assert_close(selected[mine], every_row[mine], rtol=0, atol=0)
    assert int(selected.min()) >= 0 and int(selected.max()) < 100


def test_each_part_can_be_called_by_itself(on_cpu):
    for dcp_size in (1, 4):
        calls = draw_step(dcp_size).part_calls(2)
        for part in parts_of(dcp_size, True):
            assert len(calls[part.name]) == 2
            for call in calls[part.name]:
                call()


def test_table_compares_with_the_tp_rank_and_says_how_communication_was_had():
    tp, four, eight = (DecodeCase("glm-5.2", size, 64, 4096) for size in (1, 4, 8))
    results = {
        tp: fake_result(tp, 9000.0, "none"),
        four: fake_result(four, 4500.0, "measured", latent_memory_share=0.25),
        eight: fake_result(eight, 3000.0, "counted"),
    }
    text = format_report(results, [{"case": "some case", "error": "Traceback\nCUDA error"}], [replace(tp, batch=1)])
    rows = [line for line in text.splitlines() if line.startswith("   64 ")]
    assert len(rows) == 3
    assert "9.000" in rows[0] and rows[0].endswith("| -") and "x" not in rows[0].split("|")[2]
    assert "2.00x" in rows[1] and rows[1].endswith("measured")
    assert "3.00x" in rows[2] and rows[2].endswith("counted")
    # 7 others * 64 rows * 8 heads * (1,152 bytes of query + 1,028 of partial result)
    assert "7.81 MB a layer" in rows[2]
    assert "glm-5.2 TP-DCP 4 b=64 context=4096: 25%" in text
    assert "some case: CUDA error" in text and "Traceback" not in text
    assert "1 cases were not run: glm-5.2 TP b=1 context=4096" in text


def test_table_without_a_tp_rank_has_no_ratio():
    case = DecodeCase("glm-5.2", 8, 64, 4096)
    (row,) = (
        line
        for line in format_report({case: fake_result(case, 3000.0, "counted")}, [], []).splitlines()
        if line.startswith("   64 ")
    )
    assert "x" not in row.split("|")[2]


def test_ranks_are_started_where_each_has_its_own_gpu():
    cases = list_cases(["glm-5.2"], [2, 4, 8], [1], [4096])
    worlds = bench_decode.plan_worlds(cases, num_gpus=4)
    assert {size: [case.dcp_size for case in chosen] for size, chosen in worlds.items()} == {1: [1, 8], 2: [2], 4: [4]}
    assert list(bench_decode.plan_worlds(cases, num_gpus=1)) == [1]


def rank_settings(deadline: float = FOREVER) -> RankSettings:
    return RankSettings(1, 1 << 30, True, True, deadline=deadline)


def test_a_case_that_fails_does_not_lose_the_others(monkeypatch):
    cases = list_cases(["glm-5.2"], [8], [1, 2, 3], [4096])
    bad = cases[3]
    kept = []

    def run_ranks(function, world_size, args, device_type, timeout_s, on_message):
        assert device_type == "cuda"
        for case in args[0]:
            if case == bad:
                raise RuntimeError("rank 0 failed:\nillegal memory access")
            on_message((case, {}))

    monkeypatch.setattr(bench_decode, "run_ranks", run_ranks)
    failures = bench_decode.run_world(1, cases, rank_settings(), lambda case, result: kept.append(case))
    assert kept == [case for case in cases if case != bad]
    assert failures == [{"case": "glm-5.2 TP-DCP 8 b=2 context=4096", "error": "rank 0 failed:\nillegal memory access"}]


def test_a_world_where_everything_fails_is_given_up(monkeypatch):
    starts = []

    def run_ranks(*args, **kwargs):
        starts.append(args)
        raise RuntimeError("no FlashMLA")

    monkeypatch.setattr(bench_decode, "run_ranks", run_ranks)
    cases = list_cases(["glm-5.2"], [8], [1, 2, 3, 4, 5], [4096])
    failures = bench_decode.run_world(1, cases, rank_settings(), lambda case, result: None)
    assert len(failures) == len(starts) == 4


def test_no_rank_is_started_after_the_deadline(monkeypatch):
    monkeypatch.setattr(bench_decode, "run_ranks", lambda *args, **kwargs: pytest.fail("started"))
    cases = list_cases(["glm-5.2"], [8], [1], [4096])
    assert bench_decode.run_world(1, cases, rank_settings(deadline=0), lambda case, result: None) == []


def test_quick_is_a_few_cases_of_one_model():
    args = bench_decode.parse_args(["--quick"])
    assert len(list_cases(args.models, args.dcp_sizes, args.batches, args.contexts)) == 3
