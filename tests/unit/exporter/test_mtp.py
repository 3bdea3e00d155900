"""The draft kind `mtp`: what a checkpoint's own head proposes, against plain tensors; refusals by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForConditionalGeneration
from vlmexport.exporter.drafts.eagle.mtp import MtpKind
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.common.errors import ExportError, OptionError
from vlmexport.runtime.drafts.adversarial import always_wrong
from vlmexport.runtime.images.synthetic import synthetic_image

from tests.support import mtp_oracle, tiny_models, tiny_qwen3_5

LENGTH = 5


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(bundle, checkpoint); the build compares the graph with the head in PyTorch."""
    folder = tmp_path_factory.mktemp("mtp")
    source = tiny_qwen3_5.add_mtp(tiny_models.checkpoint("qwen3.5", folder / "checkpoint"))
    build_bundle(
        BuildRequest(model=str(source), output=folder / "bundle", drafts=["mtp"], max_length=200, max_batch=3)
    )
    return folder / "bundle", source


def _proposals(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """What the draft proposes from now on: (emitted tokens, drafted tokens) of each cycle."""
    proposer: Any = session.proposer("mtp")
    propose, seen = proposer.propose, []

    def watched(sequences: Any, budgets: Any) -> Any:
        trees = propose(sequences, budgets)
        for sequence, tree in zip(sequences, trees, strict=True):
            assert tree.is_chain
            seen.append((list(sequence.tokens), list(tree.tokens[1:])))
        return trees

    monkeypatch.setattr(proposer, "propose", watched)
    return seen


@pytest.mark.parametrize("pictures", [0, 1])
def test_it_drafts_what_plain_tensors_say(
    built: tuple[Path, Path], pictures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, source = built
    tensors = load_file(source / "model.safetensors")
    model = Qwen3_5ForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()
    images = [synthetic_image(70, 100)] * pictures
    with Session.load(bundle) as session:
        prepared = session._family.prepare(session.bundle, images or None, "the red cup left of a box")
        seen = _proposals(session, monkeypatch)
        found = session.generate(
            images=images or None, prompt="the red cup left of a box", max_new_tokens=14, ignore_eos=True,
            draft="mtp", draft_length=LENGTH,
        )  # fmt: skip
        plain = session.generate(
            images=images or None, prompt="the red cup left of a box", max_new_tokens=14, ignore_eos=True,
            draft="none",
        )  # fmt: skip
        vision = {}
        if images:
            from PIL import Image
            from vlmexport.exporter.checkpoint import open_checkpoint
            from vlmexport.exporter.families.registry import family_for

            asked = family_for(open_checkpoint(str(source))).reference_prompt(
                [Image.fromarray(image) for image in images], "the red cup left of a box"
            )
            assert asked.vision is not None
            vision = dict(asked.vision)
    assert found.tokens == plain.tokens
    assert len(seen) >= 3
    for emitted, drafted in seen:
        tokens = [*prepared.token_ids.tolist(), *emitted]
        assert drafted == mtp_oracle.drafted(tensors, model, tokens, len(drafted), **vision)


def test_no_token_depends_on_the_head(built: tuple[Path, Path]) -> None:
    with Session.load(built[0], max_batch=3) as session:
        asked = [
            {"prompt": text, "max_new_tokens": 20, "ignore_eos": True}
            for text in ("a", "the box stands on", "where is it " * 6)
        ]
        plain = [
            result.tokens for result in session.generate_batch([{**one, "draft": "none"} for one in asked])
        ]
        for length in (1, 3, 8):
            drafted = [{**one, "draft": "mtp", "draft_length": length} for one in asked]
            assert [result.tokens for result in session.generate_batch(drafted)] == plain
            with always_wrong(session, "mtp"):
                assert [session.generate(**one).tokens for one in drafted] == plain


def test_trees_are_refused(built: tuple[Path, Path]) -> None:
    with (
        Session.load(built[0]) as session,
        pytest.raises(OptionError, match=r"draft_nodes: 7 .* linear attention"),
    ):
        session.generate(prompt="a", draft="mtp", draft_length=3, draft_nodes=7)


def test_what_holds_no_head_is_refused(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    kind = MtpKind()
    with pytest.raises(OptionError, match=r"has no tensors mtp\.\*"):
        kind.of_model(str(tiny_checkpoint("qwen3.5")))
    with pytest.raises(OptionError, match="download 'Qwen/Qwen3"):
        kind.of_model("Qwen/Qwen3.5-0.8B")


@pytest.mark.parametrize(
    ("field", "value"), [("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)]
)
def test_heads_of_another_shape_are_refused(
    built: tuple[Path, Path], tmp_path: Path, field: str, value: object
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(built[1], folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["text_config"][field] = value
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ExportError, match=f"{field} "):
        MtpKind().of_model(str(folder))
