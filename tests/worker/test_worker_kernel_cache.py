"""The folder of torch's compiled kernels: no other user of the host can put code into it."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from pipeworker.errors import UsageError
from pipeworker.worker import kernel_cache
from support.real_jobs.jobs import Jobs
from support.slow import slow


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch's default folder, which does not exist yet."""
    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Path(kernel_cache.default_folder())


@pytest.mark.parametrize("user", ["ada", "domain\\ada:1", ""])
def test_the_default_is_torchs_own(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, user)
    assert kernel_cache.default_folder() == default_cache_dir()


def test_a_folder_of_the_users_own_is_kept(default: Path) -> None:
    for _ in range(2):  # it is made the first time
        kernel_cache.keep_private()
        assert default.is_dir()
        assert kernel_cache.VARIABLE not in os.environ


def test_a_folder_that_everybody_can_write_is_not_used(default: Path, tmp_path: Path) -> None:
    default.mkdir()
    default.chmod(0o777)
    kernel_cache.keep_private()
    assert os.environ[kernel_cache.VARIABLE] == str(tmp_path / "home/.cache/torchinductor")


def test_another_users_folder_is_not_used(default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setenv(kernel_cache.VARIABLE, str(default))  # as torch sets it, once imported
    kernel_cache.keep_private()
    assert os.environ[kernel_cache.VARIABLE] != str(default)


def test_a_folder_that_the_user_chose_is_kept(
    default: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default.touch()
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    kernel_cache.keep_private()
    assert os.environ[kernel_cache.VARIABLE] == str(tmp_path)


def _no_temporary_folder() -> str:
    raise FileNotFoundError("No usable temporary directory found")


def test_without_temporary_folders_the_home_folder_is_used(
    default: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", _no_temporary_folder)
    kernel_cache.keep_private()
    assert os.environ[kernel_cache.VARIABLE] == str(tmp_path / "home/.cache/torchinductor")
    monkeypatch.setenv(kernel_cache.VARIABLE, str(default))
    kernel_cache.keep_private()
    assert os.environ[kernel_cache.VARIABLE] == str(default)


@pytest.mark.parametrize("temporary", [True, False])
def test_an_unknown_user_without_a_home_folder_names_one(
    tmp_path: Path, temporary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # in no user database
    default = Path(kernel_cache.default_folder())
    default.touch()
    found = f"{default} cannot be used"
    if not temporary:
        monkeypatch.setattr(tempfile, "gettempdir", _no_temporary_folder)
        found = "there are no temporary folders"
    message = (
        f"{kernel_cache.VARIABLE}: {found}, and there is no home folder; set it to a folder that "
        "you alone may write to"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        kernel_cache.keep_private()


@slow
def test_a_file_in_place_of_the_folder_does_not_stop_a_process(jobs: Jobs, default: Path) -> None:
    default.touch()
    env = {**os.environ, "TMPDIR": str(default.parent)}
    code = "from pipeworker.worker.internals import preload; preload()"
    process = jobs.python("-c", code, env=env, cold=True)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr
