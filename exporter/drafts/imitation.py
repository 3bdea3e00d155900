"""The imitation draft (FastVLM, arXiv 2510.22641 section 3): a small stateless network after decoder layer n.

Its folder (see `files`) describes the network by
`{"hidden_size": 128, "num_linear": 2, "activation": "gelu", "norm": "layer_norm", "residual": true}`.
In a bundle it is the graph `imitation.n`: `hidden` [batch, width, E] after layer n → `hidden_out`, which enters `head`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...runtime.errors import ExportError, OptionError
from ..graphs.dtypes import TORCH
from .base import Run, SelfDraft, TrainedKind
from .files import draft_folder, read_document, read_tensors, write_document, write_tensors
from .tensors import DraftTensors

if TYPE_CHECKING:
    from ..families.base import Family, GraphSpec
    from ..graphs.weights import WeightStore
    from ..parity.capture import Captured

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "none": nn.Identity,
}
NORMS = ("layer_norm", "rms_norm", "none")
WIDEST = 1 << 17
"""Largest width of a decoder that is believed."""


@dataclass(frozen=True)
class ImitationConfig:
    """Shape of an `ImitationNetwork`; see there."""

    hidden_size: int
    num_linear: int = 2
    activation: str = "gelu"
    norm: str = "layer_norm"
    residual: bool = True

    def __post_init__(self) -> None:
        if type(self.hidden_size) is not int or not 1 <= self.hidden_size <= WIDEST:
            raise OptionError(
                f"an imitation network needs a hidden size in 1..{WIDEST}, not {self.hidden_size!r:.40}"
            )
        if self.num_linear not in (1, 2) or type(self.num_linear) is not int:
            raise OptionError(f"an imitation network has 1 or 2 linear layers, not {self.num_linear!r:.40}")
        if self.activation not in ACTIVATIONS:
            raise OptionError(
                f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        if self.norm not in NORMS:
            raise OptionError(f"unknown norm {self.norm!r}; choose one of {', '.join(NORMS)}")


class ImitationNetwork(nn.Module):
    """Maps rows after decoder layer n to rows that enter the target's own final norm and LM head.

    `norm`, then one or two linear layers of the model's width with `activation` between them (after the only
    one there is none), plus the input itself when `residual`. With `residual` the last linear layer starts
    at zero, so that an untrained network equals an early exit.

    Args:
        hidden_size: E, width of the target's decoder.
        num_linear: 1 or 2. activation: a key of `ACTIVATIONS`. norm: one of `NORMS`, on the input.
        residual: add the input to the output.
    """

    def __init__(
        self,
        hidden_size: int,
        num_linear: int = 2,
        activation: str = "gelu",
        norm: str = "layer_norm",
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.config = ImitationConfig(hidden_size, num_linear, activation, norm, residual)
        self.norm: nn.Module = {
            "layer_norm": lambda: nn.LayerNorm(hidden_size, eps=1e-5),
            "rms_norm": lambda: nn.RMSNorm(hidden_size, eps=1e-6),
            "none": nn.Identity,
        }[norm]()
        self.linear = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(num_linear)])
        self.activation = ACTIVATIONS[activation]()
        self.residual = residual
        if residual:
            last = self.linear[-1]
            nn.init.zeros_(last.weight)  # type: ignore[arg-type]
            nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] float to [..., E], row by row."""
        rows = self.linear[0](self.norm(hidden))
        for layer in list(self.linear)[1:]:
            rows = layer(self.activation(rows))
        return hidden + rows if self.residual else rows


@dataclass
class ImitationDraft(SelfDraft):
    """A trained network with the identity of the one target it fits."""

    network: ImitationNetwork
    layer: int
    target: dict[str, Any]  # name, fingerprint, num_layers
    provenance: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    kind = "imitation"

    @property
    def fingerprint(self) -> str:
        """`sha256:` of the network: its options, names, shapes and float32 values."""
        digest = hashlib.sha256(json.dumps(asdict(self.network.config), sort_keys=True).encode())
        for name, value in sorted(self.network.state_dict().items()):
            digest.update(f"{name}{tuple(value.shape)}".encode())
            digest.update(value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return f"sha256:{digest.hexdigest()}"

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes the draft folder; each file is replaced atomically, the description last."""
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder, self.network.state_dict(), dtype)
        document = {
            "kind": self.kind,
            "layer": self.layer,
            "network": asdict(self.network.config),
            "target": self.target,
            "provenance": self.provenance,
            "evaluation": self.evaluation,
        }
        write_document(folder, document)

    @classmethod
    def load(cls, folder: Path) -> ImitationDraft:
        """Reads a draft folder, or the best draft of a training run's folder; weights in float32.

        Raises:
            ExportError: a file is missing, unreadable, of another format, or its tensors do not fit.
        """
        folder = draft_folder(folder)
        document = read_document(folder)
        if document["kind"] != cls.kind or document["layer"] is None:
            found = f"{document['kind']!r:.80} at layer {document['layer']}"
            raise ExportError(f"{folder} holds a draft of kind {found}, not {cls.kind!r} at a layer")
        try:
            config = ImitationConfig(**document["network"])
            with torch.device("meta"):  # nothing is allocated before the file is known to hold it
                network = ImitationNetwork(**asdict(config))
        except (OptionError, TypeError) as error:
            raise ExportError(f"{folder / 'draft.json'}: {error}") from error
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        network.load_state_dict(read_tensors(folder, shapes), assign=True)
        return cls(
            network.eval(),
            document["layer"],
            document["target"],
            document.get("provenance") or {},
            document.get("evaluation") or {},
        )

    def check_target(self, name: str, fingerprint: str, num_layers: int, hidden_size: int) -> None:
        """Raises ExportError, naming both targets, unless the draft was trained for this one."""
        if self.target.get("fingerprint") != fingerprint:
            raise ExportError(
                f"this draft was trained for {self.target.get('name')!r:.80} ({_short(self.target.get('fingerprint'))}), "
                f"not for {name!r} ({_short(fingerprint)}); train one with: "
                f"{ImitationKind().train_command(name, self.layer)}"
            )
        if not 0 < self.layer < num_layers or self.network.config.hidden_size != hidden_size:
            raise ExportError(
                f"this draft (layer {self.layer}, width {self.network.config.hidden_size}) does not fit "
                f"{name!r} ({num_layers} layers, width {hidden_size})"
            )

    def graph_names(self) -> dict[str, str]:
        return {"imitation": f"imitation.{self.layer}"}

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        from ..families.base import GraphSpec
        from ..graphs.compose import Composer
        from ..graphs.hooks import export_hooks
        from ..graphs.template import TraceInput, trace

        ((role, name),) = self.graph_names().items()
        tensors = DraftTensors(name, self.network.state_dict())
        store.add_reader(tensors)
        shape = ("batch", "width", self.network.config.hidden_size)
        network = self.network.eval().requires_grad_(False)
        with export_hooks():
            template = trace(
                network, lambda m, hidden: (m(hidden),), [TraceInput("hidden", shape)], ("hidden_out",)
            )
        graph = Composer(name, store, role)
        hidden = graph.input("hidden")
        out = graph.call(template, role, {"hidden": hidden}, tensors.prefix.__add__)["hidden_out"]
        graph.output("hidden_out", out)
        return [GraphSpec(name, role, graph.model())]

    def stored_as(self, dtype: str) -> ImitationDraft:
        from ..parity.reference import rounded

        return replace(self, network=rounded(copy.deepcopy(self.network), TORCH[dtype]))

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for captured in captures:
            hidden = captured.residuals[self.layer]
            with torch.no_grad():
                expected = self.network(torch.from_numpy(hidden)).numpy()
            yield run({"hidden": hidden})["hidden_out"], expected


class ImitationKind(TrainedKind):
    """See the module."""

    name = ImitationDraft.kind
    title = "a small network trained to stand for the other layers"
    has_layer = True

    def load(self, folder: Path) -> ImitationDraft:
        return ImitationDraft.load(folder)


def _short(fingerprint: object) -> str:
    return str(fingerprint)[:19]
