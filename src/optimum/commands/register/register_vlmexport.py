"""`optimum-cli export vlmexport`: `vlmexport build` for users of optimum, by optimum's own registration.

optimum imports every file of the namespace package `optimum.commands.register` (which therefore has no `__init__.py`)
whenever its command starts, so nothing heavy is imported here. Options are those of `vlmexport build` as it declares
them; what was given goes to that command as it stands, with its checks, errors and exit status.
"""

from __future__ import annotations

# pyright: reportMissingImports=false
# It is a part of another package, which need not be installed, and imports this one by its whole name.
import sys
from argparse import ArgumentParser
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

HELP = "Export a vision-language model as a vlmexport bundle: plain ONNX graphs with drafts for speculative decoding."


def build_options() -> list[Any]:
    """The options of `vlmexport build`, as its command line declares them."""
    import typer
    from vlmexport.runtime.cli import build_app

    group: Any = typer.main.get_command(build_app("build"))
    parameters = group.commands["build"].params
    return [each for each in parameters if each.param_type_name == "option" and each.name != "help_all"]


class VlmexportExportCommand(BaseOptimumCLICommand):
    """Collects options as they were typed and hands them on."""

    COMMAND = CommandInfo(name="vlmexport", help=HELP)

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """See optimum. `vlmexport build` says which options are missing, and which values are wrong."""
        parser.description = HELP
        parser.allow_abbrev = False
        for option in build_options():
            settings: dict[str, Any] = {"dest": option.name, "help": (option.help or "").replace("%", "%%")}
            if option.is_flag:
                parser.add_argument(*option.opts, action="store_true", **settings)
            else:
                parser.add_argument(*option.opts, action="append", metavar=option.metavar, **settings)

    def run(self) -> None:
        """Runs `vlmexport build`; ends with its exit status unless that is 0."""
        from vlmexport.runtime.cli import main

        words = ["build"]
        for option in build_options():
            given, name = getattr(self.args, option.name), option.opts[-1]
            values = [name] * given if option.is_flag else [f"{name}={value}" for value in given or []]
            words += values
        status = main(words)
        if status:
            sys.exit(status)


REGISTER_COMMANDS = [(VlmexportExportCommand, ExportCommand)]
