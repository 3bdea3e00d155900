"""What a caller may ask of one request: the one declaration, of which `run` and `bench` make their flags.

To add an option, add it here: it is checked, has a flag and a line in the reference, and `RequestOptions` has its value
(`request_options.py`).
"""

# Annotations are no strings here: what stands in them is the declaration.
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from ..common.errors import OptionError
from ..common.options import (
    Choice,
    Custom,
    Integer,
    Number,
    Switch,
    Text,
    Texts,
)
from ..common.validation import ADAPTIVE, CHANNELS
from ..grammars.grammar import Grammar, read_grammar
from ..text.stop import LONGEST

if TYPE_CHECKING:
    from ..drafts.memory.answers import Memory
    from ..policy.base import DraftPolicy
    from ..sampling.logprobs import Logprobs
    from ..sampling.typical import Typical

DRAFT_SAMPLING = ("match", "drawn", "auto")
"""Match the target's draws; draw proposals; whichever accepts more."""

LONGEST_NAME = 200
"""Characters of a memory's name."""


def _policy(name: str, value: Any) -> Any:
    from ..policy.base import check_policy

    check_policy(value)
    return value


def _memory(name: str, value: Any) -> "Memory | str":
    from ..drafts.memory.answers import Memory

    if isinstance(value, Memory) or (isinstance(value, str) and 1 <= len(value) <= LONGEST_NAME):
        return value
    raise OptionError(f"{name}: {value!r:.80} is no `Memory` and no name of 1 to {LONGEST_NAME} characters")


def _logprobs(name: str, value: Any) -> "Logprobs":
    from ..sampling.logprobs import check_logprobs

    return check_logprobs(name, value)


def _lossy(name: str, value: Any) -> "Typical":
    from ..sampling.typical import Typical

    return Typical.of(name, value)


class GenerateOptions(TypedDict, total=False):
    """The options of `Session.generate`, `stream`, `generate_batch` and `Conversation.say`, by name."""

    max_new_tokens: Annotated[
        int, Integer(default=128, low=1, metavar="N", help="Stop after this many tokens.")
    ]
    stop: Annotated[
        Sequence[str] | str,
        Texts(longest=LONGEST, expert=True, metavar="TEXT", help="End before this text. Repeat for several."),
    ]
    deadline: Annotated[
        float | None,
        Number(
            above=True, expert=True, metavar="SECONDS", help="End after this time, counted from the call."
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        Number(
            low=1e-3,
            high=1e3,
            expert=True,
            metavar="X",
            help="Repetition penalty (1 is off). Default: the model's.",
        ),
    ]
    schema: Annotated[
        Any,
        Custom(
            checked=read_grammar, flag=None,
            help="JSON schema of the answer: a dict, or a class of pydantic's. `Result.parsed` has its value.",
        ),
    ]  # fmt: skip
    regex: Annotated[
        Grammar | str | None,
        Custom(
            checked=read_grammar, expert=True, metavar="PATTERN",
            help="A regular expression that the whole answer matches.",
        ),
    ]  # fmt: skip
    choices: Annotated[
        Grammar | Sequence[str] | None,
        Custom(checked=read_grammar, flag=None, help="Texts, one of which is the answer."),
    ]
    grammar: Annotated[
        Grammar | str | None,
        Custom(
            checked=read_grammar, flag=None, help="A grammar of the answer, in llguidance's Lark notation."
        ),
    ]
    ignore_eos: Annotated[bool, Switch(flag=None, help="Go on after an end token.")]
    logprobs: Annotated[
        "int | Logprobs | None",
        Custom(
            checked=_logprobs, flag=None,
            help="Note each token's log-probability, and those of so many of the likeliest tokens in its place: in "
            "`Result.logprobs`, or in a `Logprobs` of yours. They are the model's own, before temperature, penalties and "
            "grammars.",
        ),
    ]  # fmt: skip
    channels: Annotated[
        str,
        Choice(
            default="rgb",
            choices=CHANNELS,
            flag=None,
            group="Input",
            help="Order of colours of image arrays.",
        ),
    ]
    plain_text: Annotated[
        bool,
        Switch(
            group="Input",
            expert=True,
            help="Read the prompt as plain text: nothing in it becomes a special token.",
        ),
    ]
    reuse_prompt: Annotated[
        bool,
        Switch(
            flag=None,
            group="Input",
            help="Keep the prompt's cache for the next request, and use the last one's.",
        ),
    ]
    similar: Annotated[
        float | None,
        Number(
            high=255, group="Input", expert=True, metavar="X",
            help="Let the embeddings of an earlier picture stand for one that differs by at most X of 255 in each of 8 x 8 "
            "parts. Then the text is NOT the model's for this picture.",
        ),
    ]  # fmt: skip
    temperature: Annotated[
        float, Number(default=0.0, group="Sampling", metavar="T", help="0 takes the likeliest token.")
    ]
    top_k: Annotated[
        int,
        Integer(
            default=0,
            group="Sampling",
            expert=True,
            metavar="K",
            help="Sample among the K likeliest tokens. 0: all.",
        ),
    ]
    top_p: Annotated[
        float,
        Number(
            default=1.0, high=1, above=True, group="Sampling", expert=True, metavar="P",
            help="Sample among the likeliest tokens that together have this probability.",
        ),
    ]  # fmt: skip
    min_p: Annotated[
        float,
        Number(
            default=0.0, high=1, group="Sampling", expert=True, metavar="P",
            help="Sample among tokens that have at least this share of the likeliest one's probability.",
        ),
    ]  # fmt: skip
    seed: Annotated[
        int | None,
        Integer(
            high=(1 << 64) - 1,
            group="Sampling",
            metavar="N",
            help="Seed of sampling: the same seed gives the same text.",
        ),
    ]
    draft: Annotated[
        str | None,
        Text(
            noun="the name or kind of a draft", group="Speculation", metavar="NAME|KIND|none",
            help="Draft to use. `none`: no speculation. `prompt-lookup+KIND`: prompt lookup first, KIND where it has no "
            "match. Default: the bundle's.",
        ),
    ]  # fmt: skip
    memory: Annotated[
        "Memory | str | None",
        Custom(
            checked=_memory, flag=None, group="Speculation",
            help="Remember the answer under this name, and propose how earlier answers of that name went on.",
        ),
    ]  # fmt: skip
    speculative: Annotated[
        bool, Switch(default=True, flag=None, group="Speculation", help="False: decode plainly.")
    ]
    draft_length: Annotated[
        int | None,
        Integer(
            group="Speculation", metavar="N", help="Tokens to draft per cycle. Default: a controller chooses."
        ),
    ]
    draft_nodes: Annotated[
        int | None,
        Integer(
            group="Speculation", expert=True, metavar="N",
            help="Tokens to draft per cycle, for drafts that propose trees. At most --draft-length of them are on one path.",
        ),
    ]  # fmt: skip
    adaptive: Annotated[
        str | None,
        Choice(
            choices=ADAPTIVE, group="Speculation", expert=True, metavar="|".join(ADAPTIVE),
            help="What sets the draft length: the bundle's fixed length (off), what was accepted in this request or in the "
            "session, or the draft's confidence (Draft & Verify). Default: the bundle's; usually session.",
        ),
    ]  # fmt: skip
    confidence_threshold: Annotated[
        float | None,
        Number(
            high=1, group="Speculation", expert=True, metavar="P",
            help="Stop drafting after a token that the draft gives a lower probability.",
        ),
    ]  # fmt: skip
    policy: Annotated[
        "DraftPolicy | None",
        Custom(checked=_policy, flag=None, group="Speculation", help="A policy of your own."),
    ]
    draft_sampling: Annotated[
        str | None,
        Choice(
            choices=DRAFT_SAMPLING, group="Speculation", expert=True, metavar="|".join(DRAFT_SAMPLING),
            help="Above temperature 0: match the model's own draws, draw proposals from the draft, or use whichever is "
            "accepted more often. Default: match with a seed, else auto.",
        ),
    ]  # fmt: skip
    lossy: Annotated[
        "Typical | str | None",
        Custom(
            checked=_lossy, group="Speculation", expert=True, metavar="typical[:E,D]",
            help="Accept drafts that are likely enough: p > min(E, D · exp(−entropy)). The text is NOT distributed as the "
            "model's. Needs --temperature.",
        ),
    ]  # fmt: skip
