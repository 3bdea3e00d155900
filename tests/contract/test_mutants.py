"""Seeded errors that the suite must catch: each is planted in the real code, then the rows that guard it must fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lossless
import numpy as np
import pytest
from rig import Rig
from rows import ROWS
from vlmexport.runtime.decode.encoder import Encoder
from vlmexport.runtime.decode.kv import KVArena
from vlmexport.runtime.decode.masks import CausalMask
from vlmexport.runtime.decode.passes import Decoder
from vlmexport.runtime.decode.tree import TokenTree
from vlmexport.runtime.speculate import cycle
from vlmexport.runtime.speculate.acceptance import Verdict

Patch = pytest.MonkeyPatch


def zeroed_bias_in_the_tail(patch: Patch) -> None:
    """T5 block k > 0 given no bias uses zeros, silently (the trap of transformers' own blocks)."""
    tail, chain, in_tail = Decoder.tail, CausalMask.chain, []

    def without_bias(self: Any, out: np.ndarray, row: int, start: int, width: int) -> None:
        chain(self, out, row, start, width)
        if in_tail and out.dtype != np.bool_:
            out[row][out[row] > -1e4] = 0

    def marked(self: Any, *args: Any) -> None:
        in_tail.append(True)
        try:
            tail(self, *args)
        finally:
            in_tail.pop()

    patch.setattr(CausalMask, "chain", without_bias)
    patch.setattr(Decoder, "tail", marked)


def _moved_length(step: int) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        accept = Decoder.accept

        def wrong(self: Any, tree: TokenTree, path: Any, row: int = 0) -> None:
            accept(self, tree, path, row)
            if len(path) < tree.proposed:  # only where something was rejected
                self.arena.lengths[row] += step

        patch.setattr(Decoder, "accept", wrong)

    return plant


def crop_forgotten(patch: Patch) -> None:
    """Rejected rows stay."""
    accept = Decoder.accept
    patch.setattr(
        Decoder, "accept", lambda self, tree, path, row=0: accept(self, tree, range(1, len(tree)), row)
    )


def slots_instead_of_depths(patch: Patch) -> None:
    """A tree node takes its slot for its position."""
    full = Decoder.full

    def wrong(self: Any, *trees: TokenTree) -> None:
        made = [copy.copy(tree) for tree in trees]
        for tree in made:
            tree.depths = list(range(len(tree)))
        full(self, *made)

    patch.setattr(Decoder, "full", wrong)


def siblings_visible(patch: Patch) -> None:
    """A causal triangle instead of the tree's ancestors."""
    mask = CausalMask.tree

    def wrong(self: Any, out: np.ndarray, row: int, start: int, tree: TokenTree) -> None:
        other = copy.copy(tree)
        other.__dict__["ancestors"] = np.tril(np.ones((len(tree), len(tree)), bool))
        mask(self, out, row, start, other)

    patch.setattr(CausalMask, "tree", wrong)


def path_not_committed(patch: Patch) -> None:
    """The length moves, the rows of the path stay where the tree had them."""
    patch.setattr(Decoder, "_commit", lambda self, path, row: None)


def pad_id_0_accepted(patch: Patch) -> None:
    """Short paths padded with token 0: the target's own token 0 then looks like an accepted proposal."""
    verify = cycle.verify_draws

    def wrong(tree: TokenTree, choose: Callable[[int, int], int]) -> Verdict:
        verdict = verify(tree, choose)
        if verdict.token != 0 or len(verdict.path) >= max(tree.depths):
            return verdict
        last = len(tree) - 1  # index −1 of the logits
        return Verdict([*verdict.path, last], choose(last, len(verdict.path) + 1), verdict.evaluated + 1)

    patch.setattr(cycle, "verify_draws", wrong)


def write_index_off_by_one(patch: Patch) -> None:
    run = Decoder._run

    def wrong(self: Any, prepared: Any) -> None:
        prepared.indices[...] += 1
        run(self, prepared)

    patch.setattr(Decoder, "_run", wrong)


def stale_exit_rows(patch: Patch) -> None:
    """The tail sees the exit rows of the cycle before."""
    begin, tail, saved = Decoder.begin_cycle, Decoder.tail, []

    def remember(self: Any, width: int) -> None:
        view = self.engine.view(self._exit, self._exit.shape)
        saved[:] = [np.array(self.engine.read(view))]
        begin(self, width)

    def stale(self: Any, cut: int, count: int) -> None:
        self.engine.write(self.engine.view(self._exit, self._exit.shape), saved[0])
        tail(self, cut, count)

    patch.setattr(Decoder, "begin_cycle", remember)
    patch.setattr(Decoder, "tail", stale)


def last_draft_skips_the_trunk(patch: Patch) -> None:
    """Only d of the d + 1 rows pass the trunk; the last exit row is what an earlier cycle left."""
    speculate, full = Rig.speculate, Decoder.trunk

    def wrong(self: Rig, cut: int, tokens: Any) -> np.ndarray:
        patch.setattr(
            Decoder,
            "trunk",
            lambda decoder, at, token: (
                full(decoder, at, token)
                if decoder.exit_count < len(tokens) - 1
                else setattr(decoder, "exit_count", len(tokens))
            ),
        )
        return speculate(self, cut, tokens)

    patch.setattr(Rig, "speculate", wrong)


def rows_left_over_by_growth(patch: Patch) -> None:
    """The bound view grows, the rows stay in the old layout."""

    def wrong(self: KVArena, rows: int) -> None:
        self.rows = rows

    patch.setattr(KVArena, "_grow", wrong)


def source_padding_seen(patch: Patch) -> None:
    """Cross-attention sees the rows that only fill up a ragged batch of sources."""
    run = Encoder.run

    def wrong(self: Any, rows: Any) -> None:
        run(self, rows)
        self._lengths = [self._source] * len(rows)

    patch.setattr(Encoder, "run", wrong)


def earlier_batch_masks_kept(patch: Patch) -> None:
    """Masks of the source are made again only when the shape changes, not when the padding does."""
    run = Encoder.run

    def wrong(self: Any, rows: Any) -> bool:
        if self._lengths and max(map(len, rows)) == self._source and len(rows) == len(self._lengths):
            self._lengths = [len(part) for part in rows]
        return run(self, rows)

    patch.setattr(Encoder, "run", wrong)


def views_of_the_last_request_kept(patch: Patch) -> None:
    """Passes that were bound while the view was longer are used again after it shrank."""
    patch.setattr(Decoder, "reset", lambda self, batch=1: self.arena.reset(batch))


Guard = Callable[[Callable, str], None]


def table(name: str) -> Guard:
    """A row of the contract table, on ONNX Runtime."""
    return lambda rigs, family: ROWS[name](lambda bundle: rigs(bundle, "onnxruntime"), family)


def on_device(name: str) -> Guard:
    """A row of the contract table, on the recording device."""
    return lambda rigs, family: ROWS[name](lambda bundle: rigs(bundle, "device"), family)


def generation(draft: str, *lengths: int) -> Guard:
    """Whole generations on ONNX Runtime."""
    return lambda rigs, family: lossless.greedy(
        rigs(family, "onnxruntime"), draft, (41, 42, 47), lengths, (40,)
    )


@dataclass(frozen=True)
class Mutant:
    """An error, and what must notice it for these families."""

    plant: Callable[[Patch], None]
    guards: dict[str, Guard]
    families: tuple[str, ...] = ("t5", "llama")


MUTANTS = {
    "T5 bias zeroed in the tail": Mutant(
        zeroed_bias_in_the_tail,
        {
            "trunk and tail": table("trunk_and_tail"),
            "device": on_device("trunk_and_tail"),
            "generation": generation("perfect", 5),
        },
        ("t5",),
    ),
    "length one too high after a rejection": Mutant(
        _moved_length(+1), {"crop": table("crop_after_rejection"), "generation": generation("often-right", 5)}
    ),
    "length one too low after a rejection": Mutant(
        _moved_length(-1), {"crop": table("crop_after_rejection"), "generation": generation("often-right", 5)}
    ),
    "rejected rows kept": Mutant(
        crop_forgotten, {"crop": table("crop_after_rejection"), "generation": generation("always-wrong", 3)}
    ),
    "tree positions without depth": Mutant(
        slots_instead_of_depths,
        {
            "tree": table("tree"),
            "ragged trees": table("ragged_trees"),
            "device": on_device("tree"),
            "generation": generation("tree", 6),
        },
    ),
    "siblings visible in a tree": Mutant(
        siblings_visible, {"tree": table("tree"), "generation": generation("tree", 6)}
    ),
    "tree path not committed": Mutant(
        path_not_committed,
        {
            "commit": table("commit_of_a_tree_path"),
            "ragged": table("ragged_trees"),
            "generation": generation("tree", 6),
        },
    ),
    "padding with id 0 accepted": Mutant(
        pad_id_0_accepted, {"generation": generation("tree", 4, 6, 9)}, ("llama",)
    ),
    "write index off by one": Mutant(
        write_index_off_by_one,
        {
            name: table(name)
            for name in ("prefill", "one_token", "chain", "trunk_and_tail", "tree", "ragged_batch")
        }
        | {"device": on_device("chain"), "generation": generation("early-exit", 3)},
    ),
    "stale exit rows": Mutant(
        stale_exit_rows,
        {name: table(name) for name in ("trunk_and_tail", "crop_after_rejection", "two_cut_points")}
        | {"generation": generation("perfect", 3)},
    ),
    "last draft not run through the trunk": Mutant(
        last_draft_skips_the_trunk, {"trunk and tail": table("trunk_and_tail")}
    ),
    "padding of the source seen": Mutant(source_padding_seen, {"ragged": table("ragged_batch")}, ("t5",)),
    "masks of an earlier batch": Mutant(
        earlier_batch_masks_kept, {"next request": table("next_request")}, ("t5",)
    ),
    "views of an earlier request": Mutant(
        views_of_the_last_request_kept, {"next request": table("next_request")}, ("llama",)
    ),
    "growth without moving rows": Mutant(
        rows_left_over_by_growth, {"last positions": table("last_positions")}
    ),
}

CASES = [
    (name, family, guard)
    for name, mutant in MUTANTS.items()
    for family in mutant.families
    for guard in mutant.guards
]


@pytest.mark.parametrize(("mutant", "family", "guard"), CASES)
def test_the_suite_catches(rigs: Callable, monkeypatch: Patch, mutant: str, family: str, guard: str) -> None:
    with monkeypatch.context() as patch:
        MUTANTS[mutant].plant(patch)
        with pytest.raises(AssertionError):
            MUTANTS[mutant].guards[guard](rigs, family)


@pytest.mark.parametrize(("family", "guard"), sorted({(family, guard) for _, family, guard in CASES}))
def test_the_same_guards_pass_without_a_mutant(rigs: Callable, family: str, guard: str) -> None:
    for mutant in MUTANTS.values():
        if family in mutant.families and guard in mutant.guards:
            mutant.guards[guard](rigs, family)
