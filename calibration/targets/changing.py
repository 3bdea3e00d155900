"""The part of a target that changes where a draft is trained together with it: its decoder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ...exporter.checkpoint import Checkpoint, fingerprint
from ...exporter.checkpoint.changed import ChangedTensors, write_changed
from ...exporter.checkpoint.origin import Origin
from ...exporter.checkpoint.tensors import TensorFiles
from ...exporter.families.common.parts import Parts


class ChangingDecoder:
    """Layers, final norm and LM head of a target; tables that are tied to the head change with it.

    Everything else stays: the vision tower, a text encoder and whatever it reads (its embedding table, also where the
    head is tied to it), tables of positions, and an embedding table of its own. So what the decoder sees of pictures
    and prompts never changes.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, parts: Parts, origin: Origin) -> None:
        """`model` of `checkpoint`, its `parts`, and what is said of it in what is written. Raises UnsupportedModelError where a parameter is stored in a form that it cannot be written back in."""
        kept = set() if parts.encoder is None else {id(p) for p in parts.encoder.parameters()}
        inside = {
            id(p) for module in (parts.layers, parts.final_norm, parts.lm_head) for p in module.parameters()
        }
        self.checkpoint, self.origin = checkpoint, origin
        self._stored: dict[str, nn.Parameter] = {}
        """Tensor on disk → parameter; several where a checkpoint stores a tied table more than once."""
        parameters: dict[int, nn.Parameter] = {}
        names = self.checkpoint.names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in inside - kept:
                self._stored[names.find(name) or names.stored(name)] = parameter
                parameters[id(parameter)] = parameter
        self.parameters = list(parameters.values())

    @property
    def tensors(self) -> ChangedTensors:
        """The checkpoint's tensors as they are now."""
        return ChangedTensors(self.checkpoint, self._stored)

    @property
    def fingerprint(self) -> str:
        """Identity of the weights as they are now: that of the folder which `save` would write."""
        return fingerprint(self.tensors)

    def learn(self, now: bool) -> None:
        """Whether gradients are computed."""
        for parameter in self.parameters:
            parameter.requires_grad_(now)

    def save(self, folder: Path) -> None:
        """Writes the whole model, which opens as any other."""
        write_changed(folder, self.checkpoint, self.tensors, self.origin)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """The weights that `save` wrote."""
        files = TensorFiles(folder)
        for name, parameter in self._stored.items():
            parameter.copy_(files.read(name))
