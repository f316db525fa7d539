"""bench_prefill: what ranks receive, which rows and tokens each mode works on, where modes cross, what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_dcp.planning.dimensions import preset_dims
from nsa_dcp.planning.steps.step_model import DecodeSetup, measured_inputs, override_inputs, predict_step
from nsa_dcp_kernels import _flash_mla, gather_pages
from scripts.benchmarks.decode_step.cases import DecodeCase
from scripts.benchmarks.decode_step.cases import received_bytes as received_in_decode
from scripts.benchmarks.prefill_chunk import bench as bench_prefill
from scripts.benchmarks.prefill_chunk.cases import (
    MODES,
    PER_SELECTION,
    Crossover,
    PrefillCase,
    find_crossover,
    list_cases,
    measured_link,
    pool_pages,
    predict_layers,
    received_bytes,
    sum_layers,
)
from scripts.benchmarks.prefill_chunk.rank import RankChunk, draw_positions

GLM, DEEPSEEK = preset_dims("glm-5.2"), preset_dims("deepseek-v3.2")
TINY = replace(GLM, num_attention_heads=8, index_topk=64, index_n_heads=4, name="tiny")
SIZES = pytest.mark.parametrize("dcp_size", [2, 4, 8])


def draw_chunk(monkeypatch, dcp_size: int, prefix: int = 150, chunk: int = 16, pages: int = 5) -> RankChunk:
    monkeypatch.setattr(_flash_mla, "count_sms", lambda device: 132)
    torch.manual_seed(0)
    return RankChunk(PrefillCase("tiny", dcp_size, chunk, prefix), TINY, pages, "cpu")


@SIZES
@pytest.mark.parametrize("comm_backend", ["a2a", "ag_rs"])
def test_bytes_of_tp_dcp_are_those_of_the_step_model(dcp_size, comm_backend):
    # The step model's batch is this chunk; over a link of 1 GB/s, microseconds past the latency are kilobytes.
    case = PrefillCase("glm-5.2", dcp_size, 256, 0)
    inputs = override_inputs(measured_inputs(GLM), ["link_bandwidth_gbs=1"])
    setup = DecodeSetup(dcp_size, dcp_size, comm_backend, replicate_q_proj=False)
    terms = predict_step(GLM, setup, inputs, "tp_dcp", case.chunk, 4096)
    latency = {name: next(iter(inputs[name].value.values())) for name in ("all_gather", "all_to_all", "reduce_scatter")}
    exchange = latency["all_to_all"] if comm_backend == "a2a" else latency["all_gather"] + latency["reduce_scatter"]
    received = received_bytes(case, GLM, comm_backend)["tp_dcp"]
    layers = GLM.num_hidden_layers
    assert received["queries"] / 1e3 == pytest.approx(terms["gather_q"] / layers - latency["all_gather"], rel=1e-9)
    assert received["partials"] / 1e3 == pytest.approx(terms["exchange"] / layers - exchange, rel=1e-9)


@pytest.mark.parametrize("dims", [GLM, DEEPSEEK], ids=lambda dims: dims.name)
def test_bytes_of_tp_dcp_are_those_of_the_decode_benchmark(dims):
    received = received_bytes(PrefillCase(dims.name, 8, 8192, 32768), dims)["tp_dcp"]
    decoded = received_in_decode(DecodeCase(dims.name, 8, 8192, 40960), dims, row_split=True)
    assert (received["queries"], received["partials"], received["selections"]) == tuple(
        decoded[name] for name in ("gather q", "merge", "select")
    )


@pytest.mark.parametrize(("prefix", "megabytes"), [(0, 13), (131072, 88)], ids=["no_prefix", "128k"])
def test_bytes_are_the_runbooks(prefix, megabytes):
    received = received_bytes(PrefillCase("glm-5.2", 8, 8192, prefix), GLM)
    assert round((received["tp_dcp"]["queries"] + received["tp_dcp"]["partials"]) / 1e6) == 1000
    assert round((received["cp_dcp"]["pages"] + received["cp_dcp"]["latents"]) / 1e6) == megabytes


@given(st.sampled_from([2, 4, 8]), st.integers(1, 64), st.integers(0, 200_000))
def test_pages_received_hold_the_context_and_less_than_a_page_more_from_each_rank(dcp_size, share, prefix):
    case = PrefillCase("glm-5.2", dcp_size, share * dcp_size, prefix)
    received = received_bytes(case, GLM)["cp_dcp"]
    context_bytes = (prefix + share * dcp_size) * 656
    excess = received["pages"] * dcp_size / (dcp_size - 1) - context_bytes
    assert -1e-3 < excess < 64 * 656 * dcp_size
    assert received["latents"] == (dcp_size - 1) * share * 1152
    assert received["index keys"] == (dcp_size - 1) * share * 256


@SIZES
def test_pages_counted_are_the_other_ranks_packed_pages(monkeypatch, dcp_size):
    chunk = draw_chunk(monkeypatch, dcp_size)
    packed = gather_pages(chunk.latents[0], chunk.plans[0].pages)
    assert received_bytes(chunk.case, TINY)["cp_dcp"]["pages"] == (dcp_size - 1) * packed.nbytes


@SIZES
@pytest.mark.parametrize("prefix", [0, 150], ids=["no_prefix", "prefix"])
def test_tp_attends_to_its_part_for_all_rows_and_cp_to_everything_for_its_own(monkeypatch, dcp_size, prefix):
    chunk = draw_chunk(monkeypatch, dcp_size, prefix)
    tp, cp = (chunk.part_calls(mode) for mode in MODES)
    for calls in (*tp.values(), *cp.values()):
        for call in calls:
            call()
    visible = torch.arange(prefix + 1, prefix + 17).clamp(max=64)
    for at in range(2):
        part, whole = tp["localise"][at](), cp["localise"][at]()
        owned = (chunk.slots[at] >= 0) & (chunk.slots[at] % dcp_size == dcp_size - 1)
        torch.testing.assert_close(part.length, owned.sum(-1, dtype=torch.int32), rtol=0, atol=0)
        torch.testing.assert_close(whole.length, visible[dcp_size - 1 :: dcp_size].int(), rtol=0, atol=0)
    out, lse = tp["attend"][0]()
    assert out.shape == (16, 8, 512) and lse.shape == (16, 8)
    assert cp["attend"][0]()[0].shape == (16 // dcp_size, 8, 512)
    assert tp["merge"][0]()[1][0].shape == (16, 8 // dcp_size, 512)
    assert tp["arrange"][0]().shape == (16, 8, 576) and cp["arrange"][0]().shape == (16, 576)


@SIZES
def test_the_two_modes_selections_name_the_same_tokens(monkeypatch, dcp_size):
    """The rows that TP-DCP's ranks keep, put together, are the rows that CP-DCP reads in the gathered buffer."""
    chunk = draw_chunk(monkeypatch, dcp_size)
    whole = chunk.part_calls("cp_dcp")["localise"][1]()
    pages = chunk.plans[1].pages
    # Each rank's pool names its own rows, so that a gathered row tells rank and row.
    rows = torch.arange(len(chunk.latents[0]), dtype=torch.int32).unsqueeze(1)
    gathered = torch.cat([gather_pages(rows, pages) * dcp_size + rank for rank in range(dcp_size)]).flatten()
    slots = chunk.slots[1][dcp_size - 1 :: dcp_size]
    for row, length, expected in zip(whole.rows, whole.length, slots):
        torch.testing.assert_close(gathered[row[:length].long()], expected[expected >= 0], rtol=0, atol=0)


@SIZES
def test_ranks_score_a_share_of_the_rows_of_which_the_last_sees_the_whole_context(monkeypatch, dcp_size):
    chunk = draw_chunk(monkeypatch, dcp_size)
    scored = {mode: chunk.part_calls(mode)["select"][0]() for mode in MODES}
    for positions in scored.values():
        assert positions.shape == (16 // dcp_size, 64)
        assert int(positions.min()) >= 0 and int(positions.max()) < chunk.case.context
    assert received_bytes(chunk.case, TINY)["tp_dcp"]["selections"] == (dcp_size - 1) * scored["tp_dcp"].nbytes


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.integers(1, 100))
def test_drawn_positions_are_visible_and_ascending_and_all_of_a_short_context(context_lens, topk):
    positions = draw_positions(torch.tensor(context_lens, dtype=torch.int32), topk)
    for row, seen in zip(positions.tolist(), context_lens):
        kept = row[: min(seen, topk)]
        assert kept == sorted(kept) and kept[0] >= 0 and kept[-1] < seen
        if seen <= topk:
            assert row == [*range(seen), *[-1] * (topk - seen)]


def test_a_pool_that_does_not_hold_the_request_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="hold the request's 2 pages a rank, got 1"):
        draw_chunk(monkeypatch, 2, pages=1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (([1], [8192], [0]), "dcp_sizes must be 2 or more"),
        (([3], [8192], [0]), "divide 64 heads, got 3"),
        (([8], [100], [0]), "chunks must be multiples"),
        (([8], [8192], [-1]), "prefixes must be 0 to 1040384"),
        (([8], [8192], [1040385]), "got 1040385"),
    ],
    ids=["one_rank", "heads", "chunk", "negative", "context"],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        list_cases(GLM, *sizes)


def test_pool_is_the_planners_and_link_is_the_largest_measured_gather():
    assert pool_pages(GLM, 8, 40) * 64 == 585_536
    link_gbs, _ = measured_link(GLM)
    assert link_gbs == pytest.approx(67_108_864 / 291.3 / 1e3)


def test_mean_layer_weighs_layers_as_the_model_has_them():
    values = {"select": 78.0, "attend": 5.0, "index keys": 156.0}
    assert {"select", "index keys"} <= PER_SELECTION and "attend" not in PER_SELECTION
    assert sum_layers(values, GLM) == {"selects": 239.0, "shares": 5.0, "mean": pytest.approx(5 + 21 * 3.0)}
    assert sum_layers(values, DEEPSEEK)["mean"] == 239.0


def test_predicted_layer_is_kernels_and_bytes_over_the_link():
    layers = predict_layers({"attend": 100.0, "select": 10.0}, {"pages": 2_000_000, "index keys": 400_000}, GLM, 200.0)
    assert layers["shares"] == pytest.approx(110.0)
    assert layers["selects"] == pytest.approx(122.0)


@pytest.mark.parametrize(
    ("tp_dcp", "cp_dcp", "expected"),
    [
        ([70, 70, 300], [50, 90, 170], Crossover(5, extrapolated=False)),
        ([100, 100, 100], [20, 60, 110], Crossover(18, extrapolated=False)),
        ([100, 100, 100], [20, 40, 64], Crossover(35, extrapolated=True)),
        ([100, 100, 100], [100, 90, 80], Crossover(0, extrapolated=False)),
        ([100, 100, 100], [20, 60, 50], None),
        ([100, 110, 120], [20, 30, 40], None),
    ],
    ids=["first_gap", "second_gap", "beyond", "at_once", "falling_back", "parallel"],
)
def test_modes_cross_where_their_lines_meet(tp_dcp, cp_dcp, expected):
    found = find_crossover([0, 10, 20], tp_dcp, cp_dcp)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found.prefix == pytest.approx(expected.prefix) and found.extrapolated == expected.extrapolated


def test_one_prefix_shows_no_crossing_unless_there():
    assert find_crossover([0], [100], [99]) is None
    assert find_crossover([512], [100], [101]) == Crossover(512, extrapolated=False)


def timed_parts(tp_dcp: float, cp_dcp: float) -> dict[str, object]:
    def parts(attend: float, *names: str) -> dict[str, dict[str, float]]:
        return {
            name: {"us": us, "low": us, "high": us}
            for name, us in {**dict.fromkeys(names, 1), "attend": attend}.items()
        }

    return {
        "parts": {
            "tp_dcp": parts(tp_dcp, "select", "localise", "arrange", "merge"),
            "cp_dcp": parts(cp_dcp, "select", "localise", "arrange", "pack pages"),
        },
        "attended_rows": {"tp_dcp": 1, "cp_dcp": 1},
        "dequantised": {"tp_dcp": True, "cp_dcp": False},
    }


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine that looks right; returns main's arguments for a passing test report and a JSON file."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(bench_prefill, "describe_environment", lambda: {"date": "2026-01-01", "torch": "2"})
    report = tmp_path / "tests.xml"
    report.write_text('<testsuites><testsuite tests="4" failures="0" errors="0" skipped="1"/></testsuites>')
    return ["--dcp-sizes", "8", "--tests-report", str(report), "--json", str(tmp_path / "prefill.json")]


@pytest.mark.parametrize(
    "suite", ['tests="4" failures="1" errors="0" skipped="0"', 'tests="4" failures="0" errors="0" skipped="4"']
)
def test_no_case_is_timed_or_printed_where_the_ops_tests_fail_or_none_ran(hopper, monkeypatch, capsys, tmp_path, suite):
    monkeypatch.setattr(bench_prefill, "bench_case", lambda *args: pytest.fail("timed"))
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite {suite}/></testsuites>")
    with pytest.raises(SystemExit, match="no numbers"):
        bench_prefill.main(hopper)
    assert capsys.readouterr().out == "" and not (tmp_path / "prefill.json").exists()


def test_results_are_written_after_every_case_and_a_failing_one_does_not_lose_the_others(
    hopper, monkeypatch, capsys, tmp_path
):
    written = []

    def bench(case, dims, pages):
        if (tmp_path / "prefill.json").exists():
            written.append(len(json.loads((tmp_path / "prefill.json").read_text())["records"]))
        if case.prefix == 32768:
            raise RuntimeError("out of memory\nof the GPU")
        return timed_parts(1000.0, 500.0)

    monkeypatch.setattr(bench_prefill, "bench_case", bench)
    bench_prefill.main([*hopper, "--link-gbs", "100"])
    assert written == [1, 1]
    results = json.loads((tmp_path / "prefill.json").read_text())
    assert [record["prefix"] for record in results["records"]] == [0, 131072]
    assert results["left_out"] == ["glm-5.2 dcp=8 chunk=8192 prefix=32768: out of memory"]
    assert results["environment"]["command"] and "--link-gbs" in results["environment"]["link"]
    # 1,002 us and 1,000 MB against 502 us and 13 MB, 88 MB at 128K, over 100 GB/s.
    (crossing,) = results["crossovers"]
    shares = crossing["predicted_us shares"]
    moved = [received_bytes(PrefillCase("glm-5.2", 8, 8192, prefix), GLM)["cp_dcp"]["pages"] for prefix in (0, 131072)]
    gap = (1002 - 502) * 1e5 + received_bytes(PrefillCase("glm-5.2", 8, 8192, 0), GLM)["tp_dcp"]["queries"]
    gap += received_bytes(PrefillCase("glm-5.2", 8, 8192, 0), GLM)["tp_dcp"]["partials"] - 7 * 1024 * 1152 - moved[0]
    assert shares["prefix"] == pytest.approx(gap / (moved[1] - moved[0]) * 131072) and shares["extrapolated"]
    text = capsys.readouterr().out
    assert "1000.0a" in text and "500.0b" in text and "beyond the model's 1,048,576" in text
    assert "out of memory" in text and "of the GPU" not in text


def test_no_case_is_started_after_the_time_limit_and_no_result_is_a_failure(hopper, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_prefill, "bench_case", lambda *args: pytest.fail("timed"))
    with pytest.raises(SystemExit) as stopped:
        bench_prefill.main([*hopper, "--time-limit", "-1"])
    assert stopped.value.code == 1
    assert len(json.loads((tmp_path / "prefill.json").read_text())["left_out"]) == 3
