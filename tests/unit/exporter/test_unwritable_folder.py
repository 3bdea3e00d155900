"""A folder that cannot be written to is refused in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from vlmexport.exporter.common.write_errors import explain_write_errors
from vlmexport.runtime.common.errors import OptionError


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("name", ["", "shard-0.jsonl", "a/b"])
def test_a_folder_that_may_not_be_written_to_is_one_line(tmp_path: Path, name: str, number: int) -> None:
    with (
        pytest.raises(OptionError, match=f"^cannot write to {tmp_path}: .*; give another folder"),
        explain_write_errors(tmp_path),
    ):
        raise OSError(number, os.strerror(number), str(tmp_path / name))


@pytest.mark.parametrize("name", ["/elsewhere/picture.png", None])
def test_unreadable_input_is_a_different_error(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(PermissionError), explain_write_errors(tmp_path):
        raise OSError(errno.EACCES, "Permission denied", name)
