"""The imitation draft (FastVLM, arXiv 2510.22641 section 3): a small stateless network after decoder layer n.

Its folder (see `files`) describes the network by
`{"hidden_size": 128, "num_linear": 2, "activation": "gelu", "norm": "layer_norm", "residual": true}`.
In a bundle it is the graph `imitation.n`: `hidden` [batch, width, E] after layer n → `hidden_out`, which enters `head`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...runtime.errors import OptionError
from .base import Run, SelfDraft, TrainedKind
from .trained import TrainedDraft, check_width

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
OPERATIONS = {"gelu": 5, "silu": 4, "relu": 1, "layer_norm": 7, "rms_norm": 4, "none": 0}
"""Of an activation or a norm, per number; a function such as exp or erf is one."""


@dataclass(frozen=True)
class ImitationConfig:
    """Shape of an `ImitationNetwork`; see there."""

    hidden_size: int
    num_linear: int = 2
    activation: str = "gelu"
    norm: str = "layer_norm"
    residual: bool = True

    def __post_init__(self) -> None:
        check_width("an imitation network", self.hidden_size)
        if self.num_linear not in (1, 2) or type(self.num_linear) is not int:
            raise OptionError(f"an imitation network has 1 or 2 linear layers, not {self.num_linear!r:.40}")
        if self.activation not in ACTIVATIONS:
            raise OptionError(
                f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        if self.norm not in NORMS:
            raise OptionError(f"unknown norm {self.norm!r}; choose one of {', '.join(NORMS)}")

    @property
    def flops(self) -> int:
        """Floating-point operations per row: a multiplication and an addition for every weight, and what is done number by
        number."""
        width = self.hidden_size
        singly = self.num_linear + OPERATIONS[self.norm] + self.residual
        singly += OPERATIONS[self.activation] * (self.num_linear - 1)
        return 2 * width * width * self.num_linear + width * singly


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


@dataclass(kw_only=True)
class ImitationDraft(TrainedDraft, SelfDraft):
    """A trained network after decoder layer `layer`."""

    network: ImitationNetwork
    layer: int  # pyright: ignore[reportGeneralTypeIssues]  # has no default here: it is always given

    kind = "imitation"
    has_layer = True

    @classmethod
    def untrained(cls, options: Mapping[str, Any]) -> ImitationNetwork:
        return ImitationNetwork(**asdict(ImitationConfig(**options)))

    def graph_names(self) -> dict[str, str]:
        return {"imitation": f"imitation.{self.layer}"}

    def graphs(self, store: WeightStore, family: Family) -> list[GraphSpec]:
        from ..families.base import GraphSpec
        from ..graphs.compose import Composer
        from ..graphs.hooks import export_hooks
        from ..graphs.template import TraceInput, trace

        ((role, name),) = self.graph_names().items()
        tensors = self.stored_in(store, name)
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

    def parity(
        self, graph: str, run: Run, captures: Sequence[Captured]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        from ..parity.exact import with_error

        for captured in captures:
            hidden = captured.residuals[self.layer]
            expected, error = with_error(
                self.network, lambda net, rows: net(rows), [torch.from_numpy(hidden)]
            )
            yield "hidden", run({"hidden": hidden})["hidden_out"], expected.numpy(), error.numpy()


class ImitationKind(TrainedKind):
    """See the module."""

    name = ImitationDraft.kind
    title = "a small network trained to stand for the other layers"
    has_layer = True

    def load(self, folder: Path) -> ImitationDraft:
        return ImitationDraft.load(folder)
