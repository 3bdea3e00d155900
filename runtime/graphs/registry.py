"""Every role of a graph, and every kind of draft: those of the package, and those that `register` adds."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from . import decoding, on_device, reading
from .role import TOKEN, VERIFY, GraphRole

if TYPE_CHECKING:
    from ..bundle.draft_kind import DraftKind
    from ..bundle.manifest import GraphInfo

DRAFTS = "..drafts"
"""The package of the kinds: `KINDS` maps the name of each to its module there, whose `KIND` it is. It is imported when a
kind is first asked for: a kind's proposer needs the modules that ask here."""

UNKNOWN = GraphRole("", None, (TOKEN, VERIFY), timed=(TOKEN,), captures=False)
"""Stands for roles of later versions, whose drafts cannot be chosen."""

_registered: dict[str, DraftKind] = {}


def register(kind: DraftKind) -> None:
    """Add a kind that is not of this package. Raises `ValueError` for a name or a role that is taken."""
    taken = [role.name for role in kind.roles if role.name in graph_roles()]
    if kind.name in draft_kinds() or taken:
        raise ValueError(
            f"draft kind {kind.name!r}: the name or one of the roles {taken} is taken; choose another"
        )
    _registered[kind.name] = kind


def unregister(name: str) -> None:
    """Take back a kind that `register` added."""
    del _registered[name]


def draft_kinds() -> dict[str, DraftKind]:
    """Name → kind."""
    return _own_kinds() | _registered


@cache
def _own_kinds() -> dict[str, DraftKind]:
    package = import_module(DRAFTS, __package__)
    return {
        name: import_module(f".{module}", package.__name__).KIND for name, module in package.KINDS.items()
    }


def graph_roles() -> dict[str, GraphRole]:
    """Name → role; the decoder's first."""
    return _own_roles() | {role.name: role for kind in _registered.values() for role in kind.roles}


@cache
def _own_roles() -> dict[str, GraphRole]:
    declared = [*reading.ROLES, *decoding.ROLES, *on_device.ROLES]
    declared += [role for kind in _own_kinds().values() for role in kind.roles]
    return {role.name: role for role in declared}


def graph_role(name: str) -> GraphRole:
    """The role of that name, `UNKNOWN` for one that this version does not know."""
    return _own_roles().get(name) or graph_roles().get(name, UNKNOWN)


def reads_prompts(graph: GraphInfo) -> bool:
    """Whether a draft's graph sees a prompt and every width after it."""
    return graph_role(graph.role).reads_prompts(graph)
