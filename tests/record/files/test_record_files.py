"""Files that appear whole, or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from pipeworker.record.files import atomic_file
from pipeworker.record.files.atomic_file import open_file


def test_a_json_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    atomic_file.write_json(path, {"a": [1]})
    with pytest.raises(TypeError):
        atomic_file.write_json(path, {"b": object()})
    assert json.loads(path.read_text()) == {"a": [1]}
    atomic_file.write_json(path, 2)
    assert path.read_text() == "2\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("mode", ["ab", "wb", "a+b"])
def test_a_pipe_in_place_of_a_file_to_write_is_an_error(tmp_path: Path, mode: str) -> None:
    """It may be in the directory of a run that is resumed; nothing would read it."""
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match=r"it is not a regular file|No such device or address"):
        open_file(tmp_path / "log", mode)


def test_a_new_file_has_the_permissions_that_the_umask_permits(tmp_path: Path) -> None:
    """Other members of a group resume a run in a folder of theirs, and add rows to its files."""
    before = os.umask(0o002)
    try:
        open_file(tmp_path / "rows", "ab").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "rows").stat().st_mode) == 0o664
