"""ShareGPT conversations: a list of id and conversations, text alone (`ShareGPT_V3_unfiltered_cleaned_split.json`)."""

from __future__ import annotations

from ..reading.arguments import Arguments
from ..reading.records import Problems, Record
from ..reading.turns import load_conversations

USAGE = "CONVERSATIONS.json[,turns=first|all]"
TASK = None


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per answer, or per conversation with `turns=first`. Raises OptionError for a file of another layout."""
    return load_conversations(arguments, problems, "ShareGPT", lambda entry: None, [])
