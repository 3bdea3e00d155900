"""Change the manifest of a bundle: one writer after the other, in one step for readers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..common.atomic_files import is_scratch
from ..common.errors import BundleError, OptionError
from ..common.foreign_errors import raise_if_foreign
from ..common.locks import alone, remove
from .certificate import Certificate
from .manifest import Manifest
from .manifest_file import MANIFEST, bundle_instead, check_texts, read_manifest
from .seal import check_seal, replace_manifest
from .stored_entries import check_measured

LOCK = ".manifest.lock"
"""Held while a manifest is changed; gone afterwards, unless its holder was killed."""
UNFINISHED = ".manifest.json.new"
"""What a killed writer of an older vlmexport left; never read."""
REPLACING = 0.05
"""Seconds that a writer waits for a folder that is not there: while one takes another's place there is none for a moment."""


def is_own(name: str) -> bool:
    """Whether a path in a bundle is that of its manifest, or of what a writer of the manifest has, or left, beside it."""
    return name in (MANIFEST, UNFINISHED, LOCK) or is_scratch(name, MANIFEST)


def check_writable(bundle: Path) -> None:
    """Raise `OptionError` when the manifest of a bundle cannot be replaced; for before something long is measured."""
    if not os.access(bundle, os.W_OK | os.X_OK):
        raise _not_writable(bundle, "the folder is read-only")


def _not_writable(bundle: Path, why: str | None) -> OptionError:
    return OptionError(
        f"{bundle / MANIFEST}: cannot be written ({why}); save into a copy of the bundle that you may write to"
    )


@contextlib.contextmanager
def locked(bundle: Path) -> Iterator[None]:
    """Nobody else changes the manifest in the folder `bundle`, or puts another folder in its place, inside the block.
    Waits for who does. Raises `OptionError` when the folder cannot be written, `BundleError` when there is none."""
    with contextlib.ExitStack() as stack:
        folder = _lock_folder(bundle, stack)
        try:
            yield
        finally:
            if bundle.exists() and os.path.samestat(
                folder, bundle.stat()
            ):  # else another folder's lock lies there
                remove(bundle / LOCK)


def _lock_folder(bundle: Path, stack: contextlib.ExitStack) -> os.stat_result:
    """The folder at `bundle`, locked until `stack` is closed."""
    while True:
        try:
            folder = bundle.stat()
            with contextlib.ExitStack() as tried:
                tried.enter_context(alone(bundle / LOCK, bundle))
                if os.path.samestat(folder, bundle.stat()):  # else it was replaced while this process waited
                    stack.push(tried.pop_all())
                    return folder
        except FileNotFoundError as error:
            raise_if_foreign(error)
            time.sleep(REPLACING)
            if not bundle.exists():
                raise BundleError(f"{bundle}: does not exist; {bundle_instead(bundle)}") from error
        except OSError as error:
            raise_if_foreign(error)
            raise _not_writable(bundle, error.strerror) from error


def store_costs(
    bundle: Path,
    entries: Sequence[dict[str, Any]],
    acceptance: Sequence[dict[str, Any]] = (),
    anew: bool = False,
) -> None:
    """Write entries into the `costs` and the `acceptance` of a bundle's manifest. Costs replace those of the same
    machine and threads, whose `choice` stays where the new ones have none; acceptance replaces that of the same draft
    and budget, and `anew` all that was there of its drafts.

    Raises `OptionError` when the folder cannot be written, `BundleError` when it holds no valid manifest or an entry is
    none.
    """

    check_measured(entries, acceptance)

    def stored(document: Any) -> None:
        check_seal(document, bundle / MANIFEST)
        costs = {(old.get("machine"), old.get("threads")): old for old in document.get("costs", [])}
        for entry in entries:
            here = entry["machine"], entry["threads"]
            choice = entry.get("choice") or costs.pop(here, {}).get("choice")
            costs[here] = entry if choice is None else {**entry, "choice": choice}
        document["costs"] = list(costs.values())
        gone = {entry["draft"] for entry in acceptance} if anew else set()
        stored_entries = [
            *(old for old in document.get("acceptance", []) if old.get("draft") not in gone),
            *acceptance,
        ]
        document["acceptance"] = list(
            {(e.get("draft"), e.get("nodes"), e.get("depth")): e for e in stored_entries}.values()
        )

    change_manifest(bundle, stored)


def store_certificate(bundle: Path, certificate: Certificate) -> None:
    """Write a certificate into a bundle's manifest, in place of one of the same engine, machine and threads. Raises what
    `store_costs` does."""

    def stored(document: Any) -> None:
        check_seal(document, bundle / MANIFEST)
        others = [Certificate.parse(entry, "certificates") for entry in document.get("certificates", [])]
        kept = [entry for entry in others if entry.place != certificate.place]
        document["certificates"] = [entry.to_dict() for entry in (*kept, certificate)]

    change_manifest(bundle, stored)


def reseal(bundle: Path) -> None:
    """Write the manifest's own checksum anew, after an edit. Raises `BundleError` when the manifest is not valid."""
    change_manifest(bundle, lambda document: None)


def change_manifest(bundle: Path, change: Callable[[Any], None]) -> None:
    """Let `change` edit the parsed manifest of a bundle, check it, and write it in place of the old one: in one step for
    readers, who never wait, and one after the other for writers.

    Raises what `change` does, `OptionError` when the folder cannot be written, `BundleError` when the manifest is not
    valid, before or afterwards; it is then as it was.
    """
    read_manifest(bundle / MANIFEST)  # of what is no bundle nothing is locked
    with locked(bundle):
        path = bundle / MANIFEST
        document = read_manifest(path)
        Manifest.from_dict(document)  # `change` may rely on every field
        change(document)
        try:
            check_texts(document)
            document = Manifest.from_dict(document).to_dict()
            (bundle / UNFINISHED).unlink(missing_ok=True)
            replace_manifest(path, document)
        except (ValueError, RecursionError) as error:
            raise_if_foreign(error)
            raise BundleError(f"{path}: cannot be written as JSON ({error})") from error
        except OSError as error:
            raise_if_foreign(error)
            raise _not_writable(bundle, error.strerror) from error
