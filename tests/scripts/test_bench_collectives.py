"""The collectives of a step: their sizes and counts, and a run over gloo with the smallest of them."""

import json

import pytest

from nsa_dcp.planning.dimensions import preset_dims
from nsa_dcp.planning.steps.step_inputs import measured_inputs, override_inputs
from scripts.benchmarks.collectives import bench as bench_collectives
from scripts.benchmarks.collectives import cases

GLM = preset_dims("glm-5.2")


def find(part, rows, num_ranks):
    (found,) = [case for case in cases.list_collectives(GLM, num_ranks) if (case.part, case.rows) == (part, rows)]
    return found


@pytest.mark.parametrize(
    ("part", "kind", "sent", "received"),
    [
        # 64 requests, 64 heads, 8 ranks: 8 heads of 576 bfloat16 values from each of the 7 others.
        ("queries", "all_gather", 64 * 8 * 576 * 2, 7 * 64 * 8 * 576 * 2),
        # 8 heads' outputs and lse of 64 rows from each of the 7 others.
        ("partials, a2a", "all_to_all", 64 * 64 * 1028, 7 * 64 * 8 * 1028),
        ("partials, ag_rs", "reduce_scatter", 64 * 64 * 512 * 4, 7 * 64 * 8 * 512 * 4),
        ("lse, ag_rs", "all_gather", 64 * 64 * 4, 7 * 64 * 64 * 4),
        ("selections", "all_gather", 8 * 2048 * 4, 7 * 8 * 2048 * 4),
        ("TP all-reduce", "all_reduce", 64 * 6144 * 2, 2 * 7 * 64 * 6144 * 2 // 8),
        ("hidden states", "all_gather", 8 * 6144 * 2, 7 * 8 * 6144 * 2),
    ],
)
def test_bytes_are_those_of_the_step(part, kind, sent, received):
    case = find(part, 64, 8)
    assert (case.kind, case.sent_bytes, case.received_bytes(8)) == (kind, sent, received)


def test_gathered_pages_are_each_rank_s_share_of_the_tokens():
    assert find("gathered pages", 131072, 4).sent_bytes == 131072 // 4 * 656


@pytest.mark.parametrize(
    ("config", "replicated", "backend", "expected"),
    [
        ("tp1-dcp1", False, "a2a", {}),
        ("tp2-dcp1", False, "a2a", {"TP all-reduce": 157}),
        ("tp2-dcp2-a2a", True, "a2a", {"TP all-reduce": 157, "partials, a2a": 78}),
        (
            "tp2-dcp2-ag_rs",
            False,
            "ag_rs",
            {"TP all-reduce": 157, "queries": 78, "lse, ag_rs": 78, "partials, ag_rs": 78},
        ),
        ("tp2-dcp2-cpi-slice", False, "a2a", {"TP all-reduce": 157, "queries": 78, "partials, a2a": 78}),
        ("tp2-dcp2-cpi", False, "a2a", {"TP all-reduce": 79, "partials, a2a": 78, "merged heads": 78}),
    ],
)
def test_counts_follow_the_mode(config, replicated, backend, expected):
    assert cases.count_per_step(config, GLM, replicated, backend) == expected


def test_a_share_needs_every_part_s_time_and_is_interpolated_between_rows():
    counts = {"queries": 10, "partials, a2a": 10}
    times = {"queries": {1: 1.0, 64: 5.0}}
    assert cases.share_of_step(counts, times, 64, 1000.0) is None
    times["partials, a2a"] = {64: 20.0, 128: 40.0}
    assert cases.share_of_step(counts, times, 64, 1000.0) == {"queries": 0.05, "partials, a2a": 0.2}
    assert cases.share_of_step(counts, times, 65, 1000.0) is None
    assert cases.share_of_step({"partials, a2a": 10}, times, 96, 1000.0) == {"partials, a2a": 0.3}


def test_two_ranks_time_the_small_ones_and_the_tables_replace_the_model_s(tmp_path, capsys):
    steps = {
        "reports": [
            {
                "config": "tp2-dcp2-a2a",
                "resolved": {"dcp_replicate_q_proj": True, "dcp_comm_backend": "a2a"},
                "decode": [
                    {"context": 4096, "running": 1, "step_us": 1e6},
                    {"context": 1, "running": 17, "step_us": 1},
                ],
            }
        ]
    }
    (tmp_path / "bench.json").write_text(json.dumps(steps))
    files = {name: tmp_path / f"{name}.json" for name in ("times", "tables", "bench")}
    flags = ["--device", "cpu", "--max-bytes", "70000", "--json", str(files["times"]), "--steps", str(files["bench"])]
    bench_collectives.main(["glm-5.2", *flags, "--tables", str(files["tables"])])
    done = json.loads(files["times"].read_text())
    small = [case for case in cases.list_collectives(GLM, 2) if case.sent_bytes <= 70000]
    assert [(one["part"], one["rows"], one["kind"]) for one in done["records"]] == [
        (case.part, case.rows, case.kind) for case in small
    ]
    assert {one["kind"] for one in done["records"]} == set(cases.KINDS)
    assert done["failures"] == [] and all(one["us"] > 0 for one in done["records"])
    inputs = override_inputs(measured_inputs(GLM), tables=files["tables"])
    assert list(inputs["all_gather"].value) == [4096.0, 65536.0]
    printed = capsys.readouterr().out
    assert "| tp2-dcp2-a2a | 4,096 | 1 | 1000.00 |" in printed
    assert "78 partials, a2a" in printed
    # No exchange of so many rows was timed.
    assert "| tp2-dcp2-a2a | 1 | 17 |" not in printed


def test_a_run_out_of_time_says_what_is_missing(tmp_path, capsys):
    path = tmp_path / "times.json"
    with pytest.raises(SystemExit):
        bench_collectives.main(["glm-5.2", "--device", "cpu", "--json", str(path), "--time-limit", "-5"])
    assert "the time is up" in json.loads(path.read_text())["failures"][0]


def test_tables_come_from_two_ranks_alone():
    records = [{"part": "table", "kind": "all_gather", "sent_bytes": 4096, "us": 1.0 + n, "ranks": n} for n in (2, 4)]
    assert cases.model_tables(records) == {"all_gather": {"4096": 3.0}}
