"""``--replicas`` with real processes, sockets and files; results depend only on their number."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import (
    Jobs,
    Record,
    Reference,
    ended,
    processes_of,
    steps_of,
    until,
)
from support.real_jobs.ranks import LOOP, Scripts, script
from support.real_jobs.sources import CALM, DIES, DROPOUT_JOB, JOB, NESTED_JOB, gated
from support.slow import slow

WORDS = ("--microbatches", "4", "--clip-grad-norm", "0.5")

RICH = (
    DROPOUT_JOB
    + """
    def evaluation():
        for size in (11, 5, 2):
            x = torch.randn(size, 8)
            yield x, (x[:, 0] > 0).long()

    def metrics(output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean()}
"""
)
"""A job with random layers, batch norm, a scheduler, and evaluation."""


def test_results_are_the_same_for_any_number_of_stages(jobs: Jobs) -> None:
    words = (*WORDS, "--evaluate-every", "2", "--steps", "6", "--replicas", "2")
    ways = (("1", "never"), ("2", "except_first"))
    one, two = (
        jobs.train("--stages", stages, "--recompute", mode, *words, source=RICH)
        for stages, mode in ways
    )
    assert_same(two, one)
    assert two.evaluations == one.evaluations
    assert len(two.summary["peak_memory_bytes"]) == len(two.plan["stages"]) == 4
    assert "2 replicas of " in two.stdout
    assert two.log("worker-2") == ""


@slow
def test_results_with_another_number_of_replicas_are_close(reference: Reference) -> None:
    words = ("--microbatches", "4")
    one = reference("--stages", "2", *words, source=JOB)
    two = reference("--stages", "2", "--replicas", "2", *words, source=JOB)
    for a, b in zip(one.metrics, two.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert (a["samples"], a["epoch"]) == (b["samples"], b["epoch"])
    for name, weight in one.weights.items():
        assert torch.allclose(weight, two.weights[name], rtol=1e-4, atol=1e-6)


def test_the_default_is_four_micro_batches_per_stage_of_each_replica(jobs: Jobs) -> None:
    run = jobs.train("--stages", "1", "--replicas", "3", "--steps", "1", source=JOB)
    assert json.loads((run.path / "run.json").read_text())["options"]["microbatches"] == 12
    assert run.plan["microbatches"] == 10  # as many as there are samples
    assert run.metrics[0]["samples"] == 10  # fewer than 12


@pytest.mark.parametrize(
    "words",
    [
        ("--backend", "gloo", "--precision", "fp16", "--deferred-batch-norm"),
        (
            *("--backend", "tls", "--precision", "bf16"),
            *("--accumulate", "2", "--clip-grad-value", "0.01"),
        ),
    ],
    ids=" ".join,
)
@slow
def test_results_are_the_same_with_other_options(jobs: Jobs, words: tuple[str, ...]) -> None:
    """Five mini-batches: with two per step, the last step has one.

    One of the two runs has the default backend.
    """
    runs = [
        jobs.train("--stages", k, "--replicas", "2", *WORDS, *more, source=DROPOUT_JOB)
        for k, more in (("1", words[2:]), ("2", words))
    ]
    assert_same(*runs)
    assert len(runs[0].metrics) == (3 if "--accumulate" in words else 5)


TOKENS = """
    import torch
    from torch import nn

    tied = [("0.weight", "3.weight")]

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(11, 8) * 0.1)

        def forward(self, x):
            return x @ self.weight.t()

    def model():
        return [lambda: nn.Embedding(11, 8), lambda: nn.Linear(8, 8), nn.Tanh, Head]

    def loss(output, target):
        counted = target >= 0
        total = nn.functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum"
        )
        return total, counted.sum()

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-2)

    def data():
        for size in (9, 8, 1, 2):
            yield torch.randint(0, 11, (size, 4)), torch.randint(-1, 11, (size, 4))
"""


@slow
def test_tied_weights_and_a_loss_with_a_count(jobs: Jobs) -> None:
    """In some mini-batches a replica has no samples."""
    runs = [jobs.train("--stages", k, "--replicas", "3", *WORDS, source=TOKENS) for k in ("1", "2")]
    assert_same(*runs)
    one = jobs.train("--stages", "2", *WORDS, source=TOKENS)
    for a, b in zip(one.metrics, runs[0].metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


HELD = gated(DIES, "length = random", "_ == 3")
"""In its third step it waits for the test to kill a worker."""
LOST = ("--stages", "2", "--replicas", "2", "--microbatches", "4", "--steps", "7")


@pytest.fixture
def quiet(reference: Reference) -> Record:
    """Return a run without a fault."""
    return reference(*LOST, source=DIES)


@slow
def test_a_lost_worker_of_a_replica_is_replaced(jobs: Jobs, quiet: Record) -> None:
    rank = 3
    process, path = jobs.start(*LOST, source=HELD)
    until(lambda: steps_of(path) > 1)
    pid = Record(path).plan["stages"][rank]["pid"]
    os.kill(pid, signal.SIGKILL)
    (jobs.folder / "go").touch()
    run = ended(process, path)
    assert run.summary["restarts"] == 1
    (cause,) = run.summary["causes"]
    assert "the worker of stage 1 of replica 1 was killed by SIGKILL" in cause
    assert_same(run, quiet)


@slow
def test_the_cause_names_the_stage_and_replica_of_a_lost_worker(jobs: Jobs, quiet: Record) -> None:
    run = jobs.train(*LOST, "--", "kill", source=DIES)
    assert (jobs.folder / "died").exists()
    assert_same(run, quiet)
    assert re.search(r"the worker of stage \d of replica \d was killed", run.summary["causes"][0])


@slow
def test_a_run_resumes_with_the_same_number_of_replicas(jobs: Jobs, reference: Reference) -> None:
    words = ("--replicas", "2", "--microbatches", "4")
    whole = reference("--stages", "2", *words, "--steps", "6", source=DROPOUT_JOB)
    part = jobs.train("--stages", "2", *words, "--steps", "3", source=DROPOUT_JOB)
    names = {file.name for file in (part.checkpoint.path).iterdir()}
    assert {"model-00002-of-00002.safetensors"} <= names, names
    line = ("launch", "--run-dir", str(part.path), "--resume", str(jobs.folder / "job.py"))
    refused = jobs.pipeworker(*line, "--replicas", "1", "--steps", "6")
    assert refused.returncode == 2
    assert "--replicas (2, now 1)" in refused.stderr
    assert "--allow-change replicas" in refused.stderr
    done = jobs.pipeworker(*line, "--stages", "3", "--steps", "6")
    assert done.returncode == 0, done.stderr
    assert_same(Record(part.path), whole)
    other = jobs.pipeworker(*line, "--replicas", "1", "--allow-change", "replicas", "--steps", "8")
    assert other.returncode == 0, other.stderr


UNLIKE = JOB.replace("import torch", "import os\n    import torch", 1).replace(
    "yield x,", "x = x + (os.getpid() if generator.initial_seed() and _ == 2 else 0)\n"
    "            yield x,"
)  # fmt: skip
"""A job whose third mini-batch differs between processes."""


BUFFERS = """
    import torch
    from torch import nn

    class Mean(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("mean", None, persistent=False)
            self.register_buffer("table", torch.ones(4096, 8))

        def forward(self, x):
            y = super().forward(x)
            if self.training:
                mean = y.detach().mean(0)
                self.mean = mean if self.mean is None else self.mean.lerp(mean, 0.1)
                self.table.data[-1].lerp_(mean, 0.1)  # leaves no trace in its version
            return torch.tanh(y - self.mean + self.table[-1])

    class Fitted(nn.Linear):
        fitted = False

        def forward(self, x):
            if not self.fitted:  # by the first micro-batch of this replica
                self.weight.data.div_(x.std())
                self.fitted = True
            return super().forward(x)

    def model():
        return nn.Sequential(Mean(), Mean(), Mean(), nn.Linear(8, 8))

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        while True:
            x = torch.randn(12, 8)
            yield x, x.argmax(1)
"""
"""Layers with buffers that a forward creates, or changes without a trace."""


APART = (
    JOB
    + """
    updates = 0

    def before_update(params):
        global updates
        updates += 1
        if updates == 13:
            try:
                open("changed", "x").close()
            except FileExistsError:
                return
            next(iter(params)).data.mul_(2)
"""
)
"""One replica alone changes a weight of the first of three layers before update 5."""

BY_EPOCH = """
    scheduler_interval = "epoch"

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)
"""


def test_all_buffers_that_a_forward_changes_are_those_of_replica_0(jobs: Jobs) -> None:
    words = ("--replicas", "2", "--microbatches", "4")
    whole = jobs.train("--stages", "1", "--steps", "4", *words, source=BUFFERS)
    path = jobs.train("--stages", "1", "--steps", "2", *words, source=BUFFERS).path
    jobs.train("--resume", "--stages", "2", "--steps", "4", "--run-dir", str(path), source=BUFFERS)
    assert_same(Record(path), whole)


def test_weights_that_a_forward_changes_by_its_own_samples_are_an_error(jobs: Jobs) -> None:
    source = BUFFERS.replace("nn.Sequential(Mean()", "nn.Sequential(Fitted(8, 8)")
    words = ("--stages", "1", "--microbatches", "2", "--steps", "2")
    run = jobs.run(*words, "--replicas", "2", source=source)
    assert run.status == 2
    assert "stage 0, layer 0: `weight` differs between the replicas" in run.stderr
    jobs.train(*words, source=source)


@slow
def test_weights_are_compared_in_the_step_after_a_checkpoint(jobs: Jobs) -> None:
    """Otherwise the next comparison would be before update 8."""
    words = ("--stages", "1", "--replicas", "2", "--microbatches", "4", "--steps", "8")
    run = jobs.run(*words, "--checkpoint-every", "6", source=APART)
    assert run.status == 1
    assert re.search(r"`weight` differs between the replicas,[^\n]*\n[^\n]* step 7\n", run.stderr)


def test_weights_are_compared_in_a_last_step_that_reads_one_more_mini_batch(jobs: Jobs) -> None:
    """A scheduler of epochs has to know whether the epoch ends with it."""
    words = ("--stages", "1", "--replicas", "2", "--microbatches", "2", "--steps", "6")
    run = jobs.run(*words, source=APART + BY_EPOCH)
    assert run.status == 1
    assert re.search(r"`weight` differs between the replicas,[^\n]*\n[^\n]* step 6\n", run.stderr)


def test_replicas_that_read_different_data_fail(jobs: Jobs) -> None:
    run = jobs.run("--stages", "1", "--replicas", "2", "--microbatches", "2", source=UNLIKE)
    assert run.status == 1
    assert "data(): replica 1 read another mini-batch for step 3 than replica 0" in run.stderr
    until(lambda: not processes_of(jobs.folder))


ONCE = ("--replicas", "2", "--microbatches", "4", "--data-reader", "first")


@slow
def test_replica_0_may_read_for_all(jobs: Jobs, reference: Reference) -> None:
    """Results equal those of reading in every replica; processes may then have different data."""
    for stages, words, source in (
        ("1", ("--steps", "6"), DROPOUT_JOB),
        ("2", ("--accumulate", "2"), NESTED_JOB),
        ("1", ("--replicas", "3", "--accumulate", "2"), TOKENS),
    ):
        every = reference("--stages", "2", *ONCE[:-2], *words, source=source)
        assert_same(jobs.train("--stages", stages, *ONCE, *words, source=source), every)
    run = jobs.train("--stages", "2", *ONCE, source=UNLIKE)
    assert len(run.metrics) == 6


@slow
def test_recovery_with_data_read_by_replica_0(jobs: Jobs, quiet: Record) -> None:
    run = jobs.train(*LOST, "--data-reader", "first", "--", "kill", source=DIES)
    assert (jobs.folder / "died").exists()
    assert run.summary["restarts"] >= 1
    assert_same(run, quiet)


def test_a_mini_batch_passed_on_one_rank_of_a_script_is_for_all(
    reference: Reference, scripts: Scripts
) -> None:
    local = reference("--stages", "1", "--replicas", "2", "--microbatches", "4", source=JOB)
    loop = LOOP.replace("pipe.step(batch)", "pipe.step(batch if rank == 0 else None)")
    options = json.dumps({"replicas": 2, "data_reader": "first"})
    ranks = scripts.start(script(JOB, loop), 2, OPTIONS=options)
    ranks.succeed()
    for rank in range(2):
        assert ranks.reported(rank)["loss"] == [row["loss"] for row in local.metrics]


@slow
def test_a_replica_that_lost_all_workers_is_replaced(jobs: Jobs, quiet: Record) -> None:
    """All workers of replica 0 die at once; their replacements get the state of replica 1."""
    process, path = jobs.start(*LOST, source=HELD)
    until(lambda: steps_of(path) > 1)
    stages = Record(path).plan["stages"]
    os.kill(process.pid, signal.SIGSTOP)  # the launcher replaces no worker until all are dead
    for stage in stages:
        if stage["replica"] == 0:
            os.kill(stage["pid"], signal.SIGKILL)
    os.kill(process.pid, signal.SIGCONT)
    (jobs.folder / "go").touch()
    run = ended(process, path)
    assert run.summary["restarts"] == 1
    assert_same(run, quiet)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--replicas", "0"), "--replicas 0: must be 1 or more"),
        (("--replicas", "300"), "--replicas 300: must be 256 or less"),
        (("--replicas", "4", "--microbatches", "3"), "must be 4 or more, because"),
    ],
)
def test_an_invalid_number_of_replicas_is_rejected(
    jobs: Jobs, words: tuple[str, ...], expected: str
) -> None:
    run = jobs.run("--stages", "2", *words, source=JOB)
    assert run.status == 2
    assert expected in run.stderr
    assert not run.path.exists()


SHARDED = ("--replicas", "2", "--microbatches", "4", "--shard-optimizer")


@slow
def test_a_sharded_optimizer_equals_a_whole_one(jobs: Jobs) -> None:
    """Results do not change; each worker keeps and writes its part of the state."""
    words = ("--steps", "6", "--clip-grad-norm", "0.5")
    whole = jobs.train("--stages", "2", *SHARDED[:-1], *words, source=DROPOUT_JOB)
    run = jobs.train("--stages", "3", *SHARDED, *words, source=DROPOUT_JOB)
    assert_same(run, whole)
    shards = run.checkpoint.worker_files()
    assert len(shards) == 6
    sizes = [shard.optimizer.stat().st_size for shard in shards]
    assert max(sizes) < sum(s.optimizer.stat().st_size for s in whole.checkpoint.worker_files())
    assert all(json.loads(s.state.read_text())["extra"] == {} for s in shards)


@slow
def test_a_run_with_sharded_state_resumes_with_any_layout(jobs: Jobs, reference: Reference) -> None:
    first = ("--steps", "3", "--checkpoint-every", "1")
    whole = reference("--stages", "2", *SHARDED[:-1], "--steps", "6", source=DROPOUT_JOB)
    for begin, then in (
        (("--stages", "2", *SHARDED), ("--stages", "3", "--no-shard-optimizer")),
        (("--stages", "3", *SHARDED[:-1]), ("--stages", "1", "--shard-optimizer")),
    ):
        run = jobs.train(*begin, *first, source=DROPOUT_JOB)
        line = ("launch", "--run-dir", str(run.path), "--resume", str(jobs.folder / "job.py"))
        done = jobs.pipeworker(*line, *then, "--steps", "6")
        assert done.returncode == 0, done.stderr
        assert_same(Record(run.path), whole)


@slow
def test_sharded_state_is_recovered(jobs: Jobs, quiet: Record) -> None:
    run = jobs.train(*LOST, "--shard-optimizer", "--snapshot-every", "1", "--", "kill", source=DIES)
    assert (jobs.folder / "died").exists()
    assert run.summary["restarts"] >= 1
    assert_same(run, quiet)


@slow
def test_a_script_with_replicas_equals_a_job(reference: Reference, scripts: Scripts) -> None:
    """Stage 0 of each replica is passed the whole mini-batch; all ranks get the same results."""
    local = reference("--stages", "2", "--replicas", "2", "--microbatches", "4", source=JOB)
    ranks = scripts.start(script(JOB, LOOP), 4, OPTIONS=json.dumps({"replicas": 2}))
    ranks.succeed()
    for rank in range(4):
        reported = ranks.reported(rank)
        assert reported["loss"] == [row["loss"] for row in local.metrics]
        assert reported["norm"] == [row["grad_norm"] for row in local.metrics]
    (saved,) = Path(ranks.run_dir).glob("checkpoints/step-*")
    assert len(list(saved.glob("model-*"))) == 2


@slow
def test_the_calls_of_a_script_with_replicas(scripts: Scripts) -> None:
    loop = """
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
            microbatches=4, replicas=2, shard_optimizer=bool(os.environ.get("SHARD")),
            run_dir="run",
        ) as pipe:
            batches = list(data())
            pipe.step(*batches[:2])
            seen = pipe.evaluate(*batches)
            out = pipe.predict(batches[0][0], everywhere=True)
            path = pipe.save()
            first = pipe.step(batches[2]).loss
            assert pipe.load(path) == 1
            assert pipe.step(batches[2]).loss == first
            report(where=[pipe.replica, pipe.replicas, pipe.stage, pipe.stages], seen=seen["loss"],
                 out=out.tolist(), loss=first)
    """
    losses = set()
    for ranks, shard in ((2, ""), (4, "1")):
        started = scripts.start(script(JOB, loop), ranks, SHARD=shard)
        started.succeed()
        reports = [started.reported(rank) for rank in range(ranks)]
        where = [[r, 2, k, ranks // 2] for r in range(2) for k in range(ranks // 2)]
        assert [one.pop("where") for one in reports] == where
        assert all(one == reports[0] for one in reports)
        losses.add(reports[0]["loss"])
    assert len(losses) == 1


def test_a_number_of_processes_not_divisible_by_replicas_is_rejected(scripts: Scripts) -> None:
    ranks = scripts.start(script(JOB, LOOP), 3, OPTIONS=json.dumps({"replicas": 2}))
    for run in ranks.end():
        assert run.status == 1
        assert "--replicas 2: must divide the number of processes, 3" in run.stderr


def test_an_interrupt_saves_a_checkpoint(jobs: Jobs) -> None:
    words = ("--stages", "1", "--replicas", "2", "--microbatches", "4", "--steps", "100000")
    process, path = jobs.start(*words, source=CALM)
    until(lambda: steps_of(path))
    process.send_signal(signal.SIGINT)
    ended(process, path, 130)
    assert list((path / "checkpoints").glob("step-*/manifest.json"))
