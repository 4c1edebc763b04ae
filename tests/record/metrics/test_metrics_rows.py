"""Files of rows: writing, reading, and the last row."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeworker.record.metrics import rows
from pipeworker.record.metrics.rows import Rows


def wrote(path: Path, *found: dict[str, Any] | str) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in found))
    return path


def test_an_incomplete_row_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert rows.last(path) is None
    for whole, torn in ((0, '{"st'), (0, "{"), (2, '{"step": 33'), (3, "")):
        wrote(path, *({"step": step} for step in range(1, whole + 1)), torn)
        assert rows.last(path) == ({"step": whole} if whole else None)
        file = Rows(path)
        file.add({"step": whole + 1})
        file.close()
        assert [row["step"] for row in rows.read(path)] == [*range(1, whole + 2)]


def test_an_incomplete_row_is_removed_although_no_descriptor_was_free_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator tries again; see :class:`pipeworker.host.descriptors.DescriptorReserve`."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "no descriptor")

    def descriptors() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    file, before = Rows(path, later=True), descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(rows, "open_bounded", refuse)
        with pytest.raises(OSError, match="no descriptor"):
            file.open()
    assert descriptors() == before
    file.add({"step": 2})
    file.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_rows_that_a_full_disk_refuses_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a row is removed. A file that was removed is another error than a full disk."""
    path, room = tmp_path / "metrics.jsonl", [15]
    write = os.write

    def little(handle: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= (written := write(handle, data[: room[0]]))
        return written

    monkeypatch.setattr(os, "write", little)
    file = Rows(path)
    file.add({"step": 1})
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            file.add({"step": step})
        assert path.read_text() == '{"step": 1}\n'
    room[0] = 1000
    file.sync()  # on another thread, which must not write rows
    assert path.read_text() == '{"step": 1}\n'
    file.flush()
    file.add({"step": 4})
    assert [row["step"] for row in rows.read(path)] == [1, 2, 3, 4]
    path.unlink()
    with pytest.raises(FileNotFoundError):
        file.add({"step": 5})
    file.close()


def test_the_last_row_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wrote(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2}, {"step": 3})
    file = Rows(path)
    file.withdraw(2)  # is not the last one
    file.withdraw(3)
    assert [row["step"] for row in rows.read(path)] == [1, 2]
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda *_: 0)
        with pytest.raises(OSError, match="No space left"):
            file.add({"step": 3})
        file.withdraw(3)
    file.add({"step": 4})
    assert [row["step"] for row in rows.read(path)] == [1, 2, 4]
    file.close()


def test_a_row_behind_which_another_one_is_pending_is_not_withdrawn(tmp_path: Path) -> None:
    path = wrote(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2})
    file = Rows(path)
    file.append({"step": 3})
    file.withdraw(2)
    file.flush()
    file.append({"step": 3})  # a loop of the user's own has gone back
    file.withdraw(3)
    file.flush()
    assert [row["step"] for row in rows.read(path)] == [1, 2, 3]
    file.close()
    Rows(tmp_path / "none", later=True).withdraw(1)
    assert not (tmp_path / "none").exists()


def test_lines_are_read_from_the_end(tmp_path: Path) -> None:
    path = wrote(tmp_path / "x", *({"step": step, "a": "x" * 90} for step in range(2000)), "{")
    assert path.stat().st_size > 2 * rows.BLOCK_BYTES
    assert [*rows.reversed_lines(path)] == path.read_bytes().splitlines(keepends=True)[::-1]
    found = rows.last(path)
    assert found
    assert found["step"] == 1999


@pytest.mark.parametrize("torn", ["", '{"ste', '{"step": 4, "a": "' + "x" * 3 * rows.BLOCK_BYTES])
def test_a_row_may_be_longer_than_a_block(tmp_path: Path, torn: str) -> None:
    """A torn row costs neither the row before it nor the next one."""
    long = {"a": "x" * 2 * rows.BLOCK_BYTES}
    path = wrote(tmp_path / "x", {"step": 1, **long}, {"step": 2}, {"step": 3, **long}, torn)
    assert rows.last(path) == {"step": 3, **long}
    file = Rows(path)
    file.add({"step": 4})
    file.close()
    assert [row["step"] for row in rows.read(path)] == [1, 2, 3, 4]


def test_a_row_that_no_reader_accepts_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 100)
    file = Rows(tmp_path / "x")
    file.add({"step": 1, "a": 78 * "x"})
    with pytest.raises(OSError, match="the row of step 2 has 100 bytes; record fewer metrics"):
        file.add({"step": 2, "a": 79 * "x"})
    file.add({"step": 3})
    file.close()
    assert [row["step"] for row in rows.read(tmp_path / "x")] == [1, 3]


def test_lines_that_are_not_rows_are_skipped(tmp_path: Path) -> None:
    texts = ("\n", "3\n", "[]\n", "{}\n", '{"step": "1"}\n', '{"step": true}\n', "[" * 9999 + "\n")
    path = wrote(tmp_path / "x", {"step": 1}, *texts, {"step": 2}, *texts)
    assert [row["step"] for row in rows.read(path)] == [1, 2]
    assert rows.last(path) == {"step": 2}
    assert list(rows.read(tmp_path / "none")) == []
