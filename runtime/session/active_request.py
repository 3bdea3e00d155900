"""A request while it is decoded: from prompt to slots of the cache, and from tokens to text."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ..common.errors import NumericsError, PromptError, PromptTooLongError
from ..decoder.decoder import Decoder
from ..decoder.prefill import Prefill
from ..drafts.memory.answers import tokenizer_checksum
from ..families.base import Prepared, View
from ..sampling.draft_sampling import DraftSampling
from ..sampling.logits_processors import Processors
from ..speculative.proposer import Picture
from ..speculative.sequence import Sequence, SequenceLimits
from ..speedup.stats import Stats, lossy_ways
from ..text.incremental import IncrementalDetokenizer
from .picture_cache import PictureCache, embeds_of
from .result import Result

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from ..bundle.manifest import Manifest
    from ..speculative.proposer import Proposer
    from .request import Settings


@dataclass(frozen=True)
class Delivery:
    """How a request came, and how its text leaves. Not `streamed`: as a whole, by `ActiveRequest.last`."""

    begin: float
    """When it came (`time.perf_counter`)."""
    cancelled: Callable[[], bool]
    streamed: bool = True
    unended: list[ActiveRequest] = field(default_factory=list)
    """Holds it for as long as its draft knows it."""
    pictures: PictureCache = field(default_factory=lambda: PictureCache(0))
    """What the tower has seen."""


class ActiveRequest:
    """One request in the decoder's batch: `prefill` puts it there.

    `start`, `take` and `last` hand out text, `close` gives the result.
    """

    def __init__(
        self,
        bundle: Bundle,
        decoder: Decoder,
        prepared: Prepared,
        settings: Settings,
        proposer: Proposer | None,
        delivery: Delivery,
        reused: int = 0,
    ):
        """`prepared` goes to the next place of the batch. `reused`: so many of its positions are cached already."""
        begin = delivery.begin
        self._decoder, self._begin, self._manifest = decoder, begin, bundle.manifest
        self._generation = bundle.manifest.generation
        if settings.repetition_penalty is not None:
            self._generation = replace(self._generation, repetition_penalty=settings.repetition_penalty)
        self._parts: list[str] = []
        deadline = None if settings.deadline is None else begin + settings.deadline
        self.sequence = Sequence(
            [],
            SequenceLimits(settings.max_new_tokens, settings.eos, deadline, delivery.cancelled),
            Stats(
                prompt_tokens=len(prepared.token_ids),
                reused_tokens=reused,
                draft=None if settings.draft is None else settings.draft.name,
                draft_length=settings.draft_length,
                forced=settings.forced is not None,
                similar_pictures=sum(view.similar for view in prepared.views),
                lossy=lossy_ways(
                    [
                        *(["typical"] if settings.typical is not None else []),
                        *("similar" for view in prepared.views if view.similar),
                    ]
                ),
            ),
            settings.sampling,
            proposer,
            settings.policy,
            force_acceptance=settings.forced,
            typical=settings.typical,
            drawing=None
            if settings.draft_sampling == "match"
            else DraftSampling(settings.draft_sampling == "auto"),
            batch_index=decoder.arena.max_batch,  # none yet
            memory=settings.memory,
            grammar=settings.grammar,
            logprobs=settings.logprobs,
        )
        self._text = IncrementalDetokenizer(bundle.tokenizer, settings.stop)
        # Nobody asks after every token whether its text is certain: decoding once costs a tenth of it.
        self._push = self._text.push if delivery.streamed or settings.stop else self._text.hold
        self._unended, self._pictures = delivery.unended, delivery.pictures
        self._unended.append(self)
        self._prepared, self._reused, self._first = prepared, reused, -1
        self.next_part = "picture" if prepared.views else "encoder"
        """What `prefill` does next: "picture", "encoder" (the encoder, or embeddings and the first chunk) or "chunk"."""

    def prefill(self) -> Iterator[None]:
        """Everything up to the first token: yields between its parts, which are the pictures, the encoder and chunks of the
        prompt. Its sequence is staged then (`Decoder.stage`), so that those before it may go through cycles and leave.

        Raises `PromptError` for a prompt that does not fit, `NumericsError` for logits that are not finite; the batch
        is then as before, and so it is when the iterator is closed before its end.
        """
        decoder, sequence = self._decoder, self.sequence
        try:
            for placed, following in self._parts_of_prefill():
                self.next_part = following
                if not placed:
                    yield
                    continue
                decoder.stage()
                try:
                    yield
                finally:
                    sequence.batch_index = decoder.unstage()
        except BaseException as error:
            self.end_proposer()
            if decoder.batch > sequence.batch_index:
                if isinstance(error, NumericsError):
                    decoder.clear(sequence.batch_index)
                decoder.remove(sequence.batch_index)
            raise

    def start(self) -> Iterator[str]:
        """The text of the first token, which prefill gave."""
        self.sequence.stats.time_to_first_token = time.perf_counter() - self._begin
        return self.take([self._first])

    def take(self, tokens: list[int]) -> Iterator[str]:
        """Emit the tokens of a cycle; pieces of text, each as soon as it is certain."""
        sequence, text = self.sequence, self._text
        for token in sequence.emit(tokens):
            piece = self._push(token)
            if text.stopped:
                sequence.stop("stop")  # also when the end token or the limit came with it
            if piece:
                self._parts.append(piece)
                yield piece

    def last(self) -> Iterator[str]:
        """The text that was held back, once the sequence has ended."""
        rest = self._text.finish()
        if self._text.stopped:  # also when the held-back end completed a stop string
            self.sequence.stop("stop")
        if rest:
            self._parts.append(rest)
            yield rest

    def close(self, whole: bool = True) -> Result:
        """Counters are final; the place in the batch is the caller's to free. Not `whole`: an exception ended a cycle."""
        sequence = self.sequence
        self.end_proposer()
        sequence.stats.total_seconds = time.perf_counter() - self._begin
        sequence.finish(whole)
        assert sequence.finish_reason is not None
        if sequence.memory is not None and sequence.error is None:
            sequence.memory.remember(sequence.tokens, tokenizer_checksum(self._manifest))
        text, parse = "".join(self._parts), sequence.grammar and sequence.grammar.parse
        noted = sequence.logprobs and sequence.logprobs.entries
        return Result(text, sequence.tokens, sequence.finish_reason, sequence.stats, parse, noted)

    def end_proposer(self) -> None:
        """The draft forgets the request. Again: does nothing."""
        if self not in self._unended:
            return
        if self.sequence.proposer is not None:
            self.sequence.proposer.end(self.sequence)
        self._unended.remove(self)

    def _parts_of_prefill(self) -> Iterator[tuple[bool, str]]:
        """Everything up to the first token; yields after a part whether the sequence has a place by then, and what is next."""
        decoder, sequence, proposer = self._decoder, self.sequence, self.sequence.proposer
        prepared, reused = self._prepared, self._reused
        manifest, seconds, ids = decoder.manifest, sequence.stats.seconds, prepared.token_ids
        if len(ids) == 0:
            raise PromptError("the prompt is empty; give at least one token")
        crosses = manifest.decoder.cross_attention
        views, image_positions = prepared.views, prepared.image_positions
        if reused and image_positions is not None:
            ends = np.cumsum([view.num_embeds for view in views])
            views = [
                view for view, end in zip(views, ends, strict=True) if end > np.sum(image_positions < reused)
            ]
            image_positions = image_positions[image_positions >= reused] - reused
        embeds: list[np.ndarray] = []
        sequence.stats.reused_pictures = len(prepared.views) - len(views)
        for left, view in zip(range(len(views) - 1, -1, -1), views, strict=True):
            embeds.append((yield from self._see(view)))
            yield False, "picture" if left else "encoder"
        start = time.perf_counter()
        image_embeds = None if not embeds else embeds[0] if len(embeds) == 1 else np.concatenate(embeds)
        # Of an encoder-decoder all of the prompt is kept or nothing, and nothing of the decoder's own slots.
        sequence.batch_index = decoder.resume(0 if crosses else reused) if reused else decoder.add()
        if crosses:
            if not reused:
                decoder.encode(sequence.batch_index, decoder.embed(ids, image_embeds, image_positions))
            ids = decoder_ids(manifest, prepared)
            hidden_states = decoder.embed(ids)
        elif len(ids) > decoder.max_length:
            raise PromptTooLongError(
                f"the prompt takes {len(ids)} positions, the session holds {decoder.max_length}"
            )
        else:
            hidden_states = decoder.embed(ids[reused:], image_embeds, image_positions)
            if prepared.image_positions is not None:
                sequence.barred = frozenset(ids[prepared.image_positions].tolist())
        sequence.prompt_ids, sequence.prompt_positions = ids.tolist(), prepared.positions
        sequence.processors = Processors.from_info(
            self._generation, manifest.text.eos_token_ids, sequence.prompt_ids, sequence.grammar
        )
        seconds.encoder = time.perf_counter() - start
        if crosses:
            yield True, "chunk"
        start = time.perf_counter()
        on_hidden_states = None
        if proposer is not None and proposer.needs_pictures:
            size = (
                manifest.decoder.hidden_size
            )  # what enters the decoder, without what is added behind later layers
            entering = None if image_embeds is None else image_embeds[:, :size]
            proposer.on_pictures(sequence, pictures_of(views, image_positions, entering, reused))
        if proposer is not None and proposer.needs_prompt_hidden:
            on_hidden_states = lambda slot, part: proposer.on_hidden_states(sequence, slot, part)  # noqa: E731
        prefill = Prefill(
            decoder,
            hidden_states,
            sequence.batch_index,
            prepared.positions,
            on_hidden_states,
            prepared.blocks,
        )
        while (logits := prefill.step()) is None:
            seconds.prefill += time.perf_counter() - start
            yield True, "chunk"
            start, prefill.batch_index = time.perf_counter(), sequence.batch_index
        if proposer is not None:
            proposer.begin(sequence)
        sequence.limits.max_new_tokens = min(
            sequence.limits.max_new_tokens,
            decoder.max_length - decoder.arena.lengths[sequence.batch_index] + 1,
        )
        self._first = sequence.choose_first(logits)
        seconds.prefill += time.perf_counter() - start

    def _see(self, view: View) -> Generator[tuple[bool, str], None, np.ndarray]:
        """Rows of a picture, which may stand in a prompt twice; the vision tower runs where nobody encoded it."""
        stats, start = self.sequence.stats, time.perf_counter()
        known = self._pictures.recall(view)
        if known.encoded is not None:
            stats.reused_pictures += 1
            return embeds_of(known)
        parts = self._pictures.encode_in_parts(self._decoder, known)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                stats.seconds.vision += time.perf_counter() - start
                return embeds_of(end.value)
            stats.seconds.vision += time.perf_counter() - start
            yield False, "picture"
            start = time.perf_counter()


def pictures_of(
    views: Iterable[View], image_positions: np.ndarray | None, image_embeds: np.ndarray | None, first: int = 0
) -> list[Picture]:
    """The pictures of a prompt whose embeddings are `image_embeds` [n, E], at `image_positions` int64 [n] behind its
    first `first` positions. One with text between its embeddings is several, one for each of its `spans`."""
    pictures, done = [], 0
    for view in views:
        assert image_positions is not None and image_embeds is not None
        frames = view.frames if len(view.spans) == 1 else 1
        for span in view.spans:
            embeds = image_embeds[done : done + span].reshape(frames, -1, image_embeds.shape[-1])
            pictures.append(Picture(first + int(image_positions[done]), embeds))
            done += span
    return pictures


def decoder_ids(manifest: Manifest, prepared: Prepared) -> np.ndarray:
    """int64 [n]: what stands before the first new token in the decoder. With cross-attention that is not the prompt."""
    if not manifest.decoder.cross_attention:
        return prepared.token_ids
    if prepared.decoder_ids is not None:
        return prepared.decoder_ids
    first = manifest.text.decoder_start_token_id
    return np.asarray([0 if first is None else first], np.int64)
