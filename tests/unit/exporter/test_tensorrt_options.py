"""What plans are built as, by the TensorRT that is installed: modules stand in for its versions."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from vlmexport.exporter.families.languages import LANGUAGES, language_class
from vlmexport.exporter.graphs.retype import WIDE_RESIDUAL
from vlmexport.exporter.tensorrt import PlanOptions, api
from vlmexport.exporter.tensorrt.options import resolve
from vlmexport.runtime.common.errors import ExportError, OptionError


def install(monkeypatch: pytest.MonkeyPatch, version: str, *names: str) -> None:
    """A full TensorRT of this version, on a Jetson Orin."""
    module = SimpleNamespace(__version__=version, **dict.fromkeys(names))
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(api, "local_architecture", lambda: "sm87")


def full(lowering: str = "auto") -> PlanOptions:
    return PlanOptions("tensorrt", "native", "auto", lowering)


def test_the_lowering_follows_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "10.3.0.30")
    found = resolve(full(), "llama")
    assert (found.target, found.precision, found.lowering) == ("sm87", "float16", "portable")
    install(monkeypatch, "10.13.3", "IAttention")
    assert resolve(full(), "t5").lowering == "portable"
    install(monkeypatch, "10.16.1", "IAttention", "IKVCacheUpdateLayer")
    assert resolve(full()).lowering == "native"
    assert resolve(full("portable")).lowering == "portable"


def test_native_plans_need_the_cache_update(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "10.3.0.30")
    with pytest.raises(
        OptionError, match=r"tensorrt 10\.3\.0\.30 has no key/value cache update .* --lowering portable"
    ):
        resolve(full("native"))


@pytest.mark.parametrize("version", ["8.6.2", "10.1.0", "10.2.0.19"])
def test_an_older_tensorrt_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    with pytest.raises(ExportError, match=r"is older than 10\.3"):
        resolve(full())


def test_an_unknown_lowering_is_named_before_tensorrt_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(OptionError, match="unknown --lowering 'rows'; choose one of auto, native, portable"):
        resolve(full("rows"))
    with pytest.raises(ExportError, match="needs the module tensorrt"):
        resolve(full())


def test_decoders_with_a_wide_residual_are_decoders() -> None:
    assert {name for name in LANGUAGES if language_class(name).name in WIDE_RESIDUAL} == WIDE_RESIDUAL
