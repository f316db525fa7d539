"""The step model: measured points come back unchanged, terms react to what should move them, inputs can be replaced."""

import json
from dataclasses import replace

import pytest

from nsa_dcp.model_dims import dims_from_config, preset_dims
from nsa_dcp.step_inputs import interpolate, measured_inputs, override_inputs
from nsa_dcp.step_model import DecodeSetup, format_report, predict_report, predict_step

GLM, DEEPSEEK = preset_dims("glm-5.2"), preset_dims("deepseek-v3.2")
INPUTS = measured_inputs(GLM)
SETUP = DecodeSetup()


def step(mode, batch=128, context=32768, model=GLM, setup=SETUP, inputs=INPUTS):
    return predict_step(model, setup, inputs, mode, batch, context)


def test_every_input_says_its_unit_and_where_it_comes_from():
    for name, entry in INPUTS.items():
        assert entry.unit, name
        assert any(word in entry.source for word in ("measured", "assumed", "stated", "collective tables")), name
        if isinstance(entry.value, dict):
            assert "measured on" in entry.source, name
            assert list(entry.value) == sorted(entry.value), name


def test_measured_attention_comes_back_as_measured():
    assert step("tp")["attention"] == pytest.approx(78 * 119.0)
    # dcp 8 of a 2,048-token selection: 256 valid on average, the case that was measured.
    assert step("tp_dcp")["attention"] == pytest.approx(78 * 30.0)
    assert step("tp_dcp", batch=64)["attention"] == pytest.approx(78 * 28.0)


def test_attention_over_more_valid_indices_takes_longer():
    times = [step("tp_dcp", setup=replace(SETUP, dcp_size=size))["attention"] for size in (8, 4, 2)]
    assert times == sorted(times) and times[0] < times[-1] < step("tp")["attention"] * 1.1


def test_dcp_of_size_1_is_tp():
    assert step("tp_dcp", setup=replace(SETUP, dcp_size=1)) == step("tp")


def test_128_gathered_heads_use_the_128_head_table_and_launches_of_132_rows():
    inputs = measured_inputs(DEEPSEEK)
    assert step("tp_dcp", model=DEEPSEEK, inputs=inputs)["attention"] == pytest.approx(61 * 43.3)
    twice = step("tp_dcp", model=DEEPSEEK, inputs=inputs, batch=256)["attention"]
    assert twice == pytest.approx(2 * 61 * 43.3)


def test_the_terms_add_up():
    for mode in ("tp", "tp_dcp", "cp_dcp"):
        terms = step(mode)
        assert terms.pop("total") == pytest.approx(sum(terms.values()))
        assert min(terms.values()) >= 0


def test_only_dcp_modes_exchange():
    assert [step("tp")[term] for term in ("localize", "gather_q", "exchange", "combine")] == [0, 0, 0, 0]
    assert all(step("tp_dcp")[term] > 0 for term in ("localize", "exchange", "combine"))


def test_a_replicated_q_projection_trades_the_gather_for_weight_bytes():
    with_it, without = step("tp_dcp"), step("tp_dcp", setup=replace(SETUP, replicate_q_proj=False))
    assert with_it["gather_q"] == 0 < without["gather_q"]
    assert with_it["weights"] > without["weights"]


def test_cp_dcp_without_the_head_slice_reads_every_attention_weight():
    sliced, whole = step("cp_dcp"), step("cp_dcp", setup=replace(SETUP, cp_decode_attn_tp=False))
    assert whole["weights"] > sliced["weights"]
    assert (sliced["gather_q"] > 0, whole["gather_q"]) == (True, 0)
    assert sliced["total"] == step("tp_dcp", setup=replace(SETUP, replicate_q_proj=False))["total"]


def test_row_split_selection_scores_an_eighth_of_the_rows():
    everyone, split = step("tp_dcp"), step("tp_dcp", setup=replace(SETUP, row_split_selection=True))
    assert split["selection"] < everyone["selection"]
    assert step("tp", setup=replace(SETUP, row_split_selection=True)) == step("tp")


def test_a2a_and_ag_rs_differ_in_the_exchange_alone():
    a2a, ag_rs = step("tp_dcp"), step("tp_dcp", setup=replace(SETUP, comm_backend="ag_rs"))
    assert {term for term in a2a if a2a[term] != ag_rs[term]} == {"exchange", "total"}


def test_weight_bytes_follow_the_experts_that_a_batch_touches():
    one, many = step("tp", batch=1)["weights"], step("tp", batch=256)["weights"]
    assert one < many
    # All 256 experts of 75 layers, half a byte a weight, over 8 GPUs: a floor at large batch.
    experts = 75 * 256 * 3 * 6144 * 2048 / 8 * 0.5
    assert many > experts / 4220 / 1e3


def test_the_exchange_of_more_ranks_is_read_at_equal_bytes_received():
    # 2 ranks of 4 KiB each receive 4 KiB; 3 ranks of 2 KiB each receive as much.
    inputs = override_inputs(INPUTS, ["localize_us=0"])
    two = step("tp_dcp", batch=1, setup=DecodeSetup(tp_size=2, dcp_size=2, replicate_q_proj=False), inputs=inputs)
    assert two["gather_q"] == pytest.approx(78 * interpolate(INPUTS["all_gather"].value, 32 * 576 * 2))


def test_a_stated_link_replaces_the_tables_bandwidth_and_keeps_their_latency():
    fast = step("tp_dcp", inputs=override_inputs(INPUTS, ["link_bandwidth_gbs=1e9"]))
    assert fast["exchange"] == pytest.approx(78 * 10.8, rel=1e-3)
    slow = step("tp_dcp", inputs=override_inputs(INPUTS, ["link_bandwidth_gbs=10"]))
    assert slow["exchange"] == pytest.approx(78 * (10.8 + 128 * 64 * 1028 * 7 / 8 / 1e4))


def test_the_report_names_itself_predicted_and_carries_every_input():
    report = predict_report(GLM, SETUP, INPUTS, [8, 128], [4096, 131072], gpu_memory_gib=40)
    assert report["kind"] == "predicted"
    assert set(report["inputs"]) == set(INPUTS)
    json.dumps(report)
    text = format_report(report, show_inputs=True)
    assert text.startswith("predicted decode step of glm-5.2")
    for entry in INPUTS.values():
        assert entry.source in text


def test_the_crossover_is_the_first_batch_that_is_not_slower():
    report = predict_report(GLM, SETUP, INPUTS, [1], [32768])
    (entry,) = report["crossover"]
    batch = entry["tp_dcp"]
    assert step("tp_dcp", batch=batch)["total"] <= step("tp", batch=batch)["total"]
    assert step("tp_dcp", batch=batch - 1)["total"] > step("tp", batch=batch - 1)["total"]
    slow = override_inputs(INPUTS, ["combine_us=1000"])
    assert predict_report(GLM, SETUP, slow, [1], [32768])["crossover"] == [
        {"context": 32768, "tp_dcp": None, "cp_dcp": None}
    ]


def test_the_largest_batch_is_what_the_pool_holds():
    report = predict_report(GLM, SETUP, INPUTS, [128], [131072], gpu_memory_gib=40)
    (entry,) = report["capacity"]
    assert (entry["tp"]["batch"], entry["tp_dcp"]["batch"]) == (796_224 // 131072, 4_684_288 // 131072)
    assert report["predictions"][0]["fits"] == {"tp": False, "tp_dcp": False, "cp_dcp": False}
    tiny = predict_report(GLM, SETUP, INPUTS, [1], [1_000_000], gpu_memory_gib=40)["capacity"]
    assert tiny[0]["tp"] == {"batch": 0, "tokens_per_second": 0.0}


def test_cp_dcp_is_left_out_when_the_sizes_rule_it_out():
    report = predict_report(GLM, replace(SETUP, dcp_size=4), INPUTS, [1], [4096])
    assert report["modes"] == ["tp", "tp_dcp"]


@pytest.mark.parametrize(
    ("key", "extend", "expected"),
    [(1, False, 10.0), (3, False, 20.0), (5, False, 35.0), (9, False, 40.0), (9, True, 55.0), (1, True, 10.0)],
)
def test_interpolation_is_linear_between_points(key, extend, expected):
    assert interpolate({2: 10.0, 4: 30.0, 6: 40.0}, key, extend=extend) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nonsense=1", "set must be NAME=VALUE with NAME one of"),
        ("localize_us", "set must be NAME=VALUE"),
        ("all_gather=3", "set must be NAME=VALUE"),
        ("localize_us=abc", "localize_us must be a number of 0 or more, got 'abc'"),
        ("localize_us=-1", "localize_us must be a number of 0 or more, got '-1'"),
        ("localize_us=nan", "localize_us must be a number of 0 or more, got 'nan'"),
        ("memory_bandwidth_gbs=0", "memory_bandwidth_gbs must be a number of more than 0, got '0'"),
    ],
)
def test_bad_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        override_inputs(INPUTS, [setting])


def test_tables_are_replaced_from_a_file(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"attend_stock_64": {"256": 200, "1": 10}}))
    inputs = override_inputs(INPUTS, tables=path)
    assert inputs["attend_stock_64"].value == {1: 10, 256: 200}
    assert str(path) in inputs["attend_stock_64"].source
    assert step("tp", batch=256, inputs=inputs)["attention"] == 78 * 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "tables must be a readable JSON file"),
        ("[]", "tables must be a JSON object"),
        ('{"nonsense": {"1": 1}}', "tables must be a JSON object with names among"),
        ('{"all_gather": {}}', "table all_gather must be an object of at least one key"),
        ('{"all_gather": {"x": 1}}', "all_gather key must be a number of more than 0, got 'x'"),
        ('{"all_gather": {"1": null}}', r"all_gather\[1\] must be a number of 0 or more, got None"),
    ],
)
def test_bad_tables_are_refused(tmp_path, content, message):
    path = tmp_path / "tables.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        override_inputs(INPUTS, tables=path)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mode": "pp"}, "mode must be one of tp, tp_dcp, cp_dcp, got 'pp'"),
        ({"mode": "tp", "batch": 0}, "batch must be a positive integer, got 0"),
        ({"mode": "tp", "batch": 257}, "batch must be at most 256, the largest that was measured, got 257"),
        ({"mode": "tp", "context": -1}, "context must be a positive integer, got -1"),
        ({"mode": "tp", "setup": replace(SETUP, dcp_size=3)}, "dcp_size must divide tp_size = 8, got 3"),
        ({"mode": "tp", "setup": replace(SETUP, comm_backend="fi_a2a")}, "comm_backend must be one of a2a, ag_rs"),
        ({"mode": "tp", "setup": DecodeSetup(7, 7)}, "tp_size must divide num_attention_heads = 64, got 7"),
        ({"mode": "cp_dcp", "setup": replace(SETUP, dcp_size=4)}, "dcp_size must equal the context-parallel size 8"),
    ],
)
def test_bad_loads_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        step(**kwargs)


def test_head_counts_outside_the_measured_tables_are_not_implemented():
    with pytest.raises(
        NotImplementedError, match="heads per TP rank must be at most 64, the measured tables', got 128"
    ):
        step("tp", model=DEEPSEEK, setup=DecodeSetup(1, 1))
    wide = replace(DEEPSEEK, num_attention_heads=256)
    with pytest.raises(NotImplementedError, match="gathered heads must be at most 128, the measured tables', got 256"):
        step("tp_dcp", model=wide)


def test_a_config_without_weight_dimensions_cannot_be_modelled():
    dims = dims_from_config(
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_topk": 2048,
            "index_head_dim": 128,
            "max_position_embeddings": 4096,
        },
        name="x",
    )
    with pytest.raises(ValueError, match=r"config must have hidden_size, .* to count weights"):
        step("tp", model=dims)
