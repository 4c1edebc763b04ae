"""``--resume``: the job file of a run, named on the command line or found in its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.in_process.checkpoints import complete
from support.real_jobs.resume_command import NEW, RESUME, Command, command_in

command = pytest.fixture(command_in)


def test_a_job_file_may_have_moved_or_changed(command: Command) -> None:
    command.launch(*NEW)
    complete(command.run, 3)
    moved = command.folder / "elsewhere" / "net.py"
    moved.parent.mkdir()
    command.job_file.rename(moved)
    words = (*RESUME[:-1], str(moved))
    assert command.launch(*words).job_file == str(moved)
    assert not command.warnings
    moved.write_text("job = 2\n")
    command.launch(*words)
    (warning,) = command.warnings
    assert warning.startswith(f"{moved} has changed since the run was last started. ")
    assert (command.run.path / "job.py").read_text() == "job = 1\n"
    assert (command.run.path / "job-2.py").read_text() == "job = 2\n"


def test_the_job_file_is_found_in_the_run(command: Command) -> None:
    """The original is used if it has the recorded content, else the copy; both are reported."""
    command.launch(*NEW, "--", "a")
    for words in (("--resume", "run"), ("--resume=run",), ("--run-dir", "run", "--resume")):
        result = command(*words, "--", "a")
        assert result.output == f"note: job file {command.job_file}, as the run recorded it\n"
        options, run_dir, _ = command.prepared[-1]
        assert (options.job_file, options.arguments) == (str(command.job_file), ("a",))
        assert run_dir.path == command.run.path
    copy = command.run.path / "job.py"
    for reason in ("has changed since", "is gone"):
        if reason == "is gone":
            command.job_file.unlink()
        else:
            command.job_file.write_text("job = 2\n")
        assert command("--resume", "run").output == (
            f"warning: job file run/job.py: the copy in the run is used, because "
            f"{command.job_file} {reason}; name a job file to use another one\n"
        )
        assert command.prepared[-1][0].job_file == str(copy)
    command.job_file.write_text("job = 1\n")  # the run still knows where it was
    assert command("--resume", "run").output.startswith(f"note: job file {command.job_file}, as")
    command.job_file.unlink()
    copy.write_text("job = 3\n")
    assert command.refused("--resume", "run") == (
        f"--resume run: neither {command.job_file} nor a copy in the run has the recorded content; "
        "name the job file: --resume run job.py\n"
    )
    command.job_file.write_text("job = 4\n")
    assert command("--resume", "run", "job.py").exit_code == 0
    assert command.prepared[-1][0].job_file == str(command.job_file)


def test_the_copy_of_a_job_file_finds_its_neighbours(command: Command) -> None:
    (command.folder / "layers.py").write_text("width = 3\n")
    command.launch(*NEW)
    command.job_file.write_text("job = 2\n")
    for _ in range(2):  # the second time its folder is there already
        result = command("--resume", "run")
        assert result.exit_code == 0, result.output
        placed = Path(command.prepared[-1][0].job_file)
        assert placed.read_text() == "job = 1\n"
        assert placed.name == "job.py"
        assert placed.parent.parent == command.run.path
        assert (placed.parent / "layers.py").read_text() == "width = 3\n"
        assert sorted(path.name for path in placed.parent.iterdir()) == ["job.py", "layers.py"]
    command.job_file.unlink()
    (command.folder / "layers.py").rename(command.folder / "parts.py")
    assert command("--resume", "run").exit_code == 0
    assert (placed.parent / "parts.py").read_text() == "width = 3\n"
    assert not (placed.parent / "layers.py").is_symlink()  # it would lead nowhere


def test_a_copy_outside_of_the_run_is_not_used(command: Command) -> None:
    command.launch(*NEW)
    command.job_file.rename(command.folder / "else.py")
    command.run.run.write_text(json.dumps({**command.record, "job": "../else.py"}))
    assert "nor a copy in the run has" in command.refused("--resume", "run")


def test_the_run_of_a_script_is_resumed_there(command: Command) -> None:
    command.launch(*NEW)
    changed = {**command.record, "command": [str(command.job_file)]}
    command.run.run.write_text(json.dumps(changed))
    assert command.refused("--resume", "run") == (
        f"--resume run: the script {command.job_file} began this run; resume it there, with "
        "resume=True\n"
    )
