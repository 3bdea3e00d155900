"""The command line `vlmexport`. Only names and help live here; every command imports its work when it runs."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import typer

from .commands.examples import EXAMPLES
from .commands.interrupts import STOPPING as STOPPING
from .commands.interrupts import interrupts
from .commands.option_flags import command_class
from .commands.suggestions import suggestion
from .commands.terminal import forget_odd_sizes, open_closed_streams
from .commands.verbosity import Quiet, Verbose, choose, printable, saying, with_verbosity
from .common.errors import NO_ONNX_RUNTIME, OptionError, VlmexportError
from .common.paths import path_text
from .images.quiet import quiet_log

RUNTIME_COMMANDS = {
    "run": ("run", "Caption an image, or answer a question about it."),
    "serve": ("serve", "Serve a bundle over HTTP, in OpenAI's protocol (needs the extra serve)."),
    "caption": (
        "caption",
        "Caption every picture of files, folders or Parquet tables; the same command continues a killed run.",
    ),
    "bench": ("bench", "Measure plain against speculative decoding, with the bound that the graphs allow."),
    "profile": ("profile", "Time every graph at every width with trtexec, or on the engine at hand."),
    "inspect": ("inspect", "Show what is in a bundle: graphs, weights, drafts, limits, parity, plans."),
}
"""Command → (module under commands/, help: in the list and of the command)."""

MOUNTED_COMMANDS = {
    "models": ("exporter", "List the models that can be exported, and their drafts."),
    "build": ("exporter", "Export a model as a bundle."),
    "verify": ("exporter", "Compare a bundle with its model: parity and losslessness."),
    "fit": (
        "exporter",
        "Say what a bundle or model would need on a device, and how fast its memory allows it to be.",
    ),
    "compile": (
        "exporter",
        "Build TensorRT plans into a bundle, in place of those for the same backend and target.",
    ),
    "export-draft": ("exporter", "Write a trained draft as a checkpoint that other programs read."),
    "train": (
        "calibration",
        "Train a draft for a target; only --joint and --fine-tune change it; the same command continues a killed run.",
    ),
    "search": (
        "calibration",
        "Search a draft out of what a target has: the sublayers that it can leave out.",
    ),
    "generate-data": (
        "calibration",
        "Write a target's own answers, to train drafts on; the same command continues a killed run.",
    ),
    "eval": ("calibration", "Measure how many drafted tokens a target accepts on held-out data."),
    "quantize": (
        "calibration",
        "Write a model with integer weights, chosen by data, and measure what they cost.",
    ),
    "tune": ("calibration", "Choose the draft, length and tree that pay on this device, for a bundle."),
}
"""Command → (package whose `cli.register(app)` adds it, help: in the list and of the command)."""

RENAMED_COMMANDS = {"calibrate": "tune"}
"""Old name → new one, for one release."""

ROOM_FOR_A_TABLE = 100
"""Columns of a terminal from which help is a table; a narrower one would cut the longest options."""

# The backslash keeps rich from reading the bracket as markup.
PANELS = {
    "exporter": "Export (needs the extra \\[export])",
    "calibration": "Train (needs the extra \\[train])",
}

log = logging.getLogger(__name__)
_PROJECT = __name__.partition(".")[0]


def missing_extra(error: ModuleNotFoundError, command: str | None = None) -> OptionError | None:
    """The one-line error for a module that an extra would install, or ONNX Runtime; None for any other module."""
    module = (error.name or "").partition(".")[0]
    if module == "onnxruntime":
        return OptionError(NO_ONNX_RUNTIME)
    from .common.optional_deps import MODULES, install_command

    for extra, modules in MODULES.items():
        if module in modules:
            needs = f"`vlmexport {command}` needs" if command else "this needs"
            if MOUNTED_COMMANDS.get(command or "", ("",))[0] == "calibration":
                extra = "train"  # it brings [export] with it
            return OptionError(f"{needs} the extra [{extra}] ({module} is missing): {install_command(extra)}")
    return None


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"vlmexport {version('vlmexport')}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Export vision-language models for robots, and run them faster without changing one output token."""
    choose(verbose, quiet)


def build_app(command: str | None = None) -> typer.Typer:
    """The application. Only `command` gets its real options; the others appear with their help line.

    So that `vlmexport --help` and `vlmexport run` never import another room.
    """
    wide = shutil.get_terminal_size().columns >= ROOM_FOR_A_TABLE
    app = typer.Typer(
        name="vlmexport", no_args_is_help=True, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode="rich" if wide else None,
    )  # fmt: skip
    app.callback()(_root)
    for name, (module, text) in RUNTIME_COMMANDS.items():
        if name == command:
            import_module(f".commands.{module}", __package__).register(app)
            _complete(app.registered_commands[-1], text)
        else:
            app.command(name, help=text)(_nothing)
    for name, (package, text) in MOUNTED_COMMANDS.items():
        panel = PANELS[package]
        if name == command:
            _mount(app, name, package)
        else:
            app.command(name, help=text, rich_help_panel=panel)(_nothing)
    return app


def _complete(info: Any, text: str) -> None:
    """Give a registered command its help, with an example at its end, and the options that all commands have."""
    info.help = text
    info.epilog = "\n\n".join(filter(None, (info.epilog, f"Example: {EXAMPLES[info.name]}")))
    info.cls = command_class(getattr(info.callback, "expert", ()))
    info.callback = with_verbosity(info.callback)


def _nothing() -> None:
    """Stands for a command that was not asked for."""


def _mount(app: typer.Typer, command: str, package: str) -> None:
    """Add one command of another room, or, where its extra is missing, a command that says so."""
    other = typer.Typer()
    try:
        register: Callable[[typer.Typer], Any]
        if package == "exporter":
            from ..exporter.cli import register
        else:
            from ..calibration.cli import register
        register(other)
    except ModuleNotFoundError as error:
        failure = missing_extra(error, command)
        if error.name in (f"{_PROJECT}.{package}", f"{_PROJECT}.{package}.cli"):
            failure = OptionError(
                f"`vlmexport {command}` is not part of this installation: reinstall vlmexport"
            )
        if failure is None:
            raise
        _add_unavailable(app, command, failure)
        return
    for info in other.registered_commands:
        name = info.name or getattr(info.callback, "__name__", "").replace("_", "-")
        if name == command:
            _complete(info, MOUNTED_COMMANDS[command][1])
            app.registered_commands.append(info)
            return
    failure = OptionError(f"`vlmexport {command}` is not part of this installation: reinstall vlmexport")
    _add_unavailable(app, command, failure)


def _add_unavailable(app: typer.Typer, command: str, failure: OptionError) -> None:
    def unavailable() -> None:
        raise failure

    text = f"{MOUNTED_COMMANDS[command][1]} Not available: {failure}"
    accept_all = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(command, help=text, context_settings=accept_all)(unavailable)


def _refuse_empty_paths(application: Any) -> None:
    """Of every command: an empty path would be the current folder."""
    for command in (application, *getattr(application, "commands", {}).values()):
        for parameter in command.params:
            if getattr(parameter.type, "name", "") == "path":
                parameter.type.convert = functools.partial(_convert_path, parameter.type.convert)


def _convert_path(convert: Callable[..., Any], value: Any, parameter: Any = None, context: Any = None) -> Any:
    if value == "":
        flags = [each for each in parameter.opts if each.startswith("-")]
        raise OptionError(
            f"{flags[-1] if flags else parameter.name.upper()}: the path is empty; name a file or folder"
        )
    return convert(value, parameter, context)


def _command_name(arguments: Sequence[str]) -> str | None:
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _completed_words() -> list[str]:
    """What stands on the line that a shell wants completed, without the program; empty when none does."""
    if "_VLMEXPORT_COMPLETE" not in os.environ:
        return []
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")  # bash; zsh and fish
    return line.split()[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for an error of use or input, 130 for Ctrl-C, 143 for
    SIGTERM."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    open_closed_streams()
    quiet_log()
    forget_odd_sizes()
    command = _command_name(_completed_words() or arguments)
    renamed = RENAMED_COMMANDS.get(command or "")
    if command is not None and renamed is not None and command in arguments:
        arguments[arguments.index(command)] = renamed
    with interrupts() as seen, saying():
        try:
            if renamed is not None:
                log.warning("`vlmexport %s` is now `vlmexport %s`", command, renamed)
                command = renamed
            application = typer.main.get_command(build_app(command))
            _refuse_empty_paths(application)
            status = application.main(args=arguments, prog_name="vlmexport", standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            status = 130
        except Exception as error:
            status = 130 if seen else _fail(error, command)
    if status == 130:  # newer versions of typer turn Ctrl-C into a status themselves
        sys.stderr.write("\nInterrupted.\n")
        return 128 + seen[-1] if seen else 130
    return status if isinstance(status, int) else 0


def _fail(error: Exception, command: str | None) -> int:
    """Say in one line what went wrong; an error that is not deliberate is raised again."""
    if isinstance(error, VlmexportError):
        return _complain(str(error))
    if isinstance(error, ModuleNotFoundError):
        failure = missing_extra(error, command)
        if failure is None:
            raise error
        return _complain(str(failure))
    if isinstance(error, ImportError):  # a shared library that is damaged, or for which there is no memory
        lines = str(error).strip().splitlines()
        return _complain(
            f"{error.name or 'a library'} cannot be loaded: {lines[0] if lines else type(error).__name__}"
        )
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        reason = f" ({error})" if str(error) else ""
        return _complain(f"not enough memory{reason}; use a smaller model or smaller limits")
    if isinstance(error, OSError) and error.strerror:  # a full disk, a file that may not be written, …
        return _complain(f"{path_text(error.filename) if error.filename else 'the output'}: {error.strerror}")
    # Errors of use (unknown option, missing argument) know how to show themselves.
    show = getattr(error, "show", None)
    if show is None:
        raise error
    hint = suggestion(error)
    if hint is not None:
        return _complain(hint)
    show()
    return int(getattr(error, "exit_code", 2))


def _complain(message: str) -> int:
    sys.stderr.write(f"vlmexport: {printable(message)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
