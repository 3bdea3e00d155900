"""The way in: load a bundle, then generate or stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from . import engines
from .bundle.folder import Bundle
from .decode.passes import Decoder
from .errors import OptionError, PromptError, VlmexportError
from .families import get_family
from .options import integer
from .request import RequestOptions, Settings, resolve
from .result import Result
from .speculate.cycle import Generation, Limits
from .speculate.policy import DraftPolicy
from .speculate.stats import Stats
from .text.incremental import IncrementalDetokenizer

INT64 = 2**63 - 1


class Stream:
    """Iterate for pieces of text, each as soon as it is certain; `result` is there when the iteration is over.

    `close` (or leaving the loop) ends the request; its finish reason is then `cancelled`.
    """

    def __init__(self, pieces: Callable[[list[Result]], Iterator[str]]):
        # The generator gets the list, not the stream: a cycle would keep a dropped stream's request running.
        self._found: list[Result] = []
        self._pieces = pieces(self._found)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the request now."""
        self._pieces.close()  # type: ignore[attr-defined]

    @property
    def result(self) -> Result:
        """The whole result. Raises `VlmexportError` while the stream is still running."""
        if not self._found:
            raise VlmexportError("the stream is not finished; iterate it to its end, or close it, first")
        return self._found[0]


class Session:
    """One bundle on one device: weights, K/V arena, buffers. Construct with `Session.load`.

    A session serves one request at a time. A second request, from another thread or from inside a running stream,
    raises `VlmexportError` at once instead of waiting; load a second session (weights are then held twice) or queue.
    `cancel` may be called from any thread.
    """

    def __init__(self, bundle: Bundle, decoder: Decoder, threads: int | None):
        self.bundle, self.decoder, self.threads = bundle, decoder, threads
        self.max_length = decoder.max_length
        self.draft_pick: Callable[[np.ndarray], int] | None = None
        """Replaces how self-drafts choose tokens; for tests (`proposers.always_wrong`)."""
        self._family = get_family(bundle.manifest.model.family)
        self._busy = threading.Lock()
        self._cancelled = threading.Event()
        self._closed = False

    @classmethod
    def load(
        cls,
        bundle: Bundle | Path | str,
        device: str = "cpu",
        max_length: int | None = None,
        max_batch: int = 1,
        threads: int | None = None,
    ) -> Session:
        """Load a bundle. `max_length` (prompt and output positions) is at most the bundle's; `threads` is the size
        of the process's one thread pool, by default all cores, for small models only the caller's.

        Raises `BundleError`, `OptionError`.
        """
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        limits = bundle.manifest.limits
        if max_length is not None:
            max_length = integer("max_length (of this bundle)", max_length, 1, limits.max_length)
        max_batch = integer("max_batch (of this bundle)", max_batch, 1, limits.max_batch)
        engine = engines.create(bundle, device, threads)
        decoder = Decoder(engine, bundle.manifest, bundle.tensor, max_length, max_batch)
        session = cls(bundle, decoder, getattr(engine, "threads", threads))
        session._load_graphs()
        return session

    # --- requests ---

    def generate(
        self,
        image: Any = None,
        prompt: Any = None,
        *,
        max_new_tokens: int = 128,
        draft: str | None = None,
        speculative: bool = True,
        draft_length: int | None = None,
        confidence_threshold: float | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] | str = (),
        deadline: float | None = None,
        ignore_eos: bool = False,
        on_text: Callable[[str], object] | None = None,
        policy: DraftPolicy | None = None,
        force_acceptance: float | None = None,
    ) -> Result:
        """Caption an image or answer a prompt.

        `image`: path, PIL image, uint8 array [H, W, 3], or None. `prompt`: text, chat messages, or None for the
        bundle's default. `draft`: a draft of the bundle, by name or kind, or "none"; default: the bundle's policy.
        `temperature` 0 is greedy. `seed` None draws one when sampling. `deadline`: seconds from this call, checked
        between cycles. `on_text` receives each piece of text when it is certain. `force_acceptance` accepts drafts
        at this rate whatever they are: for timing only, the output is not text.
        Raises `InputError` for the request, `OptionError` for an option.
        """
        options = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "on_text", "image", "prompt")
        }
        if on_text is not None and not callable(on_text):
            raise OptionError(f"on_text: {on_text!r:.80} cannot be called")
        stream = self.stream(image, prompt, **options)
        try:
            for piece in stream:
                if on_text is not None:
                    on_text(piece)
        finally:
            stream.close()  # also when `on_text` raises: the session is free again at once
        return stream.result

    def stream(self, image: Any = None, prompt: Any = None, **options: Any) -> Stream:
        """Like `generate`, but hands out text while it is produced. Options are checked here, before any work."""
        settings = self._settings(options)

        def pieces(found: list[Result]) -> Iterator[str]:
            begin = time.perf_counter()
            prepared = self._family.prepare(self.bundle, image, prompt)  # type: ignore[arg-type]
            yield from self._run(found, prepared.token_ids, prepared.pixel_values, settings, begin)

        return Stream(self._guarded(pieces))

    def generate_tokens(self, token_ids: Sequence[int], **options: Any) -> Result:
        """Like `generate` for a prompt of token ids, special tokens included; no image, no chat template.

        Raises `PromptError` for ids outside the vocabulary.
        """
        settings = self._settings(options)
        if not isinstance(token_ids, list | tuple | range | np.ndarray):
            raise PromptError(f"token_ids: {token_ids!r:.80} is not a list of token ids")
        try:  # the decoder checks them against the vocabulary
            ids = np.asarray([integer("token_ids", token, 0, INT64) for token in token_ids], np.int64)
        except OptionError as error:
            raise PromptError(str(error)) from None

        def pieces(found: list[Result]) -> Iterator[str]:
            yield from self._run(found, ids, None, settings, time.perf_counter())

        stream = Stream(self._guarded(pieces))
        for _ in stream:
            pass
        return stream.result

    def cancel(self) -> None:
        """End the running request after its current cycle with finish reason `cancelled`. For any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """Free weights and buffers; a request that is still running ends as `cancelled` and frees them then.

        The session cannot be used afterwards. Closing twice does nothing.
        """
        self._closed = True
        self._cancelled.set()
        self._free_when_idle()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- private ---

    def _settings(self, options: dict[str, Any]) -> Settings:
        return resolve(RequestOptions(**options), self.bundle.manifest, self.draft_pick)

    def _free_when_idle(self) -> None:
        if not self._busy.acquire(blocking=False):
            return  # the running request calls again when it ends
        decoder, self.decoder = self.decoder, cast(Decoder, None)
        if decoder is not None and (close := getattr(decoder.engine, "close", None)) is not None:
            close()
        self._busy.release()

    def _load_graphs(self) -> None:
        """Load what the default request needs, so that the first one is not slower than the others."""
        manifest = self.bundle.manifest
        names = [
            *manifest.segments,
            "head",
            *(n for n in ("vision", "encoder", "cross_kv") if n in manifest.graphs),
        ]
        draft = manifest.draft(manifest.policy.draft) if manifest.policy.draft else None
        if draft is not None and manifest.policy.speculative:
            names.extend(draft.graphs.values())
        load = getattr(self.decoder.engine, "load", None)
        if load is not None:
            load(*names)

    def _guarded(
        self, pieces: Callable[[list[Result]], Iterator[str]]
    ) -> Callable[[list[Result]], Iterator[str]]:
        def run(found: list[Result]) -> Iterator[str]:
            if not self._busy.acquire(blocking=False):
                raise VlmexportError(
                    "this session is busy with another request; wait for it, close its stream, or load a second session"
                )
            try:
                self._cancelled.clear()
                if self._closed:
                    raise VlmexportError("this session is closed; load the bundle again")
                yield from pieces(found)
            finally:
                self._busy.release()
                if self._closed:
                    self._free_when_idle()

        return run

    def _run(
        self,
        found: list[Result],
        token_ids: np.ndarray,
        pixels: np.ndarray | None,
        settings: Settings,
        begin: float,
    ) -> Iterator[str]:
        stats = Stats(
            prompt_tokens=len(token_ids), draft=settings.draft_name, forced=settings.forced is not None
        )
        stats.draft_length = settings.draft_length
        logits = self._prefill(token_ids, pixels, stats)
        limit = min(settings.max_new_tokens, self.max_length - self.decoder.arena.lengths[0] + 1)
        deadline = None if settings.deadline is None else begin + settings.deadline
        generation = Generation(
            self.decoder,
            logits[0],
            Limits(limit, settings.eos, deadline, self._cancelled.is_set),
            stats,
            settings.proposer,
            settings.policy,
            settings.sampling,
            token_ids.tolist(),
            settings.forced,
        )
        text = IncrementalDetokenizer(self.bundle.tokenizer, settings.stop)
        parts: list[str] = []
        tokens = iter(generation)
        try:
            for token in tokens:
                if len(generation.tokens) == 1:
                    stats.time_to_first_token = time.perf_counter() - begin
                piece = text.push(token)
                if text.stopped:
                    generation.stop("stop")  # also when the end token or the limit came with it
                if piece:
                    parts.append(piece)
                    yield piece
            rest = text.finish()
            if text.stopped:  # also when the held-back end completed a stop string
                generation.stop("stop")
            if rest:
                parts.append(rest)
                yield rest
        finally:
            tokens.close()  # type: ignore[attr-defined]
            stats.total_seconds = time.perf_counter() - begin
            reason = generation.finish_reason or "cancelled"
            found.append(Result("".join(parts), generation.tokens, reason, stats))

    def _prefill(self, token_ids: np.ndarray, pixels: np.ndarray | None, stats: Stats) -> np.ndarray:
        decoder, manifest, seconds = self.decoder, self.bundle.manifest, stats.seconds
        if len(token_ids) == 0:
            raise PromptError("the prompt is empty; give at least one token")
        start = time.perf_counter()
        decoder.reset()
        image_rows = None if pixels is None else decoder.image_rows(pixels)
        vision = time.perf_counter()
        seconds.vision = vision - start
        rows = decoder.embed(token_ids, image_rows)
        if manifest.decoder.cross_attention:
            decoder.encode([rows])
            first = manifest.text.decoder_start_token_id
            rows = decoder.embed(np.asarray([0 if first is None else first], np.int64))
        elif len(rows) > self.max_length:
            raise PromptError(f"the prompt takes {len(rows)} positions, the session holds {self.max_length}")
        encoded = time.perf_counter()
        seconds.encoder = encoded - vision
        logits = decoder.prefill(rows)
        seconds.prefill = time.perf_counter() - encoded
        return logits
