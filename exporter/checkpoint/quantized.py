"""Which tensors of a checkpoint are weights: floats of 16, 32 or 64 bits, each of which belongs to a parameter.

Everything else that stands where a weight stands is a quantised model's: integers or floats of 8 bits in a weight's place,
and scales, zero points and permutations beside it. To read one without the other gives another model. What config.json
describes (`layouts/`) is not seen here any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...runtime.common.errors import UnsupportedModelError
from .layouts.settings import REMEDY as ORIGINAL
from .names import StoredNames
from .plain import WEIGHT_DTYPES
from .tensors import TensorFiles

PARAMETERS = ("weight", "bias")
"""Names of parameters in their modules: one that the configuration does not ask for is no quantisation's."""
UNMERGED = "an adapter's, saved without being merged; merge it (peft's merge_and_unload) and save the model"
REMEDY = f"quantized numbers that config.json does not describe; {ORIGINAL}"


def check_weights(tensors: TensorFiles, names: StoredNames) -> None:
    """UnsupportedModelError that names the first tensor that stands for a parameter and is no weight, or that stands beside
    a parameter and belongs to none."""
    for parameter in names.shapes:
        disk = names.held(parameter)
        if disk is not None and tensors.dtype(disk) not in WEIGHT_DTYPES:
            raise UnsupportedModelError(
                f"{tensors.folder}: tensor {disk} is {tensors.dtype(disk)}, which is no weight: {REMEDY}"
            )
    for disk, module, own in _beside(names.unread, names.modules):
        if own in PARAMETERS and tensors.dtype(disk) in WEIGHT_DTYPES:
            continue  # of another form of the model: transformers does not read it either, and a notice tells
        unmerged = own.rpartition(".")[2] in PARAMETERS and own not in PARAMETERS
        raise UnsupportedModelError(
            f"{tensors.folder}: tensor {disk} stands beside the parameters of {module} and is none of them: "
            f"{UNMERGED if unmerged else REMEDY}"
        )


def _beside(unread: Iterable[tuple[str, str]], modules: dict[str, bool]) -> Iterator[tuple[str, str, str]]:
    """(tensor, module, name in the module) of those `unread` (parameter's name, tensor) that lie in a module with
    parameters, or anywhere below one that has no modules of its own (`q_proj.weight.absmax`)."""
    for name, disk in unread:
        path = name.split(".")
        for length in range(len(path) - 1, 0, -1):
            module = ".".join(path[:length])
            if module in modules and (modules[module] or length == len(path) - 1):
                yield disk, module, ".".join(path[length:])
                break
