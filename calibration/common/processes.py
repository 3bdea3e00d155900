"""The processes of one training: what a launcher (`torchrun`, `accelerate launch`, `mpirun`) started, and what they do together.

Only what joins the others imports torch: commands that one process runs ask nothing but the environment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.commands.verbosity import LOGGER
from ...runtime.common.errors import LostProcessError, OptionError

if TYPE_CHECKING:
    from accelerate import PartialState

SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Where launchers say how many processes there are and which one this is: the names that accelerate reads."""

TORCHRUN = "torchrun --nproc_per_node N -m vlmexport.runtime.cli train"
PATIENCE = timedelta(hours=12)
"""How long processes wait for each other: the first one may build a feature cache meanwhile. A process that ends is
noticed at once."""


def launched_processes(
    environment: Mapping[str, str] = os.environ, remedy: str = f"start them with {TORCHRUN}"
) -> int | None:
    """How many processes the launcher says there are; None where there is no launcher. `remedy` is what errors say to do.

    Raises OptionError for a launcher that was asked for several and started one, and for variables that name no
    process.
    """
    name = next((name for name in SIZES if environment.get(name)), None)
    if name is None:
        if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
            raise OptionError(
                "accelerate launch started one process and was asked for several (it set MASTER_ADDR), as it does on "
                f"CPUs: {remedy}, or give --num_processes 1 and unset MASTER_ADDR"
            )
        return None
    said = environment[name]
    if not said.isdecimal() or not 0 < int(said[:9]) < 1 << 20:
        raise OptionError(f"{name}={said!r:.40} is not a number of processes; unset it, or {remedy}")
    if int(said) > 1 and not any(environment.get(rank) for rank in RANKS):
        raise OptionError(
            f"{name}={said}, and nothing says which of these processes this is (RANK): {remedy}, or unset {name}"
        )
    return int(said)


def run_alone(command: str) -> None:
    """OptionError where a launcher started several processes of a command that would do all its work in each of them."""
    count = launched_processes(remedy="start it without a launcher")
    if count is not None and count > 1:
        raise OptionError(
            f"{command} runs in one process, and the launcher started {count}, each of which would do the whole work: "
            "start it without a launcher"
        )


def join_processes(cpu: bool) -> PartialState:
    """This process among those of the training, on CPUs or GPUs.

    Raises OptionError where the launcher started another number of processes than accelerate finds, or they do not find
    each other.
    """
    from accelerate import PartialState

    count = launched_processes()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "OMP_NUM_THREADS")  # it says how many threads it chose
            state = PartialState(cpu=cpu, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OptionError(
            f"the {count or 1} processes do not find each other ({reason:.200}); start them with {TORCHRUN}"
        ) from error
    if count is not None and state.num_processes != count:
        raise OptionError(
            f"the launcher started {count} processes and accelerate finds {state.num_processes}: each would train alone "
            f"and write the same folder; on CPUs create PartialState(cpu=True) first, or start {TORCHRUN}"
        )
    return state


def described(state: PartialState) -> str:
    """Such as `2 processes on cpu (gloo)`."""
    backend = f" ({state.backend})" if state.num_processes > 1 else ""
    device = str(state.device).partition(":")[0]  # each has a GPU of another number
    return f"{state.num_processes} process{'es' * (state.num_processes > 1)} on {device}{backend}"


@contextlib.contextmanager
def said_once(state: PartialState) -> Iterator[None]:
    """Within the block the first process alone writes to stderr what all of them would; errors are shown behind it."""
    if state.is_main_process:
        yield
        return
    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):  # noqa: PTH123
            yield
    finally:
        LOGGER.setLevel(level)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around what needs all processes. LostProcessError where one of them is gone."""
    import torch
    from accelerate import PartialState

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        state = PartialState()
        if state.num_processes == 1:
            raise
        raise LostProcessError(
            f"process {state.process_index} of {state.num_processes} has lost another one: it ended, or cannot be "
            "reached; the same command goes on from the last state that was saved"
        ) from error


def wait_for_all() -> None:
    """Returns when every process is here. Raises LostProcessError."""
    from accelerate import PartialState

    with together():
        PartialState().wait_for_everyone()


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """The block, in the first process before the others. Raises LostProcessError."""
    from accelerate import PartialState

    main = PartialState().is_main_process
    if not main:
        wait_for_all()
    yield
    if main:
        wait_for_all()


def check_shared(folder: Path, mark: str) -> None:
    """OptionError in a process that does not see the file `mark` that the first one has made in `folder`."""
    from accelerate import PartialState

    wait_for_all()
    state = PartialState()
    if not (folder / mark).exists():
        raise OptionError(
            f"process {state.process_index} of {state.num_processes} does not see what the first one writes to {folder}: "
            "give a folder that all machines share"
        )


def all_summed(tensor: Any) -> Any:
    """A tensor, summed over all processes. Raises LostProcessError."""
    from accelerate.utils import reduce

    with together():
        return reduce(tensor, "sum")
