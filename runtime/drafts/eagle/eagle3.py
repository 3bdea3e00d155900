"""EAGLE-3: EAGLE's layer over hidden states after three of the target's layers (Li et al., arXiv 2503.01840).

What the three hidden states of a position are joined to, by the graph `fusion`, stands where EAGLE has a feature.
Everything else is as there: pairs with the target's hidden states are run after they are known, trees grow out of what
the layer gave itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...common.errors import BundleError
from ...engines.base import DTYPES
from .eagle import Eagle
from .eagle3_options import TAPPED

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...decoder.token_tree import TokenTree
    from ...engines.base import Call, View
    from ...sampling.verify import Verdict
    from ...speculative.sequence import Sequence


class Eagle3(Eagle):
    """The draft kind `eagle3`. Raises `BundleError` for a draft without its graph `fusion` or without its taps, and as
    `Eagle`."""

    role: ClassVar[str] = "eagle3"

    def __init__(self, draft: DraftInfo, decoder: Decoder):
        fusion = draft.graphs.get("fusion")
        if fusion is None or not draft.options.tap_layers:
            raise BundleError(f"manifest: draft {draft.name!r} joins no rows; build the bundle again")
        super().__init__(draft, decoder)
        self._decoder, self._fusion, self._layers = decoder, fusion, draft.options.tap_layers
        max_num_tokens = max(self._widest, decoder.arena.max_batch * decoder.max_width)
        self._joined = self._engine.allocate(
            f"{draft.name}.joined", max_num_tokens * self._size * DTYPES[self._dtype].itemsize
        )
        self._joins: dict[tuple[int, ...], Call] = {}
        self._number = -1

    def on_hidden_states(self, sequence: Sequence, slot: int, hidden_states: View) -> None:
        super().on_hidden_states(sequence, slot, self._join(hidden_states))

    def advance(
        self, sequence: Sequence, tree: TokenTree, verdict: Verdict, hidden_states: View | None
    ) -> None:
        assert hidden_states is not None
        super().advance(sequence, tree, verdict, self._join(hidden_states))

    def _join(self, hidden_states: View) -> View:
        """What the graph `fusion` makes of the taps where `hidden_states` of the last pass stand; it runs once per
        pass."""
        decoder = self._decoder
        if self._number != decoder.pass_number:
            taps = {
                name: decoder.hidden_after(layer) for name, layer in zip(TAPPED, self._layers, strict=True)
            }
            shape = taps[TAPPED[0]].shape
            call = self._joins.get(shape)
            if call is None:
                joined = self._joined.view(shape, self._dtype)
                call = self._joins[shape] = self._engine.bind(self._fusion, taps, {"hidden_out": joined})
            call.run()
            self._number = decoder.pass_number
        return self._joined.view(hidden_states.shape, self._dtype, decoder.offset_of(hidden_states))
