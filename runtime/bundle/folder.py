"""Open a deployment bundle: check it, then hand out its graphs, tensors and tokenizer. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import stat
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..common.errors import BundleError, OptionError
from ..common.foreign_errors import raise_if_foreign
from ..common.paths import look_at
from ..common.validation import integer
from ..text.tokenizer import Tokenizer
from .file_checks import check_file, check_nothing_else, compare_checksum, verified_mark
from .manifest import Manifest, TensorInfo
from .manifest_file import MANIFEST, REBUILD, bundle_instead, read_manifest
from .seal import check_seal
from .verified_cache import Identity, identity, read_record, record_path, write_record

SMALL = 4 << 20
"""Files up to this many bytes are always compared with their checksum: it costs milliseconds."""

Check = Literal["size", "sha256", "once"]
"""How much of a bundle is compared when it is opened; see `Bundle.open`."""

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
        """The same bundle for passes of `width` positions, 0 for as many as are verified. Raises `OptionError`."""
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
        folder, kind = look_at(path, BundleError, "the bundle")
        if kind != "folder":
            what = "does not exist" if kind == "nothing" else "is a file, not a bundle folder"
            raise BundleError(f"{folder}: {what}; {bundle_instead(folder)}")
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
                    f"{REBUILD}"
                )
        bundle = cls(folder, manifest)
        for name, info in manifest.files.items():
            bundle._opened[name] = identity(check_file(folder, name, info))
        check_nothing_else(folder, manifest.files)
        if check == "size":
            bundle.check_sums(SMALL)
        else:
            bundle._compare_files(check)
        return bundle

    def check_model(self, name: str, fingerprint: str) -> None:
        """`OptionError` unless it was built of the model with this fingerprint, which is called `name`."""
        model = self.manifest.model
        if model.fingerprint != fingerprint:
            raise OptionError(
                f"{self.path}: is a bundle of {model.source} ({model.fingerprint[:19]}), not of {name} "
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
            name: verified_mark(self.path / name, info, before.get(name))
            for name, info in self.manifest.files.items()
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
            self._opened[name] = identity(compare_checksum(path, self.manifest.files[name]))
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
            compare_checksum(self.path / name, info, None if progress is None else partial(progress, name))
            compared += 1
        return compared


def _check_option(check: Any) -> None:
    if check not in get_args(Check):
        raise OptionError(f"check: {check!r:.80} is not one of {', '.join(get_args(Check))}")
