"""Options that are declared once. From a declaration come checks, flags, the JSON schema and the reference page.

A declaration is a class whose annotations are `Annotated[TYPE, KIND(…)]`, or aliases of that: a TypedDict, whose names an
editor completes, or a dataclass. The kinds below say what a value may be; a field that is no option is
`Annotated[TYPE, NO_OPTION]`. A dataclass has its defaults as every dataclass, a TypedDict has them
in the kinds.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar

from .errors import OptionError
from .validation import integer, number

GROUPS = ("Input", "Generation", "Training", "Sampling", "Speculation", "Server", "Engine", "Output")
"""Panels of help pages."""

NO_OPTION = object()
"""Marks a field of a declaration that is no option: `Annotated[TYPE, NO_OPTION]`."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. `flag`: its names on a command line; "" makes one of the option's name, None has none."""

    default: Any = None
    """None also means that None is allowed: not given."""
    help: str = ""
    group: str = "Generation"
    metavar: str | None = None
    flag: str | None = ""
    expert: bool = False
    """Shown by `--help-all` only."""
    hidden: bool = False
    """Never shown: deprecated."""
    required: bool = False

    python_type: ClassVar[Any] = str
    """What a command line parses."""
    json_type: ClassVar[dict[str, Any]] = {"type": "string"}

    def check(self, name: str, value: Any) -> Any:
        """The value as a plain Python one. Raises `OptionError`, which calls the option `name`."""
        return None if value is None and self.default is None else self._check(name, value)

    def _check(self, name: str, value: Any) -> Any:
        return value

    def json_schema(self) -> dict[str, Any]:
        """Of one value."""
        schema = {**self.json_type, **self._limits()}
        if self.default is None and "type" in schema:
            schema["type"] = [schema["type"], "null"]
        return {**schema, "default": self.default, "description": self.help}

    def _limits(self) -> dict[str, Any]:
        return {}

    def flags(self, name: str) -> tuple[str, ...]:
        """`--some-name`, with whatever else names it; nothing for an option of Python alone."""
        if self.flag is None:
            return ()
        return tuple(self.flag.split()) if self.flag else (f"--{name.replace('_', '-')}",)


@dataclass(frozen=True, kw_only=True)
class Integer(Option):
    """An integer in low..high."""

    low: int = 0
    high: int | None = None
    python_type: ClassVar[Any] = int
    json_type: ClassVar[dict[str, Any]] = {"type": "integer"}

    def _check(self, name: str, value: Any) -> int:
        return integer(name, value, self.low, self.high)

    def _limits(self) -> dict[str, Any]:
        return {"minimum": self.low, **({} if self.high is None else {"maximum": self.high})}


@dataclass(frozen=True, kw_only=True)
class Number(Option):
    """A finite number in low..high, above `low` where `above`."""

    low: float = 0.0
    high: float = float("inf")
    above: bool = False
    python_type: ClassVar[Any] = float
    json_type: ClassVar[dict[str, Any]] = {"type": "number"}

    def _check(self, name: str, value: Any) -> float:
        return number(name, value, self.low, self.high, self.above)

    def _limits(self) -> dict[str, Any]:
        low = {"exclusiveMinimum" if self.above else "minimum": self.low}
        return low if self.high == float("inf") else {**low, "maximum": self.high}


@dataclass(frozen=True, kw_only=True)
class Text(Option):
    """A string; `noun` is what an error calls it."""

    noun: str = "text"

    def _check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise OptionError(f"{name}: {value!r:.80} is not {self.noun}")
        return value


@dataclass(frozen=True, kw_only=True)
class Choice(Option):
    """One of several words."""

    choices: tuple[str, ...] = ()

    def _check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.choices:
            raise OptionError(f"{name}: {value!r:.80} is not one of {', '.join(self.choices)}")
        return value

    def _limits(self) -> dict[str, Any]:
        return {"enum": [*self.choices, *([None] if self.default is None else [])]}


@dataclass(frozen=True, kw_only=True)
class Switch(Option):
    """True or False."""

    default: Any = False
    python_type: ClassVar[Any] = bool
    json_type: ClassVar[dict[str, Any]] = {"type": "boolean"}

    def _check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise OptionError(f"{name}: {value!r:.80} is not True or False")
        return value


@dataclass(frozen=True, kw_only=True)
class Texts(Option):
    """One string or several, of `longest` characters together."""

    default: Any = ()
    longest: int | None = None
    python_type: ClassVar[Any] = list[str]
    json_type: ClassVar[dict[str, Any]] = {"type": "array", "items": {"type": "string"}}

    def _check(self, name: str, value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise OptionError(f"{name}: {value!r:.80} is not text or a list of texts")
        size = sum(map(len, texts))
        if self.longest is not None and size > self.longest:
            raise OptionError(
                f"{name}: {len(texts)} texts of {size:,} characters; all of them may have {self.longest:,}: give fewer"
            )
        return tuple(texts)


@dataclass(frozen=True, kw_only=True)
class File(Option):
    """The path of a file or folder."""

    python_type: ClassVar[Any] = Path


@dataclass(frozen=True, kw_only=True)
class Files(Option):
    """Paths; the option is repeated on a command line."""

    default: Any = ()
    python_type: ClassVar[Any] = list[Path]
    json_type: ClassVar[dict[str, Any]] = {"type": "array", "items": {"type": "string"}}


@dataclass(frozen=True, kw_only=True)
class Custom(Option):
    """Whatever `checked(name, value)` accepts and returns."""

    checked: Callable[[str, Any], Any] = lambda name, value: value

    def _check(self, name: str, value: Any) -> Any:
        return self.checked(name, value)


def is_declaration(annotation: Any) -> bool:
    """Whether it is a class whose annotations declare options: a dataclass or a TypedDict."""
    return isinstance(annotation, type) and (
        dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation)
    )


@functools.cache
def declared_options(declaration: type) -> dict[str, Option]:
    """Name → option, in the order of declaration.

    Raises `TypeError` for a field without a kind that is not marked as `NO_OPTION`, and for an annotation that cannot be
    evaluated.
    """
    options: dict[str, Option] = {}
    for owner in reversed(declaration.__mro__):
        if not is_declaration(owner):
            continue
        for name, annotation in inspect.get_annotations(owner).items():
            option = _declared_option(annotation, owner, name)
            if option is not None:
                options[name] = option
    if dataclasses.is_dataclass(declaration):
        for field in dataclasses.fields(declaration):
            if field.name in options:
                options[field.name] = dataclasses.replace(options[field.name], **_default(field))
    return options


def _declared_option(annotation: Any, owner: type, name: str) -> Option | None:
    """None for what is no field, and for a field that is marked as `NO_OPTION`. Raises `TypeError`."""
    place = f"{owner.__module__}.{owner.__qualname__}.{name}"
    try:
        hint = _evaluated(annotation, owner)
        if hint is dataclasses.KW_ONLY or ClassVar in (hint, typing.get_origin(hint)):
            return None
        kinds = list(_kinds(hint, owner))
    except (NameError, SyntaxError) as error:
        raise TypeError(
            f"{place}: its annotation {annotation!r:.200} cannot be evaluated ({type(error).__name__}: {error}); import "
            "what it names outside of TYPE_CHECKING, or quote the TYPE of Annotated[TYPE, KIND(…)]"
        ) from error
    if not kinds:
        raise TypeError(
            f"{place}: its annotation {annotation!r:.200} has no kind of option; write Annotated[TYPE, KIND(…)], or "
            "Annotated[TYPE, NO_OPTION] for a field that is no option"
        )
    return kinds[-1] if isinstance(kinds[-1], Option) else None


def _kinds(hint: Any, owner: type) -> Iterator[Any]:
    """Options and `NO_OPTION` in the metadata of a hint, of the members of a union, and of what an alias stands for."""
    hint = _evaluated(hint, owner)
    if isinstance(hint, getattr(typing, "TypeAliasType", ())):
        yield from _kinds(hint.__value__, owner)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _kinds(member, owner)
    for metadata in getattr(hint, "__metadata__", ()):
        if isinstance(metadata, Option) or metadata is NO_OPTION:
            yield metadata


def _evaluated(hint: Any, owner: type) -> Any:
    """An annotation that is a string, as `from __future__ import annotations` leaves it, is evaluated where it stands."""
    module = owner.__module__
    if isinstance(hint, typing.ForwardRef):
        module, hint = hint.__forward_module__ or module, hint.__forward_arg__
    if not isinstance(hint, str):
        return hint
    names = vars(sys.modules[module]) if isinstance(module, str) else vars(module)
    return _evaluated(eval(hint, names, dict(vars(owner))), owner)


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    if field.default is not MISSING:
        return {"default": field.default}
    if field.default_factory is not MISSING:
        return {"default": field.default_factory()}
    return {"required": True}


def check_options(declaration: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its checked value or default. Raises `OptionError` for a wrong value or an unknown name."""
    options = declared_options(declaration)
    unknown = sorted(str(name) for name in given if name not in options)
    if unknown:
        raise OptionError(f"no option {', '.join(unknown):.200}; there are {', '.join(options)}")
    return {name: option.check(name, given.get(name, option.default)) for name, option in options.items()}


def json_schema(declaration: type) -> dict[str, Any]:
    """Of an object with these options; those whose values only Python has are left out."""
    properties = {
        name: option.json_schema()
        for name, option in declared_options(declaration).items()
        if not isinstance(option, Custom) or option.flag is not None
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def default_text(option: Option) -> str:
    """The sentence that says the default; "" where there is nothing to say."""
    value = option.default
    if option.required or value is None or value is False or value in ("", (), []):
        return ""
    return f"Default: {value:g}." if isinstance(value, float) else f"Default: {value}."
