"""From declarations of options (`common/options.py`) to the flags of a command, and the pages of its help."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import typer
import typer.core

from ..common.options import GROUPS, Option, declared_options, default_text, is_declaration

KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_flags(
    command: Callable[..., Any],
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    without: Collection[str] = (),
) -> Callable[..., Any]:
    """`command`, whose parameters that are annotated with a declaration become flags.

    A dataclass is given to the command with every value, checked under the flag's name. A TypedDict is given as a dict of
    what was typed, whose owner checks it. `changes` to options of a TypedDict, by name, are this command's own; it goes
    `without` some. The names of expert flags are left on the result as `expert`, and `command` as `command`.
    """
    parameters, expert = [], set()
    owners: dict[str, tuple[Any, dict[str, Option]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if not is_declaration(parameter.annotation):
            parameters.append(parameter.replace(kind=KEYWORD))
            continue
        options = declared_options(parameter.annotation)
        changed = {} if dataclasses.is_dataclass(parameter.annotation) or changes is None else changes
        options = {
            name: dataclasses.replace(option, **changed.get(name, {}))
            for name, option in options.items()
            if name not in without and option.flag is not None
        }
        owners[parameter.name] = (parameter.annotation, options)
        parameters += [_flag(name, option) for name, option in options.items()]
        expert |= {name for name, option in options.items() if option.expert}

    def run(**values: Any) -> Any:
        for name, (owner, options) in owners.items():
            typed = {each: values.pop(each) for each in options}
            values[name] = _gathered(owner, options, typed)
        return command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__doc__, run.__name__, run.command = command.__doc__, command.__name__, command  # type: ignore[attr-defined]
    run.expert = expert | getattr(command, "expert", set())  # type: ignore[attr-defined]
    return run


def _gathered(owner: Any, options: Mapping[str, Option], typed: Mapping[str, Any]) -> Any:
    given = {
        name: value
        for name, value in typed.items()
        if value is not None and value is not False and value != []
    }
    if not dataclasses.is_dataclass(owner):
        changed = {name: option.default for name, option in options.items() if option.default is not None}
        usual = declared_options(owner)
        changed = {name: value for name, value in changed.items() if value != usual[name].default}
        return {**changed, **given}
    checked = {
        name: option.check(option.flags(name)[-1], given.get(name, option.default))
        for name, option in options.items()
    }
    return owner(**checked)  # type: ignore[operator]


def _flag(name: str, option: Option) -> inspect.Parameter:
    """A keyword whose value is None where nothing is typed."""
    is_switch, is_list = option.python_type is bool, str(option.python_type).startswith("list")
    text = " ".join(filter(None, (option.help, default_text(option))))
    declared = typer.Option(
        *option.flags(name), help=text, metavar=None if is_switch else option.metavar, hidden=option.hidden,
        rich_help_panel=option.group, show_default=False,
    )  # fmt: skip
    if is_switch:
        return inspect.Parameter(name, KEYWORD, default=False, annotation=Annotated[bool, declared])
    if option.required:
        return inspect.Parameter(name, KEYWORD, annotation=Annotated[option.python_type, declared])
    default: Any = [] if is_list else None
    kind = option.python_type if is_list else option.python_type | None
    return inspect.Parameter(name, KEYWORD, default=default, annotation=Annotated[kind, declared])


def flag_texts(declaration: type, given: Mapping[str, Any]) -> list[str]:
    """`--some-name 3` of options that were given, in the order of declaration."""
    options = declared_options(declaration)
    return [f"{options[name].flags(name)[-1]} {given[name]}" for name in options if name in given]


def command_class(expert: Collection[str]) -> type[typer.core.TyperCommand]:
    """A command whose help shows these options with `--help-all` only, and its options in groups."""

    class Command(typer.core.TyperCommand):
        def __init__(self, *given: Any, **named: Any):
            super().__init__(*given, **named)
            for parameter in self.params:
                if self.rich_markup_mode == "rich" and getattr(parameter, "help", None):
                    parameter.help = re.sub(r"(?<!\\)\[", r"\\[", parameter.help)  # type: ignore[attr-defined]
                if parameter.param_type_name == "option" and not getattr(parameter, "rich_help_panel", None):
                    parameter.rich_help_panel = "Output"  # type: ignore[attr-defined]
            self.params.sort(key=_group)
            if expert:
                self.params.append(_help_all())

        def get_help_option(self, ctx: Any) -> Any:
            option: Any = super().get_help_option(ctx)
            if option is not None:
                option.rich_help_panel = "Output"
            return option

        def format_help(self, ctx: Any, formatter: Any) -> None:
            if ctx.meta.get(HELP_ALL):
                super().format_help(ctx, formatter)
                return
            left_out: list[Any] = [each for each in self.params if each.name in expert and not each.hidden]  # type: ignore[attr-defined]
            for each in left_out:
                each.hidden = True
            try:
                super().format_help(ctx, formatter)
            finally:
                for each in left_out:
                    each.hidden = False

        def format_options(self, ctx: Any, formatter: Any) -> None:
            groups: dict[str, list[tuple[str, str]]] = {}
            for parameter in self.get_params(ctx):
                record = parameter.get_help_record(ctx)
                if record is not None:
                    is_option = parameter.param_type_name == "option"
                    title = getattr(parameter, "rich_help_panel", None) or "Options"
                    groups.setdefault(title if is_option else "Arguments", []).append(record)
            for title, records in groups.items():
                with formatter.section(title):
                    formatter.write_dl(records)

    return Command


HELP_ALL = "vlmexport.help_all"


def _help_all() -> Any:
    def show(ctx: Any, _parameter: Any, value: bool) -> None:
        if value:
            ctx.meta[HELP_ALL] = True
            if text := ctx.get_help():
                typer.echo(text, color=ctx.color)
            ctx.exit()

    return typer.core.TyperOption(
        param_decls=["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show,
        help="Show the expert options, too.", rich_help_panel="Output",
    )  # fmt: skip


def _group(parameter: Any) -> int:
    """Where a parameter is shown: arguments first, then groups in their order."""
    group = getattr(parameter, "rich_help_panel", None)
    if parameter.param_type_name != "option":
        return -1
    return GROUPS.index(group) if group in GROUPS else len(GROUPS)
