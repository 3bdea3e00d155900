"""The command line `vlmexport`. Only names and help live here; every command imports its work when it runs."""

from __future__ import annotations

import _thread
import contextlib
import errno
import functools
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import FrameType
from typing import IO, Any

import typer

from .commands.suggestions import suggestion
from .commands.verbosity import Quiet, Verbose, choose, printable, saying, with_verbosity
from .common.errors import NO_ONNX_RUNTIME, OptionError, VlmexportError
from .common.paths import path_text
from .images.quiet import quiet_log

RUNTIME_COMMANDS = {
    "run": ("run", "Caption an image, or answer a question about it."),
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
    "calibrate": ("calibration", "Choose the draft, length and tree that pay on this device, for a bundle."),
}
"""Command → (package whose `cli.register(app)` adds it, help: in the list and of the command)."""

ROOM_FOR_A_TABLE = 100
"""Columns of a terminal from which help is a table; a narrower one would cut the longest options."""

NARROWEST = 10
"""Columns of a terminal that are believed."""

# The backslash keeps rich from reading the bracket as markup.
PANELS = {
    "exporter": "Export (needs the extra \\[export])",
    "calibration": "Train (needs the extra \\[train])",
}

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
    """Give a registered command its help, and the options that all commands have."""
    info.help = text
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
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with the stream closed (`>&-`)
            # Its number is taken in any case, or the next file that is opened would get what is written to it.
            nowhere = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115
            setattr(sys, name, _Closed(nowhere) if name == "stdout" else nowhere)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A console that cannot show a character shows "?" instead of failing.
            stream.reconfigure(errors="replace")
    quiet_log()
    _forget_odd_sizes()
    command = _command_name(_completed_words() or arguments)
    with _interrupts() as interrupts, saying():
        try:
            application = typer.main.get_command(build_app(command))
            _refuse_empty_paths(application)
            status = application.main(args=arguments, prog_name="vlmexport", standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            status = 130
        except Exception as error:
            status = 130 if interrupts else _fail(error, command)
    if status == 130:  # newer versions of typer turn Ctrl-C into a status themselves
        sys.stderr.write("\nInterrupted.\n")
        return 128 + interrupts[-1] if interrupts else 130
    return status if isinstance(status, int) else 0


def _forget_odd_sizes() -> None:
    """What libraries would take for the size of the terminal and no line would fit in, or is no number: it has its own."""
    for name in ("COLUMNS", "LINES"):
        value = os.environ.get(name)
        number = int(value) if value and value.isascii() and value.isdecimal() and len(value) < 6 else 0
        if value is not None and number < (NARROWEST if name == "COLUMNS" else 1):
            del os.environ[name]


class _Closed(io.TextIOBase):
    """In place of a standard output that is closed: results that are written there are not lost without a word."""

    def __init__(self, nowhere: IO[str]):
        self._nowhere = nowhere

    def write(self, text: str) -> int:
        if text:
            raise OSError(errno.EBADF, "is closed; lead it to a file, or to /dev/null", "standard output")
        return 0


STOPPING: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Signals that end a command with its cleaning up, and how Python treats them before anybody else decided."""


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Turns Ctrl-C and SIGTERM into KeyboardInterrupt, and collects them: a library that is interrupted while it is
    imported may raise an error of its own instead.

    An interrupt that hits a callback (of a weak reference, say) is dropped by Python: it is then sent again.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    ours = [number for number, usual in STOPPING.items() if signal.getsignal(number) is usual]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def unraisable(dropped: Any) -> None:
        if seen and dropped.exc_type is not None and issubclass(dropped.exc_type, KeyboardInterrupt):
            # Not at once: it would hit this hook, whose errors are dropped as well.
            again = threading.Timer(0.01, _thread.interrupt_main, seen[-1:])
            again.daemon = True
            again.start()
        else:
            hook(dropped)

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield seen
    finally:
        for number in ours:
            signal.signal(number, STOPPING[number])
        sys.unraisablehook = hook


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
        said = str(error).strip().splitlines()
        return _complain(
            f"{error.name or 'a library'} cannot be loaded: {said[0] if said else type(error).__name__}"
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
    said = suggestion(error)
    if said is not None:
        return _complain(said)
    show()
    return int(getattr(error, "exit_code", 2))


def _complain(message: str) -> int:
    sys.stderr.write(f"vlmexport: {printable(message)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
