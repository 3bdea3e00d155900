"""Files outside of bundles are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vlmexport.runtime.common.atomic_files import check_folder, write_file
from vlmexport.runtime.common.errors import OptionError


def test_writing_through_a_symlink_keeps_the_symlink(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_file(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_non_unicode_file_names_are_reported(tmp_path: Path) -> None:
    write_file(tmp_path / "report.json", os.fsdecode(b"\xff.png"))
    assert (tmp_path / "report.json").read_bytes() == b"?.png"


def test_unreplaceable_file_is_refused_before_writing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "a device or a pipe"), (".", "is a folder"), ("no/file", "does not exist")):
        with pytest.raises(OptionError, match=reason):
            check_folder("--report", tmp_path / name)
    check_folder("--report", tmp_path / "new.json")
