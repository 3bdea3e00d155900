"""Errors of an engine with a queue, and of those who drive it, planted in the real code or in the recording device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.common.errors import NumericsError
from vlmexport.runtime.decoder.device import logits_processors
from vlmexport.runtime.decoder.device.logits_processors import DeviceLogitsProcessors
from vlmexport.runtime.decoder.device_cycle import OnDevice
from vlmexport.runtime.decoder.device_passes import DevicePasses
from vlmexport.runtime.decoder.embedding import Embedding
from vlmexport.runtime.decoder.forward_passes import ForwardPasses
from vlmexport.runtime.decoder.kv_cache import KVArena
from vlmexport.runtime.decoder.logits import ArgmaxResult, TargetLogits
from vlmexport.runtime.decoder.positions import Positions
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.eagle.layer_pass import EaglePass
from vlmexport.runtime.engines.base import DTYPES, View
from vlmexport.runtime.engines.buffers import HostBuffer
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu
from vlmexport.runtime.graphs.text_layout import CONTEXT

from tests.support import lossless
from tests.support.engines import memory, recording_device
from tests.support.engines.recording_device import RecordingDevice
from tests.support.engines.stream import Context
from tests.support.rig import Rig

Patch = pytest.MonkeyPatch


def not_finite(rig: Rig) -> None:
    """A number that leaves its range ends the request in the same cycle, whoever drafts; here a key of the first row
    turns to NaN. On a device two of these are whole cycles."""
    request = rig.request(71)
    truth, cycle = rig.oracle.greedy(request, 12), lossless.Cycle.run

    # Of the first layer that attends: a convolution reads the last rows alone.
    layers = rig.decoder.arena.layers
    attending = next(number for number, own in enumerate(layers) if "key_cache" in own)

    def damaged(self: Any) -> Any:
        for view in rig.decoder.arena.view(attending):
            values = np.array(rig.engine.read(view))
            values[0, 0, 0] = np.nan
            rig.engine.write(view, values)
        tokens = cycle(self)
        assert self.sequences[0].error is not None, "nobody noticed that logits are not finite"
        return tokens

    for draft, length in (("perfect", 3), ("early-exit", 3), ("perfect", 0)):
        proposer = lossless.DRAFTS[draft](rig, truth)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lossless.Cycle, "run", damaged)
            with pytest.raises(NumericsError):
                lossless.generate(rig, request, 12, proposer=proposer, length=length)


def layered(rig: Rig) -> list[str]:
    """Drafts with graphs of their own that a device runs before it verifies."""
    drafts = ("draft-and-verify", "medusa", "eagle", "eagle3", "vispec")
    return [
        draft
        for draft in drafts
        if lossless.fits(rig.tiny.name, draft) and lossless.runs_on(rig.column, draft)
    ]


def same_drafts(rig: Rig) -> None:
    """Whole cycles on a device draft and accept what the host does step by step."""
    for draft in ("early-exit", "imitation", *layered(rig)):
        same_drafts_of(rig, draft)


def same_drafts_of(rig: Rig, draft: str) -> None:
    """The same for one draft."""
    request, runs = rig.request(72), []
    drafted: list[list[list[int]]] = []
    tell = lossless.Cycle._tell

    def noted(self: Any, sequence: Any, tree: Any, verdict: Any) -> Any:
        drafted[-1].append(list(map(int, tree.tokens)))
        return tell(self, sequence, tree, verdict)

    for steps in (False, True):
        drafted.append([])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lossless.Cycle, "_tell", noted)
            if steps:
                patch.setattr(lossless.Cycle, "_stays_on_device", lambda self, budgets: False)
            runs.append(
                lossless.generate(rig, request, 40, proposer=lossless.DRAFTS[draft](rig, ()), length=3)
            )
    counts = [(run.stats.cycles, run.stats.proposed, run.stats.accepted) for run in runs]
    assert runs[0].tokens == runs[1].tokens and counts[0] == counts[1], (draft, counts)
    assert drafted[0] == drafted[1], draft


@dataclass(frozen=True)
class Asked:
    """What a model's configuration asks of a request, and what ends it."""

    info: GenerationInfo
    eos: tuple[int, ...] = ()


def changing(plain: tuple[int, ...], vocabulary: int) -> list[Asked]:
    """Requests whose output is another than `plain`, which nothing changes."""
    few, late = plain[:10], (plain[3], plain[5])
    # Of few tokens n-grams come again soon.
    narrow, narrower = ([token for token in range(vocabulary) if token not in few[:n]] for n in (10, 3))
    return [
        Asked(GenerationInfo(repetition_penalty=1.7)),
        Asked(GenerationInfo(repetition_penalty=1.3, suppress_tokens=[plain[2], plain[9]])),
        Asked(GenerationInfo(bad_words_ids=[[plain[0]], [plain[4]]])),
        Asked(GenerationInfo(no_repeat_ngram_size=2, suppress_tokens=narrow)),
        Asked(GenerationInfo(bad_words_ids=[list(plain[3:5]), list(plain[7:11])])),
        Asked(GenerationInfo(min_new_tokens=11), late),
        Asked(GenerationInfo(no_repeat_ngram_size=4, suppress_tokens=narrower)),
        Asked(
            GenerationInfo(
                repetition_penalty=1.2, no_repeat_ngram_size=3, suppress_tokens=narrow, min_new_tokens=20,
                bad_words_ids=[list(pair) for pair in zip(few, few[3:], strict=False)],
            ),
            late,
        ),
    ]  # fmt: skip


def changed_logits(rig: Rig, host: Rig, every: int = 3, made: dict[str, Any] | None = None) -> None:
    """Repetition penalty, tokens, words and n-grams that never come, ends that are held back: a device says what the host
    would choose, whichever request came before. Each draft takes one request of `every`, each request some draft. `made`: drafts
    of the bundle that were made before, to be gone on with."""
    made = {} if made is None else made
    requests = [rig.request(seed) for seed in (54, 55)]
    plain = host.oracle.greedy(requests[0], 30)
    asked = changing(plain, host.manifest.text.vocab_size)
    said = [lossless.generate(host, requests[0], 30, asked=ask.info, eos=ask.eos).tokens for ask in asked]
    assert len({*said, plain}) == len(asked) + 1, "every one must change the output"
    drafts = [("early-exit", 3), ("tree", 5), ("prompt-lookup", 4), (None, 0)]
    drafts += [("imitation", 5), *((draft, 3) for draft in layered(rig))]
    truths: dict[tuple[int, int], Any] = {}
    for place, (draft, length) in enumerate(drafts):
        for number, ask in enumerate(asked):
            if (number + place) % every:
                continue
            which = (place + number // every) % 2
            request = requests[which]
            if (number, which) not in truths:
                truths[number, which] = lossless.generate(host, request, 30, asked=ask.info, eos=ask.eos)
            truth = truths[number, which]
            proposer = None if draft is None else made.get(draft) or lossless.DRAFTS[draft](rig, truth.tokens)
            if draft in lossless.SHARED:
                made[draft] = proposer
            run = lossless.generate(
                rig, request, 30, proposer=proposer, length=length, asked=ask.info, eos=ask.eos
            )
            assert (run.tokens, run.reason) == (truth.tokens, truth.reason), (draft, ask)


def missing_synchronisation(patch: Patch) -> None:
    """Results are fetched while the work is still in the queue."""

    def early(self: Any, view: View) -> np.ndarray:
        values = self.memory.array(view).copy()
        self.stream.synchronise()
        return values

    patch.setattr(RecordingDevice, "read", early)


def updated_cache_elsewhere(patch: Patch) -> None:
    """The engine computes new values of a cache into memory of its own."""
    bind = OnnxRuntimeCpu._bind

    def wrong(self: Any, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Any:
        moved = dict(outputs)
        for name, view in outputs.items():
            if name.startswith("updated_value_cache."):
                moved[name] = memory.allocate(name, view.nbytes, True).view(view.shape, view.dtype)
        return bind(self, graph, inputs, moved)

    patch.setattr(OnnxRuntimeCpu, "_bind", wrong)


def keys_and_values_swapped(patch: Patch) -> None:
    """The runtime binds an updated cache at another's address."""
    bindings = KVArena.bindings

    def wrong(self: Any, *args: Any) -> Any:
        inputs, outputs = bindings(self, *args)
        swap = {"updated_key_cache": "updated_value_cache", "updated_value_cache": "updated_key_cache"}
        return inputs, {
            f"{swap[name.split('.')[0]]}.{name.split('.')[1]}": view for name, view in outputs.items()
        }

    patch.setattr(KVArena, "bindings", wrong)


def stale_mask(patch: Patch) -> None:
    """A mask reaches the device only the first time that its shape is used."""
    push, seen = HostBuffer.push, set()

    def wrong(self: Any, shape: tuple[int, ...]) -> None:
        if self.buffer.name == "attn_mask":
            if (self.buffer.address, shape) in seen:
                return
            seen.add((self.buffer.address, shape))
        push(self, shape)

    patch.setattr(HostBuffer, "push", wrong)


def write_beyond_the_buffer(patch: Patch) -> None:
    """The pass that fills the last row of the cache writes one further."""
    launch = ForwardPasses._launch

    def wrong(self: Any, forward_pass: Any) -> None:
        indices = forward_pass.indices
        indices[indices + forward_pass.width == self.arena.capacity] += 1
        launch(self, forward_pass)

    patch.setattr(ForwardPasses, "_launch", wrong)


def buffer_too_small(patch: Patch) -> None:
    """Masks get less memory than they take."""
    allocate = RecordingDevice.allocate

    def wrong(self: Any, name: str, nbytes: int, zeroed: bool = False) -> Any:
        return allocate(self, name, nbytes // 64 if name == "attn_mask" else nbytes, zeroed)

    patch.setattr(RecordingDevice, "allocate", wrong)


def staging_memory_reused(patch: Patch) -> None:
    """The host prepares the next pass in memory that the device has not fetched yet."""

    def wrong(self: Any, shape: tuple[int, ...]) -> None:
        self._engine.write(self.view(shape), self.host(shape))

    patch.setattr(HostBuffer, "push", wrong)


def caches_not_zeroed(patch: Patch) -> None:
    """A cache starts with whatever was in its memory."""
    allocate = RecordingDevice.allocate
    patch.setattr(
        RecordingDevice, "allocate", lambda self, name, nbytes, zeroed=False: allocate(self, name, nbytes)
    )


def context_of_a_graph(patch: Patch) -> None:
    """All calls of one graph share an execution context, captured ones too."""
    contexts: dict[Any, Context] = {}
    patch.setattr(
        RecordingDevice,
        "_context",
        lambda self, graph, key: contexts.setdefault((id(self), graph), Context(graph)),
    )


def nan_logits(patch: Patch) -> None:
    """Every fourth call of the head gives NaN for one token of its first row."""
    judge, calls = recording_device._Call._judge, []

    def wrong(self: Any) -> None:
        calls.append(self)
        if len(calls) % 4 == 0:
            self._value("logits")[0, 5] = np.nan
        judge(self)

    patch.setattr(recording_device._Call, "_judge", wrong)


def finite_always_true(patch: Patch) -> None:
    """The device's flag does not look."""
    judge = recording_device._Call._judge

    def wrong(self: Any) -> None:
        judge(self)
        self._value("finite")[...] = True

    patch.setattr(recording_device._Call, "_judge", wrong)


def finite_not_asked(patch: Patch) -> None:
    """The runtime takes the device's best token without asking whether it is one."""
    patch.setattr(TargetLogits, "check", lambda self, row: None)


def finite_not_asked_in_cycles(patch: Patch) -> None:
    """Of a cycle on the device the best tokens are taken without asking whether they are any."""
    patch.setattr(ArgmaxResult, "best", lambda self, row: self._best[row])


def upload_reused(patch: Patch) -> None:
    """The host prepares the next cycle in memory that the device has not fetched yet."""
    launch = recording_device._Captured.launch

    def wrong(self: Any) -> None:
        launch(self)
        self.upload[:8] ^= 1

    patch.setattr(recording_device._Captured, "launch", wrong)


def slots_of_the_last_pass(patch: Patch) -> None:
    """Passes of a cycle write where the one before the cycle wrote."""
    bind = DevicePasses.bind

    def wrong(self: Any, forward_pass: Any, *args: Any) -> list[Any]:
        mask, _slots, *calls = bind(self, forward_pass, *args)
        return [mask, *calls]

    patch.setattr(DevicePasses, "bind", wrong)


def mask_of_the_first_step(patch: Patch) -> None:
    """Every drafted token sees what the pending one sees."""
    bind = DevicePasses.bind

    def wrong(self: Any, forward_pass: Any, up: Any, number: int, nodes: Any) -> list[Any]:
        mask = bind(self, forward_pass, up, 0, nodes)[0]
        return [mask, *bind(self, forward_pass, up, number, nodes)[1:]]

    patch.setattr(DevicePasses, "bind", wrong)


def tokens_not_handed_on(patch: Patch) -> None:
    """Every step of a draft reads the pending token."""
    bind, pending = Embedding.bind, {}

    def wrong(self: Any, tokens: View) -> Any:
        first = pending.setdefault(id(self), tokens) if tokens.shape == (1, 1) else tokens
        return bind(self, first if "tokens" in tokens.buffer.name else tokens)

    patch.setattr(Embedding, "bind", wrong)


def positions_count_slots(patch: Patch) -> None:
    """Positions behind a picture go on with its number of rows, whatever its sides."""
    patch.setattr(Positions, "of_slot", lambda self, slot, batch_index=0: slot)


def text_not_kept(patch: Patch) -> None:
    """A device forgets after every cycle which tokens that one brought."""
    patch.setattr(
        DeviceLogitsProcessors, "keep", lambda self: self._engine.copy(self._now, self._kept["said"])
    )


def text_of_another_request(patch: Patch) -> None:
    """A request finds the text of the one before it."""
    begin = DeviceLogitsProcessors.begin

    def wrong(self: Any, changes: Any) -> Any:
        if self._known is not None:
            self._known = changes, len(changes.history)
        return begin(self, changes)

    patch.setattr(DeviceLogitsProcessors, "begin", wrong)


def _nodes(patch: Patch, name: str, value: Any) -> None:
    """A graph that changes logits is told `value` of everything that it asks about the nodes by `name`."""
    call = DeviceLogitsProcessors.call

    def wrong(self: Any, graph: str, sent: Any, nodes: Any, best: View) -> Any:
        right = nodes[name]
        array = np.full(right.shape, value, DTYPES[right.dtype])
        return call(self, graph, sent, nodes | {name: self._engine.constant("wrong", array)}, best)

    patch.setattr(DeviceLogitsProcessors, "call", wrong)


def path_without_tokens(patch: Patch) -> None:
    """A drafted token is judged by what was emitted, not by the drafts before it."""
    _nodes(patch, "ancestors", False)


def depth_of_the_root(patch: Patch) -> None:
    """What may follow a drafted token is looked up behind the pending one."""
    _nodes(patch, "depths", 0)


def drafts_at_one_place(patch: Patch) -> None:
    """The drafts of a path lie at the place of the last emitted token."""
    _nodes(patch, "token_depths", 0)


def _of_cycle(patch: Patch, name: str, change: Any) -> None:
    made = logits_processors.of_cycle

    def wrong(*args: Any) -> Any:
        found = made(*args)
        return found | {name: change(found[name])}

    patch.setattr(logits_processors, "of_cycle", wrong)


def ends_open_early(patch: Patch) -> None:
    """An end may come one token before the least length is reached."""
    _of_cycle(patch, "held", lambda held: held - 1)


def ends_open_late(patch: Patch) -> None:
    """An end may come one token after the least length is reached."""
    _of_cycle(patch, "held", lambda held: held + 1)


def last_tokens_one_place_late(patch: Patch) -> None:
    """The last tokens of a text are written one place behind their own."""
    _of_cycle(patch, "recent", lambda recent: np.roll(recent, 1))


def _needed(patch: Patch, change: Any) -> None:
    made = logits_processors.of_request

    def wrong(changes: Any, layout: Any, vocabulary: int) -> Any:
        found = made(changes, layout, vocabulary)
        change(found["needed"], changes, layout)
        return found

    patch.setattr(logits_processors, "of_request", wrong)


def ngrams_of_the_prompt(patch: Patch) -> None:
    """Only what the prompt says may not come twice."""

    def change(needed: Any, changes: Any, layout: Any) -> None:
        needed[len(changes.history) : layout.room] = logits_processors.NEVER

    _needed(patch, change)


def ngrams_one_longer(patch: Patch) -> None:
    """An n-gram may come twice, one that is a token longer may not."""
    _needed(
        patch, lambda needed, changes, layout: np.add(needed, needed < CONTEXT, out=needed, casting="unsafe")
    )


def words_by_their_last_token(patch: Patch) -> None:
    """The last token of a word that must not come never comes."""

    def change(needed: Any, changes: Any, layout: Any) -> None:
        words = needed[layout.room :]
        words[words < logits_processors.NEVER] = 0

    _needed(patch, change)


def words_forgotten(patch: Patch) -> None:
    """Words of several tokens may come."""

    def change(needed: Any, changes: Any, layout: Any) -> None:
        needed[layout.room :] = logits_processors.NEVER

    _needed(patch, change)


def layer_reads_its_pending_token(patch: Patch) -> None:
    """Every pass of a layer that a device repeats reads the token behind the first pair, not what the pass before drafted."""
    call, began = EaglePass._call, {}

    def wrong(self: Any, inputs: dict[str, View], *rest: Any) -> Any:
        read = inputs["next_ids"]
        if read.buffer in (self._ids, self._others):
            first = began[self]
            inputs["next_ids"] = first.buffer.view((1, 1), first.dtype, first.offset)
        else:
            began[self] = read
        return call(self, inputs, *rest)

    patch.setattr(EaglePass, "_call", wrong)


def chain_told_in_another_order(patch: Patch) -> None:
    """The host hears of a drafted chain in another order than the target saw it."""
    verify = OnDevice.verify_drafted

    def wrong(self: Any, *args: Any) -> Any:
        found = verify(self, *args)
        root, *tokens = found.tree.tokens
        found.tree = TokenTree.chain([root, *reversed(tokens)])
        return found

    patch.setattr(OnDevice, "verify_drafted", wrong)


def programs_of_other_caches(patch: Patch) -> None:
    """Programs that were made for caches of another length are launched."""
    program = OnDevice._program

    def wrong(self: Any, key: Any, make: Any) -> Any:
        for programs in self._programs.values():
            if key in programs:
                return programs[key]
        return program(self, key, make)

    patch.setattr(OnDevice, "_program", wrong)


def best_of_the_row_before(patch: Patch) -> None:
    """The device's best tokens are one row off."""
    judge = recording_device._Call._judge

    def wrong(self: Any) -> None:
        judge(self)
        self._value("best")[...] = np.roll(self._value("best"), 1)

    patch.setattr(recording_device._Call, "_judge", wrong)
