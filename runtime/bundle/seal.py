"""The manifest's own checksum: what no entry of `files` covers (image mean, end tokens, policy, the checksums).

It is the last field, `sha256`, over the canonical JSON of everything else: sorted names, no white space, whole numbers
without a fraction. Printing a manifest in another layout or order changes nothing, another value does. A manifest
without the field is of an older vlmexport, or edited on purpose: it opens, and only `check="size"` accepts it.

`checksum.py` is the command that writes the field anew after an edit of your own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.atomic_files import atomic_write
from ..common.errors import BundleError

FIELD = "sha256"
RESEAL = "python -m vlmexport.runtime.bundle.checksum"
"""The command that writes the field anew."""


def checksum(document: Mapping[str, Any]) -> str:
    """SHA-256, hexadecimal, of a parsed manifest without its own checksum."""
    rest = {name: value for name, value in document.items() if name != FIELD}
    text = json.dumps(_canonical(rest), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its checksum as the last field, instead of one that it had."""
    rest = {name: value for name, value in document.items() if name != FIELD}
    return {**rest, FIELD: checksum(rest)}


def manifest_text(document: Mapping[str, Any]) -> str:
    """What a `manifest.json` of this document holds, checksum included. Every writer of manifests asks here. Raises
    `ValueError` for a number that JSON has not."""
    return json.dumps(sealed(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def check_seal(document: Mapping[str, Any], path: Path, needed: bool = False) -> None:
    """Raise `BundleError` when the checksum is not that of the document, or is missing although it is `needed`."""
    stored = document.get(FIELD)
    if stored is None:
        if needed:
            raise BundleError(
                f"{path}: has no checksum of its own (an older vlmexport wrote it): build the bundle again, or trust it "
                f"as it is with `{RESEAL} {path.parent}`"
            )
        return
    try:
        expected = checksum(document)
    except RecursionError:
        raise BundleError(f"{path}: is nested too deeply; copy the whole folder again") from None
    if stored != expected:
        raise BundleError(
            f"{path}: the checksum of its fields is {expected[:12]}…, its field 'sha256' says {str(stored)[:12]}…: a value "
            f"was changed; copy the whole folder again, or after an edit of your own run `{RESEAL} {path.parent}`"
        )


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _canonical(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_canonical(entry) for entry in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # other programs write 1.0 as 1
    return value


def replace_manifest(path: Path, document: Mapping[str, Any]) -> None:
    """Write the manifest in one step, so that a reader finds the old one or the new. Raises `OSError`."""
    with atomic_write(path) as stream:
        stream.write(manifest_text(document).encode())
