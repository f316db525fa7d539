"""Online weight updates are refused where decode reads copies of weights, which an update does not reach.

sglang gathers the query projection of all ranks once (`--dcp-replicate-q-proj`), and cuts `o_proj` once into the slices
that decode uses (`--enable-cp-decode-attn-tp`). After `/update_weights_from_*` prefill would use the new weights and
decode the old ones, without an error.

sglang asks whether weights may be updated at each load, but not at `/begin_weight_update` and `/end_weight_update`,
which undo and repeat what a quantisation makes of the weights: that is not the same twice (W4AFP8 interleaves its
scales once more). So on such a server both are done around a load that is accepted, and not otherwise.

Experts in W4AFP8 are refused with or without copies: sglang 0.5.23 rearranges their scales after loading, so a later
load finds parameters of another shape and stops with part of the weights written.
"""

from __future__ import annotations

import logging
from typing import Any

from nsa_dcp.sglang_plugin import patches
from nsa_dcp.sglang_plugin.admission.server_settings import ServerSettings
from nsa_dcp.sglang_plugin.compat import require

logger = logging.getLogger(__name__)

# sglang's method of experts whose parameters no longer have the checkpoint's shapes once they are loaded.
_REARRANGING = "W4AFp8MoEMethod"
_METHODS = (
    "begin_weight_update",
    "end_weight_update",
    "update_weights_from_tensor",
    "load_weights_from_distributed",
    "get_model",
)


def refuse_weight_updates(model_runner: Any, settings: ServerSettings) -> None:
    """Have sglang answer every online weight update of such a server with the reason, and change nothing.

    A draft's weights are not copied: they can still be updated alone, and are left as they are by an update of all.
    May be called more than once.

    Args:
        model_runner: sglang's ModelRunner, the target's or a draft's. A target's attention layers are told, where
            sglang's updater looks for reasons; the updater of either is replaced.
        settings: the server's resolved arguments.

    Raises:
        RuntimeError: sglang's updater has not got the methods that are replaced.
    """
    reason = _find_reason(model_runner.model, settings)
    if reason is None:
        return
    if not model_runner.is_draft_worker:
        patches.give_reason_against_updates(
            model_runner.model, f"nsa-dcp: online weight updates are not supported here: {reason}."
        )
    updater = getattr(model_runner, "weight_updater", None)
    if isinstance(updater, LoadingUpdater):
        return
    for method in _METHODS:
        require(callable(getattr(updater, method, None)), f"a weight updater with {method}", type(updater).__name__)
    patches.replace_weight_updater(model_runner, LoadingUpdater(updater))


def _find_reason(model: Any, settings: ServerSettings) -> str | None:
    """Why the weights of this server cannot be updated, and what to do; None: they can."""
    if settings.copies_weights:
        copied, flag = ("copied slices of o_proj", "no --enable-cp-decode-attn-tp")
        if settings.dcp_replicate_q_proj:
            copied, flag = ("gathered copies of the query projection", "--no-dcp-replicate-q-proj")
        return (
            f"decode reads {copied}, which an update would leave as they are. Restart the server with the new weights, "
            f"or serve with {flag}"
        )
    if any(type(getattr(module, "quant_method", None)).__name__ == _REARRANGING for module in model.modules()):
        return (
            "sglang rearranged the scales of W4AFP8 experts when it loaded them, and cannot load others into them. "
            "Restart the server with the new weights"
        )
    return None


class LoadingUpdater:
    """Stands in a model runner for its weight updater: an update begins with the first load that is accepted.

    Everything else is the updater's own.

    Args:
        updater: sglang's WeightUpdater.
    """

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self._in_session = self._begun = False
        self._written: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updater, name)

    def begin_weight_update(self) -> None:
        """Open a session. The weights stay as they are until something is loaded."""
        self._in_session, self._begun = True, False
        refusal = self._find_refusal()
        if refusal is not None:
            logger.error("%s Loads of this update will be refused.", refusal)
            self._written = self._hash_weights()

    def end_weight_update(self, *, run_post_load: bool) -> None:
        """Close the session, and process the weights that were loaded in it.

        Args:
            run_post_load: as sglang calls it.

        Raises:
            RuntimeError: the weights of a server that refuses updates were written from outside, past every question.
                That ends the server: it could only answer wrongly.
        """
        begun, written = self._begun, self._written
        self._in_session, self._begun, self._written = False, False, {}
        if begun:
            self._updater.end_weight_update(run_post_load=run_post_load)
        elif written:
            changed = [name for name, value in self._hash_weights().items() if written.get(name) != value]
            if changed:
                raise RuntimeError(
                    f"nsa-dcp: {len(changed)} weights, {changed[0]} among them, were written between "
                    f"/begin_weight_update and /end_weight_update. {self._find_refusal()}"
                )

    def update_weights_from_tensor(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Load tensors, or return why not. Args, returns: as sglang's."""
        return self._load(self._updater.update_weights_from_tensor, args, kwargs)

    def load_weights_from_distributed(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Load what was received from a trainer, or return why not. Args, returns: as sglang's."""
        return self._load(self._updater.load_weights_from_distributed, args, kwargs)

    def _load(self, load: Any, args: tuple, kwargs: dict) -> tuple[bool, str]:
        refusal = self._find_refusal()
        if refusal is not None:
            return False, refusal
        if self._in_session and not self._begun:
            self._updater.begin_weight_update()
            self._begun = True
        return load(*args, **kwargs)

    def _find_refusal(self) -> str | None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import (
            _unsupported_derived_weight_cache_error,
        )

        return _unsupported_derived_weight_cache_error(self._updater.get_model())

    def _hash_weights(self) -> dict[str, int]:
        from sglang.srt.managers.mm_utils import tensor_hash

        return {name: tensor_hash(weight.detach()) for name, weight in self._updater.get_model().named_parameters()}
