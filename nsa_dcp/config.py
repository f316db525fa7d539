"""What a deployment asks for, and every reason to refuse it: what was asked, why not, and what would work."""

from dataclasses import dataclass

from nsa_dcp.choices import COMM_BACKENDS, CP_STRATEGIES, INDEX_KEYS, KV_CACHE_DTYPES, MODES, PREFILL_WAYS, SELECTIONS
from nsa_dcp_kernels.kv_format import INDEX_HEAD_DIM, KV_LORA_RANK, PAGE_SIZE, QK_ROPE_HEAD_DIM

MAX_GATHERED_HEADS = 128
_MOST_RANKS = 1024  # that a refusal suggests
ARCHITECTURES = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM")


@dataclass(frozen=True)
class ModelShape:
    """The dimensions that decide how a model can be split.

    indexer_layers: layers that own an indexer; the others reuse the selection of the last one that does.
    """

    architecture: str
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    index_head_dim: int
    index_topk: int
    indexer_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise NotImplementedError(
                f"architecture {self.architecture} is not supported: nsa-dcp serves DeepSeek Sparse Attention models, "
                f"{' and '.join(ARCHITECTURES)}"
            )
        wanted = (KV_LORA_RANK, QK_ROPE_HEAD_DIM, INDEX_HEAD_DIM)
        got = (self.kv_lora_rank, self.qk_rope_head_dim, self.index_head_dim)
        if got != wanted:
            raise NotImplementedError(
                f"kv_lora_rank, qk_rope_head_dim and index_head_dim must be {wanted}, the row format of FlashMLA and "
                f"DeepGEMM, got {got}"
            )
        if not self.indexer_layers or self.indexer_layers[0] != 0:
            raise ValueError(
                "indexer_layers must start with layer 0, since a layer without an indexer reuses an earlier selection, "
                f"got {list(self.indexer_layers)}"
            )

    def check_split(self, config: "DcpConfig") -> None:
        """Refuse ranks that this model cannot be split over. Errors: as `DcpConfig.check_model`."""
        config.check_model(self)


@dataclass(frozen=True)
class DcpConfig:
    """How the ranks share one model's attention.

    tp_size: ranks of one node, the world of the embedded engine.
    dcp_size: ranks over which each request's latents are spread.
    mode: "tp", prompts and steps run head-sharded; "cp", prompts run token-sharded over `tp_size` context-parallel
        ranks and decode steps head-sharded.
    cp_strategy: "interleave" or "zigzag".
    dcp_comm_backend: "a2a" or "ag_rs".
    selection: "replicated", every rank scores every query row; "row_split", 1/dcp_size of them. With sharded index
        keys, of a prompt's rows; then a decode step's are scored by every rank, each against its own keys.
    prefill: how prompts that run head-sharded attend: "queries", every rank with its tokens to the heads of all ranks;
        "rows", every rank with its rows to the tokens of all ranks; "auto", whichever moves fewer bytes.
    index_keys: "replicated", every rank holds every token's; "sharded", each holds those of its own tokens.
    """

    tp_size: int = 1
    dcp_size: int = 1
    mode: str = "tp"
    cp_strategy: str = "interleave"
    dcp_comm_backend: str = "a2a"
    selection: str = "row_split"
    prefill: str = "auto"
    index_keys: str = "replicated"

    def __post_init__(self) -> None:
        for name in ("tp_size", "dcp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        _check_choice("mode", self.mode, MODES)
        _check_choice("cp_strategy", self.cp_strategy, CP_STRATEGIES)
        _check_choice("dcp_comm_backend", self.dcp_comm_backend, COMM_BACKENDS)
        _check_choice("selection", self.selection, SELECTIONS)
        _check_choice("prefill", self.prefill, PREFILL_WAYS)
        _check_choice("index_keys", self.index_keys, INDEX_KEYS)
        if self.tp_size % self.dcp_size:
            raise ValueError(
                f"dcp_size must divide tp_size, since a DCP group is a slice of the TP ranks, got dcp_size "
                f"{self.dcp_size} with tp_size {self.tp_size}; {_divisors(self.tp_size)} would work"
            )
        if self.mode == "cp" and self.dcp_size not in (1, self.tp_size):
            raise NotImplementedError(
                f"dcp_size must equal the context-parallel size in cp mode, got dcp_size {self.dcp_size} with "
                f"{self.tp_size} context-parallel ranks; use --dcp-size {self.tp_size}, or --mode tp"
            )

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks of a prefill chunk."""
        return self.tp_size if self.mode == "cp" else 1

    @property
    def shards_index_keys(self) -> bool:
        """Whether a rank lacks some tokens' index keys."""
        return self.index_keys == "sharded" and self.dcp_size > 1

    def check_model(self, shape: ModelShape) -> None:
        """Refuse a model that cannot be split this way.

        Raises:
            ValueError: its heads cannot be split over `tp_size` ranks.
            NotImplementedError: a DCP group would gather more heads than FlashMLA takes.
        """
        if shape.num_attention_heads % self.tp_size:
            raise ValueError(
                f"tp_size must divide the model's {shape.num_attention_heads} attention heads, got {self.tp_size}; "
                f"{_divisors(shape.num_attention_heads)} would work"
            )
        gathered = shape.num_attention_heads // self.tp_size * self.dcp_size
        if self.mode == "cp":
            gathered = shape.num_attention_heads
        if gathered > MAX_GATHERED_HEADS:
            raise NotImplementedError(
                f"a DCP group must gather at most {MAX_GATHERED_HEADS} heads, the most FlashMLA takes, got {gathered} "
                f"({shape.num_attention_heads} heads, tp_size {self.tp_size}, dcp_size {self.dcp_size}); a larger "
                "tp_size, or a smaller dcp_size, would work"
            )


@dataclass(frozen=True)
class CacheConfig:
    """How much a rank caches.

    kv_cache_dtype: "float32", "bfloat16" or "fp8_e4m3" (packed, 656 bytes a token and layer).
    max_total_tokens: tokens of all requests together that the pool must hold, over the whole DCP group.
    """

    kv_cache_dtype: str = "fp8_e4m3"
    max_total_tokens: int = 0

    def __post_init__(self) -> None:
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.max_total_tokens < 1:
            raise ValueError(f"max_total_tokens must be at least 1, got {self.max_total_tokens}")

    def rows(self, dcp_size: int) -> int:
        """Rows that tokens can use on each rank: whole pages, rounded up."""
        return -(-self.max_total_tokens // (PAGE_SIZE * dcp_size)) * PAGE_SIZE


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, _MOST_RANKS) + 1) if number % d == 0)
