"""What registering does to sglang, and that it stays light, idempotent and findable."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]


def test_the_entry_point_names_the_register_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"nsa_dcp": "nsa_dcp.sglang_plugin.plugin:register"}


def test_registering_twice_wraps_sglangs_factories_once(registered):
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, create_dsa_backend

    registered.register()
    for name in ("nsa", "dsa"):
        assert isinstance(ATTENTION_BACKENDS[name], registered.BackendFactory)
        assert not isinstance(ATTENTION_BACKENDS[name].stock, registered.BackendFactory)
    assert ATTENTION_BACKENDS["dsa"].stock is create_dsa_backend
    assert {step: len(wrappers) for step, wrappers in _HOOKS.items()} == {
        "handle_decode_context_parallelism": 1,
        "handle_other_validations": 1,
    }


def test_registering_leaves_every_other_backend_alone(registered):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    others = [factory for name, factory in ATTENTION_BACKENDS.items() if name not in ("nsa", "dsa")]
    assert others
    assert not any(isinstance(factory, registered.BackendFactory) for factory in others)


def test_registering_imports_no_backend_and_no_kernel():
    program = """
import sys
import sglang.srt.plugins, torch
from nsa_dcp.sglang_plugin.plugin import register
register()
heavy = ("nsa_dcp_kernels", "flash_mla", "deep_gemm", "sglang.srt.layers.attention.dsa_backend", "sglang.srt.models")
loaded = [name for name in sys.modules if name.startswith(heavy)]
assert not loaded, loaded
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=900)


def test_a_failure_while_registering_hooks_is_found_by_the_factory(registered):
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    from nsa_dcp.sglang_plugin.startup import startup

    _HOOKS.clear()
    with pytest.raises(RuntimeError, match="hook around handle_decode_context_parallelism"):
        startup._check_hooks()
