"""The commands that continue from a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeworker.display.commands import Commands, further, relative


def test_commands_are_quoted_for_a_shell() -> None:
    commands = Commands(
        ("python", "-m", "pipeworker"), ("torchrun", "-m", "pipeworker"), "a job.py"
    )
    assert commands.export("my runs/1") == (
        "python -m pipeworker export 'my runs/1' weights.safetensors"
    )
    assert commands.save("my runs/1") == "python -m pipeworker checkpoint 'my runs/1'"
    resume = "torchrun -m pipeworker --resume --run-dir 'my runs/1'"
    assert commands.resume("my runs/1") == f"{resume} 'a job.py'"
    assert commands.resume("my runs/1", ("steps", 9)) == f"{resume} --steps 9 'a job.py'"


def test_a_path_that_is_not_utf_8_can_be_typed() -> None:
    run_dir = os.fsdecode(b"runs/caf\xe9 1")
    resume = Commands(start=("pipeworker", "launch"), job_file="job.py").resume(run_dir)
    assert resume == r"pipeworker launch --resume --run-dir $'runs/caf\xe9 1' job.py"


def test_an_unknown_command_is_the_same_one() -> None:
    cluster = Commands(job_file="job.py")
    assert cluster.resume("/runs/1") == "the same command, with --resume --run-dir /runs/1"


def test_a_script_is_resumed_by_its_own_call() -> None:
    call = "in the script: pipeworker.train(..., resume=True, run_dir='runs/1'"
    assert Commands().resume("runs/1") == f"{call})"
    assert Commands().resume("runs/1", ("epochs", 8)) == f"{call}, epochs=8)"
    own_loop = Commands(script="train.py", own_loop=True)
    call = "in train.py: pipeworker.Pipeline(..., resume=True, run_dir='runs/1')"
    assert own_loop.resume("runs/1", ("steps", 8)) == call


def test_a_finished_run_is_offered_as_much_again() -> None:
    assert further(30, None) == ("steps", 60)
    assert further(30, 2) == ("epochs", 4)


def test_a_path_is_typed_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert relative(str(tmp_path / "here" / "runs" / "x")) == "runs/x"
    assert relative(str(tmp_path / "there")) == str(tmp_path / "there")
    assert relative(str(tmp_path / "here" / "-r")) == str(tmp_path / "here" / "-r")
