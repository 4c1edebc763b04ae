"""Files that appear whole, or not at all."""

from __future__ import annotations

import json
import os
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
