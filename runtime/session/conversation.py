"""A conversation: turns that know those before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..common.errors import OptionError, PromptError
from ..drafts.memory.answers import Memory
from ..families.base import View
from .inputs import RequestInputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import GenerateOptions
    from .result import Result
    from .session import Session


class Conversation:
    """Made by `Session.chat`. Between turns the session may serve other requests; the next turn is then computed anew.

    Whatever the vision tower has seen in one turn it need not see in another. Earlier answers are proposed again, before
    the draft that a turn uses anyway.
    """

    def __init__(self, session: Session, system: str | None = None):
        self._session = session
        self._media: list[View] = []
        self.messages: list[dict[str, Any]] = [] if system is None else [self._turn("system", system)]
        """As a chat template takes them: every turn so far."""
        self.memory = Memory()
        """Its answers: for turns that name no `memory`, not even None."""

    def say(
        self,
        prompt: str,
        image: Any = None,
        *,
        images: Any = None,
        video: Any = None,
        on_text: Callable[[str], object] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """The answer to a further turn of the user, with pictures and videos of its own; options of `Session.generate`.

        A turn that fails is as if it had not been said; one that was cut short stands with what was answered. Raises as
        `Session.generate`, `PromptError` where the bundle has no chat template, and `OptionError` for `reuse_prompt`, which
        is what a conversation does.
        """
        self.check()
        if "reuse_prompt" in options:
            raise OptionError(
                "reuse_prompt: a conversation always does; leave it out, or use Session.generate"
            )
        if not isinstance(prompt, str):
            raise PromptError(f"a turn is text, not {type(prompt).__name__}")
        media, _ = RequestInputs.of(image, None, images, video)
        channels = options.pop("channels", "rgb")
        similar = options.get("similar")
        views = [
            each if isinstance(each, View) else self._session.encode(each, channels, similar)
            for each in media
        ]
        turn = self._turn("user", prompt, views)
        options["reuse_prompt"] = True
        if "memory" not in options and self._remembers(options):
            options["memory"] = self.memory
        result = self._session.generate(
            image=[*self._media, *views], prompt=[*self.messages, turn], on_text=on_text, **options
        )  # fmt: skip
        self.messages += [turn, self._turn("assistant", result.text)]
        self._media += views
        return result

    def check(self) -> None:
        """Raises `PromptError` where the bundle has no chat template."""
        if not self._session.bundle.manifest.text.chat_template:
            raise PromptError("this bundle has no chat template and holds no conversation")

    def _remembers(self, options: GenerateOptions) -> bool:
        """Whether a turn has a draft that earlier answers can be asked before; a lossy one would be drawn towards them."""
        draft = self._session.bundle.manifest.choose_draft(options.get("draft"))
        return draft is not None and draft.layer is None and options.get("lossy") is None

    def _turn(self, role: str, text: str, views: Sequence[View] = ()) -> dict[str, Any]:
        """Templates of models that see write content in parts, those of others text."""
        if self._session.bundle.manifest.image is None:
            return {"role": role, "content": text}
        return {
            "role": role,
            "content": [*({"type": view.kind} for view in views), {"type": "text", "text": text}],
        }
