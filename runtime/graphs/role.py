"""What is known of a graph by its role: inputs and outputs, when it runs, and what an engine may do with it.

The decoder's roles are declared in this folder, those of a draft kind in the kind's own (`runtime/drafts/`). Whoever treats
graphs differently asks their roles (`registry.py`) and names none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ..bundle.manifest import GraphInfo, Manifest

Shape: TypeAlias = "tuple[int | str, ...]"
"""Symbolic dimensions are strings, and may have any name in a bundle."""
Values: TypeAlias = "dict[str, tuple[str, Shape]]"
"""Name → (dtype, shape)."""
Interface: TypeAlias = "Callable[[Manifest, str, Sequence[int] | None], tuple[Values, Values]]"
"""(manifest, name of the graph, [first, end) of its layers or None) → (inputs, outputs). Raises `BundleError` where the
manifest lacks what they follow from."""

REQUEST, PREFILL, TOKEN, VERIFY = "request", "prefill", "token", "verify"
PASSES = (PREFILL, TOKEN, VERIFY)
"""When a graph runs: once for a picture or a source; over a chunk of a prompt; over one token; over several."""


def no_layers(manifest: Manifest, graph: GraphInfo) -> Sequence[int]:
    """Of graphs that read no keys and values of the target."""
    return ()


@dataclass(frozen=True)
class GraphRole:
    """A role. Its graph is called as the role, or `NAME.number` where a bundle may have several (`numbered`)."""

    name: str
    interface: Interface | None
    """None for a graph whose inputs a family declares."""
    phases: tuple[str, ...]
    """Profiles of its plan, of `REQUEST` or `PASSES`."""
    timed: tuple[str, ...] | None = None
    """Of these, the ones that `profile` times; None: all."""
    captures: bool = True
    """Whether it runs again and again between two tokens and may be captured in a CUDA graph. An engine runs such a graph
    several times before it has captured it: it must give the same again, also in caches."""
    numbered: bool = False
    own_cache: bool = False
    """Whether it may be a draft's layer with keys and values of its own."""
    reads_picture: bool = False
    """Of a graph that runs once per request: whether it reads a picture, else hidden states of a source."""
    has_plan: bool = True
    """False for a graph that holds weights of the target a second time, which plans cannot share."""
    cached_layers: Callable[[Manifest, GraphInfo], Sequence[int]] = no_layers
    """Layers of the target whose keys and values it reads."""

    @property
    def per_request(self) -> bool:
        """Whether it runs once for a picture or a source."""
        return self.phases == (REQUEST,)

    def reads_prompts(self, graph: GraphInfo) -> bool:
        """Whether a draft's graph sees a prompt and every width after it: those with keys and values of their own do."""
        return self.own_cache and any(value.name == "key_cache.0" for value in graph.inputs)

    def plan_phases(self, reads_prompts: bool = False) -> tuple[str, ...]:
        """Profiles of the plan of a graph that `reads_prompts`, or not."""
        return PASSES if reads_prompts else self.phases

    def timed_phases(self, graph: GraphInfo) -> tuple[str, ...]:
        """What `profile` times of a graph."""
        if self.reads_prompts(graph):
            return PASSES
        return self.phases if self.timed is None else self.timed
