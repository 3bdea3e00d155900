"""What a proposer is: it hands over token trees whose roots are the pending tokens of sequences."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..common.errors import BundleError
from ..decoder.device.draft_chain import NOTHING_SENT, Sent
from ..decoder.token_tree import TokenTree
from ..sampling.verify import Verdict
from ..speedup.budget import Budget

if TYPE_CHECKING:
    from ..decoder.device.draft_chain import DeviceChain
    from ..decoder.forward_pass import ForwardPass
    from ..engines.base import Call, View
    from .sequence import Sequence


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture or video of a prompt, or a part of one that text stands around: its first slot, and what enters the decoder
    there and behind, [frames, n, E]."""

    start: int
    image_embeds: np.ndarray


class Proposer:
    """One draft of a bundle, for all sequences of a session that use it; built once per session.

    Every sequence begins and ends; in between it is asked for a proposal when the policy gives it a budget, and told
    the outcome of every cycle, also of those without a proposal. What a proposer keeps about a sequence it keeps by the
    sequence. A proposal is a deterministic function of the request and the tokens emitted so far, so that
    draw-and-match verification is lossless at any temperature; one that is drawn from a distribution q of its own
    carries q in its tree (`TokenTree.q`), and is verified by acceptance and residual; it draws with
    `Sequence.proposing`.
    """

    name: str
    needs_prompt_hidden: ClassVar[bool] = False
    """Whether `on_hidden_states` is called."""
    needs_pictures: ClassVar[bool] = False
    """Whether `on_pictures` is called."""
    needs_hidden: ClassVar[bool] = False
    """Whether `advance` gets hidden states."""
    needs_passes: ClassVar[bool] = False
    """Whether `on_pass` is called."""
    drafts_on_device: ClassVar[bool] = False
    """Whether it has a `draft_step`, behind the trunk's hidden state or, without a `cut`, behind that of its
    `pass_apart`."""
    draft_graph: str = "head"
    """The graph that is named where its logits are not finite."""

    @property
    def cut(self) -> int | None:
        """Segments of the target that drafting itself runs over every node (self-speculation: the tail verifies), or
        None: the verifier runs all segments."""
        return None

    @property
    def resumable(self) -> int:
        """Of the last request, how many slots of the cache a next one may go on behind: none for a proposer that reads a
        prompt's hidden states and does not keep what it made of them."""
        return 0 if self.needs_prompt_hidden else sys.maxsize

    def resume(self, length: int) -> None:
        """The next request goes on behind the first `length` slots of the last one, at most `resumable`; they end
        within no picture. Its `on_pictures` and `on_hidden_states` tell of what is behind them."""

    def begin(self, sequence: Sequence) -> None:
        """A request was prefilled; its first token is not chosen yet."""

    def on_pictures(self, sequence: Sequence, pictures: Items[Picture]) -> None:
        """Pictures of a request that is about to be prefilled, in the order of their slots; also when there are none."""

    def on_hidden_states(self, sequence: Sequence, slot: int, hidden_states: View) -> None:
        """Prompt hidden states [1, n, E] before the final norm, of slots slot.. of the cache, chunk by chunk while
        prefilling."""

    def propose(self, sequences: Items[Sequence], budgets: Items[Budget]) -> list[TokenTree]:
        """A tree for each of several sequences, within its budget and rooted at its last token.

        Every budget allows at least one token. Proposers with a `cut` draft on the trunk instead (`self_drafting.py`).
        """
        return [self.propose_one(*pair) for pair in zip(sequences, budgets, strict=True)]

    def matched(self, sequence: Sequence) -> int | None:
        """Of a draft that may come first: how many tokens of the text stood where its proposal is from. None: it does not
        say."""
        return None

    def pass_apart(self) -> ForwardPass:
        """Proposers that draft on a device without a `cut`: the pass over one token of every sequence that they draft
        with (`Decoder.apart`)."""
        raise NotImplementedError

    def passed(self, step: int) -> None:
        """Proposers with a `cut`: drafted tokens of theirs passed the trunk as `step` of this cycle, and nothing is
        drafted behind these hidden states. Steps behind which something is are asked for as `step_logits`."""

    def on_pass(self) -> None:
        """A cycle's pass over all of its nodes is done, and none is accepted yet: the decoder's lengths are those before
        it."""

    def sent_on_device(self, count: int, start: int) -> Sent:
        """Proposers that draft on a device: inputs of their own graphs in a cycle of `count` drafts behind the pending
        token in slot `start`. Asked once in every such cycle."""
        return NOTHING_SENT

    def draft_step(
        self, hidden: View, outputs: dict[str, View], number: int, sent: Mapping[str, View]
    ) -> list[Call]:
        """Proposers that draft on a device: what follows the trunk's hidden state `hidden` [1, 1, E] there, the one of
        that `number` in the cycle, to write `outputs` of the head: its `logits` (float32 [1, V]) or the `best` token of
        them (int64 [1]), and whether they are `finite` (bool [1]). `sent`: `sent_on_device`, where the engine has
        it."""
        raise NotImplementedError

    def last_step(self, hidden: View, number: int, sent: Mapping[str, View]) -> list[Call]:
        """The same for the hidden state of the last drafted token, behind which nothing is drafted (as `passed`)."""
        return []

    def propose_on_device(self, sequence: Sequence, budget: Budget) -> DeviceChain | TokenTree:
        """Proposers without a `cut`, for the only sequence of a device that does whole cycles: a chain that it drafts by
        itself, or else a tree as of `propose`, which the host may have to wait for."""
        return self.propose([sequence], [budget])[0]

    def check_ids(self, ids: np.ndarray, vocabulary: int) -> None:
        """Raises `BundleError` for proposed ids outside the vocabulary: tables of a draft of its own may name such."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise BundleError(
                f"draft {self.name!r} proposes ids outside the vocabulary; build the bundle again"
            )

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        """`propose` for one sequence: what a proposer without a pass over the batch overrides."""
        raise NotImplementedError

    def advance(
        self, sequence: Sequence, tree: TokenTree, verdict: Verdict, hidden_states: View | None
    ) -> None:
        """The outcome of a cycle; if `needs_hidden`, the hidden states [1, n, E] before the final norm of the tree's n
        nodes, where the engine has them until the next pass."""

    def end(self, sequence: Sequence) -> None:
        """A request ended, also before its first token."""
