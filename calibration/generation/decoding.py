"""One session of a bundle that answers records, a wave at a time; in this process or in a worker's."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

from ...runtime.bundle.folder import Bundle
from ...runtime.common.errors import InputError, NumericsError
from ...runtime.session.result import Result
from ...runtime.session.session import Session
from ..data.layout import prompt_of
from ..data.reading.records import Record
from .answers import GenerationOptions, stream_seed

Ask = tuple[Record, int]
"""A record, and the number of the answer to it."""

Outcome = tuple[int, ...] | InputError | NumericsError
"""An answer, or why there is none."""


class Decoding:
    """A session, and how it is asked.

    Args:
        bundle: of the target. batch: most requests decoded together. threads: as `Session.load` takes them.
        speculative: whether drafts of the bundle may propose.

    Raises:
        BundleError, OptionError: as `Session.load`.
    """

    def __init__(self, bundle: Bundle, batch: int, threads: int | None, speculative: bool) -> None:
        self._manifest = bundle.manifest
        self._session = Session.load(bundle, max_batch=batch, threads=threads)
        self._speculative = speculative

    def wave(
        self, wanted: Iterable[Ask], options: GenerationOptions
    ) -> Generator[tuple[int, Outcome], None, None]:
        """What comes of each, with its place in `wanted`, as soon as it is there. Requests are made when there is room
        for them. Closing the iterator ends those that are running."""
        outcomes: Any = self._session.generate_many(
            self._request(record, number, options) for record, number in wanted
        )
        try:
            for place, outcome in outcomes:
                yield place, tuple(outcome.tokens) if isinstance(outcome, Result) else outcome
        finally:
            outcomes.close()

    def waves(
        self, asked: Sequence[Ask], waves: Sequence[range], options: GenerationOptions
    ) -> Generator[tuple[int, Outcome], None, None]:
        """The same for places of `asked`, where a wave ends before the next begins."""
        for wave in waves:
            for place, outcome in self.wave(asked[wave.start : wave.stop], options):
                yield wave[place], outcome

    def close(self) -> None:
        """Free weights and buffers."""
        self._session.close()

    def _request(self, record: Record, number: int, options: GenerationOptions) -> dict[str, Any]:
        """What the session is asked. It reads picture files itself, when their turn comes."""
        image = None if record.image is None else record.image.file or record.image.load()
        manifest = self._manifest
        request: dict[str, Any] = {
            "image": image,
            "prompt": prompt_of(record, image, bool(manifest.text.chat_template), manifest.image is not None),
            "max_new_tokens": options.max_new_tokens,
            "speculative": self._speculative,
        }
        if options.temperature:
            seed = stream_seed(options.seed, record.key, number)
            request |= {"temperature": options.temperature, "seed": seed}
        return request
