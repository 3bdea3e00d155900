"""How much one sequence may draft in one cycle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Most drafted tokens of a tree (its root not counted), and most of them on one path.

    `nodes == depth` asks for a chain; more nodes than depth leave room for branches. Raises `ValueError` for
    negative numbers and for one of the two without the other.
    """

    nodes: int
    depth: int

    def __post_init__(self) -> None:
        if self.depth < 0 or self.nodes < 0 or (self.nodes == 0) != (self.depth == 0):
            raise ValueError(f"no tree has {self.nodes} drafted nodes and depth {self.depth}")

    @classmethod
    def chain(cls, length: int) -> Budget:
        """`length` tokens one after the other; 0 drafts nothing."""
        return cls(length, length)

    @property
    def empty(self) -> bool:
        """True when nothing may be drafted."""
        return self.nodes == 0

    def within(self, nodes: int, depth: int) -> Budget:
        """No more than this: `nodes` from the width of a pass, `depth` from the tokens that are left."""
        if self.depth <= self.nodes <= nodes and self.depth <= depth:
            return self
        fewer, shallower = min(self.nodes, nodes), min(self.depth, depth)
        # A path is no deeper than the tree has nodes, and a chain that lost depth has lost those nodes too.
        if self.nodes == self.depth:
            fewer = min(fewer, shallower)
        return NOTHING if fewer <= 0 or shallower <= 0 else Budget(fewer, min(shallower, fewer))


NOTHING = Budget(0, 0)
"""Decode one token plainly."""
