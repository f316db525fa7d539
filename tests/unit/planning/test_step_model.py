"""The step model: measured points come back unchanged, terms react to what should move them, inputs can be replaced."""

import json
from dataclasses import replace

import pytest

from nsa_dcp.planning.dimensions import dims_from_config, preset_dims
from nsa_dcp.planning.steps.step_inputs import interpolate, measured_inputs, override_inputs
from nsa_dcp.planning.steps.step_model import DecodeSetup, format_report, predict_report, predict_step

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
    assert step("tp")["attention"] == pytest.approx(78 * 109.1)
    # dcp 8 of a 2,048-token selection: 256 valid on average, the case that was measured.
    assert step("tp_dcp")["attention"] == pytest.approx(78 * 25.0)
    assert step("tp_dcp", batch=64)["attention"] == pytest.approx(78 * 24.3)
    # dcp 4 and 2: 512 and 1,024 valid.
    assert step("tp_dcp", setup=replace(SETUP, dcp_size=4))["attention"] == pytest.approx(78 * 38.7)
    assert step("tp_dcp", setup=replace(SETUP, dcp_size=2))["attention"] == pytest.approx(78 * 64.5)


def test_attention_over_more_valid_indices_takes_longer():
    times = [step("tp_dcp", setup=replace(SETUP, dcp_size=size))["attention"] for size in (8, 4, 2)]
    assert times == sorted(times) and times[0] < times[-1] < step("tp")["attention"] * 1.1


def test_dcp_of_size_1_is_tp():
    assert step("tp_dcp", setup=replace(SETUP, dcp_size=1)) == step("tp")


def test_128_gathered_heads_use_the_128_head_table_and_launches_of_132_rows():
    inputs = measured_inputs(DEEPSEEK)
    assert step("tp_dcp", model=DEEPSEEK, inputs=inputs)["attention"] == pytest.approx(61 * 39.1)
    twice = step("tp_dcp", model=DEEPSEEK, inputs=inputs, batch=256)["attention"]
    assert twice == pytest.approx(2 * 61 * 39.1)


def test_the_terms_add_up():
    for mode in ("tp", "tp_dcp", "cp_dcp"):
        terms = step(mode)
        assert terms.pop("total") == pytest.approx(sum(terms.values()))
        assert min(terms.values()) >= 0


# Communication and weights are not in bench_decode; slot look-ups are.
COMMUNICATION = {"gather_q", "exchange", "gather_selection", "all_reduce"}


def predict_parts(dcp_size, batch, context, slots_us, left_out):
    """What bench_decode times of a step, us, without the terms `left_out`."""
    setup = DecodeSetup(dcp_size=dcp_size, replicate_q_proj=False, row_split_selection=True)
    # The engine that it times joins no scores, and makes its page table once.
    inputs = override_inputs(INPUTS, [f"slots_us={slots_us}", "context_length=0"])
    terms = step("tp_dcp", batch, context, setup=setup, inputs=inputs)
    return terms["total"] - sum(terms[name] for name in left_out | {"page_table", "weights", "other"})


@pytest.mark.parametrize(
    ("dcp_size", "batch", "context", "slots_us", "measured_us"),
    [
        (1, 16, 32768, 2.3, 4091),
        (1, 256, 32768, 2.9, 25550),
        (1, 64, 131072, 2.6, 14830),
        (8, 64, 32768, 2.5, 4685),
        (8, 16, 131072, 2.4, 3721),
        (8, 256, 131072, 2.9, 12465),
        # 2026-11-29, when slots were looked up by several operations.
        (4, 64, 32768, 24.1, 5950),
        (4, 256, 32768, 28.4, 12092),
    ],
)
def test_the_terms_of_one_rank_add_up_to_a_measured_step(dcp_size, batch, context, slots_us, measured_us):
    """bench_decode's whole step in one graph, H200, 2026-11-30 (docs/performance/decode_step.md)."""
    assert predict_parts(dcp_size, batch, context, slots_us, COMMUNICATION) == pytest.approx(measured_us, rel=0.06)


@pytest.mark.parametrize(
    ("batch", "context", "slots_us", "measured_us", "within"),
    [
        (16, 32768, 2.3, 5678, 0.15),
        (64, 32768, 2.5, 9195, 0.07),
        (128, 32768, 2.6, 13247, 0.07),
        (256, 32768, 2.9, 21090, 0.07),
        (16, 131072, 2.3, 6805, 0.15),
        (64, 131072, 2.5, 12357, 0.07),
        (128, 131072, 2.6, 19421, 0.07),
        (256, 131072, 3.0, 32865, 0.07),
    ],
)
def test_the_terms_of_two_ranks_and_their_communication_add_up_to_a_measured_step(
    batch, context, slots_us, measured_us, within
):
    """The same, on two H200s that NVLink joins; collectives of 16 rows take less in a graph than alone."""
    predicted = predict_parts(2, batch, context, slots_us, {"all_reduce"})
    assert predicted == pytest.approx(measured_us, rel=within)


@pytest.mark.parametrize(("dcp_size", "slots_us", "measured_us"), [(4, 23.1, 3979), (8, 23.0, 3526)])
def test_selecting_for_fewer_rows_than_were_measured_is_predicted_too_long(dcp_size, slots_us, measured_us):
    """A rank's 4 and 2 rows of 32K: the nearest measured are 1 of 16K or 128K and 8 of 16K, with twice the heads."""
    kernels = predict_parts(dcp_size, 16, 32768, slots_us, COMMUNICATION)
    assert measured_us < kernels == pytest.approx(measured_us, rel=0.08)


def test_only_dcp_modes_exchange():
    assert [step("tp")[term] for term in ("localize", "gather_q", "exchange", "combine")] == [0, 0, 0, 0]
    assert [step("tp")[term] for term in ("arrange_heads", "gather_selection")] == [0, 0]
    assert all(step("tp_dcp")[term] > 0 for term in ("localize", "exchange", "combine"))


def test_a_replicated_q_projection_trades_the_gather_for_weight_bytes():
    with_it, without = step("tp_dcp"), step("tp_dcp", setup=replace(SETUP, replicate_q_proj=False))
    assert with_it["gather_q"] == with_it["arrange_heads"] == 0 < min(without["gather_q"], without["arrange_heads"])
    assert with_it["weights"] > without["weights"]


def test_cp_dcp_without_the_head_slice_reads_every_attention_weight():
    sliced, whole = step("cp_dcp"), step("cp_dcp", setup=replace(SETUP, cp_decode_attn_tp=False))
    assert whole["weights"] > sliced["weights"]
    assert (sliced["gather_q"] > 0, whole["gather_q"]) == (True, 0)
    same = replace(SETUP, replicate_q_proj=False)
    assert sliced["total"] == step("tp_dcp", setup=same)["total"]


def test_heads_are_padded_to_64_except_where_a_group_gathers_as_many():
    assert step("tp")["pad_heads"] == pytest.approx(78 * 9.5)
    assert step("tp_dcp")["pad_heads"] == 0
    # 32 of 64 heads: a DCP rank's own padding, which writes no zeros.
    assert step("tp_dcp", setup=replace(SETUP, dcp_size=4))["pad_heads"] == pytest.approx(78 * 6.3)


def test_selecting_takes_the_longer_of_what_context_and_size_ask_for():
    scores = INPUTS["index_scores"].value
    assert step("tp", batch=8, context=131072)["selection"] == pytest.approx(21 * (scores[1048576] + 39.1))
    many = step("tp", batch=256, context=1048576)["selection"] - step("tp", batch=256, context=524288)["selection"]
    slopes = (94.0 - 57.1) / 1048576 + (454.3 - 19.9) / (67108864 - 2097152)
    assert many == pytest.approx(21 * 256 * 524288 * slopes)


def test_a_slot_look_up_is_counted_once_per_selection_where_it_is_set():
    slow = step("tp_dcp", inputs=override_inputs(INPUTS, ["slots_us=25"]))
    assert slow["total"] - step("tp_dcp")["total"] == pytest.approx(21 * 25)


def test_caches_are_written_in_each_layer_and_keys_with_each_selection():
    assert step("tp")["cache_writes"] == step("tp_dcp")["cache_writes"] == pytest.approx((78 + 21) * 2.1)


def test_row_split_selection_scores_an_eighth_of_the_rows():
    everyone, split = (step("tp_dcp", setup=replace(SETUP, row_split_selection=on)) for on in (False, True))
    assert split["selection"] < everyone["selection"]
    assert everyone["gather_selection"] == 0 < split["gather_selection"]
    assert step("tp", setup=replace(SETUP, row_split_selection=True)) == step("tp")


@pytest.mark.parametrize(
    ("mode", "batch", "splits"),
    [
        ("tp_dcp", 64, True),
        ("tp_dcp", 256, True),
        ("tp_dcp", 56, False),
        # Captured as 64 and as 104 rows.
        ("tp_dcp", 57, True),
        ("tp_dcp", 100, True),
        ("cp_dcp", 128, True),
        ("cp_dcp", 48, False),
        ("tp", 128, False),
    ],
)
def test_rows_are_split_by_default_where_the_plugin_splits_them(mode, batch, splits):
    assert step(mode, batch) == step(mode, batch, setup=replace(SETUP, row_split_selection=splits))
    assert (step(mode, batch)["gather_selection"] > 0) == splits


def test_the_default_splits_from_as_many_rows_as_the_plugin():
    from nsa_dcp.sglang_plugin.selection.row_split_decode import MIN_ROWS

    assert [step("tp_dcp", batch)["gather_selection"] > 0 for batch in (MIN_ROWS - 8, MIN_ROWS)] == [False, True]
    # Over all ranks of the replica, however few share a cache.
    assert step("tp_dcp", setup=replace(SETUP, dcp_size=2))["selection"] == step("tp_dcp")["selection"]


def test_an_override_splits_below_the_plugins_bound():
    on = replace(SETUP, row_split_selection=True)
    for mode in ("tp_dcp", "cp_dcp"):
        assert step(mode, batch=4)["gather_selection"] == 0 < step(mode, batch=4, setup=on)["gather_selection"]


def test_an_all_reduce_is_read_from_its_own_table():
    assert step("tp", 1, setup=DecodeSetup(2, 1))["all_reduce"] == pytest.approx(
        2 * 78 * interpolate(INPUTS["all_reduce"].value, 6144 * 2)
    )
    # Eight ranks receive 7/4 of the buffer in all, two as much as it has.
    assert step("tp", 64)["all_reduce"] == pytest.approx(
        2 * 78 * interpolate(INPUTS["all_reduce"].value, 64 * 6144 * 2 * 7 / 4)
    )


def test_a2a_and_ag_rs_differ_in_the_exchange_alone():
    a2a, ag_rs = (step("tp_dcp", setup=DecodeSetup(8, 8, backend, False)) for backend in ("a2a", "ag_rs"))
    assert {term for term in a2a if a2a[term] != ag_rs[term]} == {"exchange", "total"}


def test_weight_bytes_follow_the_experts_that_a_batch_touches():
    one, many = step("tp", batch=1)["weights"], step("tp", batch=256)["weights"]
    assert one < many
    # All 256 experts of 75 layers, half a byte a weight, over 8 GPUs: a floor at large batch.
    experts = 75 * 256 * 3 * 6144 * 2048 / 8 * 0.5
    assert many > experts / 4230 / 1e3


def test_the_exchange_of_more_ranks_is_read_at_equal_bytes_received():
    # 2 ranks of 4 KiB each receive 4 KiB; 3 ranks of 2 KiB each receive as much.
    two = step("tp_dcp", batch=1, setup=DecodeSetup(tp_size=2, dcp_size=2, replicate_q_proj=False))
    assert two["gather_q"] == pytest.approx(78 * interpolate(INPUTS["all_gather"].value, 32 * 576 * 2))


def test_a_stated_link_replaces_the_tables_bandwidth_and_keeps_their_latency():
    fast = step("tp_dcp", inputs=override_inputs(INPUTS, ["link_bandwidth_gbs=1e9"]))
    assert fast["exchange"] == pytest.approx(78 * 10.2, rel=1e-3)
    slow = step("tp_dcp", inputs=override_inputs(INPUTS, ["link_bandwidth_gbs=10"]))
    assert slow["exchange"] == pytest.approx(78 * (10.2 + 128 * 64 * 1028 * 7 / 8 / 1e4))


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
    slow = INPUTS | {"combine": replace(INPUTS["combine"], value={1: 1000.0})}
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
        ("slots_us", "set must be NAME=VALUE"),
        ("all_gather=3", "set must be NAME=VALUE"),
        ("slots_us=abc", "slots_us must be a number of 0 or more, got 'abc'"),
        ("slots_us=-1", "slots_us must be a number of 0 or more, got '-1'"),
        ("slots_us=nan", "slots_us must be a number of 0 or more, got 'nan'"),
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


def test_scores_of_more_rows_than_sms_are_joined_over_the_context_length():
    assert step("tp", batch=132)["join_scores"] == 0
    # 133 rows of 1,048,576 float32, read and written in each of 21 layers.
    assert step("tp", batch=133)["join_scores"] == pytest.approx(21 * 2 * 133 * 1048576 * 4 / 4230 / 1e3)
    bounded = override_inputs(INPUTS, ["context_length=65536"])
    assert step("tp", batch=133, inputs=bounded)["join_scores"] == pytest.approx(21 * 2 * 133 * 65536 * 4 / 4230 / 1e3)
    assert step("tp", batch=256, inputs=override_inputs(INPUTS, ["context_length=0"]))["join_scores"] == 0
    assert step("tp", batch=96, inputs=override_inputs(INPUTS, ["rows_scored_at_once=78"]))["join_scores"] > 0


def test_split_rows_are_few_enough_to_be_scored_at_once():
    whole = replace(SETUP, row_split_selection=False)
    for mode in ("tp_dcp", "cp_dcp"):
        assert step(mode, batch=256)["join_scores"] == 0 < step(mode, batch=256, setup=whole)["join_scores"]


def test_a_tp_ranks_page_table_costs_by_the_context_length_and_a_dcp_ranks_by_the_contexts():
    longest = INPUTS["context_length"].value
    assert step("tp", batch=64, context=4096)["page_table"] == pytest.approx(64 * longest / 128 * 0.61e-3)
    for mode in ("tp_dcp", "cp_dcp"):
        short, long = (step(mode, batch=64, context=context)["page_table"] for context in (4096, 131072))
        assert 0 < short < long < 10
    bounded = override_inputs(INPUTS, ["context_length=131072"])
    assert step("tp", batch=64, inputs=bounded)["page_table"] == pytest.approx(64 * 1024 * 0.61e-3)


def test_over_peer_memory_one_kernel_stands_for_packing_exchanging_and_merging():
    """The measured table, for the two ranks and 64 heads that it was measured with."""
    two = DecodeSetup(tp_size=2, dcp_size=2, wire="peer")
    for rows, us in [(1, 4.5), (16, 6.8), (64, 13.4), (256, 36.3)]:
        terms = step("tp_dcp", batch=rows, setup=two)
        assert terms["exchange"] == pytest.approx(78 * us)
        assert terms["combine"] == terms["arrange_heads"] == 0
        # Queries are gathered: their projection is not replicated.
        assert terms["gather_q"] > 0
    nccl = step("tp_dcp", batch=64, setup=replace(two, wire="nccl"))
    assert nccl["exchange"] + nccl["combine"] > step("tp_dcp", batch=64, setup=two)["exchange"]
    assert step("tp", setup=two) == step("tp", setup=replace(two, wire="nccl"))
    gathered_again = step("cp_dcp", setup=replace(SETUP, wire="peer", cp_decode_attn_tp=False))
    assert gathered_again["exchange"] > step("cp_dcp", setup=replace(SETUP, wire="peer"))["exchange"]


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (replace(SETUP, wire="infiniband"), "wire must be one of nccl, peer, got 'infiniband'"),
        (replace(SETUP, wire="peer", replicate_q_proj=True), "replicate_q_proj must be off with wire peer"),
    ],
    ids=["unknown", "replicated"],
)
def test_wires_that_no_server_has_are_refused(setup, message):
    with pytest.raises(ValueError, match=message):
        step("tp_dcp", setup=setup)
