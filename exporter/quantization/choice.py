"""Which matrices become integers, as `--weights` says: `int4`, or `int4,head=int8,down_proj=int8,layers.3.mlp=float`.

No PyTorch is needed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...runtime.common.errors import OptionError
from ..common.precisions import INTEGERS

FLOAT = "float"
KINDS = (*reversed(INTEGERS), FLOAT)
HEAD = "head"
"""The LM head, whatever its module is called."""
HEAD_MODULE = "lm_head"
HEAD_KIND = "int8"
"""Of the head beside integers, where nothing else is said: a head of 4 bits costs more than all layers."""


@dataclass(frozen=True)
class WeightsChoice:
    """The kind of most matrices, and of those whose module's name holds a part: names or numbers between dots.

    Of several parts that a name holds the one with most names decides, and of equally long ones the last.
    """

    kind: str
    parts: tuple[tuple[str, str], ...] = ()

    def dtype_of(self, module: str) -> str | None:
        """int8 or int4 for the matrix of a linear module by its dotted name, `head` or `lm_head` for the LM head; None
        where it stays float."""
        kind = self.kind
        if _is_head(module):
            module = HEAD
            kind = FLOAT if self.kind == FLOAT else HEAD_KIND
        most = 0
        for part, other in self.parts:
            length = part.count(".") + 1
            if length >= most and _holds(module, part):
                kind, most = other, length
        return None if kind == FLOAT else kind

    def check_parts(self, modules: Iterable[str]) -> None:
        """OptionError for a part that none of the linear `modules` has in its name."""
        names = list(modules)
        for part, kind in self.parts:
            if part != HEAD and not any(_holds(name, part) for name in names):
                last = sorted({name.rpartition(".")[2] for name in names if not _is_head(name)})
                raise OptionError(
                    f"--weights: no matrix of the model's layers has {part!r:.60} in its name ({part}={kind}); they end "
                    f"in {', '.join(last)}"
                )

    def check_tied(self) -> None:
        """OptionError for an LM head of 4 bits, of a model whose head is its embedding table, too."""
        if self.dtype_of(HEAD) == "int4":
            raise OptionError(
                f"--weights {self}: this model's LM head is its embedding table, too, of which single tokens are read: 4 bits do "
                f"not do that; give {HEAD}=int8"
            )

    def __str__(self) -> str:
        return ",".join([self.kind, *(f"{part}={kind}" for part, kind in self.parts)])


def check_no_states(linear_attention: object | None, weights: str) -> None:
    """OptionError for integer `weights` of a decoder with linear attention, whose sizes are given."""
    if linear_attention is not None:
        raise OptionError(
            f"{weights} weights: with linear attention they do not give the same text with drafts as without, since a state "
            "rounds as it is folded; build with weights of floats"
        )


def parse_weights(text: str) -> WeightsChoice:
    """`KIND[,PART=KIND…]`; kinds are int4, int8 and float. Raises OptionError for anything else."""
    first, *others = (each.strip() for each in text.split(","))
    kind = _kind(first, text)
    parts: dict[str, str] = {}
    for entry in others:
        part, equals, value = (each.strip() for each in entry.partition("="))
        if not equals or not all(part.split(".")):
            raise OptionError(
                f"--weights {text!r:.80}: {entry!r:.40} is not PART=KIND, such as head=int8 or down_proj=int8"
            )
        part = HEAD if part == HEAD_MODULE else part
        if part in parts:
            raise OptionError(f"--weights {text!r:.80} names {part!r:.40} twice; leave one of them out")
        parts[part] = _kind(value, text)
    return WeightsChoice(kind, tuple(parts.items()))


def _kind(value: str, text: str) -> str:
    if value not in KINDS:
        raise OptionError(
            f"--weights {text!r:.80}: {value!r:.40} is no kind of weights; choose {', '.join(KINDS[:-1])} or {KINDS[-1]}, "
            "other kinds for parts behind commas (int4,head=int8)"
        )
    return value


def _is_head(module: str) -> bool:
    return module.rpartition(".")[2] in (HEAD, HEAD_MODULE)


def _holds(module: str, part: str) -> bool:
    return f".{part}." in f".{module}."
