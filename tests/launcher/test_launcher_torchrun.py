"""Tests of a torchrun rank: its error file, and the run that it prepares."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from launcher import torchrun
from launcher.torchrun import write_error
from pipeworker.errors import InUse, RendezvousError, UsageError
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.runs.begin import PreparedRun, RunRequest
from pipeworker.wire.lines import Verdict
from support.real_jobs.jobs import until


def test_torchrun_never_reads_half_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun reads the file once it has terminated the rank, which may be in the middle of it."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    message = "stage 1: " + 10_000_000 * "x"
    writer = threading.Thread(target=write_error, args=(message,))
    writer.start()
    until(path.exists)
    size = path.stat().st_size
    writer.join()
    assert size == path.stat().st_size
    assert json.loads(path.read_text())["message"]["message"] == message
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_error_of_a_rank_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error("the first")
    write_error("a later one")
    assert json.loads(path.read_text())["message"]["message"] == "the first"


@pytest.mark.parametrize(
    ("option", "error"),
    [("resume", RendezvousError), ("auto_resume", RendezvousError), ("", InUse)],
)
def test_a_restarted_pod_tries_again_while_its_run_directory_is_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, error: type[Exception]
) -> None:
    """A cluster starts each pod again by the same command, and gives up on a usage error."""

    def prepare(_: RunRequest) -> PreparedRun:
        raise InUse("run directory: is in use")

    monkeypatch.setattr(RunRequest, "prepare", prepare)
    resume, auto_resume = option == "resume", option == "auto_resume"
    request = RunRequest("job.py", None, {}, tmp_path, resume, auto_resume)
    with pytest.raises(error, match="is in use") as caught:
        torchrun.prepare(RankInfo.single_process(), request, 0)
    assert caught.type is error


def test_restarted_ranks_do_not_begin_a_run_anew_whose_directory_was_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that a mistake removed is begun anew."""
    monkeypatch.setattr(RankInfo, "has_store", True)
    store = HashStore()
    monkeypatch.setattr(RankInfo, "open_store", lambda _: store)
    path, job_file = tmp_path / "run", tmp_path / "job.py"
    job_file.touch()
    info, request = RankInfo.single_process(), RunRequest(str(job_file), 1, {}, path)
    torchrun.prepare(info, request, 0).close(Verdict("failed", 2, 0, 0.0, (), 0.0, "a mistake"))
    assert not path.exists()
    torchrun.prepare(info, request, 1).close()
    path.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=rf"^run directory {path}: is not there any more; to res"):
        torchrun.prepare(info, request, 2)
    assert not path.exists()
