"""The options of `vlmexport profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..common.errors import OptionError
from ..common.options import File, Integer, Number, Switch, Text
from .options import DeviceOptions


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which plans trtexec times, and how."""

    target: Annotated[
        str | None,
        Text(
            group="Engine",
            metavar="SM",
            help="Plans to time, where the bundle has plans for several targets.",
        ),
    ] = None
    backend: Annotated[
        str | None,
        Text(
            group="Engine",
            metavar="NAME",
            help="TensorRT of the plans, where the bundle has plans of several.",
        ),
    ] = None
    trtexec: Annotated[
        Path | None,
        File(group="Engine", metavar="FILE", help="The program. Default: on PATH, or where JetPack has it."),
    ] = None
    iterations: Annotated[
        int,
        Integer(
            low=10,
            high=100_000,
            group="Engine",
            expert=True,
            metavar="N",
            help="Runs of trtexec for each graph.",
        ),
    ] = 200
    save_commands: Annotated[
        Path | None,
        File(
            group="Output",
            metavar="FILE",
            help="Write the commands as a shell script for the device, and run nothing.",
        ),
    ] = None
    import_results: Annotated[
        Path | None, File(flag="--import", group="Input", metavar="DIR", help="Read what that script wrote.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ProfiledEngine(DeviceOptions):
    """What is timed in place of plans."""

    engine: Annotated[
        bool, Switch(group="Engine", help="Time the engine at hand, even where the bundle has plans.")
    ] = False
    widths: Annotated[
        str | None,
        Text(
            group="Input", metavar="Q,…", help="Positions in one pass. Default: 1 to the bundle's max_width."
        ),
    ] = None

    def check(self, plans: PlanOptions) -> None:
        """Refuse options that are for trtexec's plans where an engine is timed. Raises `OptionError`."""
        elsewhere = plans.save_commands is not None or plans.import_results is not None
        if plans.save_commands is not None and plans.import_results is not None:
            raise OptionError(
                "--save-commands and --import are two steps: run the script on the device in between"
            )
        if self.device != "cpu" and (elsewhere or plans.trtexec is not None):
            raise OptionError(
                f"--device {self.device} times that engine: leave --save-commands, --import and --trtexec out"
            )
        if elsewhere or not (self.engine or self.device != "cpu"):
            return
        how = "--engine" if self.engine else f"--device {self.device}"
        for option in ("trtexec", "target", "backend"):
            if (value := getattr(plans, option)) is not None:
                raise OptionError(
                    f"--{option} {value} is for trtexec's plans, {how} times an engine; choose one"
                )


@dataclass(frozen=True, kw_only=True)
class ProfiledRequest:
    """The request whose time is split into graphs."""

    tokens: Annotated[
        int,
        Integer(
            low=1,
            group="Generation",
            metavar="N",
            help="Tokens of the request whose time is split into graphs.",
        ),
    ] = 64
    acceptance: Annotated[
        float,
        Number(high=1, group="Generation", metavar="A", help="Share of its drafted tokens that is accepted."),
    ] = 0.8
    html: Annotated[Path | None, File(group="Output", metavar="FILE", help="Write a page with plots.")] = None
