"""A weight update that a server refuses changes nothing, by any route, on sglang's own manager and updaters."""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from nsa_dcp.sglang_plugin.admission.server_settings import ServerSettings
from tests.sglang.served_parts import make_weight_updater

pytestmark = pytest.mark.sglang

REFUSED = "nsa-dcp: online weight updates are not supported here: "


class Layers(torch.nn.Module):
    """An attention layer, and experts whose scales are interleaved once more each time they are processed.

    Args:
        known: whether the experts' method is the one that is known to rearrange what it has loaded.
    """

    def __init__(self, has_attention=True, known=False):
        from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config, W4AFp8MoEMethod
        from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

        super().__init__()
        if has_attention:
            self.attention = object.__new__(DeepseekV2AttentionMLA)
            torch.nn.Module.__init__(self.attention)
        self.norm = torch.nn.Parameter(torch.arange(4.0))
        self.experts = torch.nn.Module()
        method = object.__new__(W4AFp8MoEMethod if known else type("SomeMoEMethod", (W4AFp8MoEMethod,), {}))
        method.quant_config = W4AFp8Config(group_size=128)
        method.create_weights(
            self.experts,
            num_experts=2,
            hidden_size=1024,
            intermediate_size_per_partition=512,
            params_dtype=torch.bfloat16,
            weight_loader=None,
        )
        self.experts.quant_method = method
        for scale in (self.experts.w13_weight_scale_inv, self.experts.w2_weight_scale_inv):
            scale.data.copy_(torch.arange(scale.numel()).view(scale.shape))
        method.process_weights_after_loading(self.experts)
        self.loaded, self.post_loads = [], 0

    def load_weights(self, weights):
        for name, weight in weights:
            self.loaded.append(name)
            dict(self.named_parameters())[name].data.copy_(weight)

    def post_load_weights(self):
        self.post_loads += 1


class Server:
    """sglang's manager of weight updates over real updaters, one for each role."""

    def __init__(self, settings, monkeypatch, roles=("target",), known=False):
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

        from nsa_dcp.sglang_plugin.startup.weight_updates import refuse_weight_updates

        monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
        self.models, runners = {}, {}
        for role in roles:
            model = self.models[role] = Layers(has_attention=role == "target", known=known)
            updater = make_weight_updater(lambda model=model: model)
            runner = SimpleNamespace(model=model, weight_updater=updater, is_draft_worker=role == "draft")
            refuse_weight_updates(runner, settings)
            refuse_weight_updates(runner, settings)
            runners[role] = runner
        self.runners = runners
        workers = {
            role: SimpleNamespace(weight_update_runners=lambda role=role: [(role, runners[role])]) for role in roles
        }
        workers["target"].model_runner = runners["target"]
        workers["target"].deserialize_own_rank = lambda tensors: tensors
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=workers["target"],
            draft_worker=workers.get("draft"),
            memory_saver_adapter=None,
            flush_cache=lambda **_: True,
            is_fully_idle=None,
            scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
        )

    def state(self):
        """Every weight: which object it is, where it lies, and its bytes."""
        return {
            (role, name): (
                id(weight),
                weight.data_ptr(),
                hashlib.sha256(weight.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
            )
            for role, model in self.models.items()
            for name, weight in model.named_parameters()
        }

    def begin(self, selector="all"):
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        return self.manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector))

    def end(self):
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        return self.manager.end_weight_update(EndWeightUpdateReqInput())

    def load(self, route, selector="all"):
        request = SimpleNamespace(
            model_path="elsewhere",
            load_format=None,
            recapture_cuda_graph=False,
            flush_cache=True,
            torch_empty_cache=False,
            weight_version=None,
            selector=selector,
            serialized_named_tensors=[("norm", torch.full((4,), 7.0))],
            names=["norm"],
            dtypes=["float32"],
            shapes=[(4,)],
            group_name="trainer",
            zmq_handles={},
        )
        return getattr(self.manager, f"update_weights_from_{route}")(request)


@pytest.fixture
def make_server(publish_rank, monkeypatch):
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.runtime_context import get_parallel

    def make(copies="query", roles=("target",)):
        publish_rank(2, 0)
        get_parallel().tp_group.cpu_group = None
        settings = ServerSettings(
            dcp_size=2, tp_size=2, dcp_replicate_q_proj=copies == "query", enable_cp_decode_attn_tp=copies == "slices"
        )
        return Server(settings, monkeypatch, roles, known=copies == "experts")

    # What a trainer sent.
    received = [("norm", torch.full((4,), 7.0))]
    monkeypatch.setattr(weight_updater.WeightUpdater, "receive_weights_from_distributed", lambda self, **_: received)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: SimpleNamespace(current_device=lambda: "cpu"))
    return make


@pytest.mark.parametrize("copies", ["query", "slices", "experts"])
@pytest.mark.parametrize("roles", [("target",), ("target", "draft")], ids=len)
@pytest.mark.parametrize("routes", [("tensor",), ("distributed",), ("tensor", "distributed", "tensor"), ()], ids=len)
def test_a_session_whose_loads_are_refused_changes_nothing(make_server, copies, roles, routes):
    server = make_server(copies, roles)
    before = server.state()
    assert server.begin().success
    for route in routes:
        answer = server.load(route)
        assert not answer.success
        assert answer.message.startswith(REFUSED)
    assert server.end().success
    assert server.state() == before
    assert not any(model.loaded or model.post_loads for model in server.models.values())


@pytest.mark.parametrize("copies", ["query", "slices", "experts"])
@pytest.mark.parametrize("route", ["disk", "ipc"])
def test_an_update_without_a_session_is_refused_too(make_server, copies, route):
    server = make_server(copies, ("target", "draft"))
    before = server.state()
    answer = server.load(route)
    assert not answer.success
    assert answer.message.startswith(REFUSED)
    assert server.state() == before


def test_a_draft_is_updated_alone_where_its_target_refuses(make_server):
    server = make_server(roles=("target", "draft"))
    before = server.state()
    scales = server.models["draft"].experts.w13_weight_scale_inv
    assert server.begin("draft").success
    assert server.load("tensor", "draft").success
    assert server.end().success
    assert server.models["draft"].loaded == ["norm"]
    # Processed once, by sglang, as without us.
    assert server.models["draft"].experts.w13_weight_scale_inv is not scales
    assert {key for key, value in server.state().items() if value != before[key]} >= {("draft", "norm")}
    assert all(server.state()[key] == value for key, value in before.items() if key[0] == "target")


def test_a_drafts_session_whose_loads_name_the_target_too_changes_nothing(make_server):
    server = make_server(roles=("target", "draft"))
    before = server.state()
    server.begin("draft")
    assert not server.load("tensor", "all").success
    server.end()
    assert server.state() == before


def test_without_copies_sglangs_updater_is_left_as_it_is(make_server):
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    server = make_server(copies=None)
    assert type(server.runners["target"].weight_updater) is WeightUpdater
    server.begin()
    assert server.load("tensor").success
    server.end()
    assert server.models["target"].norm.tolist() == [7.0] * 4


def test_weights_that_were_written_remotely_end_a_server_that_refuses_updates(make_server):
    """Nobody is asked about a remote write; answering on would be with the old copies."""
    server = make_server()
    server.begin()
    server.models["target"].norm.data[2] = -1.0
    with pytest.raises(RuntimeError, match=f"1 weights, norm among them, were written between .* {REFUSED}"):
        server.end()


def test_what_the_updater_has_besides_is_its_own(make_server):
    updater = make_server().runners["target"].weight_updater
    assert updater.destroy_weights_update_group("none") == (False, "The group to be destroyed does not exist.")
    assert updater.tp_rank == 0


@pytest.mark.parametrize("missing", ["begin_weight_update", "end_weight_update"])
def test_an_updater_without_a_method_that_is_replaced_stops_the_server(make_server, missing):
    from nsa_dcp.sglang_plugin.startup.weight_updates import _METHODS, refuse_weight_updates

    server = make_server()
    updater = SimpleNamespace(**{method: print for method in _METHODS if method != missing})
    runner = SimpleNamespace(model=server.models["target"], weight_updater=updater, is_draft_worker=False)
    with pytest.raises(RuntimeError, match=f"needs a weight updater with {missing}, found SimpleNamespace"):
        refuse_weight_updates(runner, ServerSettings(dcp_replicate_q_proj=True))


def test_these_weights_would_show_sglangs_own_begin_and_end(make_server):
    """Two of sglang's own sessions without a load: the experts' scales are not what they were."""
    server = make_server(copies=None)
    before = server.state()
    server.begin()
    server.end()
    changed = {name for (_, name), value in server.state().items() if value != before["target", name]}
    assert {"experts.w13_weight_scale_inv", "experts.w2_weight_scale_inv"} <= changed
