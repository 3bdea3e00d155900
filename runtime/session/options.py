"""What a caller may ask of one request: the one declaration, of which `run` and `bench` make their flags.

To add an option, add it here: it is checked, has a flag and a line in the reference, and `RequestOptions` has its value.
"""

# Annotations are no strings here: what stands in them is the declaration.
import dataclasses
from collections.abc import Mapping, Sequence
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
    check_options,
    declared_options,
)
from ..common.validation import ADAPTIVE, CHANNELS
from ..text.stop import LONGEST

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..drafts.memory.answers import Memory
    from ..policy.base import DraftPolicy
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
    ignore_eos: Annotated[bool, Switch(flag=None, help="Go on after an end token.")]
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


class _Values:
    """Base of `RequestOptions`: rules between options."""

    forced_acceptance: float | None
    """Set by `measure.forced_acceptance` alone."""

    def __post_init__(self) -> None:
        checked = check_options(
            GenerateOptions, {name: getattr(self, name) for name in declared_options(GenerateOptions)}
        )
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        lossy, drawn = checked["lossy"], checked["draft_sampling"] in ("drawn", "auto")
        if drawn and (lossy is not None or self.forced_acceptance is not None):
            raise OptionError(
                f"draft_sampling: {checked['draft_sampling']} keeps the distribution, lossy and forced acceptance do not; "
                "choose one"
            )
        if lossy is not None and self.forced_acceptance is not None:
            raise OptionError("lossy and forced acceptance are two ways to accept; choose one")


if TYPE_CHECKING:

    @dataclasses.dataclass(frozen=True)
    class RequestOptions(_Values):
        """`GenerateOptions` with every value checked and every default filled in. Raises `OptionError`."""

        def __init__(
            self, *, forced_acceptance: float | None = None, **options: Unpack[GenerateOptions]
        ) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    RequestOptions = dataclasses.make_dataclass(
        "RequestOptions",
        [
            *(
                (name, Any, dataclasses.field(default=option.default))
                for name, option in declared_options(GenerateOptions).items()
            ),
            ("forced_acceptance", float | None, dataclasses.field(default=None)),
        ],
        bases=(_Values,),
        namespace={"__module__": __name__},
        frozen=True,
        kw_only=True,
    )


def request_options(options: Mapping[str, Any]) -> RequestOptions:
    """Options by name, those of the release before translated. Raises `OptionError` for a wrong value or name."""
    from .deprecated_options import translate

    current, forced = translate(options)
    known = declared_options(GenerateOptions)
    unknown = sorted(str(name) for name in current if name not in known)
    if unknown:
        raise OptionError(f"no option {', '.join(unknown):.200}; there are {', '.join(known)}")
    return RequestOptions(forced_acceptance=forced, **current)
