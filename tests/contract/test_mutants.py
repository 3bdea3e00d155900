"""Seeded errors that the suite must catch: each is planted in the real code, then the rows that guard it must fail."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.common.errors import DeviceError, NumericsError, PromptError
from vlmexport.runtime.decoder import masks
from vlmexport.runtime.decoder.commit import Commit
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.encoder import Encoder
from vlmexport.runtime.decoder.exit_states import ExitStates
from vlmexport.runtime.decoder.forward_passes import ForwardPasses
from vlmexport.runtime.decoder.kv_cache import KVArena
from vlmexport.runtime.decoder.masks import CausalMask, Seen
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.medusa import medusa
from vlmexport.runtime.drafts.medusa.medusa import Medusa
from vlmexport.runtime.drafts.medusa.static_tree import within
from vlmexport.runtime.engines import kv_append
from vlmexport.runtime.speculative import cycle, sequence

from tests.support import attending_mutants as attending
from tests.support import attending_rows, grammars, lossless
from tests.support import conv_mutants as convolutions
from tests.support import cuda_mutants as provider
from tests.support import deepstack_mutants as deepstack
from tests.support import device_mutants as device
from tests.support import eagle3_mutants as eagle3
from tests.support import eagle_mutants as eagle
from tests.support import gpu_mutants as gpu
from tests.support import integer_mutants as integers
from tests.support import memory_mutants as memories
from tests.support import skipped_mutants as skipped
from tests.support import tensorrt_mutants as plans
from tests.support import vispec_mutants as vispec
from tests.support import vispec_sessions as sessions
from tests.support import window_mutants as windows
from tests.support.pairs import fast
from tests.support.rig import Rig
from tests.support.rows import ROWS
from tests.support.wrong_verify import padded_with_0

Patch = pytest.MonkeyPatch


def heads_read_the_root(patch: Patch) -> None:
    """Medusa keeps the row of the tree's root in place of the last accepted node's."""
    patch.setattr(
        Medusa, "advance", lambda self, sequence, tree, verdict, rows: self._keep(sequence, rows, 0)
    )


def heads_read_the_first_prompt_row(patch: Patch) -> None:
    """Medusa keeps the first row of a prompt in place of the last."""
    keep, on_rows = Medusa._keep, Medusa.on_hidden_states

    def wrong(self: Any, sequence: Any, slot: int, rows: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Medusa, "_keep", lambda self, sequence, rows, row: keep(self, sequence, rows, 0))
            on_rows(self, sequence, slot, rows)

    patch.setattr(Medusa, "on_hidden_states", wrong)


def heads_of_another_sequence(patch: Patch) -> None:
    """Medusa takes the places of its rows for the order of the sequences."""
    propose = Medusa.propose

    def wrong(self: Any, sequences: Any, budgets: Any) -> Any:
        places = dict(self._batch_indices)
        self._batch_indices.update({sequence: number for number, sequence in enumerate(sequences)})
        try:
            return propose(self, sequences, budgets)
        finally:
            self._batch_indices.update(places)

    patch.setattr(Medusa, "propose", wrong)


def siblings_in_another_order(patch: Patch) -> None:
    """A tree's second child takes the third rank."""

    def wrong(order: Any, budget: Any) -> Any:
        parents, depths, ranks = within(order, budget)
        return parents, depths, [rank + 1 if rank else 0 for rank in ranks]

    patch.setattr(medusa, "within", wrong)


def _before_every_pass(patch: Patch, change: Callable[[Any], None]) -> None:
    """`change(pass)` after the host wrote what a pass needs and before it runs, on the general way and the short one."""
    launch, short = ForwardPasses._launch, ForwardPasses._chain_step

    def wrong(self: Any, forward_pass: Any) -> None:
        change(forward_pass)
        launch(self, forward_pass)

    def wrong_step(self: Any, forward_pass: Any) -> Any:
        calls = forward_pass.calls
        forward_pass.calls = [SimpleNamespace(run=lambda: change(forward_pass)), *calls]
        step = short(self, forward_pass)
        forward_pass.calls = calls
        return step

    patch.setattr(ForwardPasses, "_launch", wrong)
    patch.setattr(ForwardPasses, "_chain_step", wrong_step)


def zeroed_bias_in_the_tail(patch: Patch) -> None:
    """T5 block k > 0 given no bias uses zeros, silently (the trap of transformers' own blocks)."""
    tail, in_tail = Decoder.tail, []

    def without_bias(prepared: Any) -> None:
        mask = prepared.masks["attn_mask"]
        if in_tail and mask.dtype != np.bool_:
            mask[mask > -1e4] = 0

    def marked(self: Any, *args: Any) -> None:
        in_tail.append(True)
        try:
            tail(self, *args)
        finally:
            in_tail.pop()

    _before_every_pass(patch, without_bias)
    patch.setattr(Decoder, "tail", marked)


def mask_of_another_start(patch: Patch) -> None:
    """The short way of a chain takes the first mask it kept for every start."""

    class First(Seen):
        def __missing__(self, start: int) -> np.ndarray:
            first = next(iter(self.values()), None)
            return super().__missing__(start) if first is None else first

    patch.setattr(masks, "Seen", First)


def _moved_length(step: int) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        accept, accept_all = Decoder.accept, Decoder.accept_all

        def wrong(self: Any, tree: TokenTree, path: Any, row: int = 0) -> None:
            accept(self, tree, path, row)
            if len(path) < tree.proposed:  # only where something was rejected
                self.arena.lengths[row] += step

        def wrong_all(self: Any, trees: Any, paths: Any) -> None:
            accept_all(self, trees, paths)
            for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
                if len(path) < tree.proposed:
                    self.arena.lengths[row] += step

        patch.setattr(Decoder, "accept", wrong)
        patch.setattr(Decoder, "accept_all", wrong_all)

    return plant


def crop_forgotten(patch: Patch) -> None:
    """Rejected rows stay."""
    accept, accept_all = Decoder.accept, Decoder.accept_all
    patch.setattr(
        Decoder, "accept", lambda self, tree, path, row=0: accept(self, tree, range(1, len(tree)), row)
    )
    patch.setattr(
        Decoder,
        "accept_all",
        lambda self, trees, paths: accept_all(self, trees, [range(1, len(tree)) for tree in trees]),
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
    patch.setattr(Commit, "_run", lambda self, moves, width: None)


def pad_id_0_accepted(patch: Patch) -> None:
    """Short paths padded with token 0: the target's own token 0 then looks like an accepted proposal."""
    patch.setattr(sequence, "verify_draws", padded_with_0(sequence.verify_draws))
    patch.setattr(cycle, "ranks", lambda tree, path: [])  # counting them would notice first


def write_index_off_by_one(patch: Patch) -> None:
    def wrong(prepared: Any) -> None:
        prepared.indices[...] += 1

    _before_every_pass(patch, wrong)


def stale_exit_rows(patch: Patch) -> None:
    """The tail sees the exit rows of the cycle before."""
    begin, tail = Decoder.begin_cycle, Decoder.tail
    saved: dict[int, np.ndarray] = {}

    def whole(self: Any, cut: int) -> Any:
        buffer = self.exits.buffers[cut]
        return buffer.view((buffer.nbytes // 4,), "float32")

    def remember(self: Any, width: int) -> None:
        saved.update({cut: np.array(self.engine.read(whole(self, cut))) for cut in self.exits.buffers})
        begin(self, width)

    def stale(self: Any, cut: int, *rest: Any) -> None:
        self.engine.write(whole(self, cut), saved[cut])
        tail(self, cut, *rest)

    patch.setattr(Decoder, "begin_cycle", remember)
    patch.setattr(Decoder, "tail", stale)


def last_draft_skips_the_trunk(patch: Patch) -> None:
    """Only d of the d + 1 rows pass the trunk; the last exit row is what an earlier cycle left."""
    speculate, full = Rig.speculate, Decoder.trunk

    def wrong(self: Rig, cut: int, tokens: Any) -> np.ndarray:
        def skip(decoder: Any, at: int, step: Any, trees: Any = None) -> None:
            if decoder.exit_count < len(tokens) - 1:
                full(decoder, at, step, trees)
            else:
                decoder.exit_count = len(tokens)

        patch.setattr(Decoder, "trunk", skip)
        return speculate(self, cut, tokens)

    patch.setattr(Rig, "speculate", wrong)


def rows_left_over_by_growth(patch: Patch) -> None:
    """The bound view grows, the rows stay in the old layout."""

    def wrong(self: KVArena, cache_len: int) -> None:
        self.cache_len = cache_len

    patch.setattr(KVArena, "_grow", wrong)


def source_padding_seen(patch: Patch) -> None:
    """Cross-attention sees the rows that only fill up a ragged batch of sources."""
    run = Encoder.run

    def wrong(self: Any, row: int, rows: Any) -> None:
        run(self, row, rows)
        self.arena.lengths[: self.arena.batch] = [self.arena.cache_len] * self.arena.batch

    patch.setattr(Encoder, "run", wrong)


def earlier_batch_masks_kept(patch: Patch) -> None:
    """Masks of the source are made again only when the shape changes, not when the padding does."""
    shape = property(lambda self: 1000 * self.arena.cache_len + self.arena.batch, lambda self, value: None)
    patch.setattr(Encoder, "version", shape, raising=False)


def source_of_who_left_kept(patch: Patch) -> None:
    """The last sequence takes the place of one that leaves, its source does not."""

    def wrong(self: Any, row: int) -> None:
        offsets = self.passes.positions.offsets
        offsets[row] = offsets[self.arena.batch - 1]
        self.arena.remove(row)
        self.encoder.arena.batch -= 1
        self._moved = True

    patch.setattr(Decoder, "remove", wrong)


def keys_of_who_left_kept(patch: Patch) -> None:
    """The last sequence takes the place of one that leaves, its keys and values do not."""

    def wrong(self: KVArena, row: int) -> None:
        self.lengths[row] = self.lengths[self.batch - 1]
        self.batch -= 1

    patch.setattr(KVArena, "remove", wrong)


def numbers_of_who_failed_kept(patch: Patch) -> None:
    """Who fails leaves its keys and values, behind the rows of whoever comes into its place."""
    patch.setattr(Decoder, "clear", lambda self, row: None)


def batch_in_steps_of_one(patch: Patch) -> None:
    """Exit rows of a batch lie step after step; the tail takes them sequence after sequence."""
    gather = ExitStates.gather

    def wrong(self: Any, forward_pass: Any, cut: int, count: int) -> None:
        gather(self, forward_pass, cut, count)
        hidden = forward_pass.hidden
        by_sequence = hidden.reshape(count, forward_pass.batch, -1).transpose(1, 0, 2)
        hidden[...] = by_sequence.copy().reshape(hidden.shape)

    patch.setattr(ExitStates, "gather", wrong)


def views_of_the_last_request_kept(patch: Patch) -> None:
    """Passes that were bound while the view was longer are used again after it shrank."""
    patch.setattr(Decoder, "_forget_moved", lambda self: setattr(self, "_moved", False))


def stale_rows_shown(patch: Patch) -> None:
    """The mask over the cache keeps what stood in the slots that are written after the pass."""
    split = kv_append.split_mask

    def wrong(mask: np.ndarray, starts: Any) -> Any:
        return mask.copy(), split(mask, starts)[1]

    patch.setattr(kv_append, "split_mask", wrong)


def new_rows_seen_by_all(patch: Patch) -> None:
    """Every new row sees every other: a tree's branches, and what comes after it."""
    split = kv_append.split_mask

    def wrong(mask: np.ndarray, starts: Any) -> Any:
        before, own = split(mask, starts)
        return before, np.broadcast_to(own.max(axis=-1, keepdims=True), own.shape)

    patch.setattr(kv_append, "split_mask", wrong)


def rows_appended_too_late(patch: Patch) -> None:
    """Rows are appended one slot behind their place, as far as there is one."""
    append = kv_append.append_kv

    def wrong(cache: np.ndarray, rows: np.ndarray, starts: Any) -> None:
        append(cache, rows, [min(start + 1, cache.shape[2] - rows.shape[2]) for start in starts])

    patch.setattr(kv_append, "append_kv", wrong)


Guard = Callable[[Callable, str], None]


@functools.cache
def table(name: str) -> Guard:
    """A row of the contract table, on ONNX Runtime."""
    return lambda rigs, family: ROWS[name](lambda bundle: rigs(bundle, "onnxruntime"), family)


@functools.cache
def on_device(name: str) -> Guard:
    """A row of the contract table, on the recording device."""
    return lambda rigs, family: ROWS[name](lambda bundle: rigs(bundle, "device"), family)


@functools.cache
def growing(name: str) -> Guard:
    """A row of the contract table, on the recording device whose caches grow."""
    return lambda rigs, family: ROWS[name](lambda bundle: rigs(bundle, "growing-device"), family)


@functools.cache
def portable(name: str) -> Guard:
    """A row of the contract table, on lowered graphs whose new rows are appended."""
    return lambda rigs, family: ROWS[name](lambda bundle: rigs(bundle, "portable"), family)


@functools.cache
def generation(draft: str, *lengths: int, engine: str = "onnxruntime") -> Guard:
    """Whole generations."""
    return lambda rigs, family: lossless.greedy(rigs(family, engine), draft, (41, 42, 47), lengths, (40,))


@functools.cache
def in_a_grammar(draft: str) -> Guard:
    """Whole generations that a grammar masks."""
    return lambda rigs, family: lossless.in_a_grammar(rigs(family, "onnxruntime"), draft, 3)


@functools.cache
def on_plans(name: str) -> Guard:
    """A row of the contract table, on the engine that runs TensorRT plans."""
    return lambda rigs, family: ROWS[name](lambda bundle: rigs(bundle, "tensorrt"), family)


@functools.cache
def on_cuda(name: str) -> Guard:
    """A row of the contract table, on the engine of the CUDA provider."""
    return lambda rigs, family: ROWS[name](lambda bundle: rigs(bundle, "cuda"), family)


def longer_prompt(rigs: Callable, family: str) -> None:
    """Captured cycles, and a prompt that needs more memory than those before."""
    plans.a_longer_prompt(rigs(family, "tensorrt"))


def matrix(rigs: Callable, family: str) -> None:
    """Bushy trees of a batch at a temperature."""
    lossless.matrix(rigs(family, "onnxruntime"), "bushy", "tree of 8", "limit", 3, 1.0)


def long_requests(rigs: Callable, family: str) -> None:
    """Requests whose caches grow while they run, one after the other."""
    lossless.greedy(rigs(family, "growing-device"), "eagle", (41, 42), (3,), (130,))


def not_finite(rigs: Callable, family: str) -> None:
    """Logits that are not finite end a request, on the recording device."""
    device.not_finite(rigs(family, "device"))


def one_ends(rigs: Callable, family: str) -> None:
    """A sequence that fails, and who takes its place."""
    lossless.one_ends(rigs(family, "onnxruntime"), "tree")


def same_drafts(rigs: Callable, family: str) -> None:
    """What is drafted on a device is what the host would draft."""
    device.same_drafts(rigs(family, "device"))


def changed_logits(rigs: Callable, family: str) -> None:
    """What a request changes of logits, on the recording device."""
    device.changed_logits(rigs(family, "device"), rigs(family, "onnxruntime"))


def attending_alone(rigs: Callable, family: str) -> None:
    """What an imitation network with attention says of one sequence, over a cache that grows."""
    attending_rows.alone(rigs(f"{family}-two-cuts", "onnxruntime"))


def attending_together(rigs: Callable, family: str) -> None:
    """What it says of sequences that come and go, beside other drafts."""
    attending_rows.together(rigs(f"{family}-two-cuts", "onnxruntime"))


def attending_on_device(rigs: Callable, family: str) -> None:
    """What it drafts on a device is what the host would draft."""
    device.same_drafts_of(rigs(f"{family}-two-cuts", "device"), "imitation-attending")


def turns_with_pictures(rigs: Callable, family: str) -> None:
    """A conversation whose later turns go on behind what a ViSpec layer keeps."""
    sessions.conversation(rigs(family, "onnxruntime"))


def several_pictures(rigs: Callable, family: str) -> None:
    """Prompts with several pictures, which a ViSpec layer sees."""
    sessions.several_and_none(rigs(family, "onnxruntime"))


def a_video(rigs: Callable, family: str) -> None:
    """A video that a ViSpec layer sees."""
    sessions.video(rigs(family, "onnxruntime"))


ATTENDING_GUARDS: dict[str, Guard] = {"alone": attending_alone, "together": attending_together}

SEES = ("llava", "qwen2.5-vl")
TAPPED = ("llama", "qwen2.5-vl")
"""Families with a ViSpec layer."""


@dataclass(frozen=True)
class Mutant:
    """An error, and what must notice it for these families."""

    plant: Callable[[Patch], None]
    guards: dict[str, Guard]
    families: tuple[str, ...] = ("t5", "llama")
    refused_by: tuple[type[Exception], ...] = ()
    """Errors of the runtime itself that stop it, beside a failing assertion."""


WINDOWED = ("qwen2", "gemma3", "paligemma2")
"""Families of which some layers see a window."""

CONVOLVED = ("lfm2",)
"""Families of which some layers are convolutions."""

OF_INTEGERS = ("t5-weights-int4", "llama-weights-int8")

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
    "mask of another start": Mutant(
        mask_of_another_start,
        {
            "trunk and tail": table("trunk_and_tail"),
            "crop": table("crop_after_rejection"),
            "generation": generation("perfect", 3),
            "plain": generation("early-exit", 1),
        },
    ),
    "length one too high after a rejection": Mutant(
        _moved_length(+1), {"crop": table("crop_after_rejection"), "generation": generation("often-right", 5)}
    ),
    "length one too low after a rejection": Mutant(
        _moved_length(-1), {"crop": table("crop_after_rejection"), "generation": generation("often-right", 5)}
    ),
    "rejected rows kept": Mutant(
        crop_forgotten,
        {
            "crop": table("crop_after_rejection"),
            "device": on_device("crop_after_rejection"),
            "generation": generation("always-wrong", 3),
        },
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
        siblings_visible, {"tree": table("tree"), "generation": generation("tree", 6), "matrix": matrix}
    ),
    "nothing added behind layers": Mutant(
        deepstack.nothing_added,
        {
            "prefill": table("prefill"),
            "one token": table("one_token"),
            "generation": generation("perfect", 3),
        },
        ("qwen3-vl",),
    ),
    "added behind another layer": Mutant(
        deepstack.swapped_layers, {"prefill": table("prefill"), "chain": table("chain")}, ("qwen3-vl",)
    ),
    "added behind the prompt, too": Mutant(
        deepstack.never_cleared,
        {"one token": table("one_token"), "trunk and tail": table("trunk_and_tail")},
        ("qwen3-vl",),
    ),
    "one axis of positions": Mutant(
        deepstack.one_axis, {"prefill": table("prefill"), "one token": table("one_token")}, ("qwen3-vl",)
    ),
    "window by slot": Mutant(
        windows.window_by_slot,
        {"tree": table("tree"), "ragged trees": table("ragged_trees"), "generation": generation("tree", 6)},
        WINDOWED,
    ),
    "window by slot on a device": Mutant(
        windows.window_by_slot_on_a_device, {"tree": generation("tree", 6, engine="device")}, WINDOWED
    ),
    "window one too long": Mutant(
        windows.window_one_too_long,
        {"one token": table("one_token"), "chain": table("chain"), "tree": table("tree")},
        WINDOWED,
    ),
    "window one too short": Mutant(
        windows.window_one_too_short,
        {"one token": table("one_token"), "trunk and tail": table("trunk_and_tail")},
        WINDOWED,
    ),
    "a rejected token's row convolved": Mutant(
        convolutions.rejected_rows_read,
        {"crop": table("crop_after_rejection"), "generation": generation("often-right", 5)},
        CONVOLVED,
    ),
    "a sibling's row convolved": Mutant(
        convolutions.slots_before_in_trees,
        {"tree": table("tree"), "ragged trees": table("ragged_trees"), "generation": generation("tree", 6)},
        CONVOLVED,
    ),
    "a sibling's row convolved on a device": Mutant(
        convolutions.slots_before_in_trees_on_a_device,
        {"tree": generation("tree", 6, engine="device")},
        CONVOLVED,
    ),
    "one row too few convolved": Mutant(
        convolutions.one_row_too_few,
        {
            "prefill": table("prefill"),
            "one token": table("one_token"),
            "trunk and tail": table("trunk_and_tail"),
        },
        CONVOLVED,
    ),
    "the first row convolved before it": Mutant(
        convolutions.first_row_before_the_beginning,
        {"prefill": table("prefill"), "batch": table("ragged_batch")},
        CONVOLVED,
    ),
    "rows of convolutions not committed": Mutant(
        convolutions.rows_not_committed,
        {
            "commit": table("commit_of_a_tree_path"),
            "ragged": table("ragged_trees"),
            "generation": generation("tree", 6),
        },
        CONVOLVED,
    ),
    "causal rows of a picture": Mutant(
        windows.causal_blocks,
        {"prefill": table("prefill"), "batch": table("ragged_batch"), "generation": generation("perfect", 3)},
        ("gemma3", "paligemma2"),
    ),
    "a prefix cut by windows": Mutant(
        windows.prefix_within_windows,
        {"prefill": table("prefill"), "batch": table("ragged_batch"), "generation": generation("perfect", 3)},
        ("paligemma2",),
    ),
    "tree path not committed": Mutant(
        path_not_committed,
        {
            "commit": table("commit_of_a_tree_path"),
            "ragged": table("ragged_trees"),
            "generation": generation("tree", 6),
            "matrix": matrix,
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
    "source of a sequence that left": Mutant(
        source_of_who_left_kept, {"join and leave": table("join_and_leave")}, ("t5",)
    ),
    "keys of a sequence that left": Mutant(
        keys_of_who_left_kept, {"join and leave": table("join_and_leave")}
    ),
    "exit rows of a batch mixed up": Mutant(
        batch_in_steps_of_one,
        {"batch": table("batch_on_the_trunk"), "join and leave": table("join_and_leave")},
    ),
    "heads read the root's row": Mutant(heads_read_the_root, {"medusa": table("medusa")}),
    "heads read the prompt's first row": Mutant(
        heads_read_the_first_prompt_row, {"medusa": table("medusa")}, ("llama",)
    ),
    "heads read another sequence's row": Mutant(heads_of_another_sequence, {"medusa": table("medusa")}),
    "siblings in another order": Mutant(siblings_in_another_order, {"medusa": table("medusa")}),
    "drafted rows kept": Mutant(
        skipped.drafted_rows_kept,
        {
            "generation": generation("draft-and-verify", 3),
            "long": generation("draft-and-verify", 8),
        },
        ("t5", "llama", "vit-gpt2", "qwen2.5-vl"),
    ),
    "no least width": Mutant(
        integers.no_least_width,
        {"chain": integers.drafted("often-right", 4), "trunk": integers.drafted("early-exit", 3)},
        OF_INTEGERS,
    ),
    "padding of a pass kept": Mutant(
        integers.padding_kept, {"chain": integers.drafted("often-right", 4)}, OF_INTEGERS
    ),
    "padding of a pass is seen": Mutant(
        integers.padding_seen, {"chain": integers.drafted("verified-by-all", 4)}, OF_INTEGERS
    ),
    "trees of integers": Mutant(
        integers.trees_of_integers, {"medusa": integers.drafted("medusa-tree", 4)}, OF_INTEGERS
    ),
    "scales of the neighbour in a tied table": Mutant(
        integers.scales_of_the_neighbour, {"plain": integers.as_generate}, ("llama-tied-weights-int8",)
    ),
    "integers of the neighbour in a tied table": Mutant(
        integers.integers_of_the_neighbour, {"plain": integers.as_generate}, ("llama-tied-weights-int8",)
    ),
    "remembered ids beyond the vocabulary": Mutant(
        memories.of_another_vocabulary,
        {"foreign ids": memories.foreign_ids},
        refused_by=(IndexError, ValueError),
    ),
    "remembered answers unverified": Mutant(
        memories.unverified, {"generation": generation("memory", 5), "foreign ids": memories.foreign_ids}
    ),
    "masked one token late": Mutant(
        grammars.masked_one_token_late,
        {"drafted": in_a_grammar("grammar")},
        ("t5", "llama"),
    ),
    "forced tokens unverified": Mutant(
        grammars.forced_tokens_unverified, {"forced": in_a_grammar("grammar")}, ("t5", "llama")
    ),
    "masks of the cycle before": Mutant(
        grammars.masks_of_the_cycle_before, {"plain": in_a_grammar("plain")}, ("t5", "llama")
    ),
    "drafts one slot late": Mutant(
        skipped.drafts_one_slot_late, {"draft and verify": table("draft_and_verify")}, ("t5", "llama")
    ),
    "drafts in one slot": Mutant(
        skipped.every_step_in_the_first_slot, {"draft and verify": table("draft_and_verify")}, ("t5", "llama")
    ),
    "rows of rejected nodes in the layer's cache": Mutant(
        eagle.rows_of_rejected_nodes, {"eagle": table("eagle")}, ("t5", "llama", "qwen2.5-vl")
    ),
    "features off by one": Mutant(eagle.feature_off_by_one, {"eagle": table("eagle")}),
    "slots of the last growth seen": Mutant(
        eagle.scratch_rows_seen, {"eagle": table("eagle"), "device": on_device("eagle")}
    ),
    "siblings seen in growth": Mutant(eagle.siblings_seen, {"eagle": table("eagle")}),
    "growth one position late": Mutant(eagle.growth_one_position_late, {"eagle": table("eagle")}),
    "features normed twice": Mutant(eagle.normed_twice, {"eagle": table("eagle")}),
    "d2t left out": Mutant(eagle.d2t_left_out, {"eagle": table("eagle")}, ("llama",)),
    "waiting rows of who left": Mutant(eagle.rows_of_who_left_kept, {"eagle": table("eagle")}),
    "layers joined in another order": Mutant(
        eagle3.layers_in_another_order, {"eagle3": table("eagle3")}, TAPPED
    ),
    "joined rows of the pass before": Mutant(
        eagle3.rows_of_the_pass_before, {"eagle3": table("eagle3")}, TAPPED
    ),
    "joined rows of another sequence": Mutant(
        eagle3.first_rows_of_a_pass, {"eagle3": table("eagle3")}, TAPPED
    ),
    "rows that were not joined": Mutant(eagle3.last_rows_alone, {"eagle3": table("eagle3")}, TAPPED),
    "rows after a trunk of the pass before": Mutant(
        eagle3.trunk_rows_of_the_last_pass, {"eagle3": table("eagle3")}, TAPPED
    ),
    "eagle3: features off by one": Mutant(eagle.feature_off_by_one, {"eagle3": table("eagle3")}, TAPPED),
    "eagle3: growth one position late": Mutant(
        eagle.growth_one_position_late, {"eagle3": table("eagle3")}, TAPPED
    ),
    "eagle3: one axis of positions": Mutant(
        eagle.one_axis_of_positions, {"eagle3": table("eagle3")}, ("qwen2.5-vl", "qwen3-vl")
    ),
    "eagle: one axis of positions": Mutant(
        eagle.one_axis_of_positions, {"eagle": table("eagle")}, ("qwen2-vl",)
    ),
    "eagle: text behind pictures counts slots": Mutant(
        eagle.text_counts_slots, {"eagle": table("eagle")}, ("qwen2-vl",)
    ),
    "eagle: chains on a device count slots": Mutant(
        eagle.chains_count_slots, {"drafts": same_drafts}, ("qwen2-vl",)
    ),
    "no global feature": Mutant(vispec.no_global_feature, {"vispec": table("vispec")}, SEES),
    "no global feature in prompts": Mutant(
        vispec.no_global_feature_in_prompts, {"vispec": table("vispec")}, SEES
    ),
    "picture's tokens at its first positions": Mutant(
        vispec.tokens_at_first_positions, {"several": several_pictures}, SEES
    ),
    "picture's tokens taken for text": Mutant(
        vispec.tokens_taken_for_text, {"vispec": table("vispec")}, SEES
    ),
    "picture's pairs left in": Mutant(vispec.pictures_left_in, {"several": several_pictures}, SEES),
    "gaps behind pictures closed": Mutant(vispec.gaps_closed, {"several": several_pictures}, SEES),
    "global feature of who left": Mutant(vispec.global_feature_of_another, {"vispec": table("vispec")}, SEES),
    "stale picture after a second turn": Mutant(
        vispec.stale_picture, {"conversation": turns_with_pictures}, SEES
    ),
    "pictures of earlier turns forgotten": Mutant(
        vispec.pictures_of_earlier_turns_forgotten, {"conversation": turns_with_pictures}, SEES
    ),
    "frames not averaged": Mutant(vispec.frames_not_averaged, {"video": a_video}, ("qwen2.5-vl",)),
    # Attention of an imitation network.
    **{
        f"attending: {name}": Mutant(plant, guards)
        for name, plant, guards in (
            ("prompt rows missing", attending.prompt_rows_missing, ATTENDING_GUARDS),
            ("prompt one slot late", attending.prompt_one_slot_late, ATTENDING_GUARDS),
            ("last draft missing", attending.last_draft_missing, ATTENDING_GUARDS),
            ("plain cycles missing", attending.plain_cycles_missing, ATTENDING_GUARDS),
            ("every cycle taken for drafted", attending.every_cycle_taken_for_drafted, ATTENDING_GUARDS),
            ("rejected rows seen", attending.rejected_rows_seen, ATTENDING_GUARDS),
            ("rejected rows kept", attending.rejected_rows_kept, ATTENDING_GUARDS),
            ("one position late", attending.one_position_late, ATTENDING_GUARDS),
            (
                "keys of the first sequence",
                attending.keys_of_the_first_sequence,
                {"together": attending_together},
            ),
            ("keys of who left", attending.keys_of_who_left, {"together": attending_together}),
            ("own rows left by growth", attending.own_rows_left_by_growth, {"alone": attending_alone}),
            ("rows of the pass before", attending.rows_of_the_pass_before, {"together": attending_together}),
            ("slots of the first step", attending.slots_of_the_first_step, {"device": attending_on_device}),
            ("masks of the first step", attending.masks_of_the_first_step, {"device": attending_on_device}),
        )
    },
    "growth without moving rows": Mutant(
        rows_left_over_by_growth,
        {"last positions": table("last_positions"), "growing device": growing("last_positions")},
    ),
    # An engine with a queue, and those who drive it.
    "missing synchronisation": Mutant(
        device.missing_synchronisation,
        {
            "device": on_device("one_token"),
            "growing device": growing("chain"),
            "generation": generation("early-exit", 3, engine="device"),
        },
        refused_by=(NumericsError, PromptError),
    ),
    "updated cache elsewhere": Mutant(
        device.updated_cache_elsewhere,
        {
            "device": on_device("one_token"),
            "growing device": growing("one_token"),
            "generation": generation("perfect", 3, engine="device"),
        },
    ),
    "keys and values swapped": Mutant(
        device.keys_and_values_swapped, {"device": on_device("one_token")}, refused_by=(ValueError,)
    ),
    "stale mask": Mutant(
        device.stale_mask,
        {
            "device": on_device("one_token"),
            "trunk and tail": on_device("trunk_and_tail"),
            "tree": on_device("tree"),
            "generation": generation("perfect", 3, engine="device"),
        },
    ),
    "write beyond the buffer": Mutant(
        device.write_beyond_the_buffer, {"last positions": on_device("last_positions")}
    ),
    "buffer too small": Mutant(
        device.buffer_too_small, {"device": on_device("last_positions")}, refused_by=(ValueError,)
    ),
    "staging memory reused": Mutant(
        device.staging_memory_reused,
        {
            "trunk and tail": on_device("trunk_and_tail"),
            "growing device": growing("trunk_and_tail"),
            "generation": generation("perfect", 3, engine="device"),
        },
    ),
    "upload reused": Mutant(
        device.upload_reused,
        {
            "draft": generation("early-exit", 3, engine="device"),
            "tree": generation("tree", 6, engine="device"),
        },
    ),
    "slots of the last pass": Mutant(
        device.slots_of_the_last_pass,
        {
            "draft": generation("early-exit", 3, engine="device"),
            "growing": generation("early-exit", 3, engine="growing-device"),
            "tree": generation("tree", 6, engine="device"),
        },
    ),
    "mask of the first step": Mutant(
        device.mask_of_the_first_step, {"draft": generation("early-exit", 3, engine="device")}
    ),
    "tokens not handed on": Mutant(device.tokens_not_handed_on, {"drafts": same_drafts}),
    "a layer reads its first draft again": Mutant(
        device.layer_reads_its_pending_token, {"drafts": same_drafts}, ("llama",)
    ),
    "a chain told in another order": Mutant(
        device.chain_told_in_another_order,
        {
            "eagle": generation("eagle", 3, engine="device"),
            "drafts": same_drafts,
        },
        ("llama",),
    ),
    "programs of other caches": Mutant(
        device.programs_of_other_caches, {"growing": long_requests}, ("llama",)
    ),
    "positions count slots": Mutant(
        device.positions_count_slots,
        {"draft": generation("early-exit", 3, engine="device")},
        ("qwen2.5-vl",),
    ),
    "caches not zeroed": Mutant(
        device.caches_not_zeroed,
        {"device": on_device("one_token"), "generation": generation("perfect", 3, engine="device")},
        refused_by=(NumericsError,),
    ),
    "context shared by two captured calls": Mutant(
        device.context_of_a_graph,
        {
            "draft": generation("early-exit", 3, engine="device"),
            "plain": generation("always-wrong", 0, engine="device"),
        },
    ),
    "NaN logits": Mutant(
        device.nan_logits,
        {"device": on_device("one_token"), "generation": generation("perfect", 3, engine="device")},
        refused_by=(NumericsError,),
    ),
    # Graphs that hand out new rows, and who appends them.
    "stale rows shown": Mutant(
        stale_rows_shown,
        {
            "portable": portable("crop_after_rejection"),
            "generation": generation("perfect", 3, engine="portable"),
        },
    ),
    "new rows seen by all": Mutant(
        new_rows_seen_by_all, {"portable": portable("chain"), "portable tree": portable("tree")}
    ),
    "rows appended too late": Mutant(
        rows_appended_too_late,
        {"portable": portable("one_token"), "generation": generation("early-exit", 3, engine="portable")},
    ),
    "numbers of who failed kept": Mutant(
        numbers_of_who_failed_kept, {"one ends": one_ends}, refused_by=(NumericsError,)
    ),
    "finite always true": Mutant(device.finite_always_true, {"not finite": not_finite}),
    "finite not asked": Mutant(device.finite_not_asked, {"not finite": not_finite}),
    "finite not asked in cycles": Mutant(device.finite_not_asked_in_cycles, {"not finite": not_finite}),
    # The engine that runs TensorRT plans.
    "plans: updated cache elsewhere": Mutant(
        plans.updated_cache_elsewhere, {"table": on_plans("one_token")}, refused_by=(ValueError,)
    ),
    "plans: aliases not compared": Mutant(plans.aliases_not_compared, {"table": on_plans("one_token")}),
    "plans: context of a graph": Mutant(
        plans.context_of_a_graph,
        {"table": on_plans("chain"), "draft": generation("early-exit", 3, engine="tensorrt")},
        refused_by=(NumericsError,),
    ),
    "plans: first profile always": Mutant(
        plans.first_profile_always,
        {"ragged": on_plans("ragged_batch")},
        refused_by=(DeviceError,),
    ),
    "plans: activations freed": Mutant(plans.activations_freed, {"longer prompt": longer_prompt}, ("llama",)),
    "plans: activations too small": Mutant(
        plans.activations_too_small, {"longer prompt": longer_prompt}, ("llama",)
    ),
    "plans: captured at once": Mutant(
        plans.captured_at_once, {"draft": generation("early-exit", 3, engine="tensorrt")}
    ),
    "plans: captured before it moved": Mutant(
        plans.captured_before_it_moved, {"longer prompt": longer_prompt}, ("llama",)
    ),
    "plans: NaN logits": Mutant(
        plans.nan_logits,
        {"table": on_plans("one_token"), "generation": generation("perfect", 3, engine="tensorrt")},
        refused_by=(NumericsError,),
    ),
    "plans: masks split once": Mutant(
        plans.masks_split_once, {"draft": generation("early-exit", 3, engine="tensorrt-portable")}
    ),
    "plans: rows in the other cache": Mutant(
        plans.rows_in_the_other_cache, {"draft": generation("early-exit", 3, engine="tensorrt-portable")}
    ),
    # Both engines on a GPU.
    "gpu: missing synchronisation": Mutant(
        gpu.missing_synchronisation,
        {
            "plans": on_plans("one_token"),
            "provider": on_cuda("one_token"),
            "plans' cycles": generation("early-exit", 3, engine="tensorrt"),
            "provider's cycles": generation("early-exit", 3, engine="cuda"),
        },
        refused_by=(NumericsError, PromptError),
    ),
    "gpu: wait forgotten": Mutant(
        gpu.wait_forgotten,
        {
            "plans' cycles": generation("early-exit", 3, engine="tensorrt"),
            "provider's cycles": generation("early-exit", 3, engine="cuda"),
        },
        refused_by=(NumericsError,),
    ),
    "gpu: staging memory reused": Mutant(
        gpu.staging_memory_reused, {"plans": on_plans("chain"), "provider": on_cuda("chain")}
    ),
    "gpu: upload reused": Mutant(
        gpu.upload_reused,
        {
            "plans' cycles": generation("early-exit", 3, engine="tensorrt"),
            "provider's cycles": generation("early-exit", 3, engine="cuda"),
        },
    ),
    "gpu: stale mask": Mutant(
        device.stale_mask,
        {"plans": on_plans("trunk_and_tail"), "provider": on_cuda("trunk_and_tail")},
        refused_by=(NumericsError,),
    ),
    "gpu: stale mask in cycles": Mutant(
        device.mask_of_the_first_step,
        {
            "plans' cycles": generation("early-exit", 3, engine="tensorrt"),
            "provider's cycles": generation("early-exit", 3, engine="cuda"),
        },
    ),
    "gpu: write beyond the cache": Mutant(
        device.write_beyond_the_buffer,
        {"plans": on_plans("last_positions"), "provider": on_cuda("last_positions")},
        refused_by=(DeviceError, RuntimeError),  # ONNX Runtime looks at slots itself on a CPU
    ),
    "gpu: write beyond the buffer": Mutant(
        gpu.memory_too_small, {"plans": on_plans("last_positions"), "provider": on_cuda("last_positions")}
    ),
    # The engine of ONNX Runtime's CUDA provider.
    "cuda: one number for all calls": Mutant(
        provider.one_number_for_all_calls,
        {"draft": generation("early-exit", 3, engine="cuda")},
        refused_by=(NumericsError, RuntimeError),  # ONNX Runtime looks at slots itself on a CPU
    ),
    "cuda: runs not excluded": Mutant(
        provider.runs_not_excluded,
        {"ragged": on_cuda("ragged_batch")},
        refused_by=(NumericsError,),
    ),
    "cuda: updated cache elsewhere": Mutant(
        provider.updated_cache_elsewhere,
        {"table": on_cuda("one_token"), "draft": generation("early-exit", 3, engine="cuda")},
    ),
    "cuda: NaN logits": Mutant(
        provider.nan_logits,
        {"table": on_cuda("one_token"), "generation": generation("perfect", 3, engine="cuda")},
        refused_by=(NumericsError,),
    ),
    # Logits that are changed where they lie.
    **{
        name: Mutant(plant, {"changed logits": changed_logits}, ("llama",))
        for name, plant in {
            "text not kept": device.text_not_kept,
            "text of another request": device.text_of_another_request,
            "path without tokens": device.path_without_tokens,
            "depth of the root": device.depth_of_the_root,
            "drafts at one place": device.drafts_at_one_place,
            "ends open early": device.ends_open_early,
            "ends open late": device.ends_open_late,
            "last tokens one place late": device.last_tokens_one_place_late,
            "n-grams of the prompt": device.ngrams_of_the_prompt,
            "n-grams one longer": device.ngrams_one_longer,
            "words by their last token": device.words_by_their_last_token,
            "words forgotten": device.words_forgotten,
        }.items()
    },
    "best of the row before": Mutant(
        device.best_of_the_row_before,
        {
            "generation": generation("perfect", 3, engine="device"),
            "tree": generation("tree", 6, engine="device"),
        },
    ),
}

CASES = [
    (name, family, guard)
    for name, mutant in MUTANTS.items()
    for family in mutant.families
    for guard in mutant.guards
]
ONCE = {
    (name, mutant.families[turn % len(mutant.families)], list(mutant.guards)[turn % len(mutant.guards)])
    for turn, (name, mutant) in enumerate(MUTANTS.items())
}
"""One guard of each mutant, families and guards in turn: what every run tries; `make test-all` has the product."""


@fast(("mutant", "family", "guard"), CASES, ONCE)
def test_mutant_is_killed(rigs: Callable, monkeypatch: Patch, mutant: str, family: str, guard: str) -> None:
    with monkeypatch.context() as patch:
        MUTANTS[mutant].plant(patch)
        with pytest.raises((AssertionError, *MUTANTS[mutant].refused_by)):
            MUTANTS[mutant].guards[guard](rigs, family)


GUARDS = sorted({(family, guard) for _, family, guard in CASES})
GUARDS_ONCE = {(family, guard) for _, family, guard in ONCE}


@fast(("family", "guard"), GUARDS, GUARDS_ONCE)
def test_guards_pass_without_a_mutant(rigs: Callable, family: str, guard: str) -> None:
    meant = [m.guards[guard] for m in MUTANTS.values() if family in m.families and guard in m.guards]
    for each in dict.fromkeys(meant):
        each(rigs, family)
