"""What a draft is trained to do: one file per kind, with its options in `<kind>_options.py`.

A new kind is these two files and one line in `KINDS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...runtime.common.errors import OptionError

if TYPE_CHECKING:
    from .base import Counts, LearnedTarget, Objective
    from .training_options import Options

KINDS: dict[str, tuple[str, str, str]] = {
    "imitation": ("imitation_joint", "imitation_objective", "ImitationOptions"),
    "medusa": ("medusa_joint", "medusa_objective", "MedusaOptions"),
    "eagle": ("eagle", "EagleObjective", "EagleOptions"),
    "eagle3": ("eagle3", "Eagle3Objective", "Eagle3Options"),
    "vispec": ("vispec", "VispecObjective", "VispecOptions"),
}
"""Kind → (module, what makes its objective, options class in `<kind>_options`). Options are read without importing
PyTorch."""


def options_of(kind: str) -> type[Options]:
    """The options of a kind. OptionError for one that cannot be trained."""
    if kind not in KINDS:
        raise OptionError(f"--draft {kind!r} cannot be trained; this version trains: {', '.join(KINDS)}")
    options = KINDS[kind][2]
    return getattr(import_module(f".{kind}_options", __name__), options)


def check_shape_search(kind: str) -> None:
    """OptionError for a kind whose networks have no shapes to search."""
    if options_of(kind).shape_search is None:
        searched = ", ".join(name for name in KINDS if options_of(name).shape_search)
        raise OptionError(f"--search tries shapes of {searched} networks, not of --draft {kind}")


def objective_for(options: Options, target: LearnedTarget, counts: Counts | None = None) -> Objective:
    """A new, untrained draft of the kind that `options` belong to; `counts` are of the training data's tokens."""
    for module, name, own in KINDS.values():
        if type(options).__name__ == own:
            objective: Any = getattr(import_module(f".{module}", __name__), name)
            return objective(options, target, counts)
    raise TypeError(f"{type(options).__name__} are no options of a draft kind")
