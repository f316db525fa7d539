"""What a server with DCP looks like: mode, DCP groups, heads. Doctor and the start-up line say it from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from nsa_dcp.planning.served_format import head_bucket
from nsa_dcp.sglang_plugin.admission.server_settings import ModelFacts, ServerSettings


class LineFields(TypedDict):
    """The part of a start-up line that a server's shape says."""

    mode: str
    cp_strategy: str | None
    gathered_heads: int
    head_bucket: int


@dataclass(frozen=True)
class ServerShape:
    """Args:

    mode: `TP-DCP` or `CP-DCP`.
    cp_strategy: `interleave` or `zigzag` in CP-DCP, else None.
    dcp_size: GPUs of a DCP group.
    local_heads: query heads that a rank projects.
    gathered_heads: query heads of an attention call.
    kept_heads: query heads whose results a rank keeps once the ranks' results have been exchanged.
    """

    mode: str
    cp_strategy: str | None
    dcp_size: int
    local_heads: int
    gathered_heads: int
    kept_heads: int

    @property
    def head_bucket(self) -> int:
        """Query heads of the kernel that takes `gathered_heads`. ValueError: none does."""
        return head_bucket(self.gathered_heads)

    def line_fields(self) -> LineFields:
        """The keywords of `startup_line` that say this."""
        return {
            "mode": self.mode,
            "cp_strategy": self.cp_strategy,
            "gathered_heads": self.gathered_heads,
            "head_bucket": self.head_bucket,
        }


def shape_of(*, num_attention_heads: int, attn_tp_size: int, dcp_size: int, cp_strategy: str | None) -> ServerShape:
    """The shape of a server whose sizes are resolved.

    Args:
        num_attention_heads: of the model.
        attn_tp_size: ranks that split a request's heads; 1 with prefill context parallelism.
        dcp_size: ranks that share its cache.
        cp_strategy: of prefill context parallelism; None without.
    """
    heads = num_attention_heads // attn_tp_size
    if cp_strategy is None:
        return ServerShape("TP-DCP", None, dcp_size, heads, heads * dcp_size, heads)
    # Every rank has all the heads; in decode each keeps a part of them.
    return ServerShape("CP-DCP", cp_strategy, dcp_size, heads, heads, heads // dcp_size)


def shape_of_command(settings: ServerSettings, model: ModelFacts) -> ServerShape:
    """The shape of the server that a command starts, which `validation.find_problems` accepts."""
    shard = settings.tp_size // settings.attn_dp_size
    return shape_of(
        num_attention_heads=model.num_attention_heads,
        attn_tp_size=shard // settings.context_parallel_size,
        dcp_size=settings.dcp_size,
        cp_strategy=settings.cp_strategy if settings.enable_prefill_cp else None,
    )


def count_groups(settings: ServerSettings) -> int:
    """DCP groups of all replicas and pipeline stages together."""
    return settings.tp_size // settings.dcp_size * settings.pp_size * settings.dp_size
