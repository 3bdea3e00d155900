"""Requests whose proposals are their own tokens but for each fifth, which is wrong: on the trunk, by all segments, as trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vlmexport.runtime import Session

from tests.support.lossless import Bushy, Scripted
from tests.support.remembering import wrong_token

WIDTH = 8
"""Nodes of the widest."""

WAYS: dict[str, dict[str, Any]] = {
    "all segments": {"draft_length": 4},
    "trunk and tail": {"draft_length": 4},
    "as wide as a pass": {"draft_length": WIDTH - 1},
    "tree": {"draft_length": 3, "draft_nodes": 7},
}
LONG: dict[str, Any] = {"max_new_tokens": 32, "ignore_eos": True}


def prompt(length: int = 12, first: int = 3) -> list[int]:
    """Ordinary ids."""
    return [3 + (7 * place + first) % 90 for place in range(length)]


def plainly(session: Session, ids: list[int], **options: Any) -> list[int]:
    return session.generate_tokens(ids, **LONG, **options, draft="none").tokens


def foreseen(session: Session, way: str, tokens: list[int], ids: list[int]) -> list[int]:
    """Tokens where every proposal but each fifth token is right."""
    rig: Any = SimpleNamespace(manifest=session.bundle.manifest, decoder=session.decoder)
    made = Bushy if way == "tree" else Scripted
    draft = made(
        rig,
        1 if way == "trunk and tail" else None,
        lambda index: wrong_token(tokens[index]) if index % 5 == 4 or index >= len(tokens) else tokens[index],
    )
    session.replace_proposer("prompt-lookup", draft)
    found = session.generate_tokens(ids, **LONG, **WAYS[way], draft="prompt-lookup")
    assert found.tokens != tokens or found.stats.accepted > 0, "nothing but roots was verified"
    return found.tokens
