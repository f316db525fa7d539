"""Every sglang symbol that nsa-dcp relies on is there with the parameters it was written against."""

import dataclasses
import importlib

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


@pytest.mark.parametrize("name", ["DSAMetadata", "DSAIndexerMetadata"])
def test_metadata_with_a_field_that_narrowing_does_not_know_are_refused(monkeypatch, name):
    """It would stay the whole batch's where a rank selects for its share."""
    (path,) = (symbol.path for symbol in compat.SYMBOLS if symbol.path.endswith(f":{name}"))
    module = importlib.import_module(path.partition(":")[0])
    known = getattr(module, name)
    changed = dataclasses.make_dataclass(name, [("rows_of_another_kernel", object, None)], bases=(known,), frozen=True)
    monkeypatch.setattr(module, name, changed)
    with pytest.raises(RuntimeError, match=rf":{name} takes \(.*rows_of_another_kernel\), not"):
        compat.check_symbols()
