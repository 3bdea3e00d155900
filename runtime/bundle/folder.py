"""Open a deployment bundle: check it, then hand out its graphs, tensors and tokenizer. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..common.atomic_files import is_scratch
from ..common.errors import BundleError, OptionError
from ..common.foreign_errors import raise_if_foreign
from ..common.locks import alone, remove
from ..common.paths import look_at
from ..common.validation import integer
from ..text.tokenizer import Tokenizer
from .checksum import check_seal, replace_manifest
from .manifest import FileInfo, Manifest, TensorInfo
from .stored_entries import check_measured
from .verified_cache import Identity, Mark, identity, mark, read_record, record_path, write_record

MANIFEST = "manifest.json"
LOCK = ".manifest.lock"
"""Held while a manifest is changed; gone afterwards, unless its holder was killed."""
UNFINISHED = ".manifest.json.new"
"""What a killed writer of an older vlmexport left; never read."""
REPLACING = 0.05
"""Seconds that a writer waits for a folder that is not there: while one takes another's place there is none for a moment."""
MANIFEST_LIMIT = 64 << 20
"""Bytes. A manifest of a 96-layer model with plans is below 4 MB; anything near this is not one."""
SMALL = 4 << 20
"""Files up to this many bytes are always compared with their checksum: it costs milliseconds."""

Check = Literal["size", "sha256", "once"]
"""How much of a bundle is compared when it is opened; see `Bundle.open`."""

_REBUILD = "build it again with `vlmexport build`, or copy the whole folder again"
_LINKED = (
    "copy the files in instead of linking them (`cp -rL`; of a bundle on the Hugging Face Hub: `hf download REPO --local-dir "
    "FOLDER`)"
)
_DTYPES: dict[str, str] = {"bfloat16": "uint16"}  # numpy has no bfloat16: its bits


class Bundle:
    """A checked bundle. Construct with `Bundle.open`; tensors are read-only views of the file on disk.

    `path` is absolute: graphs and tokenizer are read when they are needed, and a program may change its folder. What is
    read late is compared with what was there when the bundle was opened (`reading`)."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path.absolute()
        self.manifest = manifest
        self._tokenizer: Tokenizer | None = None
        self._maps: dict[str, np.ndarray] = {}
        self._opened: dict[str, Identity] = {}
        """What every file was when the bundle was opened; empty where it was not opened but is being written."""

    def unread(self) -> Bundle:
        """The same bundle for another process (by `pickle`), which reads for itself, and finds what was replaced since."""
        other = copy(self)
        other._tokenizer, other._maps = None, {}
        return other

    def with_verify_width(self, width: int) -> Bundle:
        """The same bundle for passes of `width` rows, 0 for as many as are verified. Raises `OptionError`."""
        width = integer("verify_width (of this bundle)", width, 0, self.manifest.limits.max_width)
        if width == 1:
            raise OptionError(
                "verify_width: 1 has no row for a drafted token; give 2 or more, or 0 for any width"
            )
        other = copy(self)
        other.manifest = replace(self.manifest, verify_width=width or None)
        return other

    @classmethod
    def open(cls, path: Path | str, check: Check = "size") -> Bundle:
        """Open the bundle in the folder `path`.

        The manifest must have its own checksum (unless it has none), every listed file must be there with its size,
        nothing else may be there, and files up to 4 MiB must have their checksum.
        `check="sha256"` compares the checksum of the big ones too (reads every byte), and the manifest must have one.
        `check="once"` does that once and remembers it in the user's cache folder; later it compares what has another
        inode, size or time of change than then (`verified_cache.py`).
        Raises `BundleError` with the first thing that is wrong, `OptionError` for another `check`.
        """
        _check_option(check)
        if path == "":
            raise BundleError(
                "the path of the bundle is empty; give the folder that `vlmexport build -o` wrote"
            )
        try:
            str(path).encode()  # as the libraries are given it
        except UnicodeEncodeError as error:
            raise BundleError(
                f"{path!r:.200}: this path has characters that Python's {sys.getfilesystemencoding()} cannot write; set "
                "PYTHONUTF8=1, or LC_ALL=C.UTF-8, or move the bundle to a path of plain letters"
            ) from error
        folder, found = look_at(path, BundleError, "the bundle")
        if found != "folder":
            what = "does not exist" if found == "nothing" else "is a file, not a bundle folder"
            raise BundleError(f"{folder}: {what}; {_give(folder)}")
        document = read_manifest(folder / MANIFEST)
        manifest = Manifest.from_dict(document)
        check_seal(document, folder / MANIFEST, needed=check != "size")
        weights = manifest.weights
        sizes = {
            "weights.bytes": (weights.bytes, weights.file),
            **{f"weights.linked.{name}": (count, name) for name, count in weights.linked.items()},
        }
        for field, (count, name) in sizes.items():
            if count != manifest.files[name].bytes:
                raise BundleError(
                    f"manifest field {field!r}: {count} is not the size under 'files' ({manifest.files[name].bytes}); "
                    f"{_REBUILD}"
                )
        bundle = cls(folder, manifest)
        for name, info in manifest.files.items():
            bundle._opened[name] = identity(bundle._check_file(name, info))
        bundle._check_nothing_else()
        if check == "size":
            bundle.check_sums(SMALL)
        else:
            bundle._compare_files(check)
        return bundle

    def check_model(self, name: str, fingerprint: str) -> None:
        """`OptionError` unless it was built of the model with this fingerprint, which is called `name`."""
        found = self.manifest.model
        if found.fingerprint != fingerprint:
            raise OptionError(
                f"{self.path}: is a bundle of {found.source} ({found.fingerprint[:19]}), not of {name} "
                f"({fingerprint[:19]}); give one of the same model"
            )

    def verify(self, check: Check) -> None:
        """Compare what `check` says, of a bundle that is open. Raises `BundleError`, `OptionError`."""
        _check_option(check)
        if check == "size":
            return
        check_seal(read_manifest(self.path / MANIFEST), self.path / MANIFEST, needed=True)
        self._compare_files(check)

    def _compare_files(self, check: Check) -> None:
        if check == "sha256":
            self.check_sums()
            return
        record = record_path(self.path)
        before = read_record(record)
        after = {
            name: self._verified(name, info, before.get(name)) for name, info in self.manifest.files.items()
        }
        if after != before:
            write_record(record, self.path, after)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle, read on first use."""
        if self._tokenizer is None:
            with self.reading(self.manifest.text.tokenizer):
                self._tokenizer = Tokenizer.open(self.path / self.manifest.text.tokenizer)
        return self._tokenizer

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view into the file that holds it; costs no memory until read. bfloat16 comes as uint16 bits."""
        info: TensorInfo | None = self.manifest.tensors.get(name)
        if info is None:
            known = ", ".join(self.manifest.tensors)
            raise BundleError(f"{self.path}: there is no tensor {name!r}; there are {known}")
        dtype = np.dtype(_DTYPES.get(info.dtype, info.dtype))
        end = info.offset + info.bytes
        return (
            self._mapped(info.file or self.manifest.weights.file)[info.offset : end]
            .view(dtype)
            .reshape(info.shape)
        )

    def _mapped(self, file: str) -> np.ndarray:
        if file not in self._maps:
            with self.reading(file):
                # A plain ndarray: memmap's own subclass makes every small operation slower.
                self._maps[file] = np.asarray(np.memmap(self.path / file, dtype=np.uint8, mode="r"))
        return self._maps[file]

    @contextlib.contextmanager
    def reading(self, *names: str) -> Iterator[None]:
        """Files that are read by their path inside the block. Raises `BundleError` where one is not the file that was there
        when the bundle was opened: a folder may be replaced while a session has it open, and one session must not mix
        two bundles. A file with the same bytes will do."""
        for name in names:
            self._check_same(name)
        try:
            yield
        except Exception:
            # What was read may be another file's, which says more than what became of it.
            for name in names:
                self._check_same(name)
            raise
        for name in names:
            self._check_same(name)

    def _check_same(self, name: str) -> None:
        known, path = self._opened.get(name), self.path / name
        if known is None:
            return
        try:
            status = path.stat()
            if identity(status) == known:
                return
            if not stat.S_ISREG(status.st_mode):  # a pipe would never end
                raise BundleError(f"{path}: is not a regular file")
            self._opened[name] = identity(self._compare(name, self.manifest.files[name]))
        except (OSError, BundleError) as error:
            raise_if_foreign(error)
            raise BundleError(
                f"{path}: was replaced since the bundle was opened; load the session again"
            ) from error

    def check_sums(self, limit: int | None = None, progress: Callable[[str, int], None] | None = None) -> int:
        """Compare the SHA-256 of every file of at most `limit` bytes; returns how many were compared.

        `progress(file, bytes)` is called after each block. Raises `BundleError` at the first difference.
        """
        compared = 0
        for name, info in self.manifest.files.items():
            if limit is not None and info.bytes > limit:
                continue
            self._compare(name, info, progress)
            compared += 1
        return compared

    def _compare(
        self, name: str, info: FileInfo, progress: Callable[[str, int], None] | None = None
    ) -> os.stat_result:
        """Compare one file with its checksum; returns what the file was when the comparison began."""
        digest = hashlib.sha256()
        with self._open(name) as stream:
            status = os.fstat(stream.fileno())
            while block := stream.read(1 << 20):
                digest.update(block)
                if progress is not None:
                    progress(name, len(block))
        if digest.hexdigest() != info.sha256:
            raise BundleError(
                f"{self.path / name}: SHA-256 is {digest.hexdigest()[:12]}…, the manifest says "
                f"{info.sha256[:12]}…: the file was changed; {_REBUILD}"
            )
        return status

    def _verified(self, name: str, info: FileInfo, known: Mark | None) -> Mark:
        """The mark of a file with its checksum, which is compared unless its mark is the `known` one."""
        try:
            found = mark((self.path / name).stat(), info.sha256)
        except OSError as error:
            raise_if_foreign(error)
            raise BundleError(f"{self.path / name}: cannot be read ({error.strerror})") from error
        return found if found == known else mark(self._compare(name, info), info.sha256)

    def _open(self, name: str) -> Any:
        try:
            return (self.path / name).open("rb")
        except OSError as error:
            raise_if_foreign(error)
            raise BundleError(f"{self.path / name}: cannot be read ({error.strerror})") from error

    def _check_file(self, name: str, info: FileInfo) -> os.stat_result:
        path = self.path / name
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except FileNotFoundError:
            raise BundleError(f"{path}: listed in the manifest but missing; {_REBUILD}") from None
        except (OSError, RuntimeError) as error:
            raise_if_foreign(error)
            raise BundleError(f"{path}: cannot be read ({error})") from error
        if not real.is_relative_to(self.path.resolve()):
            raise BundleError(f"{path}: leads out of the bundle to {real}; {_LINKED}")
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path}: is not a regular file; {_REBUILD}")
        if status.st_size != info.bytes:
            raise BundleError(
                f"{path}: {status.st_size} bytes, the manifest says {info.bytes}: cut off or changed; {_REBUILD}"
            )
        return status

    def _check_nothing_else(self) -> None:
        for folder, inner, names in os.walk(self.path):
            for name in inner:
                if (Path(folder) / name).is_symlink():
                    raise BundleError(
                        f"{Path(folder) / name}: is a link to a folder; copy the files in instead of linking them"
                    )
                if is_own((Path(folder) / name).relative_to(self.path).as_posix()):
                    raise BundleError(
                        f"{Path(folder) / name}: is a folder, where writers of the bundle have a file; remove it"
                    )
            for name in names:
                relative = (Path(folder) / name).relative_to(self.path).as_posix()
                if not is_own(relative) and relative not in self.manifest.files:
                    raise BundleError(
                        f"{self.path / relative}: not listed in the manifest; move it out of the bundle"
                    )


def is_own(name: str) -> bool:
    """Whether a path in a bundle is that of its manifest, or of what a writer of the manifest has, or left, beside it."""
    return name in (MANIFEST, UNFINISHED, LOCK) or is_scratch(name, MANIFEST)


def _check_option(check: Any) -> None:
    if check not in get_args(Check):
        raise OptionError(f"check: {check!r:.80} is not one of {', '.join(get_args(Check))}")


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
    with contextlib.ExitStack() as held:
        folder = _lock_folder(bundle, held)
        try:
            yield
        finally:
            if bundle.exists() and os.path.samestat(
                folder, bundle.stat()
            ):  # else another folder's lock lies there
                remove(bundle / LOCK)


def _lock_folder(bundle: Path, held: contextlib.ExitStack) -> os.stat_result:
    """The folder at `bundle`, locked until `held` is closed."""
    while True:
        try:
            folder = bundle.stat()
            with contextlib.ExitStack() as tried:
                tried.enter_context(alone(bundle / LOCK, bundle))
                if os.path.samestat(folder, bundle.stat()):  # else it was replaced while this process waited
                    held.push(tried.pop_all())
                    return folder
        except FileNotFoundError as error:
            raise_if_foreign(error)
            time.sleep(REPLACING)
            if not bundle.exists():
                raise BundleError(f"{bundle}: does not exist; {_give(bundle)}") from error
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
        seen = [*(old for old in document.get("acceptance", []) if old.get("draft") not in gone), *acceptance]
        document["acceptance"] = list(
            {(e.get("draft"), e.get("nodes"), e.get("depth")): e for e in seen}.values()
        )

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


def _give(folder: Path) -> str:
    """What to give in place of a folder that is no bundle: one in it, where there is one."""
    try:
        inside = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    except OSError as error:
        raise_if_foreign(error)
        inside = []
    return f"give {inside[0]}" if inside else "give the folder that `vlmexport build -o` wrote"


def read_manifest(path: Path) -> Any:
    """Parse `manifest.json` strictly: UTF-8, at most 64 MiB, no duplicate names, no NaN or infinity."""
    try:
        if path.is_symlink():
            raise BundleError(f"{path}: is a link; {_LINKED}")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise BundleError(f"{path}: is not a regular file; {_REBUILD}")
        size = status.st_size
        if size > MANIFEST_LIMIT:
            raise BundleError(f"{path}: {size} bytes; a manifest has at most {MANIFEST_LIMIT}; {_REBUILD}")
        text = path.read_bytes().decode("utf-8")
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
        )
        if "\\u" in text:
            check_texts(document)
        return document
    except FileNotFoundError:
        raise BundleError(
            f"{path.parent}: holds no {MANIFEST}, so it is not a bundle; {_give(path.parent)}"
        ) from None
    except (UnicodeDecodeError, ValueError, RecursionError, OSError) as error:
        raise_if_foreign(error)
        raise BundleError(f"{path}: not a readable manifest ({error}); {_REBUILD}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, _ in pairs if sum(other == name for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r} appears twice")
    return found


def check_texts(document: Any) -> None:
    """Raise `ValueError` that names the field of a text which no file can hold: half of a surrogate pair, which JSON may
    write as an escape."""
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{where} (a name)", name) for name in value]
            waiting += [(f"{where}.{name}" if where else str(name), each) for name, each in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{where}[{at}]", each) for at, each in enumerate(value)]
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"field {where!a:.200}: {value!a:.120} is not Unicode text") from None


def _float(digits: str) -> float:
    found = float(digits)
    if not math.isfinite(found):
        raise ValueError(f"{digits:.30} is too large a number")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _integer(digits: str) -> int:
    if len(digits) > 30:
        raise ValueError(f"{digits[:30]}… is not a sensible number")
    return int(digits)
