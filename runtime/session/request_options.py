"""The options of one request with every value checked and every default filled in."""

# The class of the values is made from the declaration of the options.
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..common.errors import OptionError
from ..common.options import check_options, declared_options
from ..grammars.grammar import READERS
from .options import GenerateOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..bundle.folder import Bundle
    from ..grammars.matcher import GrammarMatcher


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
        grammars = [name for name in READERS if checked[name] is not None]
        if len(grammars) > 1:
            raise OptionError(f"{grammars[0]} and {grammars[1]} both say what the answer must be; choose one")
        if grammars and (checked["ignore_eos"] or self.forced_acceptance is not None):
            raise OptionError(
                f"{grammars[0]}: an answer of a grammar ends where that does; leave ignore_eos out"
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


def grammar_of(options: RequestOptions, bundle: "Bundle") -> "GrammarMatcher | None":
    """The beginning of an answer in the grammar that the options give. Raises `OptionError` for one that cannot be read."""
    given = [value for name in READERS if (value := getattr(options, name)) is not None]
    if not given:
        return None
    from ..grammars.matcher import compile_grammar

    return compile_grammar(bundle, given[0])


def request_options(options: Mapping[str, Any]) -> RequestOptions:
    """Options by name, those of the release before translated. Raises `OptionError` for a wrong value or name."""
    from .deprecated_options import translate

    current, forced = translate(options)
    known = declared_options(GenerateOptions)
    unknown = sorted(str(name) for name in current if name not in known)
    if unknown:
        raise OptionError(f"no option {', '.join(unknown):.200}; there are {', '.join(known)}")
    return RequestOptions(forced_acceptance=forced, **current)
