"""A decoder with sublayers left out (Zhang et al., Draft & Verify, arXiv 2309.08168, section 3.2).

A decoder layer adds to its hidden states what attention makes of them, then what the MLP does. Without a sublayer, its norm
included, hidden states pass as they are. Self- and cross-attention of a layer go together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ....runtime.common.errors import OptionError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Sublayers:
    """Sublayers of a decoder by their layers, from 0: rising numbers, each once."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    @classmethod
    def of(cls, attention: Iterable[Any], mlp: Iterable[Any]) -> Sublayers:
        """From numbers in any order. OptionError for what is no number of a layer, and for one that is given twice."""
        numbers = {}
        for name, given in (("attention", list(attention)), ("mlp", list(mlp))):
            wrong = [each for each in given if type(each) is not int or each < 0 or given.count(each) > 1]
            if wrong:
                raise OptionError(
                    f"skipped {name} {given!r:.80}: {wrong[0]!r:.40} is no number of a layer, or is given twice"
                )
            numbers[name] = tuple(sorted(given))
        return cls(**numbers)

    def check(self, num_layers: int) -> None:
        """OptionError unless a decoder of so many layers has all of these, and other attention, and other sublayers
        than attention or not: a draft looks at what was said, and leaves something out."""
        for name, layers in (("attention", self.attention), ("mlp", self.mlp)):
            if layers and layers[-1] >= num_layers:
                raise OptionError(
                    f"skipped {name} {','.join(map(str, layers))}: this decoder has the layers 0..{num_layers - 1}"
                )
        if len(self.attention) == num_layers:
            raise OptionError(
                f"skipped attention {','.join(map(str, self.attention))} is all there is: leave one layer's, or the "
                "draft sees nothing but its last token"
            )
        if not self.attention and not self.mlp:
            raise OptionError("no sublayer is skipped: such a draft is the target itself, and costs as much")

    def kept_attention(self, num_layers: int) -> list[int]:
        """Layers whose attention is not among these."""
        return [layer for layer in range(num_layers) if layer not in self.attention]


class SublayerPaths(Protocol):
    """Where sublayers are in a decoder layer: what a `Language` says of them."""

    attention_paths: ClassVar[tuple[str, ...]]
    attention_values: ClassVar[int]
    convolution_path: ClassVar[str | None]
    mlp_path: ClassVar[str]
    attention_norm_path: ClassVar[str | None]
    mlp_norm_path: ClassVar[str | None]


def attention_of(paths: SublayerPaths, layer: nn.Module) -> list[nn.Module]:
    """What attends in a decoder layer: itself, and over the source where there is one. Of a layer with a convolution in
    place of attention, that."""
    convolution = convolution_of(paths, layer)
    if convolution is not None:
        return [convolution]
    return [layer.get_submodule(path) for path in paths.attention_paths]


def convolution_of(paths: SublayerPaths, layer: nn.Module) -> nn.Module | None:
    """The convolution that a decoder layer has in place of attention; None: it attends."""
    return None if paths.convolution_path is None else getattr(layer, paths.convolution_path, None)


def mlp_of(paths: SublayerPaths, layer: nn.Module) -> nn.Module:
    """What gives an MLP's part of the hidden states."""
    return layer.get_submodule(paths.mlp_path)


@contextlib.contextmanager
def left_out(paths: SublayerPaths, layer: nn.Module, *, attention: bool, mlp: bool) -> Iterator[None]:
    """While active, sublayers of a decoder layer are not run, and add nothing to its hidden states."""
    import torch

    with contextlib.ExitStack() as stack:
        if attention:
            nothing: Any = torch.zeros(())
            if convolution_of(paths, layer) is None:
                nothing = (nothing, *[None] * (paths.attention_values - 1))
            for module in attention_of(paths, layer):
                stack.enter_context(_instead(module, lambda *_, _given=nothing, **__: _given))
        if mlp:
            stack.enter_context(_instead(mlp_of(paths, layer), lambda *_, **__: torch.zeros(())))
        for out, path in ((attention, paths.attention_norm_path), (mlp, paths.mlp_norm_path)):
            if out and path is not None:
                stack.enter_context(_instead(layer.get_submodule(path), lambda nothing: nothing))
        yield


@contextlib.contextmanager
def disregarded(paths: SublayerPaths, layers: nn.ModuleList, skip: Sublayers) -> Iterator[None]:
    """While active, sublayers of a whole model run, and what they add to the hidden states is dropped: what else they give, keys and
    values or the bias that T5's first layer makes for all, is there."""
    with contextlib.ExitStack() as stack:
        for index in skip.attention:
            for module in attention_of(paths, layers[index]):
                stack.enter_context(_dropped(module))
        for index in skip.mlp:
            stack.enter_context(_dropped(mlp_of(paths, layers[index])))
        yield


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another `forward` of this one module."""
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


@contextlib.contextmanager
def _dropped(module: nn.Module) -> Iterator[None]:
    handle = module.register_forward_hook(_zeroed)
    try:
        yield
    finally:
        handle.remove()


def _zeroed(_module: nn.Module, _given: Any, output: Any) -> Any:
    """A forward hook: zeros in place of the hidden states, which stand first."""
    import torch

    if isinstance(output, torch.Tensor):
        return torch.zeros_like(output)
    return (torch.zeros_like(output[0]), *output[1:])
