"""Ranks that differ in anything they share selections or collectives by end with one sentence, on real gloo groups."""

import dataclasses
import datetime
import multiprocessing
import os
from types import SimpleNamespace

import pytest

from nsa_dcp.launcher import run_ranks
from nsa_dcp.sglang_plugin.startup import agreement

pytestmark = pytest.mark.sglang


class Group:
    """sglang's group of some ranks, as far as objects go: over a gloo group, as its own."""

    def __init__(self, ranks):
        import torch.distributed

        self.ranks, self.world_size = ranks, len(ranks)
        self.cpu_group = torch.distributed.new_group(ranks, backend="gloo", timeout=datetime.timedelta(seconds=120))

    def all_gather_object(self, mine):
        from sglang.srt.distributed.parallel_state import GroupCoordinator

        return GroupCoordinator.all_gather_object(self, mine)


def make_rank_settings():
    """What a rank of two is started with, nothing resolved: a runner, the command, and the checkpoint's facts."""
    from sglang.srt.server_args import ServerArgs

    from tests.served_settings import GLM, TP_DCP

    runner = SimpleNamespace(
        server_args=ServerArgs(model_path="dummy", device="cpu", tp_size=2, dcp_size=2),
        model_config=SimpleNamespace(context_len=4096, quantization="w4afp8"),
        token_to_kv_pool=SimpleNamespace(size=640),
        max_running_requests=16,
    )
    return runner, dataclasses.replace(TP_DCP, tp_size=2, dcp_size=2), GLM


def another(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, tuple):
        return value[1:]
    return "another"


def set_attribute(holder, name):
    def change(restored=()):
        before = getattr(holder, name)
        setattr(holder, name, another(before))
        return lambda: setattr(holder, name, before)

    return change


def set_variable(name):
    def change():
        from sglang.srt.environ import EnvInt, EnvTuple, envs

        known = getattr(envs, name, None)
        before, now = os.environ.get(name), None if known is None else known.get()
        if isinstance(known, EnvTuple):
            os.environ[name] = "1,2"
        elif isinstance(now, bool):
            os.environ[name] = "0" if now else "1"
        else:
            os.environ[name] = str(another(now)) if isinstance(known, EnvInt) and now is not None else "7"
        return lambda: os.environ.pop(name) if before is None else os.environ.update({name: before})

    return change


class ChangedArguments:
    """sglang's view of the arguments, with one changed."""

    def __init__(self, view, name):
        self._view, self._name = view, name

    def __getattr__(self, name):
        value = getattr(self._view, name)
        return another(value) if name == self._name else value


def changes_of(runner, settings, model):
    """For everything that is compared, by name: how to change it on this rank. Returns how to change it back."""
    import importlib

    from sglang.srt.arg_groups import overrides

    import nsa_dcp
    from nsa_dcp.sglang_plugin import compat

    def change_argument(name):
        def change():
            view = overrides.resolving_view
            overrides.resolving_view = lambda server_args: ChangedArguments(view(server_args), name)
            return lambda: setattr(overrides, "resolving_view", view)

        return change

    def change_function(module, name, result):
        def change():
            before = getattr(module, name)
            setattr(module, name, lambda: result)
            return lambda: setattr(module, name, before)

        return change

    given = {"settings": settings, "model": model}

    def change_given(which, field):
        def change():
            before = given[which]
            given[which] = dataclasses.replace(before, **{field: another(getattr(before, field))})
            return lambda: given.update({which: before})

        return change

    changes = {
        agreement.VERSION: [
            set_attribute(nsa_dcp, "__version__"),
            change_function(agreement, "hash_sources", "abcdef012345"),
        ],
        "sglang": [change_function(compat, "installed_version", "0.5.24")],
        "context length": [set_attribute(runner.model_config, "context_len")],
        "pool rows per GPU": [set_attribute(runner.token_to_kv_pool, "size")],
        "requests that run at once": [set_attribute(runner, "max_running_requests")],
        "the checkpoint's quantization": [set_attribute(runner.model_config, "quantization")],
    }
    for name in [name for name, _ in agreement.OWN_VARIABLES] + list(agreement.SGLANG_VARIABLES):
        changes[name] = [set_variable(name)]
    for field in dataclasses.fields(settings):
        changes[field.name] = [change_given("settings", field.name)]
    for field in dataclasses.fields(model):
        changes[f"the checkpoint's {field.name}"] = [change_given("model", field.name)]
    for name in agreement.ARGUMENTS:
        changes[name] = [change_argument(name)]
    for constant in agreement.CONSTANTS:
        module, _, name = constant.partition(":")
        changes[name] = [set_attribute(importlib.import_module(f"nsa_dcp.sglang_plugin.{module}"), name)]
    return changes, given


def differ_on_rank(rank, _send, search_path):
    """Both ranks compare once for each change, which rank 1 alone has; returns name, sentence and number of facts."""
    import sys

    sys.path[:0] = search_path
    runner, settings, model = make_rank_settings()
    changes, given = changes_of(runner, settings, model)
    group = Group([0, 1])
    parallel = SimpleNamespace(tp_group=group, attn_tp_group=group, dcp_group=group, pp_size=1)

    def compare():
        try:
            agreement.check_agreement(runner, parallel, given["settings"], given["model"])
        except RuntimeError as error:
            return str(error)
        return None

    found = [("nothing", compare())]
    for name, ways in changes.items():
        for change in ways:
            undo = change() if rank else lambda: None
            found.append((name, compare()))
            undo()
    found.append(("nothing", compare()))
    assert set(changes) == set(agreement.describe_rank(runner, settings, model))
    return found


def test_every_difference_ends_both_ranks_with_its_name_values_and_ranks():
    import sys

    mine, theirs = run_ranks(differ_on_rank, 2, (sys.path,))
    assert mine == theirs
    assert len(mine) > 100
    for name, sentence in mine:
        if name == "nothing":
            assert sentence is None
        else:
            assert sentence.startswith(f"nsa-dcp needs the same on every rank, found {name} "), (name, sentence)
            assert " on rank 0 and " in sentence
            assert sentence.count(" on rank 1") == 1
            assert sentence.count(": give every node") == 1


def compare_stages_on_rank(rank, _send, search_path, differs):
    import sys

    sys.path[:0] = search_path
    runner, settings, model = make_rank_settings()
    groups = {tuple(ranks): Group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    stage, column = groups[(0, 1) if rank < 2 else (2, 3)], groups[(0, 2) if rank % 2 == 0 else (1, 3)]
    parallel = SimpleNamespace(tp_group=stage, attn_tp_group=stage, dcp_group=stage, pp_group=column, pp_size=2)
    if differs and rank >= 2:
        os.environ["SGLANG_DSA_FUSE_TOPK"] = "0"
    try:
        agreement.check_agreement(runner, parallel, settings, model)
    except RuntimeError as error:
        return str(error)
    return None


def test_stages_of_a_pipeline_compare_too():
    import sys

    assert run_ranks(compare_stages_on_rank, 4, (sys.path, False)) == [None] * 4
    for rank, sentence in enumerate(run_ranks(compare_stages_on_rank, 4, (sys.path, True))):
        assert f"SGLANG_DSA_FUSE_TOPK True on rank {rank % 2} and False on rank {rank % 2 + 2}" in sentence


def meet_or_end(rank, init_method, search_path, answers):
    import sys

    sys.path[:0] = search_path
    from nsa_dcp import comm

    comm.connect(init_method, rank, 2, "cpu", 120)
    group = Group([0, 1])
    if rank == 1:
        os._exit(3)
    runner, settings, model = make_rank_settings()
    parallel = SimpleNamespace(tp_group=group, attn_tp_group=group, dcp_group=group, pp_size=1)
    try:
        agreement.check_agreement(runner, parallel, settings, model)
    except RuntimeError as error:
        answers.put(str(error))


def test_a_rank_that_failed_before_ends_the_others(tmp_path):
    import sys

    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = (f"file://{tmp_path / 'ranks'}", sys.path, answers)
    processes = [context.Process(target=meet_or_end, args=(rank, *arguments), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    # The group's own time-out would be an error after 120 s; with sglang's it would be two hours.
    sentence = answers.get(timeout=300)
    assert sentence.startswith("nsa-dcp could not compare the settings of ranks 0-1: one of them has ended before")
    for process in processes:
        process.join(300)
    assert processes[1].exitcode == 3


# --- without processes ----------------------------------------------------------------------------------------------


def test_ranks_are_named_in_runs():
    assert agreement.name_ranks([8, 1, 0, 2, 3]) == "0-3, 8"
    assert agreement.name_ranks([5]) == "5"


def test_every_value_and_all_its_ranks_are_named():
    described = {rank: {"nsa-dcp": "1", "MIN_ROWS": str(64 if rank < 8 else rank)} for rank in range(10)}
    (difference,) = agreement.find_differences(described)
    assert difference == "MIN_ROWS 64 on ranks 0-7 and 8 on rank 8 and 9 on rank 9"


def test_of_different_versions_nothing_else_is_said():
    described = {0: {"nsa-dcp": "1", "MIN_ROWS": "64"}, 1: {"nsa-dcp": "2", "ROWS_AT_LEAST": "64"}}
    assert agreement.find_differences(described) == ["nsa-dcp 1 on rank 0 and 2 on rank 1"]


def test_one_exchange_where_one_group_has_all_ranks():
    def group(*ranks):
        return SimpleNamespace(ranks=list(ranks), world_size=len(ranks))

    tp = group(0, 1, 2, 3)
    parallel = SimpleNamespace(tp_group=tp, attn_tp_group=group(0, 1), dcp_group=group(0, 1), pp_size=1)
    assert agreement._groups_to_ask(parallel) == [tp]
    alone = SimpleNamespace(tp_group=group(0), attn_tp_group=group(0), dcp_group=group(0), pp_size=1)
    assert agreement._groups_to_ask(alone) == []


@pytest.mark.usefixtures("registered", "on_hopper")
def test_text_of_the_same_settings_is_the_same_on_every_machine(model_path):
    """Nothing is compared by an address or an order that another process would have otherwise."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.server_args import ServerArgs

    from nsa_dcp.sglang_plugin import resolution

    described = []
    for _ in range(2):
        server_args = ServerArgs(model_path=model_path(), device="cuda", tp_size=4, dcp_size=4, attention_backend="nsa")
        server_args.resolve_once()
        settings, model, _ = resolution.read_command(server_args)
        runner = SimpleNamespace(
            server_args=server_args,
            model_config=model_config_of(server_args),
            token_to_kv_pool=SimpleNamespace(size=640),
            max_running_requests=16,
        )
        described.append(agreement.describe_rank(runner, settings, model))
    assert described[0] == described[1]
    assert not [name for name, value in described[0].items() if " at 0x" in value or value.startswith("{")]
    assert "bs=" in described[0]["cuda_graph_config"], "the sizes that are captured"


def test_a_variable_counts_as_sglang_reads_it(monkeypatch):
    read = []
    for value in ("1", "true", "True"):
        monkeypatch.setenv("SGLANG_DSA_TOPK_BROADCAST", value)
        read.append(agreement._read_sglang_variable("SGLANG_DSA_TOPK_BROADCAST"))
    assert read == [True] * 3
