"""Prompt lookup: what followed the last few tokens when they occurred before, in the prompt or the output, is proposed.

(Saxena, github.com/apoorvumang/prompt-lookup-decoding; LLMA, arXiv 2304.04487.) It has no weights, no graph and needs
no cut, so it is in every bundle.
"""

from __future__ import annotations

from .common.base import Draft, UntrainedKind


class PromptLookup(Draft):
    """The one draft of its kind."""

    kind = "prompt-lookup"
    layer = None


class PromptLookupKind(UntrainedKind):
    """See the module."""

    name = PromptLookup.kind
    title = "n-grams of the prompt and the output"
    has_layer = False
    draft_length = 4  # on SmolLM2 chat longer chains gain nothing

    def at(self, layer: int | None) -> PromptLookup:
        return PromptLookup()
