"""Online weight updates are refused where decode reads copies of weights, which an update does not reach.

sglang gathers the query projection of all ranks once (`--dcp-replicate-q-proj`), and cuts `o_proj` once into the slices
that decode uses (`--enable-cp-decode-attn-tp`). After `/update_weights_from_*` prefill would use the new weights and
decode the old ones, without an error.
"""

from __future__ import annotations

import torch

from nsa_dcp.sglang_plugin.admission.server_settings import ServerSettings


def refuse_weight_updates(model: torch.nn.Module, settings: ServerSettings) -> None:
    """Have sglang answer every online weight update of such a server with the reason, before anything is written.

    Args:
        model: sglang's model; its attention layers are told, where sglang's updater looks for reasons.
        settings: the server's resolved arguments.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    if not settings.copies_weights:
        return
    copied = "gathered copies of the query projection" if settings.dcp_replicate_q_proj else "copied slices of o_proj"
    flag = "--no-dcp-replicate-q-proj" if settings.dcp_replicate_q_proj else "no --enable-cp-decode-attn-tp"
    for layer in model.modules():
        if isinstance(layer, DeepseekV2AttentionMLA):
            layer._derived_weight_cache_error = (
                f"nsa-dcp: online weight updates are not supported here: decode reads {copied}, which an update would "
                f"leave as they are. Restart the server with the new weights, or serve with {flag}."
            )
