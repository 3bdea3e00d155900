"""PaliGemma: prompts that see all of themselves, in one pass, at positions from 1; soft caps; and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import DynamicCache, SiglipImageProcessorPil
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.decoder_graphs import build_head
from vlmexport.exporter.families.common.images import square_image
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.languages import base
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.graphs import hooks
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.manifest import ImageInfo
from vlmexport.runtime.common.errors import ExportError, ImageError, PromptError, UnsupportedModelError
from vlmexport.runtime.decoder.forward_pass import PREFILL_WIDTH
from vlmexport.runtime.families import RawPrompt, get_family
from vlmexport.runtime.families import paligemma as runtime_family
from vlmexport.runtime.families.plain import PlainText
from vlmexport.runtime.images.processors import preprocess
from vlmexport.runtime.images.synthetic import synthetic_image

from tests.support import kept_traces
from tests.support.own_generation import difference

PICTURES = [
    Image.fromarray(synthetic_image(height, width)) for height, width in ((40, 61), (33, 29), (90, 20))
]
MARK = "<image>"
ROWS = 16
DRAFTS = ("none", "early-exit", "prompt-lookup")


@pytest.fixture(scope="module")
def long(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Any]:
    """(bundle with room for 600 positions, its family, its model)."""
    source = tiny_checkpoint("paligemma2")
    out = tmp_path_factory.mktemp("paligemma2") / "bundle"
    build_bundle(BuildRequest(model=str(source), output=out, draft_layer=1, max_length=600, parity=False))
    checkpoint = open_checkpoint(source)
    return out, family_for(checkpoint), load_reference(checkpoint, streamed=False)


TEXTS = [
    "",
    "the cup",
    "the cup\n",
    f"{MARK}the cup",
    f"{MARK}{MARK} the box",
    f"the cup {MARK} and{MARK}\n\nthe box",
    "detect <loc0123> cup ; <seg007>",
    f"<|im_start|>{MARK}<|im_end|> a",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", [str, RawPrompt])
def test_prompts_are_laid_out_as_the_processor_does(long: Any, text: str, kind: Any) -> None:
    bundle, family, _ = long
    pictures = PICTURES[: text.count(MARK) or 2]
    with Session.load(bundle) as session:
        prepared = get_family("paligemma").prepare(session.bundle, pictures, kind(text))
    expected = family.reference_prompt(pictures, text)
    assert tuple(prepared.token_ids.tolist()) == expected.input_ids
    assert prepared.blocks == ((0, len(expected.input_ids)),)
    assert expected.positions is not None and prepared.positions is not None
    assert prepared.positions.tolist() == expected.positions.tolist()
    assert (prepared.token_ids[prepared.image_positions] == family.image_token_id).all()


def test_a_picture_is_needed_and_each_has_one_mark(long: Any) -> None:
    with Session.load(long[0]) as session:
        prepare = get_family("paligemma").prepare
        with pytest.raises(ImageError, match="reads no text without an image"):
            prepare(session.bundle, None, "the cup")
        with pytest.raises(PromptError, match=r"the prompt has 1 <image>, and 2 pictures were given"):
            prepare(session.bundle, PICTURES[:2], f"{MARK} the cup")
        with pytest.raises(PromptError, match="no chat template"):
            prepare(session.bundle, PICTURES[:1], [{"role": "user", "content": "the cup"}])


def test_text_alone_names_no_picture(long: Any) -> None:
    """Where a request's text is only text, a mark in it is none, nor does a begin token begin anything."""
    bundle, family, _ = long
    with Session.load(bundle) as session:
        tokenizer, manifest = session.bundle.tokenizer, session.bundle.manifest
        for text in (f"a {MARK} b", "a <|im_start|> b", f"plain{MARK}", "plain"):
            prepared = get_family("paligemma").prepare(PlainText(session.bundle), PICTURES[0], text)
            ids = prepared.token_ids.tolist()
            assert ids[: ROWS + 1] == [family.image_token_id] * ROWS + [manifest.text.bos_token_id]
            assert not tokenizer.special_ids.intersection(ids[ROWS + 1 :])
            assert tokenizer.decode(ids[ROWS + 1 :]) == f"{text}\n"
        with pytest.raises(ImageError, match="reads no text without an image"):
            session.generate_tokens([5, 6, 7])


@pytest.mark.parametrize(
    "count", [PREFILL_WIDTH - 1, PREFILL_WIDTH, PREFILL_WIDTH + 1, 2 * PREFILL_WIDTH + 30]
)
def test_a_long_prompt_goes_through_one_pass(long: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, family, model = long
    with Session.load(bundle) as session:
        assert session.decoder.prefill_width == 599 == session.bundle.manifest.decoder.max_block
        widths: list[int] = []
        run = session.decoder.passes.run_prompt
        monkeypatch.setattr(
            session.decoder.passes,
            "run_prompt",
            lambda forward, rows, *given: widths.append(len(rows)) or run(forward, rows, *given),
        )
        prompt = "!" * (count - ROWS - 2)
        inputs = collate(family, [family.reference_prompt(PICTURES[0], prompt)], left=True)
        assert inputs["input_ids"].shape[1] == count, "the prompt is not what the test means"
        for draft in DRAFTS:
            found = session.generate(PICTURES[0], prompt, max_new_tokens=12, draft=draft)
            assert difference(model, inputs, found.tokens, 12) is None, draft
        assert widths == [count] * len(DRAFTS)


def test_a_cached_prompt_is_read_anew(long: Any) -> None:
    """A longer prompt changes every row of what it begins with, and of an equal one no part is enough."""
    bundle, family, model = long
    with Session.load(bundle) as session:
        for words in ("the red", "the red", "the red cup", "the"):
            found = session.generate(PICTURES[0], words, max_new_tokens=8, reuse_prompt=True)
            inputs = collate(family, [family.reference_prompt(PICTURES[0], words)], left=True)
            assert difference(model, inputs, found.tokens, 8) is None
            assert found.stats.reused_tokens == 0


@pytest.mark.parametrize("first", [1, 0])
def test_positions_begin_at_1(long: Any, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are turned by them, of the prompt and of what is generated: nothing else shows where they begin."""
    bundle, family, model = long
    monkeypatch.setattr(runtime_family, "FIRST_POSITION", first)
    with Session.load(bundle) as session:
        found = session.generate(PICTURES[0], "the cup", max_new_tokens=6, draft="early-exit")
        prompt = family.reference_prompt(PICTURES[0], "the cup")
        inputs = collate(family, [prompt], [found.tokens[:-1]])
        cache = DynamicCache()
        with torch.no_grad():
            model(**inputs, past_key_values=cache, use_cache=True)
        count = len(prompt.input_ids) + len(found.tokens) - 1
        for layer in range(2):
            want = cache.layers[layer].keys[0].numpy()
            got = session.decoder.arena.read(layer)["key"][:, :count]
            far = np.abs(got - want[:, : got.shape[1]]).max() / np.abs(want).max()
            assert got.shape[1] >= len(prompt.input_ids) + 4
            assert (far < 1e-5) == (first == 1), far


def capped_at(cap: float | None) -> Callable[..., Any]:
    """What is written for an attention whose scores are bounded: this cap in place of its own."""
    written, found = hooks._onnx_attention, {} if cap is None else {"softcap": cap}

    def wrong(*given: Any) -> Any:
        if len(given) < 6 or not given[5]:
            return written(*given)
        return hooks.op.Attention(*given[:4], scale=given[4], **found)[0]  # type: ignore[index]

    return wrong


LEFT_OUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "scores": lambda patch: patch.setattr(hooks, "_onnx_attention", capped_at(None)),
    "scores of another size": lambda patch: patch.setattr(hooks, "_onnx_attention", capped_at(50.0)),
    "logits": lambda patch: patch.setattr(
        base, "build_head", lambda store, norm, table, cap: build_head(store, norm, table)
    ),
}


@pytest.mark.parametrize("what", [*LEFT_OUT])
def test_a_soft_cap_left_out_is_found_by_parity(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    LEFT_OUT[what](monkeypatch)
    named = "head" if what == "logits" else r"segment\.0"
    with kept_traces.anew(), pytest.raises(ExportError, match=f"parity failed: {named} differs from torch"):
        build_bundle(BuildRequest(model=str(tiny_checkpoint("paligemma2")), output=tmp_path / "bundle"))


def test_the_wrong_first_position_is_found_by_parity(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_family, "FIRST_POSITION", 0)
    with pytest.raises(ExportError, match=r"the runtime's positions of .* are not the model's own"):
        build_bundle(BuildRequest(model=str(tiny_checkpoint("paligemma2")), output=tmp_path / "bundle"))


@pytest.mark.parametrize("side", [224, 448])
def test_pixels_are_those_of_transformers_bit_for_bit(side: int) -> None:
    draw, processor = random.Random(side), SiglipImageProcessorPil(size={"height": side, "width": side})
    described = square_image(
        json.loads(processor.to_json_string()), (side, side), "siglip", SiglipImageProcessorPil
    )
    settings = ImageInfo.parse(described, "image")
    for _ in range(110):
        height, width = (draw.choice([draw.randint(1, 99), draw.randint(100, 700)]) for _ in range(2))
        picture = Image.fromarray(synthetic_image(height, width))
        want = processor(images=picture, return_tensors="np")["pixel_values"]
        assert np.array_equal(preprocess(picture, settings), want), (height, width)


def _changed(folder: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / file).read_text())
    change(document)
    (folder / file).write_text(json.dumps(document))


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "attention softcap": (
        "config.json", lambda c: c["text_config"].update(attn_logit_softcapping=0.0), "attn_logit_softcapping=0.0",
    ),
    "logit softcap": (
        "config.json", lambda c: c["text_config"].update(final_logit_softcapping=-1.0), "final_logit_softcapping=-1.0",
    ),
    "language": ("config.json", lambda c: c["text_config"].update(model_type="llama"), "language model 'llama'"),
    "rope": (
        "config.json",
        lambda c: c["text_config"]["rope_parameters"].update(rope_type="dynamic", factor=2.0), "rope_type 'dynamic'",
    ),
    "window": ("config.json", lambda c: c["text_config"].update(sliding_window=0), "sliding_window=0"),
    "projection": ("config.json", lambda c: c.update(projection_dim=48), "projection_dim=48"),
    "picture's token": ("config.json", lambda c: c.update(image_token_index=7), "image_token_id=7"),
    "other rows": (
        "processor_config.json",
        lambda c: c["image_processor"].update(image_seq_length=9), "image_seq_length=9",
    ),
    "template": ("tokenizer_config.json", lambda c: c.update(chat_template="{{ 1 }}"), "a chat template"),
}  # fmt: skip


@pytest.mark.parametrize("what", [*REFUSED])
def test_what_is_not_exported_exactly_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    file, change, named = REFUSED[what]
    folder = Path(shutil.copytree(tiny_checkpoint("paligemma2"), tmp_path / "model"))
    _changed(folder, file, change)
    with pytest.raises(UnsupportedModelError, match=named):
        build_bundle(BuildRequest(model=str(folder), output=tmp_path / "bundle", parity=False))
    assert not (tmp_path / "bundle").exists()


def test_a_tokenizer_without_the_processors_tokens_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("paligemma2"), tmp_path / "model"))
    _changed(
        folder,
        "tokenizer.json",
        lambda c: c.update(added_tokens=[t for t in c["added_tokens"] if t["content"] != "<loc0005>"]),
    )
    with pytest.raises(UnsupportedModelError, match="has no added token '<loc0005>'"):
        build_bundle(BuildRequest(model=str(folder), output=tmp_path / "bundle", parity=False))
