"""Errors of the draft `memory`, and the guards that must notice them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vlmexport.runtime.drafts.memory import memory
from vlmexport.runtime.drafts.memory.recall import Recall
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speculative import sequence

from tests.support import lossless
from tests.support.remembering import Remembering, remembered

Patch = pytest.MonkeyPatch


def foreign_ids(rigs: Callable, family: str) -> None:
    """Answers with ids that the model's vocabulary has not: a file may hold such."""
    rig = rigs(family, "onnxruntime")
    request = rig.request(41)
    truth = rig.oracle.greedy(request, 20)
    vocabulary = rig.manifest.text.vocab_size
    answers = [[token if at % 5 else vocabulary + at for at, token in enumerate(truth, 1)]]
    proposer = Remembering(rig.manifest.choose_draft("memory"), rig.decoder, remembered(answers))
    run = lossless.generate(rig, request, 20, proposer=proposer, length=6)
    assert run.tokens == truth and run.stats.accepted > 0


def of_another_vocabulary(patch: Patch) -> None:
    """Ids of a memory are not compared with the vocabulary."""
    make = Recall.__init__

    def wrong(self: Any, *given: Any, **options: Any) -> None:
        make(self, *given, **{**options, "vocab_size": None})

    patch.setattr(memory.Recall, "__init__", wrong)


def unverified(patch: Patch) -> None:
    """What a memory says is emitted as it is."""
    judge = sequence.Sequence.judge

    def wrong(self: Any, tree: Any, logits: Any, first: int) -> Verdict:
        right = judge(self, tree, logits, first)
        if not isinstance(self.proposer, Remembering) or not tree.is_chain:
            return right
        return Verdict(list(range(1, len(tree))), right.token, len(tree))

    patch.setattr(sequence.Sequence, "judge", wrong)
