"""The serving check of many requests at once: the server it starts has room for them. Runs without sglang and a GPU."""

from pathlib import Path

import pytest

from nsa_dcp.sglang_plugin.selection.row_split_decode import MIN_ROWS
from scripts.served_checks import ask_crowd as crowd


def value_of(command, flag):
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


@pytest.mark.parametrize(("options", "requests"), [("", 96), ("-r288", 288), ("-ag_rs-nograph-r16", 16)])
@pytest.mark.parametrize("dcp_size", [1, 2, 8])
def test_all_requests_fit_and_run_at_once(dcp_size, options, requests):
    command, _ = crowd.crowd_command(Path("model"), f"tp8-dcp{dcp_size}{options}", 21000)
    assert value_of(command, "--max-running-requests") == value_of(command, "--cuda-graph-max-bs-decode")
    assert value_of(command, "--max-running-requests") == str(requests)
    assert value_of(command, "--decode-log-interval") == "1"
    page = 64 * dcp_size
    longest = [length + max(crowd.NEW_TOKENS) for length in crowd.LENGTHS]
    needed = requests // len(longest) * sum(-(-length // page) * page for length in longest)
    assert needed < int(value_of(command, "--max-total-tokens")) * dcp_size


@pytest.mark.parametrize("option", ["r0", "r8", "r100"])
def test_requests_that_do_not_come_in_whole_rounds_are_refused(option):
    with pytest.raises(ValueError, match="positive multiple of 16"):
        crowd.crowd_command(Path("model"), f"tp2-dcp2-{option}", 21000)


def test_its_steps_are_split():
    assert crowd.SPLIT_ROWS == MIN_ROWS <= crowd.REQUESTS
    assert all(crowd.REQUESTS % ranks == 0 for ranks in (2, 4, 8))
    assert crowd.REQUESTS % len(crowd.LENGTHS) == 0


def test_halves_are_the_same_prompts_and_are_not_split(monkeypatch):
    asked = []

    def ask_at_once(server, requests, new_tokens):
        asked.append(dict(requests))
        return [{"name": name} for name in requests]

    monkeypatch.setattr(crowd.serve, "ask", lambda *_: {"name": "first"})
    monkeypatch.setattr(crowd.serve, "ask_at_once", ask_at_once)
    scenes = crowd.ask_crowd(None)
    assert all(len(requests) < MIN_ROWS for requests in asked[2:])
    assert asked[2] | asked[3] == asked[1] and len(asked[2]) + len(asked[3]) == crowd.REQUESTS
    assert [answer["name"] for answer in scenes[crowd.IN_HALVES]] == list(asked[1])
    assert len(scenes[crowd.ALL_AT_ONCE]) == crowd.REQUESTS


def test_decode_steps_are_counted_by_their_size():
    log = """
    [TP0] Prefill batch, #new-seq: 3, #running-req: 7, x
    [TP0] Decode batch, #running-req: 96, #token: 9, cuda graph: True
    [TP0] Decode batch [12], #running-req: 96, #token: 9
    [TP0] Decode batch, #running-req: 5, #token: 9
    """
    assert crowd.decode_sizes(log) == {5: 1, 96: 2}


@pytest.mark.parametrize(("config", "split"), [("tp2-dcp2", 96), ("tp4-dcp4-nextn-r32", 96), ("tp2-dcp2-r288", 288)])
def test_rows_are_split_at_once_and_not_in_halves_but_of_many(config, split):
    command, _ = crowd.crowd_command(Path("model"), config, 21000)
    rows = crowd.count_requests(config) * crowd.rows_of_request(config)
    assert rows == split >= MIN_ROWS
    assert (rows // 2 < MIN_ROWS) == ("r288" not in config)
    if "nextn" in config:
        assert value_of(command, "--speculative-num-draft-tokens") == str(crowd.rows_of_request(config))
