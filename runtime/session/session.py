"""The way in: load a bundle, then generate or stream."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from .. import drafts as proposers
from .. import engines
from ..bundle.folder import Bundle, Check
from ..bundle.stored_costs import bundle_here
from ..common.errors import BusyError, InputError, NumericsError, OptionError, VlmexportError
from ..common.heap import trim_heap
from ..common.validation import integer
from ..decoder.decoder import Decoder
from ..drafts.memory.answers import Memory, tokenizer_checksum
from ..families import Prepared, get_family
from ..families.base import View, prepared_ids
from ..families.plain import PlainText
from ..policy.base import DraftPolicy
from ..speculative.proposer import Proposer
from .active_request import ActiveRequest, Delivery
from .batch import WaitingRequest, check_request, each_request, run_batch
from .controller import make_controller
from .conversation import Conversation
from .deprecated_options import verify_width_of, warn, with_verify_width
from .inputs import RequestInputs, in_colour_order, token_array
from .options import GenerateOptions
from .picture_cache import MIB, PictureCache
from .prefix_cache import CachedRequest
from .preload import load_graphs
from .request import Settings, resolve
from .request_options import RequestOptions, grammar_of, request_options
from .result import Result
from .stream import Stream, run_alone
from .widths import note_of, open_decoder, pads_up

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..engines.base import Engine

_CLOSED = "this session is closed; load the bundle again"
_Piece = TypeVar("_Piece")


class Session:
    """One bundle on one device: weights, K/V arena, buffers. Construct with `Session.load`.

    A session serves one call at a time: a request, or a batch of them decoded together. A second call, from another
    thread or from inside a running stream, raises `BusyError` at once instead of waiting; drop it, queue it, or load a
    second session (weights are then held twice). `cancel` may be called from any thread.
    """

    def __init__(self, bundle: Bundle, decoder: Decoder, threads: int | None):
        self.bundle, self.decoder, self.threads = (
            bundle_here(bundle, decoder.engine.machine, threads or 1),
            decoder,
            threads,
        )
        self._machine, self._note = decoder.engine.machine, note_of(bundle.manifest, decoder)
        self.max_length, self.max_batch = decoder.max_length, decoder.arena.max_batch
        self._padded_to = decoder.passes.least_width
        self.least_width = self._padded_to if pads_up(bundle.manifest) and self.max_batch == 1 else None
        """What passes of one sequence are padded to, of a bundle with integer weights; None: of others, and of batches."""
        self._family = get_family(bundle.manifest.model.family)
        self._plain_text = PlainText(self.bundle)
        self._proposers: dict[str, Proposer] = {}
        self._controllers: dict[tuple[str, float | None], DraftPolicy] = {}
        self._memories: dict[str, Memory] = {}
        self._cached: CachedRequest | None = None
        """What the cache holds of the last request, where it asked for that."""
        self._pictures = PictureCache(MIB << 20)
        self._forced_acceptance: float | None = None
        """Set by `measure.forced_acceptance` alone."""
        self._user: dict[str, object] = {}
        """Under "now", who uses the session. No lock: what a signal handler raises between taking and holding it would keep it
        locked for good, since an exception does not say whether it was taken. Here its taker is written down, and it is
        given back without a call, behind which a handler could run."""
        self._cancelled = threading.Event()
        self._closed = False
        self._unended: list[ActiveRequest] = []
        """Requests that a draft knows of; one is left here whose end a signal handler's exception interrupted."""

    @classmethod
    def load(
        cls,
        bundle: Bundle | Path | str,
        device: str = "cpu",
        max_length: int | None = None,
        max_batch: int = 1,
        threads: int | None = None,
        check: Check = "size",
        kernel_cache: Path | None = None,
        picture_cache: int = MIB,
        **deprecated: Any,
    ) -> Session:
        """Load a bundle. `max_length` (prompt and output positions) is at most the bundle's; `max_batch` requests of
        `generate_batch` are decoded together, each with a key/value cache of its own; `threads` is the size of the
        process's one thread pool, by default all cores, for small models only the caller's. `check`: "size" compares
        the manifest and small files with their checksums, "sha256" every byte, "once" every byte that was not compared
        before, which it remembers in the user's cache folder (`Bundle.open`). `device`: "cpu"; on a GPU "cuda",
        ONNX Runtime's provider, or "tensorrt", the plans that the bundle has for it (docs/how-to/tensorrt.md). `kernel_cache`: a
        folder of yours where "tensorrt" keeps what TensorRT-RTX compiles, for the next process. Kernels that round
        differently at different widths want a bundle that was built with a `verify_width`
        (docs/explanation/verify-width.md). Of a bundle with integer weights it finds out from which width on this machine's
        kernels give the same bits (docs/explanation/least-width.md), unless `vlmexport tune` stored it. `picture_cache`: MiB of
        image embeddings that are kept, so that the tower sees the same picture once; 0 keeps none
        (docs/how-to/unchanged-pictures.md).

        Raises `BundleError`, `OptionError`, and `DeviceError` without the GPU or the library that is asked for.
        """
        if isinstance(bundle, Bundle):
            bundle.verify(check)
        else:
            bundle = Bundle.open(bundle, check)
        limits = bundle.manifest.limits
        if max_length is not None:
            max_length = integer("max_length (of this bundle)", max_length, 1, limits.max_length)
        max_batch = integer("max_batch (of this bundle)", max_batch, 1, limits.max_batch)
        picture_cache = integer("picture_cache (MiB)", picture_cache, 0)
        bundle = with_verify_width(bundle, verify_width_of(deprecated), "verify_width", warn)
        session = cls.on(engines.create(bundle, device, threads, kernel_cache), bundle, max_length, max_batch)
        session._pictures.max_bytes = picture_cache << 20
        return session

    @classmethod
    def on(cls, engine: Engine, bundle: Bundle, max_length: int | None = None, max_batch: int = 1) -> Session:
        """A session on an engine of its own for a bundle, which is closed with it; otherwise as `load`."""
        try:
            bundle, decoder = open_decoder(bundle, engine, max_length, max_batch)
            session = cls(bundle, decoder, engine.threads)
            load_graphs(session.bundle, engine)
            trim_heap()
        except BaseException:
            engine.close()  # memory of a device is nobody's garbage
            raise
        return session

    @property
    def note(self) -> str | None:
        """What a user should know of how the device computes this bundle; None where it does as the manifest says."""
        return self._note

    # --- requests ---

    def generate(
        self,
        image: Any = None,
        prompt: Any = None,
        *,
        images: Any = None,
        video: Any = None,
        messages: Any = None,
        on_text: Callable[[str], object] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Caption an image or answer a prompt.

        `image`: path, bytes or binary stream of an image file, PIL image, uint8 array [H, W, 3] (`channels` "rgb", or
        "bgr" as OpenCV has it) or [H, W], or None (`images/load.py`); what `encode` gave for one, a picture or a video; a
        list where the model reads several. `video`: a video file, a folder of pictures, or a `Video` of frames with their
        rate, for models that read videos. `prompt`: text, chat messages, or None for the bundle's default. `images` and
        `messages` are other words for a list of `image` and a `prompt` of messages, whose parts may hold their pictures
        themselves; what the template would drop of them is refused (docs/how-to/pictures-and-turns.md). `on_text` receives
        each piece of text when it is certain.

        `options`: `GenerateOptions` says all of them, and the page "Options of a request" of the docs. Without a draft length a
        controller drafts as much as pays on this machine. A `stop` text that is or holds a special token ("<|im_start|>")
        is looked for where special tokens are written, any other in the text as it is returned. A `deadline` counts from
        this call and is checked between cycles. `seed` None draws one when sampling. `lossy` accepts drafts that the model
        finds likely enough (Medusa's typical acceptance): faster at a temperature, but the text is not distributed as the
        model's, and `Result.lossy` says so. `reuse_prompt`: what the request before left in the cache is not computed again
        where this prompt begins with it; both must ask for it, and `chat` does.

        Raises `InputError` for the request, `OptionError` for an option, `BusyError` while the session serves another.
        """
        if on_text is not None and not callable(on_text):
            raise OptionError(f"on_text: {on_text!r:.80} cannot be called")
        inputs = RequestInputs.of(image, prompt, images, video, messages)
        stream = self._stream(inputs, options, streamed=on_text is not None)
        try:
            for piece in stream:
                if on_text is not None:
                    on_text(piece)
        finally:
            stream.close()  # also when `on_text` raises: the session is free again at once
        return stream.result

    def stream(
        self,
        image: Any = None,
        prompt: Any = None,
        *,
        images: Any = None,
        video: Any = None,
        messages: Any = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Like `generate`, but hands out text while it is produced. Options are checked here, before any work."""
        return self._stream(RequestInputs.of(image, prompt, images, video, messages), options)

    def chat(self, system: str | None = None) -> Conversation:
        """A conversation, whose every turn knows those before it and computes only what is new."""
        return Conversation(self, system)

    def encode(self, image: Any, channels: str = "rgb", similar: float | None = None) -> View:
        """Let the vision tower see a picture, or a `Video`, once: what it gives may stand for it in any number of requests
        to sessions of this model. `similar`: see `GenerateOptions`.

        Raises `ImageError`, `OptionError` for `similar`.
        """
        similar = self._resolve({"similar": similar})[0].similar

        def encoding(_: list[Result]) -> Iterator[View]:
            view = self._family.view(self.bundle, in_colour_order([image], channels)[0])
            yield self._pictures.encoded_view(self.decoder, view, similar)

        with contextlib.closing(self._guarded(encoding)([])) as views:
            return next(views)

    def generate_tokens(self, token_ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Result:
        """Like `generate` for a prompt of token ids, special tokens included; no image, no chat template.

        Raises `PromptError` for ids outside the vocabulary.
        """
        _, settings = self._resolve(options)
        ids = token_array(token_ids)

        def pieces(results: list[Result]) -> Iterator[str]:
            yield from run_alone(
                self, results, prepared_ids(self._family, ids), settings, self._delivery(streamed=False)
            )

        stream = Stream(self._guarded(pieces))
        for _ in stream:
            pass
        return stream.result

    def generate_batch(self, requests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Serve any number of requests, `max_batch` of them decoded together; results in the order of the requests.

        Each request is what `generate` takes, by name: `dict(image=…, prompt=…, max_new_tokens=…, draft=…, …)`, without
        `on_text`. A finished request makes room for a waiting one at once. Every option is checked before any work;
        a deadline counts from this call. The tokens are those of single requests, but for near-ties of float32 where
        another width adds up in another order (docs/contributing/rooms-and-rules.md, rule 1).
        Raises `InputError`, `NumericsError` and `OptionError` with the number of the request; `OptionError` for what is no
        list of them.
        """
        delivery = self._delivery(streamed=False)
        waiting = [
            check_request(number, each, delivery, self._resolve)
            for number, each in enumerate(each_request(requests))
        ]
        results: list[Result | None] = [None] * len(waiting)
        with contextlib.closing(self._guarded(lambda _: run_batch(self, iter(waiting)))([])) as outcomes:
            for number, outcome in outcomes:
                if isinstance(outcome, InputError | NumericsError):
                    raise type(outcome)(f"requests[{number}]: {outcome}") from None
                results[number] = outcome
        return cast("list[Result]", results)

    def generate_many(
        self, requests: Iterable[Mapping[str, Any]]
    ) -> Iterator[tuple[int, Result | InputError | NumericsError]]:
        """Like `generate_batch` for requests without end: one is taken from `requests` when there is room for it, and
        (its number, its result) is handed out when it has finished, in the order in which they finish.

        A request that cannot be served (a damaged picture, a prompt that is too long) gives its `InputError`, one whose
        logits are not finite its `NumericsError`; neither ends anything else. Closing the iterator ends the requests
        that are running, `cancel` and `close` too, and no further one is taken then. A deadline counts from when its
        request was taken. Raises `OptionError` for what is no iterable, and with the number of a request.
        """
        source = each_request(requests)

        def waiting() -> Iterator[WaitingRequest]:
            for number in itertools.count():
                if self._cancelled.is_set():
                    return
                try:
                    request = next(source)
                except StopIteration:
                    return
                yield check_request(number, request, self._delivery(streamed=False), self._resolve)

        return self._guarded(lambda _: run_batch(self, waiting()))([])

    def memory(self, name: str) -> Memory:
        """The memory of this session called `name`, made at its first use: what requests with `memory=name` remember.
        `save` and `Memory.load` carry it to another process."""
        return self._memories.setdefault(name, Memory())

    def forget(self, name: str | None = None) -> None:
        """Drop what the memory called `name` remembers, or every memory of the session."""
        for each, memory in list(self._memories.items()):
            if name in (None, each):
                memory.forget()

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

    def proposer(self, name: str) -> Proposer:
        """The proposer of the draft called `name`, made at its first use. Raises `OptionError`, `BundleError`, and
        `VlmexportError` when closed."""
        if self.decoder is None:  # one that is closing still serves what runs
            raise VlmexportError(_CLOSED)
        draft = self.bundle.manifest.draft(name)
        if draft is None:
            raise OptionError(f"draft: the bundle has no {name!r:.80}")
        if name not in self._proposers:
            self._proposers[name] = proposers.create(draft, self.decoder)
        return self._proposers[name]

    def replace_proposer(self, name: str, proposer: Proposer) -> None:
        """Let `proposer` serve the draft called `name` from the next request on (a draft of your own; tests)."""
        self._proposers[name] = proposer

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a session cannot be copied, pickled or sent to another process: give that the path of the bundle "
            "(session.bundle.path), and load it there with Session.load"
        )

    def take_cached(self) -> CachedRequest | None:
        """What the cache holds of the last request, which is given up with it."""
        cached, self._cached = self._cached, None
        return cached

    def keep_cached(self, cached: CachedRequest) -> None:
        """Let the next request go on behind this one."""
        self._cached = cached

    # --- private ---

    def _stream(self, inputs: RequestInputs, given: Mapping[str, Any], streamed: bool = True) -> Stream:
        options, settings = self._resolve(given)

        def pieces(results: list[Result]) -> Iterator[str]:
            delivery = self._delivery(streamed)
            prepared = self._prepare(inputs, options)
            yield from run_alone(self, results, prepared, settings, delivery)

        return Stream(self._guarded(pieces), None if settings.typical is None else "typical")

    def _resolve(self, given: Mapping[str, Any]) -> tuple[RequestOptions, Settings]:
        """Options by name, checked, and what they mean for this bundle. Raises `OptionError`."""
        options = request_options(given)
        if self._forced_acceptance is not None:
            options = replace(options, forced_acceptance=self._forced_acceptance)
        memory = options.memory if isinstance(options.memory, Memory | None) else self.memory(options.memory)
        if memory is not None:
            memory.check(tokenizer_checksum(self.bundle.manifest))
        self._pictures.check(options.similar)
        grammar = grammar_of(options, self.bundle)
        return options, resolve(options, self.bundle.manifest, self._controller, memory, grammar)

    def _delivery(self, streamed: bool) -> Delivery:
        return Delivery(time.perf_counter(), self._cancelled.is_set, streamed, self._unended, self._pictures)

    def _prepare(self, inputs: RequestInputs, options: RequestOptions) -> Prepared:
        return self._pictures.recall_all(self._lay_out(inputs, options), options.similar)

    def _lay_out(self, inputs: RequestInputs, options: RequestOptions) -> Prepared:
        """Pictures decoded, the prompt as ids. For any thread: it changes nothing of the session."""
        source = self._plain_text if options.plain_text else self.bundle
        return inputs.prepare(self._family, source, options.channels, self.bundle.manifest.model.fingerprint)

    def _controller(self, learn: str, threshold: float | None) -> DraftPolicy:
        """The session's controller of this kind, made at its first use."""
        controller = self._controllers.get((learn, threshold))
        if controller is None:
            controller = make_controller(
                self.bundle.manifest, self._machine, self.threads or 1, learn, threshold,
                self._padded_to,
            )  # fmt: skip
            self._controllers[learn, threshold] = controller
        return controller

    def _free_when_idle(self) -> None:
        me = object()
        try:
            if self._user.setdefault("now", me) is not me:
                return  # the running request calls again when it ends
            if self.decoder is not None:
                self.decoder.engine.close()
                self.decoder = cast(Decoder, None)
            self._proposers.clear()
        finally:
            try:  # without a call: Python runs signal handlers after each
                if self._user["now"] is me:
                    del self._user["now"]
            except KeyError:  # nobody uses it by now
                pass

    def _guarded(
        self, pieces: Callable[[list[Result]], Iterator[_Piece]]
    ) -> Callable[[list[Result]], Generator[_Piece, None, None]]:
        def run(results: list[Result]) -> Generator[_Piece, None, None]:
            me = object()
            try:
                if self._user.setdefault("now", me) is not me:
                    raise BusyError(
                        "this session is busy with another request; wait for it, close its stream, or load a second "
                        "session"
                    )
                self._cancelled.clear()
                if self._closed:
                    raise VlmexportError(_CLOSED)
                for left in list(self._unended):
                    left.end_proposer()
                yield from pieces(results)
            finally:
                try:  # without a call: Python runs signal handlers after each
                    if self._user["now"] is me:
                        del self._user["now"]
                except KeyError:  # nobody uses it by now
                    pass
                if self._closed:
                    self._free_when_idle()

        return run
