"""Data that cannot be skipped is read by a process that outlives the workers of a job."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, Reference, ended, pids_of, processes_of, until
from support.real_jobs.sources import LOADER, gated
from support.slow import slow

READS = """
    import os
    import random
    import signal
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn

    VICTIM = sys.argv[1] if len(sys.argv) > 1 else ""

    class Dies(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            if VICTIM == self.number and Path("due").exists():
                Path("due").rename("died")
                os.kill(os.getpid(), signal.SIGKILL)
            return x

    def model():
        return nn.Sequential(
            nn.Linear(8, 16), Dies("0"), nn.Dropout(0.1), nn.Linear(16, 16), Dies("1"),
            nn.Linear(16, 3),
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-2)

    rng = random.Random(5)

    def data():
        for number in range(8):
            with open("reads", "a") as file:
                print(os.getpid(), number, file=file)
            if number == 7 and VICTIM and not Path("died").exists():
                Path("due").touch()
            length = random.randint(5, 9) + rng.randint(0, 3)
            yield torch.randn(length, 8), torch.randint(0, 3, (length,))
"""
"""``data()`` records its calls; with an argument, the worker of that stage dies in an epoch's end.
It draws from the stream of the data and from a generator of its own."""
MORE = ("--microbatches", "4", "--steps", "10", "--snapshot-every", "1")
WORDS = ("--stages", "1", *MORE)
HERE = "--max-restarts", "0"
"""Nothing outlives a worker, so the worker reads."""


def reads(jobs: Jobs) -> list[tuple[int, int]]:
    """Return by whom and what ``data()`` has read."""
    path = jobs.folder / "reads"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [tuple(map(int, line.split())) for line in lines]
    return [(pid, number) for pid, number in found]


def reader_of(jobs: Jobs) -> int:
    """Return the pid of the process that reads."""
    (pid,) = pids_of(jobs.folder, "reader")
    return pid


@pytest.fixture
def quiet(reference: Reference) -> Record:
    """Return a run whose worker reads, without a fault."""
    return reference(*WORDS, *HERE, source=READS)


@pytest.mark.parametrize("victim", ["0", pytest.param("1", marks=slow)])
def test_nothing_is_read_again_when_a_worker_is_lost(
    jobs: Jobs, quiet: Record, victim: str
) -> None:
    run = jobs.train("--stages", "2", *MORE, "--", victim, source=READS)
    assert (jobs.folder / "died").exists()
    assert run.summary["restarts"] == 1
    assert_same(run, quiet)
    found = reads(jobs)
    assert len({pid for pid, _ in found}) == 1
    assert [number for _, number in found] == [number % 8 for number in range(10)]
    assert "reading" not in run.stderr


LOADED = (
    READS.replace("def data():", "def generated():")
    + """
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 36

        def __getitem__(self, index):
            if VICTIM and index == 30 and not Path("died").exists():
                Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.randn(8), index % 3

    def data():
        return torch.utils.data.DataLoader(Items(), batch_size=6, num_workers=2)
"""
)
"""Processes of a loader load items; with an argument, one of them is killed once."""


def test_a_killed_process_of_a_loader_is_replaced(jobs: Jobs, reference: Reference) -> None:
    words = (*WORDS, "--steps", "7")
    run = jobs.train(*words, "--", "loader", source=LOADED)
    assert (jobs.folder / "died").exists()
    (cause,) = run.summary["causes"]
    assert "a process of data() is gone: RuntimeError: DataLoader worker (pid" in cause
    assert_same(run, reference(*words, source=LOADED))


REMOVED = LOADER.replace(
    "def data():",
    """def data():
        import os, pathlib, shutil
        from multiprocessing import util
        removed = pathlib.Path("removed")
        if not removed.exists():
            removed.touch()
            shutil.rmtree(util.get_temp_dir())
            os._exit(1)""",
)
"""Its worker is lost after the folder of sockets was removed, as systems do with old folders."""


def test_a_removed_folder_of_sockets_is_made_again(jobs: Jobs) -> None:
    run = jobs.train("--stages", "1", "--steps", "2", source=REMOVED)
    assert run.summary["restarts"] == 1
    assert "Traceback" not in run.stderr


GATED = gated(READS, "length = random", "number == 6")


def test_data_is_read_again_if_its_process_is_lost(jobs: Jobs, quiet: Record) -> None:
    process, path = jobs.start(*WORDS, source=GATED)
    until(lambda: [number for _, number in reads(jobs)][-1:] == [6])
    os.kill(reader_of(jobs), signal.SIGKILL)
    (jobs.folder / "go").touch()
    run = ended(process, path)
    assert "the process that reads data() was killed by SIGKILL" in run.summary["causes"][0]
    assert_same(run, quiet)
    found = reads(jobs)
    assert len({pid for pid, _ in found}) == 2
    assert Counter(number for _, number in found)[0] == 3


@slow
@pytest.mark.parametrize("killed", ["launcher", "agent"])
def test_the_process_ends_with_the_job(jobs: Jobs, killed: str) -> None:
    process, _ = jobs.start(*WORDS, "--max-restarts", "1", source=GATED)
    until(lambda: [number for _, number in reads(jobs)][-1:] == [6])
    pid = reader_of(jobs)
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(process.pid if killed == "launcher" else parent, signal.SIGKILL)
    until(lambda: pid not in processes_of(jobs.folder))
    (jobs.folder / "go").touch()
    process.communicate(timeout=60)
    if killed == "agent":
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("lambda: 0", "it cannot be pickled"),
        ("type('Odd', (), {'__reduce__': lambda _: (int, ('x',))})()", "it cannot be unpickled"),
    ],
)
def test_data_that_cannot_pass_is_read_by_the_worker(
    jobs: Jobs, quiet: Record, odd: str, why: str
) -> None:
    source = READS.replace(
        "yield torch.randn(length, 8), torch.randint(0, 3, (length,))",
        f"odd = ({odd}) if number > 2 else None\n"
        "            yield (torch.randn(length, 8), odd), torch.randint(0, 3, (length,))",
    ).replace("nn.Linear(8, 16), Dies", "First(8, 16), Dies")
    source = source.replace(
        "    def model():",
        "    class First(nn.Linear):\n"
        "        def forward(self, pair):\n"
        "            return super().forward(pair[0])\n\n"
        "    def model():",
    )
    run = jobs.train(*WORDS, source=source)
    assert_same(run, quiet)
    assert f"data() is read in the worker: {why}" in run.log("worker-0")


FAILS = READS.replace("length = random", "length = 1 // (number != 5) * random")


def test_an_error_of_data_is_reported_as_that_of_the_worker(jobs: Jobs) -> None:
    words = (*WORDS, "--steps", "7")
    there, here = (jobs.run(*words, *more, source=FAILS) for more in ((), HERE))
    assert (there.status, there.summary["error"]) == (here.status, here.summary["error"])
    for run in (there, here):
        assert "data() raised ZeroDivisionError" in run.stderr
        assert "length = 1 // (number != 5)" in run.stderr
        assert "in reading: stage 0, step 6" in run.stderr


ONCE = READS.replace(
    "length = random",
    """if number == 5 and not Path("failed").exists():
                Path("failed").touch()
                raise ConnectionError("no route")
            length = random""",
).replace("VICTIM =", "transient = (ConnectionError,)\n    VICTIM =", 1)


def test_a_transient_error_of_data_is_tried_again(jobs: Jobs, quiet: Record) -> None:
    run = jobs.train(*WORDS, source=ONCE)
    assert_same(run, quiet)
    (cause,) = run.summary["causes"]
    assert cause.startswith("data() raised ConnectionError: no route")
    assert len({pid for pid, _ in reads(jobs)}) == 2


NEEDS_MODEL = READS.replace(
    "def model():", "def model():\n        global SIZE\n        SIZE = 8", 1
)
NEEDS_MODEL = NEEDS_MODEL.replace("torch.randn(length, 8)", "torch.randn(length, SIZE)")


def test_data_that_needs_what_model_does_is_read_by_the_worker(jobs: Jobs, quiet: Record) -> None:
    run = jobs.train(*WORDS, source=NEEDS_MODEL)
    assert_same(run, quiet)
    assert "data() is read in the worker: " in run.log("worker-0")
    assert "SIZE" in run.log("worker-0")


SKIPPED = READS.replace("def data():", "def data(start):").replace(
    "for number in range(8):", "for number in range(start, 8):"
)


def test_data_that_can_be_skipped_has_no_process(jobs: Jobs) -> None:
    run = jobs.train(*WORDS, "--steps", "2", source=SKIPPED)
    assert {pid for pid, _ in reads(jobs)} == {run.plan["stages"][0]["pid"]}


@pytest.mark.parametrize("kept", ["0", "2"])
def test_the_number_of_mini_batches_read_does_not_change(jobs: Jobs, kept: str) -> None:
    """With ``--max-restarts 0`` no worker is replaced, so the worker reads itself."""
    words = ("--stages", "1", "--microbatches", "2", "--accumulate", "2", "--steps", "5")
    run = jobs.train(*words, "--max-restarts", kept, source=READS)
    assert len(reads(jobs)) == 10
    in_worker = {pid for pid, _ in reads(jobs)} == {run.plan["stages"][0]["pid"]}
    assert in_worker == (kept == "0")


@slow
def test_replicas_that_read_each_keep_their_place(jobs: Jobs) -> None:
    words = ("--stages", "2", *MORE, "--replicas", "2", "--data-reader", "every")
    run = jobs.train(*words, "--", "1", source=READS)
    assert run.summary["restarts"] >= 1
    per_process = Counter(pid for pid, _ in reads(jobs))
    assert sorted(per_process.values()) == [10, 10]
    assert run.summary["steps"] == 10
