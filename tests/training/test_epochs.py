"""Epochs, and an evaluation at the end of each."""

from __future__ import annotations

import json

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record
from support.real_jobs.ranks import Scripts, script
from support.slow import slow

RICH = """
    import os
    import random
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    def model():
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-2)

    scheduler_interval = "epoch"

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def evaluation():
        yield torch.randn(8, 8), torch.randint(0, 4, (8,))

    passes = 0

    def data():
        global passes
        passes += 1
        for number in range(5):
            if "dies" in sys.argv and (passes, number) == (2, 3) and not Path("died").exists():
                Path("died").touch()
                os.kill(os.getpid(), 9)
            length = random.randint(9, 16)
            yield torch.randn(length, 8), torch.randint(0, 4, (length,))
"""
WORDS = ("--microbatches", "4", "--accumulate", "2", "--evaluate-every", "epoch")
"""Five mini-batches an epoch, two a step: each epoch ends with a step of one."""


LOOP = """
    batches = list(data())
    steps = [batches[:2], batches[2:4], batches[4:]]
    seen = []

    def train(until, **options):
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, scheduler=scheduler,
            scheduler_interval="epoch", microbatches=4, replicas=2, run_dir="run", **options,
        ) as pipe:
            for epoch in range(pipe.epoch, 3):
                for step in steps[pipe.steps_done - 3 * epoch:]:
                    if pipe.steps_done == until:
                        saved = pipe.save()
                        pipe.end_epoch()
                        pipe.load(saved)
                        seen.append(pipe.epoch)
                        return
                    pipe.step(*step)
                if epoch == 0:
                    pipe.save()  # which the end of the epoch replaces
                pipe.end_epoch()
            seen.append(pipe.epoch)

    train(3)
    train(5, resume=True)
    train(9, resume=True)
    report(seen=seen)
"""


@slow
def test_epochs_are_equal_at_any_number_of_stages_and_after_a_resume(
    jobs: Jobs,
) -> None:
    uncut = jobs.train("--stages", "1", *WORDS, "--epochs", "3", source=RICH)
    assert [row["epoch"] for row in uncut.metrics] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [row["lr"] for row in uncut.metrics] == [0.01] * 3 + [0.005] * 3 + [0.0025] * 3
    assert [row["step"] for row in uncut.evaluations] == [3, 6, 9]
    cut = jobs.train("--stages", "2", *WORDS, "--epochs", "1", source=RICH)
    assert len(cut.metrics) == 3
    words = ("--resume", "--run-dir", str(cut.path), str(jobs.folder / "job.py"))
    done = jobs.pipeworker("launch", "--epochs", "3", "--stages", "3", *words)
    assert done.returncode == 0, done.stderr
    run = Record(cut.path)
    assert_same(run, uncut)
    assert run.evaluations == uncut.evaluations
    record = json.loads((run.path / "run.json").read_text())
    assert (record["options"]["epochs"], record["options"]["evaluate_every"]) == (1, "epoch")
    assert record["resumed"][0]["options"] == {"stages": 3, "epochs": 3}
    done = jobs.pipeworker("launch", "--epochs", "2", *words)
    assert done.returncode == 2
    assert f"--epochs 2: the run in {cut.path} is in epoch 3 already" in done.stderr


@slow
def test_epochs_are_equal_with_replicas(jobs: Jobs) -> None:
    words = (*WORDS, "--epochs", "2", "--replicas", "2", "--data-reader", "first")
    one, two = (jobs.train("--stages", str(k), *words, source=RICH) for k in (1, 2))
    assert [row["epoch"] for row in one.metrics] == [0, 0, 0, 1, 1, 1]
    assert_same(one, two)
    assert one.evaluations == two.evaluations


@slow
def test_epochs_are_equal_after_a_lost_worker_and_in_a_script(jobs: Jobs, scripts: Scripts) -> None:
    whole = jobs.train("--stages", "1", *WORDS, "--epochs", "2", source=RICH)
    lost = jobs.train("--stages", "2", *WORDS, "--epochs", "2", "--", "dies", source=RICH)
    assert (jobs.folder / "died").exists()
    assert lost.summary["restarts"] == 1
    train = """
        pipeworker.train(
            model, loss=loss, optimizer=optimizer, data=data, evaluation=evaluation,
            scheduler=scheduler, scheduler_interval="epoch", run_dir="run",
            microbatches=4, accumulate=2, epochs=2, evaluate_every="epoch",
        )
    """
    (run, _) = scripts.start(script(RICH, train), 2).succeed()
    for other in (lost, run):
        assert_same(other, whole)
        assert other.evaluations == whole.evaluations


@slow
def test_an_own_loop_says_when_its_epochs_end(jobs: Jobs, scripts: Scripts) -> None:
    same = "torch.manual_seed(number); length = 12"  # in the script as in a job file
    source = RICH.replace("length = random.randint(9, 16)", same)
    words = ("--accumulate", "2", "--epochs", "3", "--replicas", "2", "--microbatches", "4")
    whole = jobs.train("--stages", "1", *words, source=source)
    ranks = scripts.start(script(source, LOOP), 4)
    run = ranks.succeed()[0]
    assert [row["epoch"] for row in run.metrics] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [row["lr"] for row in run.metrics] == [0.01] * 3 + [0.005] * 3 + [0.0025] * 3
    assert_same(run, whole)
    assert [ranks.reported(rank)["seen"] for rank in range(4)] == [[1, 1, 3]] * 4
