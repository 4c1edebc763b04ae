"""Refusals of the system: a file, a descriptor, a process, a port. One line reports each."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeworker.errors import UsageError
from pipeworker.ranks import rank_info
from pipeworker.timings import DEFAULT
from support.processes.nanobind import without_reports
from support.real_jobs.jobs import COMMAND, Jobs, Record, Run, cpu_seconds, processes_of, until
from support.real_jobs.sources import JOB
from support.slow import mostly_slow, slow

WORDS = ("--stages", "2", "--microbatches", "2")
FULL = Path("/dev/full")
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and namespaces are for root")


def one_error(run: Run, *parts: str) -> str:
    """Return the one line that reports the refusal; there is no traceback."""
    assert run.status == 1, (run.stdout, run.stderr)
    printed = without_reports(run.stderr)
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert "a defect in pipeworker" not in run.stderr
    for part in parts:
        assert part in errors[0]
    return errors[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount an empty file system of two pages."""
    yield from disk_of("8k", tmp_path)


@pytest.fixture
def big_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for a small run."""
    yield from disk_of("1m", tmp_path)


def disk_of(size: str, tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes=64", "none", str(disk)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        until(lambda: subprocess.run(["umount", str(disk)], capture_output=True).returncode == 0)


@root
def test_a_full_disk(jobs: Jobs, small_disk: Path) -> None:
    """Logs, plan, metrics, checkpoint, summary: the file that does not fit is named."""
    path = small_disk / "run"
    job_file = jobs.write(JOB)
    done = jobs.pipeworker("launch", *WORDS, "--run-dir", str(path), str(job_file))
    run = Run(path, done.returncode, done.stdout, done.stderr)
    one_error(run, "cannot be written", str(path), "No space left on device")
    assert not list((path / "checkpoints").glob("step-*"))


@root
def test_a_disk_that_is_full_from_the_start(jobs: Jobs, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(b"x" * 8192)
    job_file = jobs.write(JOB)
    done = jobs.pipeworker("launch", *WORDS, "--run-dir", str(small_disk / "r"), str(job_file))
    assert done.returncode in (1, 2)
    assert done.stderr.count("error: ") == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


FILLS = """
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    WHERE, DISK = sys.argv[1], Path(sys.argv[2])

    def fill(where):
        if where == WHERE:
            with open(DISK / "filler", "ab", buffering=0) as file:
                try:
                    while file.write(bytes(1 << 12)):
                        pass
                except OSError:
                    pass

    class Saved(nn.Linear):
        def state_dict(self, *words, **names):
            metrics = DISK / "run" / "metrics.jsonl"
            if metrics.exists() and metrics.stat().st_size:  # it is asked for at the start as well
                fill("checkpoints/")
            if WHERE == "summary.json":  # that place alone is taken
                (DISK / "run" / "summary.json").mkdir(exist_ok=True)
            return super().state_dict(*words, **names)

    fill("plan.json")
    model = [lambda: nn.Linear(8, 8), nn.Tanh, lambda: Saved(8, 3)]

    def loss(output, target):
        fill("metrics.jsonl")
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        for _ in range(3):
            yield torch.randn(4, 8), torch.zeros(4, dtype=torch.long)

    def evaluation():
        fill("evaluation.jsonl")
        yield from data()
"""
"""A job file that, given WHERE DISK, fills the disk just before that file is written."""


@root
@pytest.mark.parametrize(
    "where",
    mostly_slow(
        ["metrics.jsonl", "plan.json", "evaluation.jsonl", "checkpoints/", "summary.json"], 5
    ),
)
def test_a_disk_that_fills_up(jobs: Jobs, big_disk: Path, where: str) -> None:
    path = big_disk / "run"
    job_file = jobs.write(FILLS)
    words = (*WORDS, "--evaluate-every", "2", "--max-restarts", "0", "--run-dir", str(path))
    done = jobs.pipeworker("launch", *words, str(job_file), "--", where, str(big_disk))
    run = Run(path, done.returncode, done.stdout, done.stderr)
    waits = where.endswith(".jsonl")  # for as long as a checkpoint can wait
    error = one_error(run, "cannot be written", str(path), "checkpoints/" if waits else where)
    assert ("Is a directory" if where == "summary.json" else "No space left on device") in error
    reason = "No space left on device; its rows wait for room"
    expected = f"warning: {path / where}: cannot be written: {reason}"
    assert (expected in run.stderr.splitlines()) == waits
    assert bool(list((path / "checkpoints").glob("step-*"))) == (where == "summary.json")
    assert (big_disk / "filler").exists() == (where != "summary.json")


def test_a_run_directory_that_is_removed(jobs: Jobs) -> None:
    source = JOB.replace(
        "x = torch.randn(10",
        """if _ == 3:
                import pathlib, shutil
                shutil.rmtree("run-1")
            x = torch.randn(10""",
    )
    run = jobs.run(*WORDS, source=source)
    one_error(run, "cannot be written", str(run.path), "No such file or directory")


@slow
def test_too_small_files(jobs: Jobs) -> None:
    """The limit also binds the memory that workers share."""
    line = [*COMMAND, "launch", *WORDS, "--run-dir", str(jobs.folder / "run")]
    done = subprocess.run(
        [*line, str(jobs.write(JOB))],
        cwd=jobs.folder,
        capture_output=True,
        text=True,
        timeout=60,
        # Python would cut off the bytecode of modules that are new, and fail to load it later.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, 1 << 13)),
    )
    run = Run(jobs.folder / "run", done.returncode, done.stdout, done.stderr)
    one_error(run, "no shared memory: File too large; ", "raise its limit (ulimit -f")
    until(lambda: not processes_of(jobs.folder))


@slow
@root
def test_no_proc(jobs: Jobs) -> None:
    program = shutil.which("unshare")
    if program is None:
        pytest.skip("there is no unshare here")
    line = [*COMMAND, "launch", *WORDS, "--run-dir", str(jobs.folder / "run")]
    line.append(str(jobs.write(JOB)))
    done = subprocess.run(
        [program, "--mount", "sh", "-c", f"umount -l /proc; exec {shlex.join(line)}"],
        cwd=jobs.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].endswith("mount it: mount -t proc proc /proc"), errors
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("most", [10, pytest.param(20, marks=slow), pytest.param(26, marks=slow)])
def test_too_few_descriptors(jobs: Jobs, most: int) -> None:
    """The process that reaches the limit first reports it."""
    job_file = jobs.write(JOB)
    line = [*COMMAND, "launch", *WORDS, "--run-dir", str(jobs.folder / "run"), str(job_file)]
    done = subprocess.run(
        line,
        cwd=jobs.folder,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)),
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Too many open files" in done.stderr
    until(lambda: not processes_of(jobs.folder))


def test_a_run_whose_next_coordinator_cannot_start_keeps_its_steps(jobs: Jobs) -> None:
    run = jobs.run(*WORDS, source=JOB)
    steps = run.summary["steps"]
    assert (run.status, steps > 0) == (0, True), run.stderr
    words = ["--resume", "--run-dir", str(run.path), "--steps", str(steps + 1)]
    done = subprocess.run(
        [*COMMAND, "launch", *words, str(jobs.folder / "job.py")],
        cwd=jobs.folder,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30)),
    )
    assert done.stderr.count("cannot start the coordinator: Too many open files") == 1, done.stderr
    summary = Record(run.path).summary
    assert (summary["status"], summary["steps"]) == ("failed", steps)


@root
@pytest.mark.parametrize("most", [pytest.param(6, marks=slow), 10, pytest.param(25, marks=slow)])
def test_too_few_processes(jobs: Jobs, most: int) -> None:
    """Threads count: ZeroMQ ends a process that gets none. The limit does not bind root."""
    program = shutil.which("setpriv")
    if program is None:
        pytest.skip("there is no setpriv here")
    reads = "+dac_override,+dac_read_search"
    user = ["--reuid", str(100_000 + os.getpid()), "--clear-groups"]
    line = [program, *user, "--inh-caps", reads, "--ambient-caps", reads, *COMMAND, "launch"]
    done = subprocess.run(
        [*line, *WORDS, "--run-dir", str(jobs.folder / "run"), str(jobs.write(JOB))],
        cwd=jobs.folder,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (most, most)),
    )
    run = Run(jobs.folder / "run", done.returncode, done.stdout, done.stderr)
    numbers = "processes and threads, and "
    one_error(run, "cannot start the", "Resource temporarily unavailable", numbers)
    assert run.summary["status"] == "failed"  # not lost, as if its processes had been killed
    until(lambda: not processes_of(jobs.folder))


@pytest.mark.parametrize("closed", [pytest.param((1,), marks=slow), (0, 1, 2)])
def test_closed_streams(jobs: Jobs, closed: tuple[int, ...]) -> None:
    """No file that is opened gets their descriptors, and no print fails."""
    run_dir = jobs.folder / "run"

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    done = subprocess.run(
        [*COMMAND, "launch", *WORDS, "--run-dir", str(run_dir), str(jobs.write(JOB))],
        cwd=jobs.folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=jobs.forking,
        preexec_fn=close,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == ""
    run = Run(run_dir, done.returncode, done.stdout, done.stderr)
    assert run.summary["status"] == "done"


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@slow
def test_a_full_standard_output_does_not_end_the_job(jobs: Jobs) -> None:
    job_file, refused = str(jobs.write(JOB)), "standard output: cannot be written: No space left"
    for number, words in enumerate(([], ["--json"])):
        done = _to_full(jobs, "launch", *WORDS, *words, "--run-dir", f"run-{number}", job_file)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(f"warning: {refused} on device")
        assert done.stderr.count("\n") == 1
    for unbuffered in ("", "1"):
        done = _to_full(jobs, "show", "run-0", PYTHONUNBUFFERED=unbuffered)
        assert (done.returncode, done.stderr) == (1, f"error: {refused} on device\n")


def _to_full(jobs: Jobs, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command; no byte of its standard output can be written."""
    with FULL.open("w") as full:
        return subprocess.run(
            [*COMMAND, *words],
            cwd=jobs.folder,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**jobs.forking, **variables},
        )


@pytest.mark.parametrize("absolute", [True, pytest.param(False, marks=slow)])
def test_a_working_directory_that_was_removed(jobs: Jobs, absolute: bool) -> None:
    job_file = jobs.write(JOB)
    gone = jobs.folder / "gone"
    gone.mkdir()
    words = ["launch", *WORDS, str(job_file) if absolute else f"../{job_file.name}"]
    done = subprocess.run(
        ["sh", "-c", 'rmdir ../gone; exec "$@"', "sh", *COMMAND, *words],
        cwd=gone,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    message = "the current folder is gone: No such file or directory; change to another one"
    assert done.stderr == f"error: {message}\n"


@root
def test_an_unreachable_coordinator(jobs: Jobs) -> None:
    """In a network namespace without a loopback interface."""
    name = f"pipeworker-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        began = time.monotonic()
        run = jobs.run(*WORDS, namespace=name)
        assert time.monotonic() - began < 30
        one_error(run, "the coordinator cannot be reached at 127.0.0.1:", "unreachable; bring up")
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True, capture_output=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_master_without_an_address(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits as long as for ranks that start late."""

    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    limits = dataclasses.replace(DEFAULT, coordinator=2.6, reach=2.7, rendezvous=31.0)
    monkeypatch.setattr(rank_info, "timings", lambda: limits)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    expected = (
        f"rank {rank} cannot meet the others at MASTER_ADDR no-such-host.invalid, "
        "MASTER_PORT 29500: Name or service not known"
    )
    began = time.monotonic()
    with pytest.raises(UsageError, match=re.escape(expected)):
        rank_info.RankInfo(rank, 2, rank, 2, "no-such-host.invalid", 29500).open_store()
    assert limits.reach < time.monotonic() - began < DEFAULT.reach


@pytest.mark.parametrize("seconds", [0.12])
def test_an_early_interrupt_shows_no_traceback(jobs: Jobs, seconds: float) -> None:
    job_file = jobs.write(JOB)
    command = str(Path(sys.executable).with_name("pipeworker"))
    line = [command, "launch", *WORDS, "--steps", "1000000", str(job_file)]
    process = subprocess.Popen(
        line,
        cwd=jobs.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
    )
    until(lambda: cpu_seconds(process.pid) >= seconds)  # whatever it has come to by then
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    until(lambda: not processes_of(jobs.folder))
