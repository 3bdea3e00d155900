"""What `--device` names: the CPU, or a GPU of this process's own."""

from __future__ import annotations

import torch
from accelerate.utils import parse_flag_from_env

from ...runtime.common.errors import OptionError
from ..common.processes import join_processes, launched_processes


def find_device(device: str | torch.device) -> torch.device:
    """What `--device` names; `auto` is this process's CUDA GPU where there is one, else the CPU. Of several processes each has
    a GPU of its own, also for `cuda`.

    Raises OptionError for a name that is none, for a GPU that PyTorch does not find, for one that several processes
    would share, and as `join_processes`.
    """
    if device == "auto":
        cpu = not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
        return torch.device(join_processes(cpu=cpu).device or "cpu")
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"--device {str(device)!r:.80} is not auto, cpu or cuda[:N]") from error
    if torch_device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {device} is not auto, cpu or cuda[:N]")
    count = torch.cuda.device_count() if torch_device.type == "cuda" else 1
    if torch_device.type == "cuda" and (not torch.cuda.is_available() or (torch_device.index or 0) >= count):
        have = f"{count} GPU(s)" if torch.cuda.is_available() else "no GPU"
        raise OptionError(
            f"--device {device}: PyTorch {torch.__version__} finds {have} here; give --device cpu, or install a PyTorch "
            "for this machine's GPU"
        )
    several = (launched_processes() or 1) > 1
    if several and torch_device.type == "cuda" and torch_device.index is not None:
        raise OptionError(
            f"--device {device} is one GPU for all processes of the training; --device cuda gives each its own"
        )
    if several and torch_device.type == "cuda":
        return torch.device(join_processes(cpu=False).device or torch_device)
    return torch_device
