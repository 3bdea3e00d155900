"""Gemma 3: pictures anywhere among words, across the passes of a prompt, in conversations; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.common.reference import collate
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import UnsupportedModelError
from vlmexport.runtime.decoder.forward_pass import PREFILL_WIDTH
from vlmexport.runtime.families import RawPrompt, get_family
from vlmexport.runtime.images.synthetic import synthetic_image

from tests.support.own_generation import difference

PICTURES = [
    Image.fromarray(synthetic_image(height, width)) for height, width in ((40, 61), (33, 29), (90, 20))
]
MARK = "<start_of_image>"
DRAFTS = ("none", "early-exit", "prompt-lookup")


@pytest.fixture(scope="module")
def long(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Any]:
    """(bundle with room for 600 positions, its family, its model)."""
    source = tiny_checkpoint("gemma3")
    out = tmp_path_factory.mktemp("gemma3") / "bundle"
    build_bundle(BuildRequest(model=str(source), output=out, draft_layer=1, max_length=600, parity=False))
    checkpoint = open_checkpoint(source)
    return out, family_for(checkpoint), load_reference(checkpoint, streamed=False)


@pytest.mark.parametrize(
    "text",
    [
        f"{MARK}the cup",
        f"the cup\n{MARK}\nthe box",
        f"the cup\n\n{MARK}{MARK}\n",
        f" {MARK} and \n\n\n{MARK}{MARK}",
        "no picture\n\n at all",
    ],
)
def test_prompts_are_laid_out_as_the_processor_does(long: Any, text: str) -> None:
    bundle, family, _ = long
    pictures = PICTURES[: text.count(MARK)]
    with Session.load(bundle) as session:
        prepared = get_family("gemma3").prepare(session.bundle, pictures or None, RawPrompt(text))
    ids = family.reference_prompt(pictures or None, RawPrompt(text)).input_ids
    assert tuple(prepared.token_ids.tolist()) == ids
    assert list(prepared.blocks) == family.blocks({"input_ids": torch.tensor([ids])})[0]
    assert [end - first for first, end in prepared.blocks] == [16] * len(pictures)


@pytest.mark.parametrize("begin", [PREFILL_WIDTH - n for n in (17, 16, 15, 8, 1, 0)])
def test_a_picture_across_the_end_of_a_pass(long: Any, begin: int) -> None:
    """Its rows go through one pass, wherever it begins; a second one follows at once."""
    bundle, family, model = long
    with Session.load(bundle) as session:
        lead = len(session.bundle.tokenizer.encode(f"\n\n{MARK}"))
        words = "!" * (begin - lead)
        prompt = RawPrompt(f"{words}{MARK}{MARK} the red cup")
        prepared = get_family("gemma3").prepare(session.bundle, PICTURES[:2], prompt)
        assert prepared.blocks[0] == (begin, begin + 16), "the prompt is not what the test means"
        inputs = collate(family, [family.reference_prompt(PICTURES[:2], prompt)], left=True)
        for draft in DRAFTS:
            found = session.generate(images=PICTURES[:2], prompt=prompt, max_new_tokens=12, draft=draft)
            assert difference(model, inputs, found.tokens, 12) is None, draft


def test_turns_go_on_behind_whole_pictures(long: Any) -> None:
    """A conversation answers as its whole text would be answered, whatever of it was cached."""
    bundle, family, model = long
    with Session.load(bundle) as session:
        chat, pictures, reused = session.chat("you see."), [], []
        for turn, (text, picture) in enumerate(
            [("what is it?", PICTURES[0]), ("and this", PICTURES[1]), ("where?", None)]
        ):
            pictures += [] if picture is None else [picture]
            result = chat.say(text, picture, max_new_tokens=8, draft=DRAFTS[turn])
            reused.append(result.stats.reused_tokens)
            asked = family.reference_prompt(pictures, chat.messages[:-1])
            inputs = collate(family, [asked], left=True)
            assert difference(model, inputs, result.tokens, 8) is None, turn
        assert reused[0] == 0 and reused[1] > 16 and reused[2] > reused[1]


def test_a_cached_prompt_is_not_gone_on_with_within_a_picture(long: Any) -> None:
    bundle, family, model = long
    with Session.load(bundle) as session:
        for picture in (PICTURES[0], PICTURES[1], PICTURES[1]):
            prompt = RawPrompt(f"the cup {MARK} the box")
            found = session.generate(images=[picture], prompt=prompt, max_new_tokens=8, reuse_prompt=True)
            inputs = collate(family, [family.reference_prompt([picture], prompt)], left=True)
            assert difference(model, inputs, found.tokens, 8) is None
            assert found.stats.reused_tokens < len(inputs["input_ids"][0])


def _changed(folder: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / file).read_text())
    change(document)
    (folder / file).write_text(json.dumps(document))


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "attention softcap": (
        "config.json", lambda c: c["text_config"].update(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0",
    ),
    "logit softcap": (
        "config.json", lambda c: c["text_config"].update(final_logit_softcapping=30.0), "final_logit_softcapping=30.0",
    ),
    "bidirectional": (
        "config.json", lambda c: c["text_config"].update(use_bidirectional_attention=True), "use_bidirectional_attention",
    ),
    "rope": (
        "config.json",
        lambda c: c["text_config"]["rope_parameters"]["sliding_attention"].update(rope_type="dynamic", factor=2.0),
        "rope_type 'dynamic'",
    ),
    "window": ("config.json", lambda c: c["text_config"].update(sliding_window=0), "sliding_window=0"),
    "no square": ("config.json", lambda c: c.update(mm_tokens_per_image=15), "mm_tokens_per_image=15"),
    "pan and scan": (
        "processor_config.json",
        lambda c: c["image_processor"].update(do_pan_and_scan=True), "do_pan_and_scan=true",
    ),
    "other rows": ("processor_config.json", lambda c: c.update(image_seq_length=64), "image_seq_length=64"),
}  # fmt: skip


@pytest.mark.parametrize("what", [*REFUSED])
def test_what_is_not_exported_exactly_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    file, change, named = REFUSED[what]
    folder = Path(shutil.copytree(tiny_checkpoint("gemma3"), tmp_path / "model"))
    _changed(folder, file, change)
    with pytest.raises(UnsupportedModelError, match=named.replace("(", r"\(")):
        build_bundle(BuildRequest(model=str(folder), output=tmp_path / "bundle", parity=False))
    assert not (tmp_path / "bundle").exists()


def test_embeddings_are_scaled_for_every_reader(tiny_bundle: Callable[..., tuple[Path, Path]]) -> None:
    """What the host, the graph and transformers make of ids is the same, bit for bit."""
    bundle, folder = tiny_bundle("gemma3")
    model = load_reference(open_checkpoint(folder), streamed=False)
    ids = np.arange(5, 40)
    with Session.load(bundle) as session, torch.no_grad():
        found = session.decoder.embedding.embeddings(ids)
        embedding = session.decoder.embedding
        assert embedding.lookup and embedding.table is None, "rows come from the table, but not as they are"
        assert np.array_equal(found, embedding._by_graph(ids))
    assert np.array_equal(found, model.get_input_embeddings()(torch.from_numpy(ids)).detach().numpy())
