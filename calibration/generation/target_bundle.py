"""The bundle of a target, exported once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

from ...exporter.checkpoint import Checkpoint, fingerprint, open_checkpoint
from ...exporter.families.registry import family_for
from ...exporter.pipeline.build import build_bundle
from ...exporter.pipeline.request import BuildRequest
from ...runtime.bundle.folder import Bundle
from ...runtime.common.atomic_files import cache_folder
from ...runtime.common.errors import BundleError, OptionError
from ...runtime.common.locks import alone

PROMPT = 1024
"""Positions that prompts may take beside the answer; the buffers cost nothing where nobody writes them."""

MOST = 256
"""Requests that may be decoded together."""

_PACKAGE = Path(__file__).parents[2]
_CODE = ("exporter", "runtime/bundle")
"""What decides how a bundle looks."""


def target_bundle(
    model: str, max_new_tokens: int, say: Callable[[str], None], *, parity: bool = True
) -> Bundle:
    """The bundle that answers `max_new_tokens` tokens; built where the cache has none of these weights, files, versions
    and limits.

    Raises:
        UnsupportedModelError, ExportError: the model cannot be exported.
    """
    checkpoint = open_checkpoint(model)
    family = family_for(checkpoint)
    longest = PROMPT + family.needed_embeds + max_new_tokens
    positions = family.max_positions
    length = longest if positions is None else min(longest, positions)
    name = target_name(checkpoint)
    folder = cache_folder() / "bundles" / f"{name}-{_key(checkpoint, length)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.with_name(f"{folder.name}.lock"), folder):  # another process may be building it
        if folder.exists():
            try:
                return Bundle.open(folder)
            except BundleError as error:
                say(f"{error}; exporting again")
        say(f"exporting {name} once to {folder}")
        request = BuildRequest(
            model=model, output=folder, force=folder.exists(), parity=parity,
            max_length=length, max_batch=MOST, max_source=PROMPT,
        )  # fmt: skip
        build_bundle(request)
        return Bundle.open(folder)


def given_bundle(folder: Path, model: str) -> Bundle:
    """A bundle that the user built. OptionError unless it is one of `model`, with its weights unrounded."""
    bundle = Bundle.open(folder)
    bundle.check_model(model, fingerprint(open_checkpoint(model)))
    if bundle.manifest.weights_dtype != "float32":
        raise OptionError(
            f"--bundle {folder} holds {bundle.manifest.weights_dtype} weights: its answers are not the target's; "
            "build one with --precision float32"
        )
    return bundle


def target_name(checkpoint: Checkpoint) -> str:
    """How data calls the target that wrote it."""
    return checkpoint.alias.name if checkpoint.alias else Path(checkpoint.source).name


def _key(checkpoint: Checkpoint, max_length: int) -> str:
    """Everything that a bundle is a function of: weights, the checkpoint's other files, the exporter's code, the
    versions of what it exports with, and the limit that is not the same for all."""
    digest = hashlib.sha256(fingerprint(checkpoint).encode())
    for path in sorted(checkpoint.folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".model", ".txt") and path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    for path in sorted(p for part in _CODE for p in (_PACKAGE / part).rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers", "onnx", "onnxscript")}
    digest.update(json.dumps([versions, max_length], sort_keys=True).encode())
    return digest.hexdigest()[:16]
