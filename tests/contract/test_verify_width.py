"""`verify_width`: on an engine whose numbers depend on the shape of a pass, speculative decoding gives what plain decoding
gives, because every pass has one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vlmexport.exporter.tensorrt.profiles import Sizes
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.manifest_file import read_manifest
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import BundleError, CapacityError, OptionError
from vlmexport.runtime.decoder import decoder as decoder_module
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.kv_cache import KVArena

from tests.support import attending_rows
from tests.support.engines.recording_device import GrowingDevice, RecordingDevice
from tests.support.engines.width_dependent import WidthDependent
from tests.support.foreseen import LONG, WAYS, WIDTH, foreseen, plainly, prompt
from tests.support.pairs import each_value
from tests.support.tiny_bundles import TinyBundle
from tests.support.unpadded import unpadded

FAMILIES = ("t5-two-cuts", "llama-two-cuts", "qwen2.5-vl")
"""Relative bias and cross-attention, rotary and two cuts, positions with axes."""

DEVICES = {"device": RecordingDevice, "growing-device": GrowingDevice}
COLUMNS = ("cpu", *DEVICES)


@contextmanager
def opened(
    tiny: TinyBundle, column: str = "cpu", width: int | None = WIDTH, batch: int = 1
) -> Iterator[Session]:
    bundle = tiny.bundle if width is None else tiny.bundle.with_verify_width(width)
    engine: Any = WidthDependent(tiny.path, bundle.manifest)
    engine.rows_of_heads = batch == 1
    if column in DEVICES:
        engine = DEVICES[column](bundle.manifest, engine)
    with Session(bundle, Decoder(engine, bundle.manifest, bundle.tensor, max_batch=batch), None) as session:
        yield session
        if column in DEVICES:
            engine.settle()


@each_value(family=FAMILIES, column=COLUMNS, way=tuple(WAYS))
def test_drafts_change_no_token(
    tiny_bundle: Callable[[str], TinyBundle], family: str, column: str, way: str
) -> None:
    with opened(tiny_bundle(family), column) as session:
        plain = plainly(session, prompt())
        assert foreseen(session, way, plain, prompt()) == plain


@pytest.mark.parametrize("way", WAYS)
def test_without_verify_width_tokens_differ(tiny_bundle: Callable[[str], TinyBundle], way: str) -> None:
    """The engine is what the tests need."""
    with opened(tiny_bundle("llama-two-cuts"), width=None) as session:
        plain = plainly(session, prompt())
        assert foreseen(session, way, plain, prompt()) != plain


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("t5-two-cuts", {"draft": "imitation@1"}),
        ("t5-two-cuts", {"draft": "imitation@2"}),
        ("llama-two-cuts", {"draft": "early-exit", "repetition_penalty": 1.3}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["draft"],
)
def test_drafts_of_the_bundle_on_a_device(
    tiny_bundle: Callable[[str], TinyBundle], family: str, options: dict[str, Any]
) -> None:
    """Whole cycles, token feedback included."""
    target = {name: options[name] for name in options if not name.startswith("draft")}
    accepted = 0
    with opened(tiny_bundle(family), "device") as session:
        for first in range(3):
            drafted = session.generate_tokens(prompt(first=first), **LONG, **{"draft_length": 4} | options)
            assert drafted.tokens == plainly(session, prompt(first=first), **target)
            accepted += drafted.stats.accepted
    assert accepted > 0, "nothing but roots was verified"


def test_requests_of_a_batch(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    """Sequences of other lengths, with drafts of every way to propose, get what they get alone: here the number of
    sequences is no part of a kernel's shape."""
    kinds = ("early-exit", "none", "prompt-lookup", "medusa", "imitation@1", "imitation@2")
    requests = [
        {"prompt": f"a{'b' * number}", "max_new_tokens": 6 + 5 * number, "ignore_eos": True, "draft": draft}
        | ({} if draft == "none" else {"draft_length": 3})
        for number, draft in enumerate(kinds)
    ]
    with opened(tiny_bundle("llama-two-cuts"), batch=3) as session:
        together = session.generate_batch(requests)
        plain = session.generate_batch([{**request, "draft": "none"} for request in requests])
        alone = [session.generate(**request).tokens for request in requests]
    assert [result.tokens for result in together] == [result.tokens for result in plain] == alone


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_attention_over_exit_rows(rigs: Callable, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """What an imitation network says does not depend on the rows that pad a pass."""
    rig = rigs(f"{family}-two-cuts", "onnxruntime")
    monkeypatch.setattr(rig.manifest, "verify_width", 9)
    for row in (attending_rows.alone, attending_rows.together):
        row(rig.fresh())


# --- seeded errors ---


def growing_cache(patch: pytest.MonkeyPatch) -> None:
    """The bound cache is as long as what is drafted asks for."""

    def wrong(*args: Any, static: bool, **options: Any) -> KVArena:
        return KVArena(*args, **options)

    patch.setattr(decoder_module, "KVArena", wrong)


MUTANTS = {
    "plain and verifying passes not padded": (unpadded("full", "verify_width", None), "all segments", 12),
    "trunk not padded": (unpadded("trunk", "verify_width", None), "trunk and tail", 12),
    "tail not padded": (unpadded("tail", "verify_width", None), "trunk and tail", 12),
    "rows of the head not padded": (unpadded("head_of", "verify_width", None), "all segments", 12),
    "cache grows": (growing_cache, "as wide as a pass", 99),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_seeded_errors_are_detected(
    tiny_bundle: Callable[[str], TinyBundle], monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    plant, way, length = MUTANTS[mutant]
    for planted in (False, True):
        if planted:
            plant(monkeypatch)
        with opened(tiny_bundle("llama-two-cuts")) as session:
            plain = plainly(session, prompt(length))
            assert (foreseen(session, way, plain, prompt(length)) != plain) is planted


# --- what is refused ---


def test_limits(tiny_bundle: Callable[[str], TinyBundle]) -> None:
    bundle = tiny_bundle("llama").bundle
    for width in (1, 21, True):
        with pytest.raises(OptionError, match=f"verify_width.*{width}"):
            bundle.with_verify_width(width)
    with Session.load(bundle.with_verify_width(4)) as session:
        assert session.bundle.manifest.verify_width == 4 and bundle.manifest.verify_width is None
        with pytest.raises(
            OptionError, match=r"draft_length: 4 is above 3 \(the session's verify_width is 4\)"
        ):
            session.generate(prompt="a", draft="early-exit", draft_length=4)
        with pytest.raises(CapacityError, match=r"width 5; .*verify_width 4"):
            session.decoder.begin_cycle(5)
        assert session.generate(prompt="a", max_new_tokens=5, ignore_eos=True).stats.proposed > 0
    assert Sizes.of_manifest(bundle.with_verify_width(4).manifest).verify_width == 4, (
        "what plans are tuned for"
    )
    with Session.load(bundle.with_verify_width(4).with_verify_width(0)) as session:
        assert session.decoder.passes.verify_width is None
    with pytest.raises(BundleError, match=r"verify_width': 21 .*max_width \(20\)"):
        Manifest.from_dict({**read_manifest(bundle.path / "manifest.json"), "verify_width": 21})


def test_the_command(tiny_bundle: Callable[[str], TinyBundle], capsys: pytest.CaptureFixture[str]) -> None:
    run = [
        "run",
        str(tiny_bundle("llama").path),
        "--prompt",
        "a",
        "--max-new-tokens",
        "4",
        "--json",
        "--verify-width",
    ]
    assert main([*run, "4", "--draft", "early-exit", "--draft-length", "3"]) == 0
    capsys.readouterr()
    assert main([*run, "4", "--draft", "early-exit", "--draft-length", "4"]) == 2
    assert "this bundle allows 1 to 3 (verify_width less the pending token)" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main([*run, "21"]) == 2
    assert "verify_width (of this bundle): 21" in " ".join(capsys.readouterr().err.split())
