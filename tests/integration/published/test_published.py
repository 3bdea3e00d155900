"""Every layout of the library: built and token-equal to transformers loaded from the same folder, or refused by name.

The layouts are as published; the weights are random and small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.prepare import prepare
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import VlmexportError
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu
from vlmexport.runtime.images.synthetic import synthetic_image

from tests.integration.published.table import DOCUMENT, written
from tests.support.own_generation import difference
from tests.support.published.answers import Request, Transformers, messages
from tests.support.published.folders import write
from tests.support.published.layouts import Layout, layouts

TOKENS = 12
WORDS = ("what is on the table?", "a red cup and a small box", "where is it?")


def _cases() -> list[object]:
    """In every run one layout of each family is built, and all that are refused are."""
    cases, built = [], set()
    for layout in layouts():
        if layout.draft is not None:
            continue
        again = layout.refused is None and layout.family in built
        if not layout.slow and layout.refused is None:
            built.add(layout.family)
        marks = pytest.mark.slow if layout.slow or again else ()
        cases.append(pytest.param(layout, id=layout.name, marks=marks))
    return cases


@pytest.mark.parametrize("layout", _cases())
def test_a_published_layout_builds_or_is_refused_by_name(layout: Layout, tmp_path: Path) -> None:
    request = requested(layout, tmp_path)
    if layout.missing is not None:
        assert f"needs {layout.missing}: pip install {layout.missing}" in refusal(request)
        request = requested(layout.converted, tmp_path / "converted")
    if layout.refused is not None:
        assert layout.refused in refusal(request)
        return
    prepare(request, write=False)
    build_bundle(request)
    own = Transformers(Path(request.model))
    bundle = Bundle.open(request.output)
    assert bundle.manifest.model.family == layout.family
    with exact_session(bundle) as session:
        for asked in requests(own):
            found = answer(session, asked, draft="early-exit", draft_length=2)
            assert difference(own.model, own.inputs(asked), found, TOKENS) is None, asked.prompt
    if bundle.manifest.target_weights is not None:
        with Session.load(bundle) as session:
            for asked in requests(own):
                assert answer(session, asked, draft="early-exit", draft_length=2) == answer(
                    session, asked, draft="none"
                )


def exact_session(bundle: Bundle) -> Session:
    """With the sums that transformers computes: integers become floats, and no row is rounded to 8 bits."""
    integers = bundle.manifest.target_weights is not None
    return Session.on(OnnxRuntimeCpu(bundle.path, bundle.manifest, float_weights=integers), bundle)


def answer(session: Session, asked: Request, **options: Any) -> list[int]:
    """Tokens of a request."""
    return session.generate(
        images=list(asked.pictures) or None, prompt=asked.prompt or None, max_new_tokens=TOKENS, **options
    ).tokens


def requested(layout: Layout, folder: Path) -> BuildRequest:
    """A build of a layout's checkpoint, below `folder`."""
    model = write(layout, folder / "model")
    return BuildRequest(model=str(model), output=folder / "bundle", draft_layer=1, precision="float32")


def refusal(request: BuildRequest) -> str:
    """The line that a build ends with before it begins."""
    with pytest.raises(VlmexportError) as raised:
        prepare(request, write=False)
    line = str(raised.value)
    assert "\n" not in line
    return line


def requests(own: Transformers) -> list[Request]:
    """What this model can be asked: about a picture of an odd size, in text alone, in a conversation."""
    sees, kind = own.processor is not None, own.config.model_type
    pictures = (Image.fromarray(synthetic_image(61, 97)),) if sees else ()
    if kind == "vision-encoder-decoder":
        return [Request(pictures), Request(pictures, "a red cup")]
    if kind in ("blip-2", "paligemma"):
        return [Request(pictures, WORDS[0]), Request(pictures, WORDS[1])]
    found = [Request((), WORDS[1])]
    if own.chat_template is None:
        if sees:
            found.append(Request(pictures, f"<image>\n{WORDS[0]}"))
        return found
    found = [Request((), messages(WORDS[1:2], parts=sees))]
    found.append(Request(pictures, messages(WORDS[:1], len(pictures), parts=sees)))
    found.append(Request(pictures, messages(WORDS, len(pictures), parts=sees)))
    return found


def test_the_document_names_what_the_library_holds() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert written(text) == text, "python -m tests.integration.published.table"
