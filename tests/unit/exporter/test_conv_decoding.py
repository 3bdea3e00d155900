"""Rows of convolutions while a text grows and is cut: at every row of a prompt, and on cycles that are rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from vlmexport.runtime import Session
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.token_tree import TokenTree

IDS = np.arange(3, 24)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def session(tiny_bundle: Callable[..., tuple[Path, Path]]) -> Iterator[Session]:
    """Convolutions over 4 tokens before and behind a layer of attention."""
    changes = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
    bundle, _ = tiny_bundle("lfm2", **changes)
    with Session.load(bundle) as loaded:
        yield loaded


def whole(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    decoder.reset()
    return decoder.prefill(decoder.embed(ids)).logits(0).copy()


def test_a_text_goes_on_at_every_row(session: Session) -> None:
    """Behind other tokens that were cut off: as if it had never been another text."""
    decoder = session.decoder
    wanted, other = whole(decoder, IDS), whole(decoder, IDS[::-1].copy())
    assert abs(wanted - other).max() > 1
    for length in range(1, len(IDS)):
        whole(decoder, np.concatenate([IDS[:length], IDS[::-1][:7]]))
        assert decoder.resume(length) == 0
        found = decoder.prefill(decoder.embed(IDS[length:])).logits(0)
        assert abs(found - wanted).max() <= TOLERANCE, length


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, 0, 0, 1, 2, 4, 2]], ids=["chain", "tree"])
def test_rejected_rows_are_forgotten(session: Session, parents: list[int]) -> None:
    """Whichever path is accepted, what follows is what follows that text."""
    decoder = session.decoder
    tree = TokenTree([40 + node for node in range(len(parents))], parents)
    for last in range(len(parents)):
        path = np.flatnonzero(tree.ancestors[last]).tolist()
        tokens = [tree.tokens[node] for node in path]
        wanted = whole(decoder, np.array([*IDS, *tokens, 9]))
        whole(decoder, IDS)
        decoder.begin_cycle(len(tree))
        decoder.full(tree)
        decoder.head_of([tree])
        decoder.accept(tree, path[1:])
        decoder.begin_cycle(1)
        decoder.full(TokenTree.chain([9]))
        found = decoder.head(1).logits(0)
        assert abs(found - wanted).max() <= TOLERANCE, path


def test_sequences_that_join_and_leave_keep_their_rows(session: Session) -> None:
    """The last one takes the place of who leaves."""
    with Session.load(session.bundle.path, max_batch=3) as together:
        decoder = together.decoder
        texts = [IDS, IDS[::-1].copy(), IDS[4:9]]
        wanted = [whole(decoder, np.array([*text, 11])) for text in texts]
        decoder.reset(0)
        for place, text in enumerate(texts):
            assert decoder.add() == place
            decoder.prefill(decoder.embed(text), place)
        decoder.remove(0)
        decoder.begin_cycle(1)
        decoder.full(TokenTree.chain([11]), TokenTree.chain([11]))
        found = decoder.head(2)
        assert abs(found.logits(0) - wanted[2]).max() <= TOLERANCE
        assert abs(found.logits(1) - wanted[1]).max() <= TOLERANCE
