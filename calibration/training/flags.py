"""From the options of the loop and of every draft kind to the flags of `vlmexport train`, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from ...runtime.common.errors import OptionError
from ..objectives import KINDS, options_of
from ..objectives.training_options import LoopOptions, Options, flag_of


def with_option_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose parameter `options` (a mapping of names to values or None) becomes one flag per option.

    A flag that several kinds have is one flag; its help is the first kind's, and names the defaults of others that differ.
    """
    signature = inspect.signature(command, eval_str=True)
    hints: dict[str, Any] = {}
    for owner in _owners().values():
        hints = get_type_hints(owner) | hints
    flags = {name: _flag(kinds, hints[name]) for name, kinds in _fields().items()}

    def run(**values: Any) -> None:
        options = {name: values.pop(name) for name in flags}
        command(**values, options=options)

    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.name != "options"
    ]
    run.__signature__ = signature.replace(parameters=[*own, *flags.values()])  # type: ignore[attr-defined]
    run.__doc__, run.__name__, run.command = command.__doc__, command.__name__, command  # type: ignore[attr-defined]
    run.expert = {  # type: ignore[attr-defined]
        name for name, kinds in _fields().items() if next(iter(kinds.values())).metadata.get("expert")
    }
    return run


def read_flags(kind: str, given: Mapping[str, Any], preset: str | None = None) -> tuple[Options, LoopOptions]:
    """The options of a kind and of the loop, from flags (None: not given).

    Raises OptionError for an unknown kind, for a flag that belongs to other kinds only, and as the options do.
    """
    owner = options_of(kind)
    loop, own = ({f.name for f in fields(o)} for o in (LoopOptions, owner))  # type: ignore[arg-type]
    for name, value in given.items():
        if value is not None and name not in loop | own:
            metadata = next(iter(_fields()[name].values())).metadata
            raise OptionError(f"{flag_of(name, metadata)} does not apply to --draft {kind}")
    return (
        owner.of({n: given.get(n) for n in own}, preset),
        LoopOptions.of({n: given.get(n) for n in loop}),
    )


def _owners() -> dict[str, type[Options] | type[LoopOptions]]:
    """Who has options: the loop (""), and every kind of draft."""
    return {"": LoopOptions, **{kind: options_of(kind) for kind in KINDS}}


def _fields() -> dict[str, dict[str, Field[Any]]]:
    """Every option's fields, by who has it."""
    by_name: dict[str, dict[str, Field[Any]]] = {}
    for kind, owner in _owners().items():
        for one in fields(owner):  # type: ignore[arg-type]
            by_name.setdefault(one.name, {})[kind] = one
    return by_name


def _flag(kinds: Mapping[str, Field[Any]], hint: Any) -> inspect.Parameter:
    """The flag of an option, from its fields by draft kind."""
    one = next(iter(kinds.values()))
    name = flag_of(one.name, one.metadata)
    differs = {kind: each.default for kind, each in kinds.items() if each.default != one.default}
    # What a default of None stands for is said by the option's own help.
    others = {kind: default for kind, default in differs.items() if default is not None}
    shown = "" if one.default is None else f" (default: {'on' if one.default is True else one.default}"
    shown += "".join(f", {kind}: {default}" for kind, default in others.items()) + ")" if shown else ""
    text = f"{one.metadata['help'].rstrip('.')}{shown}."
    declared = f"{name}/--no-{name[2:]}" if hint is bool else name
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            hint | None, typer.Option(declared, help=text, show_default=False, rich_help_panel="Training")
        ],
    )
