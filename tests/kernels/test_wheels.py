"""A wheel that is missing, or another package of its name, is told in one sentence with the command that mends it."""

import sys
import types

import pytest

from nsa_dcp_kernels import _deep_gemm, _flash_mla


@pytest.mark.parametrize(
    ("load", "name", "wheel"),
    [
        pytest.param(_flash_mla.load_flash_mla, "flash_mla", "sgl-flash-mla", id="flash_mla"),
        pytest.param(_deep_gemm.load_deep_gemm, "deep_gemm", "sgl-deep-gemm", id="deep_gemm"),
    ],
)
@pytest.mark.parametrize("unrelated", [False, True], ids=["missing", "unrelated-upload"])
def test_a_wheel_that_is_not_there_is_named_with_the_command(load, name, wheel, unrelated, monkeypatch):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name) if unrelated else None)
    upload = name.replace("_", "-")
    message = f"pip uninstall {upload}" if unrelated else rf"needs {wheel}, .*pip install 'nsa-dcp\[cuda\]'"
    with pytest.raises(RuntimeError, match=message):
        load.__wrapped__()
