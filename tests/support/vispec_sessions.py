"""What a ViSpec layer proposes in sessions, each proposal compared with the oracle's."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vlmexport.runtime import Session
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.eagle.layer_role import LayerOptions
from vlmexport.runtime.drafts.eagle.vispec import Vispec
from vlmexport.runtime.families.base import Prepared
from vlmexport.runtime.families.llava import Llava
from vlmexport.runtime.images.synthetic import synthetic_image
from vlmexport.runtime.images.video import Video
from vlmexport.runtime.speedup.budget import Budget

from tests.support.eagle_oracle import paths_of
from tests.support.rig import Rig
from tests.support.vispec_oracle import VispecOracle
from tests.support.written_views import written_in_spans

PICTURES = [Image.fromarray(synthetic_image(*size)) for size in ((50, 70), (150, 60), (64, 64))]
TREE: dict[str, Any] = {
    "max_new_tokens": 8,
    "ignore_eos": True,
    "draft": "vispec",
    "draft_length": 4,
    "draft_nodes": 18,
}
Proposal = tuple[list[int], Budget, TokenTree]
"""Tokens so far, what was asked for, and what was proposed."""


class Watched:
    """A session of a rig's bundle whose prompts and proposals are noted."""

    def __init__(self, rig: Rig, session: Session) -> None:
        self.rig, self.session = rig, session
        self.prepared: list[Prepared] = []
        self.proposals: list[Proposal] = []

    def compare(self) -> int:
        """The proposals of the last request with the oracle's, from one pass of transformers' decoder over the whole text;
        returns how many there were."""
        rig, prepared, proposals = self.rig, self.prepared[-1], self.proposals
        network, draft = rig.tiny.networks()["vispec"], rig.manifest.draft("vispec")
        assert draft is not None and isinstance(draft.options, LayerOptions) and draft.options.ranks
        text = rig.oracle.text
        embed, table = text.get_input_embeddings(), text.lm_head.weight
        rows = [
            self.session.decoder.image_embeds(view.runs) if view.encoded is None else view.encoded
            for view in prepared.views
        ]
        for tokens, budget, tree in proposals:
            ids = [*prepared.token_ids.tolist(), *tokens]
            with torch.inference_mode():
                entering = embed(torch.tensor([ids[:-1]])).clone()
                if rows:
                    entering[0, prepared.image_positions] = torch.from_numpy(np.concatenate(rows))
                features = rig.oracle.stack(inputs_embeds=entering, **_positions(prepared, len(ids) - 1))[0][
                    0
                ]
            pictures, done = [], 0
            for view, own in zip(prepared.views, rows, strict=True):
                assert prepared.image_positions is not None
                frames = view.frames if view.written is None else 1
                for part in torch.from_numpy(own.copy()).split(view.spans):
                    shown = list(part.reshape(frames, -1, own.shape[-1]))
                    pictures.append((int(prepared.image_positions[done]), shown))
                    done += len(part)
            layer = VispecOracle(network, embed, table, features, ids, pictures)
            assert paths_of(tree) == layer.paths(budget, draft.options.ranks), f"behind {tokens}"
        count = len(proposals)
        proposals.clear()
        return count


def _positions(prepared: Prepared, count: int) -> dict[str, torch.Tensor]:
    """Of all rows, where they do not just count; text behind the prompt goes on."""
    known = prepared.positions
    if known is None:
        return {"position_ids": torch.arange(count)[None]}
    behind = known[:, -1:] + 1 + np.arange(count - known.shape[1])
    return {"position_ids": torch.from_numpy(np.concatenate([known, behind], 1))[:, None]}


@contextmanager
def watched(rig: Rig) -> Iterator[Watched]:
    """Notes what a session is asked for and what its ViSpec layer proposes."""
    propose, prepare = Vispec.propose, Session._prepare
    with pytest.MonkeyPatch.context() as patch, Session.load(rig.tiny.path) as session:
        found = Watched(rig, session)

        def noted(self: Any, sequences: Items[Any], budgets: Items[Budget]) -> list[TokenTree]:
            trees = propose(self, sequences, budgets)
            for sequence, budget, tree in zip(sequences, budgets, trees, strict=True):
                found.proposals.append((list(sequence.tokens), budget, tree))
            return trees

        def laid_out(self: Session, *about: Any) -> Prepared:
            found.prepared.append(prepare(self, *about))
            return found.prepared[-1]

        patch.setattr(Vispec, "propose", noted)
        patch.setattr(Session, "_prepare", laid_out)
        yield found


def several_and_none(rig: Rig) -> None:
    """Two pictures in one prompt, with words between them or not, and a prompt of words alone."""
    with watched(rig) as seen:
        for images in (PICTURES[:2], [], [PICTURES[2]], PICTURES):
            told = seen.session.generate(images or None, "the red cup", **TREE)
            plain = seen.session.generate(
                images or None, "the red cup", max_new_tokens=8, ignore_eos=True, draft="none"
            )
            assert told.tokens == plain.tokens
            assert seen.compare() >= 2


def several_runs(rig: Rig) -> None:
    """Pictures with words within them: every run is a picture to the layer, in conversations too."""
    with pytest.MonkeyPatch.context() as patch:
        written_in_spans(patch, Llava)
        several_and_none(rig)
        conversation(rig)


def conversation(rig: Rig) -> None:
    """Turns with and without pictures: every turn goes on behind what the layer keeps of those before, and sees the last
    picture, not an earlier one."""
    asked: dict[str, Any] = TREE | {"max_new_tokens": 4, "memory": None}  # the layer alone
    with watched(rig) as seen:
        for turns in ((None, PICTURES[0], PICTURES[2]), (PICTURES[2], None)):
            chat = seen.session.chat()
            for turn, image in enumerate(turns):
                found = chat.say("cup", image, **asked)
                assert seen.compare() >= 1
                assert found.stats.reused_tokens > 0 or not turn, "the layer keeps what it has seen"
        media = list(chat._media)
        cut = seen.session.generate(media, chat.messages[:1], reuse_prompt=True, **asked)
        again = seen.session.generate(media, chat.messages[:1], reuse_prompt=True, **asked)
        assert again.tokens == cut.tokens and again.stats.reused_tokens > 0
        assert seen.compare() >= 2
        seen.session.generate(media, "the red cup", max_new_tokens=4, draft="none")
        again = seen.session.generate(media, chat.messages[:-1], reuse_prompt=True, **asked)
        assert seen.compare() >= 1
        assert again.tokens == found.tokens and again.stats.reused_tokens == 0, "another request lay between"


def video(rig: Rig) -> None:
    """Tokens of every frame; the global feature is their mean."""
    frames = [np.asarray(picture.resize((56, 56))) for picture in (*PICTURES, *PICTURES[:1])]
    with watched(rig) as seen:
        told = seen.session.generate(None, "the red cup", video=Video(frames, fps=2), **TREE)
        assert seen.prepared[-1].views[0].frames == 2
        assert seen.compare() >= 2
        plain = seen.session.generate(
            None, "the red cup", video=Video(frames, fps=2), max_new_tokens=8, ignore_eos=True, draft="none"
        )
        assert told.tokens == plain.tokens
