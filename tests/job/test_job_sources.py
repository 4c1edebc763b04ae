"""The files that a job is made of."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from pipeworker.job import sources


def test_the_job_file_and_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    for name in ("job.py", "net/blocks.py", "job2.py"):
        (tmp_path / name).write_text(name)
    modules = []
    for file in (tmp_path / "net/blocks.py", tmp_path / "gone.py", "/usr/lib/other.py", None):
        module = ModuleType("m")
        module.__file__ = None if file is None else str(file)
        modules.append(module)
    found = dict(sources.digests(tmp_path / "job.py", modules))
    assert [*found] == ["job.py", "net/blocks.py"]
    assert len({*found.values()}) == 2
    (tmp_path / "job.py").write_text("another")
    assert dict(sources.digests(tmp_path / "job.py", [])) != {"job.py": found["job.py"]}
