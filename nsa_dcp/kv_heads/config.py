"""How a model with KV heads (GQA, MHA) can be split, and every reason to refuse it."""

from dataclasses import dataclass

from nsa_dcp.config import DcpConfig
from nsa_dcp.planning.kv_heads.dims import KV_HEAD_ARCHITECTURES
from nsa_dcp.planning.kv_heads.sizes import smallest_useful_tp_size, useful_dcp_sizes


@dataclass(frozen=True)
class KvHeadShape:
    """The dimensions that decide how a model can be split. Every layer has them."""

    architecture: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.architecture not in KV_HEAD_ARCHITECTURES:
            raise NotImplementedError(
                f"architecture {self.architecture} is not supported: of models with KV heads nsa-dcp knows "
                f"{', '.join(KV_HEAD_ARCHITECTURES)}"
            )
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide the {self.num_attention_heads} attention heads, "
                f"got {self.num_key_value_heads}"
            )

    def check_split(self, config: DcpConfig) -> None:
        """Refuse ranks that this model cannot be split over, or over which DCP would gain nothing.

        Raises:
            ValueError: the heads do not divide over the ranks, or a DCP group would hold several KV heads.
            NotImplementedError: prompts were to be token-sharded or prefilled by rows, or index keys sharded.
        """
        if config.mode != "tp":
            raise NotImplementedError(
                f"mode must be tp for models with KV heads, whose prompts are not token-sharded, got {config.mode}"
            )
        if config.prefill == "rows":
            raise NotImplementedError(
                "prefill must be queries or auto for models with KV heads, whose rows see whole contexts, got rows"
            )
        if config.index_keys != "replicated":
            raise NotImplementedError(
                f"index_keys must be replicated for models with KV heads, which have none, got {config.index_keys}"
            )
        span = config.tp_size
        if self.num_attention_heads % span:
            raise ValueError(f"tp_size must divide the model's {self.num_attention_heads} attention heads, got {span}")
        useful = useful_dcp_sizes(span, self.num_key_value_heads)
        if config.dcp_size == 1 or config.dcp_size in useful:
            return
        held = f"{self.num_key_value_heads} KV heads on {span} ranks"
        if useful:
            raise ValueError(
                f"dcp_size must divide tp_size / num_key_value_heads, so that a DCP group holds one KV head, got "
                f"dcp_size {config.dcp_size} with {held}; {', '.join(map(str, useful))} would work"
            )
        wider = smallest_useful_tp_size(self.num_key_value_heads, self.num_attention_heads)
        raise ValueError(
            f"dcp_size must be 1 where no KV head lies on two ranks, as nothing is gained there, got dcp_size "
            f"{config.dcp_size} with {held}" + (f"; from tp_size {wider} on it would gain" if wider else "")
        )
