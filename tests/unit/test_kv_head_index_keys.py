"""Models with KV heads have no index keys to shard."""

import pytest

from nsa_dcp.config import DcpConfig
from nsa_dcp.kv_heads.config import KvHeadShape


def test_sharded_index_keys_are_refused():
    shape = KvHeadShape("Qwen3ForCausalLM", 2, 8, 2, 64)
    shape.check_split(DcpConfig(tp_size=4, dcp_size=2))
    with pytest.raises(NotImplementedError, match="index_keys must be replicated for models with KV heads"):
        shape.check_split(DcpConfig(tp_size=4, dcp_size=2, index_keys="sharded"))
