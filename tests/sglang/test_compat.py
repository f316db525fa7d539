"""Every sglang symbol that nsa-dcp relies on is there with the parameters it was written against."""

import pytest

from nsa_dcp.sglang_plugin import compat

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("symbol", compat.SYMBOLS, ids=lambda symbol: symbol.path)
def test_symbol_is_as_it_was_written_against(symbol):
    assert compat._difference(symbol) is None


def test_the_installed_sglang_is_accepted():
    compat.check_version()
    compat.check_symbols()


def test_another_version_is_refused_with_the_command_that_fixes_it(monkeypatch):
    monkeypatch.setattr(compat, "installed_version", lambda: "0.5.24")
    with pytest.raises(RuntimeError, match=r"found 0\.5\.24: pip install sglang==0\.5\.23"):
        compat.check_version()


def test_a_changed_signature_and_a_missing_symbol_are_both_named(monkeypatch):
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    monkeypatch.setattr(DeepseekSparseAttnBackend, "_forward_flashmla_kv", lambda self, q: q)
    monkeypatch.setattr(compat, "SYMBOLS", (*compat.SYMBOLS, compat.Symbol("sglang.srt.environ:no_such_name", "test")))
    with pytest.raises(RuntimeError) as error:
        compat.check_symbols()
    assert "_forward_flashmla_kv takes (self, q)" in str(error.value)
    assert "no_such_name is missing" in str(error.value)
