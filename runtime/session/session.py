"""The way in: load a bundle, then generate or stream."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from .. import drafts as proposers
from .. import engines
from ..bundle.folder import Bundle, Check
from ..bundle.stored_acceptance import measured_chains, measured_trees
from ..bundle.stored_costs import bundle_here, pick_costs, with_combinations
from ..common.errors import (
    BusyError,
    ImageError,
    InputError,
    NumericsError,
    OptionError,
    PromptError,
    VlmexportError,
)
from ..common.validation import integer
from ..decoder.decoder import Decoder
from ..families import Prepared, get_family
from ..families.base import Prompt, View
from ..families.parts import gather_media
from ..families.plain import PlainText
from ..policy.adaptive import Adaptive
from ..policy.base import DraftPolicy
from ..sampling.typical import Typical
from ..speculative.cycle import Cycle
from ..speculative.proposer import Proposer
from ..speculative.sequence import Sequence as Request
from ..speedup.budget import Budget
from ..speedup.stats import Stats
from .active_request import ActiveRequest, image_embeds_of
from .conversation import Conversation
from .inputs import NAMES, request_inputs
from .prefix_cache import Prefix, align_to_images, common_length, snapshot
from .request import RequestOptions, Settings, request_options, resolve
from .result import Result

INT64 = 2**63 - 1

_CLOSED = "this session is closed; load the bundle again"
_Piece = TypeVar("_Piece")
_Outcome = Result | InputError | NumericsError
_Waiting = tuple[int, tuple[list[Any], Prompt], RequestOptions, Settings, float]
"""A request that waits for a place: its number, what it is about, its options, its settings, and when it came."""


class Stream:
    """Iterate for pieces of text, each as soon as it is certain; `result` is there when the iteration is over.

    `close` (or leaving the loop) ends the request; its finish reason is then `cancelled`.
    """

    def __init__(
        self, pieces: Callable[[list[Result]], Generator[str, None, None]], lossy: str | None = None
    ):
        # The generator gets the list, not the stream: a cycle would keep a dropped stream's request running.
        self._found: list[Result] = []
        self._pieces = pieces(self._found)
        self.lossy = lossy
        """"typical" where drafts are accepted that way: known before the first piece; `result.lossy` says it too."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece. Raises `BusyError` while another thread waits for it, and what ended the request."""
        try:  # no context manager: it costs a microsecond a piece, and the end of an iteration would pass through it
            return next(self._pieces)
        except ValueError as error:
            _refuse_second_reader(error)
            raise

    def close(self) -> None:
        """End the request now. Raises `BusyError` while another thread waits for a piece."""
        try:
            self._pieces.close()
        except ValueError as error:
            _refuse_second_reader(error)
            raise

    @property
    def result(self) -> Result:
        """The whole result. Raises `VlmexportError` while the stream is still running, and where there is none."""
        if self._found:
            return self._found[0]
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED:
            raise VlmexportError("the stream has no result: it failed, or was closed before it began")
        raise VlmexportError("the stream is not finished; iterate it to its end, or close it, first")


def _refuse_second_reader(error: ValueError) -> None:
    """`BusyError` for what Python says of a generator that two threads run."""
    if str(error) == "generator already executing":
        raise BusyError(
            "another thread is waiting for the next piece of this stream; end the request with Session.cancel"
        ) from None


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
        self._machine, self._note = decoder.engine.machine, decoder.engine.note
        self.max_length, self.max_batch = decoder.max_length, decoder.arena.max_batch
        self._family = get_family(bundle.manifest.model.family)
        self._plain_text = PlainText(self.bundle)
        self._proposers: dict[str, Proposer] = {}
        self._controllers: dict[tuple[str, float | None], DraftPolicy] = {}
        self._prefix: Prefix | None = None
        """What the cache holds of the last request, where it asked for that."""
        self._prefix_draft: Proposer | None = None
        """Who drafted for it."""
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
        verify_width: int | None = None,
    ) -> Session:
        """Load a bundle. `max_length` (prompt and output positions) is at most the bundle's; `max_batch` requests of
        `generate_batch` are decoded together, each with a key/value cache of its own; `threads` is the size of the
        process's one thread pool, by default all cores, for small models only the caller's. `check`: "size" compares
        the manifest and small files with their checksums, "sha256" every byte, "once" every byte that was not compared
        before, which it remembers in the user's cache folder (`Bundle.open`). `device`: "cpu"; on a GPU "cuda",
        ONNX Runtime's provider, or "tensorrt", the plans that the bundle has for it (docs/how-to/tensorrt.md). `kernel_cache`: a
        folder of yours where "tensorrt" keeps what TensorRT-RTX compiles, for the next process. `verify_width`: rows of
        every pass, plain ones too, for kernels that give other bits at other widths; at most the bundle's max_width, 0
        for as many rows as are verified. Default: the bundle's (docs/explanation/verify-width.md).

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
        if verify_width is not None:
            bundle = bundle.with_verify_width(verify_width)
        engine = engines.create(bundle, device, threads, kernel_cache)
        try:
            decoder = Decoder(engine, bundle.manifest, bundle.tensor, max_length, max_batch)
            session = cls(bundle, decoder, engine.threads)
            session._load_graphs()
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
        max_new_tokens: int = 128,
        draft: str | None = None,
        speculative: bool = True,
        draft_length: int | None = None,
        draft_nodes: int | None = None,
        confidence_threshold: float | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] | str = (),
        deadline: float | None = None,
        ignore_eos: bool = False,
        on_text: Callable[[str], object] | None = None,
        adaptive: str | None = None,
        policy: DraftPolicy | None = None,
        force_acceptance: float | None = None,
        lossy: str | None = None,
        typical_epsilon: float = Typical.epsilon,
        typical_delta: float = Typical.delta,
        draft_sampling: str | None = None,
        channels: str = "rgb",
        reuse_prompt: bool = False,
        plain_text: bool = False,
        images: Any = None,
        video: Any = None,
        messages: Any = None,
    ) -> Result:
        """Caption an image or answer a prompt.

        `image`: path, bytes or binary stream of an image file, PIL image, uint8 array [H, W, 3] (`channels` "rgb", or
        "bgr" as OpenCV has it) or [H, W], or None (`images/load.py`); what `encode` gave for one; a list where the model
        reads several. What `encode` gave is served as what it is, a picture or a video, under either name. `video`: a video file, a folder of pictures, or a `Video` of frames with their rate, for models
        that read videos. `prompt`: text, chat messages, or None for the bundle's default. `images` and `messages` are
        other words for a list of `image` and a `prompt` of messages, whose parts may hold their pictures themselves; what
        the template would drop of them is refused (docs/how-to/pictures-and-turns.md). `draft`: a draft of the bundle, by name or kind, or
        "none"; default: the bundle's policy.
        Without `draft_length` a controller drafts as much as pays on this machine, `adaptive` to what the session has
        seen ("session"), to this request alone ("request": its passes are then a function of the request), not at all
        ("off": the bundle's length), to the place in the answer ("logistic": FastVLM's eq. 5), or to how sure the draft
        is ("confidence": at most `draft_length` tokens, or 8, until one is less likely than a threshold that follows
        what was accepted, from `confidence_threshold` on; Draft & Verify). `draft_nodes` above the length asks drafts
        that propose trees for so many tokens a cycle, at most `draft_length` of them on one path. `temperature` 0 is greedy. `repetition_penalty` takes the
        place of the model's own. `seed` None draws one when sampling. `stop`: texts before which the answer ends; one that is or
        holds a special token ("<|im_start|>") is looked for where special tokens are written, any other in the text as it
        is returned. `deadline`: seconds from this call, checked
        between cycles. `on_text` receives each piece of text when it is certain. `force_acceptance` accepts drafts
        at this rate whatever they are: for timing only, the output is not text. `lossy="typical"` accepts drafts that
        the model finds likely enough (`typical_epsilon`, `typical_delta`; Medusa's typical acceptance): faster at a
        temperature, but the text is not distributed as the model's, and `Result.lossy` says so; at temperature 0 it is
        greedy decoding. `reuse_prompt`: what the request before left in the cache is not computed again where this prompt
        begins with it (the prompt, pictures and answer of an earlier turn; both must ask for it); `chat` does.
        `plain_text`: nothing that the prompt or a message says becomes a special token; without it, special tokens that
        are typed (`<|im_end|>`) are read as such, as in transformers (docs/how-to/pictures-and-turns.md).
        `draft_sampling`, above temperature 0: "match" gives the text of plain decoding with the same seed,
        whatever drafts; "drawn" draws chains from the draft's own distribution, which more of them survive, and gives a
        text of the same distribution; "auto" whichever accepts more. Default: "match" with a `seed`, else "auto".
        Raises `InputError` for the request, `OptionError` for an option, `BusyError` while the session serves another.
        """
        options = RequestOptions(
            max_new_tokens=max_new_tokens, draft=draft, speculative=speculative, draft_length=draft_length,
            draft_nodes=draft_nodes, confidence_threshold=confidence_threshold, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, repetition_penalty=repetition_penalty, seed=seed, lossy=lossy, typical_epsilon=typical_epsilon, typical_delta=typical_delta, draft_sampling=draft_sampling,
            stop=stop, deadline=deadline, ignore_eos=ignore_eos, adaptive=adaptive, policy=policy, force_acceptance=force_acceptance,
            channels=channels, reuse_prompt=reuse_prompt, plain_text=plain_text,
        )  # fmt: skip
        if on_text is not None and not callable(on_text):
            raise OptionError(f"on_text: {on_text!r:.80} cannot be called")
        about = request_inputs(image, prompt, images, video, messages)
        stream = self._stream(about, options, streamed=on_text is not None)
        try:
            for piece in stream:
                if on_text is not None:
                    on_text(piece)
        finally:
            stream.close()  # also when `on_text` raises: the session is free again at once
        return stream.result

    def stream(self, image: Any = None, prompt: Any = None, **options: Any) -> Stream:
        """Like `generate`, but hands out text while it is produced. Options are checked here, before any work."""
        about = request_inputs(
            image, prompt, *(options.pop(name, None) for name in ("images", "video", "messages"))
        )
        return self._stream(about, request_options(options))

    def chat(self, system: str | None = None) -> Conversation:
        """A conversation, whose every turn knows those before it and computes only what is new."""
        return Conversation(self, system)

    def encode(self, image: Any, channels: str = "rgb") -> View:
        """Let the vision tower see a picture, or a `Video`, once: what it gives may stand for it in any number of requests
        to sessions of this model.

        Raises `ImageError`.
        """

        def rows(_: list[Result]) -> Iterator[View]:
            view = self._family.view(self.bundle, self._colours([image], channels)[0])
            yield view.with_image_embeds(
                image_embeds_of(self.decoder, [view]), self.bundle.manifest.model.fingerprint
            )

        with contextlib.closing(self._guarded(rows)([])) as found:
            return next(found)

    def _stream(
        self, about: tuple[list[Any], Prompt], options: RequestOptions, streamed: bool = True
    ) -> Stream:
        settings = resolve(options, self.bundle.manifest, self._controller)

        def pieces(found: list[Result]) -> Iterator[str]:
            begin = time.perf_counter()
            prepared = self._prepare(about, options)
            yield from self._run(found, prepared, settings, begin, streamed)

        return Stream(self._guarded(pieces), None if settings.typical is None else "typical")

    def generate_tokens(self, token_ids: Sequence[int], **options: Any) -> Result:
        """Like `generate` for a prompt of token ids, special tokens included; no image, no chat template.

        Raises `PromptError` for ids outside the vocabulary.
        """
        settings = resolve(request_options(options), self.bundle.manifest, self._controller)
        if not isinstance(token_ids, list | tuple | range | np.ndarray) or np.ndim(token_ids) == 0:
            raise PromptError(f"token_ids: {token_ids!r:.80} is not a list of token ids")
        try:  # the decoder checks them against the vocabulary
            ids = np.asarray([integer("token_ids", token, 0, INT64) for token in token_ids], np.int64)
        except OptionError as error:
            raise PromptError(str(error)) from None

        def pieces(found: list[Result]) -> Iterator[str]:
            yield from self._run(found, Prepared(ids), settings, time.perf_counter(), streamed=False)

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
        begin = time.perf_counter()
        waiting = [self._checked(number, each, begin) for number, each in enumerate(self._each(requests))]
        found: list[Result | None] = [None] * len(waiting)
        with contextlib.closing(self._guarded(lambda _: self._run_batch(iter(waiting)))([])) as outcomes:
            for number, outcome in outcomes:
                if isinstance(outcome, InputError | NumericsError):
                    raise type(outcome)(f"requests[{number}]: {outcome}") from None
                found[number] = outcome
        return cast("list[Result]", found)

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
        source = self._each(requests)

        def waiting() -> Iterator[_Waiting]:
            for number in itertools.count():
                if self._cancelled.is_set():
                    return
                try:
                    request = next(source)
                except StopIteration:
                    return
                yield self._checked(number, request, time.perf_counter())

        return self._guarded(lambda _: self._run_batch(waiting()))([])

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

    # --- private ---

    def _controller(self, learn: str, threshold: float | None) -> DraftPolicy:
        """The session's controller; it decides from a stored table and what it has seen, never from the clock."""
        found = self._controllers.get((learn, threshold))
        if found is None:
            manifest = self.bundle.manifest
            costs = pick_costs(manifest, self._machine, self.threads or 1)
            costs = with_combinations(costs, manifest.drafts)
            costs = replace(costs, least=manifest.verify_width or 1)
            most = Budget.chain(manifest.widest_tree - 1)
            trees, chains = measured_trees(manifest), measured_chains(manifest)
            untrained = [draft.name for draft in manifest.drafts if not draft.trained]
            heads = {d.name: n for d in manifest.drafts if (n := d.options.most_tokens) is not None}
            found = Adaptive(costs, most, learn, threshold, trees, chains, untrained, heads)
            self._controllers[learn, threshold] = found
        return found

    def _prepare(self, about: tuple[list[Any], Prompt], options: RequestOptions) -> Prepared:
        media, prompt = gather_media(*about)
        for each in media:
            if isinstance(each, View) and each.model not in (None, self.bundle.manifest.model.fingerprint):
                raise ImageError(
                    "an encoded picture is another model's; encode it with a session of this one"
                )
        source = self._plain_text if options.plain_text else self.bundle
        return self._family.prepare(source, self._colours(media, options.channels), prompt)

    def _colours(self, media: list[Any], channels: str) -> list[Any]:
        """Arrays, and videos of them, whose colours stand in another order than RGB as what has it."""
        if channels == "rgb" or not media:
            return media
        from ..images.load import load_image  # a text model needs no Pillow
        from ..images.video import Video

        def ordered(each: Any) -> Any:
            if isinstance(each, View):
                return each
            if isinstance(each, Video):
                return replace(each, channels=channels)
            return load_image(each, channels)

        return [ordered(each) for each in media]

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

    def _load_graphs(self) -> None:
        """Load what the default request needs: the first one is then not slower than the others, and a folder that is
        replaced behind the session's back changes nothing of it."""
        manifest = self.bundle.manifest
        _ = self.bundle.tokenizer
        names = [
            *manifest.segments,
            "head",
            *(n for n in ("vision", "encoder", "cross_kv") if n in manifest.graphs),
        ]
        draft = manifest.draft(manifest.policy.draft) if manifest.policy.draft else None
        if draft is not None and manifest.policy.speculative:
            names.extend(draft.graphs.values())
        self.decoder.engine.load(*names)

    def _guarded(
        self, pieces: Callable[[list[Result]], Iterator[_Piece]]
    ) -> Callable[[list[Result]], Generator[_Piece, None, None]]:
        def run(found: list[Result]) -> Generator[_Piece, None, None]:
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
                yield from pieces(found)
            finally:
                try:  # without a call: Python runs signal handlers after each
                    if self._user["now"] is me:
                        del self._user["now"]
                except KeyError:  # nobody uses it by now
                    pass
                if self._closed:
                    self._free_when_idle()

        return run

    @staticmethod
    def _each(requests: Iterable[Any]) -> Iterator[Any]:
        if isinstance(requests, Mapping) or not isinstance(requests, Iterable):
            raise OptionError(f"requests: {requests!r:.80} is no list or iterator of requests")
        return iter(requests)

    def _checked(self, number: int, request: Any, begin: float) -> _Waiting:
        """A request of a batch with its options checked; it came at `begin`."""
        if not isinstance(request, Mapping):
            raise OptionError(f"requests[{number}]: {request!r:.80} is not a mapping of options")
        named = {name: value for name, value in request.items() if name in NAMES}
        try:
            about = request_inputs(**named)
            options = request_options({name: request[name] for name in request if name not in named})
            settings = resolve(options, self.bundle.manifest, self._controller)
        except OptionError as error:
            raise OptionError(f"requests[{number}]: {error}") from None
        return number, about, options, settings, begin

    def _start(
        self, prepared: Prepared, settings: Settings, begin: float, streamed: bool = True, alone: bool = False
    ) -> ActiveRequest:
        proposer = None if settings.draft is None else self.proposer(settings.draft.name)
        reused, prefix = 0, self._prefix
        self._prefix = None
        if alone:
            if settings.reuse_prompt and prefix:
                reused = self._resumed(common_length(prefix, prepared), prepared, proposer)
            if not reused:
                self.decoder.reset(0)
        return ActiveRequest(
            self.bundle, self.decoder, prepared, settings, proposer, begin, self._cancelled.is_set, streamed,
            reused, self._unended,
        )  # fmt: skip

    def _resumed(self, cached_len: int, prepared: Prepared, proposer: Proposer | None) -> int:
        """How many of the first `rows` rows, which are cached, `prepared` goes on behind: a draft that reads them must have
        seen them too, with the token behind the last one."""
        if proposer is None or not proposer.needs_prompt_hidden:
            return cached_len
        if proposer is not self._prefix_draft:
            return 0
        cached_len = align_to_images(prepared, min(cached_len - 1, proposer.resumable))
        if cached_len > 0:
            proposer.resume(cached_len)
        return max(0, cached_len)

    def _run(
        self,
        found: list[Result],
        prepared: Prepared,
        settings: Settings,
        begin: float,
        streamed: bool = True,
    ) -> Iterator[str]:
        """One request; its pieces of text."""
        running = self._start(prepared, settings, begin, streamed, alone=True)
        sequence, cycle = running.sequence, Cycle(self.decoder)
        cycle.join(sequence)
        pieces, whole = running.start(), False
        try:
            yield from pieces
            while sequence.finish_reason is None and not sequence.interrupted():
                pieces = running.take(cycle.run()[0])
                if sequence.error is not None:
                    raise sequence.error
                yield from pieces
            yield from running.last()
            whole = True
        except GeneratorExit:  # closed between two cycles
            whole = True
            raise
        finally:
            pieces.close()  # type: ignore[attr-defined]  # counts what a closed stream leaves
            found.append(running.close(whole))
            if settings.reuse_prompt and whole and sequence.error is None and self.decoder.can_resume:
                self._prefix = snapshot(prepared, sequence.tokens, self.decoder.arena.lengths[0])
                self._prefix_draft = sequence.proposer

    def _run_batch(self, waiting: Iterator[_Waiting]) -> Iterator[tuple[int, _Outcome]]:
        """Requests, a batch at a time: (number, result) of each when it has finished."""
        self._prefix = None
        self.decoder.reset(0)
        cycle = Cycle(self.decoder)
        active: dict[Request, tuple[int, ActiveRequest]] = {}

        def let_go(sequence: Request) -> tuple[int, _Outcome]:
            number, running = active.pop(sequence)
            _exhaust(running.last())
            cycle.leave(sequence)
            result = running.close()
            return number, sequence.error or result

        try:
            waits = True  # Python 3.11 does not see a `try` that begins with a loop, where a signal comes as it turns
            while waits:
                for sequence in [s for s in active if s.finish_reason is not None or s.interrupted()]:
                    yield let_go(sequence)
                while len(active) < self.max_batch and (taken := next(waiting, None)) is not None:
                    number, about, options, settings, begin = taken
                    if self._cancelled.is_set():
                        yield number, Result("", [], "cancelled", Stats())
                        continue
                    try:
                        prepared = self._prepare(about, options)
                        running = self._start(prepared, settings, begin, streamed=False)
                    except (InputError, NumericsError) as error:
                        yield number, error
                        continue
                    cycle.join(running.sequence)
                    active[running.sequence] = (number, running)
                    _exhaust(running.start())
                    if running.sequence.finish_reason is not None:
                        yield let_go(running.sequence)
                if not active:
                    return
                for sequence, tokens in zip(list(cycle.sequences), cycle.run(), strict=True):
                    _exhaust(active[sequence][1].take(tokens))
        finally:
            for _, running in active.values():  # an error, or the caller, ended the batch
                running.end_proposer()


def _exhaust(pieces: Iterator[str]) -> None:
    for _ in pieces:
        pass
