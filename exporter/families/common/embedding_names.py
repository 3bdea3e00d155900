"""Which tensor of a checkpoint is the embedding table, and which the LM head, where models tie the two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....runtime.common.errors import ExportError, UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint


def embedding_tensor(checkpoint: Checkpoint, table: str, head: str) -> str:
    """The tensor of the embedding table `table`; a tied checkpoint may have kept only the head's name."""
    names = checkpoint.names
    tensor = names.find(table) or (names.find(head) if names.tied(table, head) else None)
    if tensor is None:
        raise _missing(checkpoint, table)
    return tensor


def head_tensor(checkpoint: Checkpoint, embedding: str, table: str, head: str) -> str:
    """The tensor of the LM head `head`, as transformers 5 decides it: one of its own when the checkpoint holds one that
    differs from `embedding`, the tensor of the embedding table `table`; else that tensor itself when the two are tied."""
    tied, tensor = checkpoint.names.tied(table, head), checkpoint.names.find(head)
    if tensor is not None:
        return embedding if _same(checkpoint, embedding, tensor, tied) else tensor
    if not tied:
        raise _missing(checkpoint, head)
    return embedding


def shared_tensor(checkpoint: Checkpoint, tables: Sequence[str], head: str) -> str:
    """The one tensor behind several tables that must be equal; refuses tables that differ.

    A tied checkpoint may have kept only the head's name.
    """
    present = [n for n in map(checkpoint.names.find, tables) if n is not None]
    for other in present[1:]:
        if not _same(checkpoint, present[0], other, True):
            raise UnsupportedModelError(
                f"{present[0]} and {other} are different tables; one shared table is supported"
            )
    tensor = present[0] if present else checkpoint.names.find(head)
    if tensor is None:
        raise _missing(checkpoint, tables[0])
    return tensor


def _missing(checkpoint: Checkpoint, name: str) -> ExportError:
    return ExportError(f"the checkpoint {checkpoint.folder} has no tensor {name!r}")


def _same(checkpoint: Checkpoint, one: str, other: str, described: bool) -> bool:
    """Whether two tensors are equal; `described` is the answer where they are known by their headers alone."""
    if one == other:
        return True
    tensors = checkpoint.tensors
    if tensors.shape(one) != tensors.shape(other) or tensors.dtype(one) != tensors.dtype(other):
        return False
    if not tensors.readable:
        return described
    return torch.equal(tensors.read(one), tensors.read(other))
