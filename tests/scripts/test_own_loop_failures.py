"""A user's own loop that fails: every rank gets the error, and no process stays."""

from __future__ import annotations

import os
import signal

import pytest

from support.real_jobs.jobs import Jobs, processes_of, steps_of, until
from support.real_jobs.ranks import LOOP, Ranks, Scripts, script
from support.real_jobs.sources import JOB
from support.slow import slow

FAILING = """
    import time

    class Bad(nn.Module):
        def forward(self, x):
            if os.environ["WHAT"] == "layer":
                raise ValueError("as asked")
            return x

    def model():
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), Bad())

    what = os.environ["WHAT"]
    if what == "weights":
        torch.manual_seed(rank)
        model = model()
    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, microbatches=2, run_dir="run"
    ) as pipe:
        print("joined", flush=True)
        batch = next(data())
        if what == "loop" and rank == 1:
            raise RuntimeError("of my own")
        if what == "calls" and rank == 1:
            pipe.predict(batch[0])
        if what == "batch":
            batch = batch[0]
        if what == "inside":
            within = lambda *_: pipe.predict(batch[0])
            pipe.layers[max(pipe.layers)].register_forward_hook(within)
        if what == "none":
            batch = None
        if what == "sysexit" and rank == 1:
            sys.exit(3)
        if what == "exit" and rank == 1:
            os._exit(3)
        pipe.step(batch)
        if what == "closed":
            pipe.close()
            pipe.__enter__() if rank else pipe.step(batch)
        while what == "endless":
            time.sleep(0.01)
            pipe.step(batch)
"""


DIFFERENT = "stage 1 called predict(batch) while stage 0 called step(batch)"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        (
            "layer",
            "PipeworkerError: layer 3 (Bad) raised ValueError: as asked",
            "LayerError: layer 3 (Bad) raised ValueError: as asked (its input was Tensor[5, 3] "
            "float32)\n  in forward: stage 1, layer 3 (Bad), micro-batch 0, step 1",
        ),
        (
            "weights",
            "UsageError: model: the initial weights differ",
            "UsageError: model: the initial",
        ),
        (
            "loop",
            "PipeworkerError: the script of stage 1 raised RuntimeError: of my own",
            "RuntimeError: of my own",
        ),
        (
            "calls",
            f"UsageError: the script: {DIFFERENT}",
            f"UsageError: the script: {DIFFERENT}",
        ),
        pytest.param(
            "batch",
            "UsageError: step(batch): was given a Tensor; make it a pair (input, target)",
            "UsageError: step(batch): was given a Tensor",
            marks=slow,
        ),
        pytest.param(
            *("none", "UsageError: step(batch): was given a NoneType", "UsageError: step(batch)"),
            marks=slow,
        ),
        (
            "inside",
            "this pipeline is busy: a call was made inside another one",
            "this pipeline is busy: a call was made inside another one",
        ),
        pytest.param(
            *("sysexit", "PipeworkerError: the script of stage 1 called sys.exit(3)", ""),
            marks=slow,
        ),
        ("exit", "PipeworkerError: the worker of stage 1 (pid ", ""),
        (
            "closed",
            "PipeworkerError: this pipeline is closed",
            "PipeworkerError: this pipeline is closed",
        ),
    ],
)
def test_a_failure_is_raised_on_every_rank(
    scripts: Scripts, what: str, first: str, second: str
) -> None:
    ranks = scripts.start(script(JOB, FAILING), 2, WHAT=what)
    runs = ranks.end()
    assert [run.status for run in runs] == [1, 3 if what in ("exit", "sysexit") else 1]
    for run, message in zip(runs, (first, second), strict=True):
        assert message in run.stderr.replace(
            "stage 0 called step(batch) while stage 1 called predict(batch)",
            DIFFERENT,
        )
    if "UsageError" in first or what == "inside":  # a mistake, before the first step
        assert not runs[0].path.exists()
        return
    status = "done" if what == "closed" else "failed"
    assert runs[0].summary["status"] == status
    if what == "layer":
        assert 'raise ValueError("as asked")' in runs[1].stderr
        assert "stage 1, layer 3 (Bad), micro-batch 0, step 1" in runs[0].stderr


def training(ranks: Ranks) -> None:
    """Wait until a step is on record."""
    until(lambda: steps_of(ranks.run_dir))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
def test_a_killed_rank_ends_the_others(jobs: Jobs, scripts: Scripts, rank: int) -> None:
    ranks = scripts.start(script(JOB, FAILING), 3, WHAT="endless")
    training(ranks)
    os.kill(ranks.pids[rank], signal.SIGKILL)
    runs = ranks.end()
    assert [run.status for run in runs] == [-signal.SIGKILL if r == rank else 1 for r in range(3)]
    until(lambda: not processes_of(jobs.folder))
    assert runs[0].summary["status"] == "failed"
    if rank:
        assert f"the worker of stage {rank} (pid " in runs[0].summary["error"]


def test_an_interrupt_reaches_the_users_handler(jobs: Jobs, scripts: Scripts) -> None:
    ranks = scripts.start(script(JOB, FAILING), 3, WHAT="endless")
    training(ranks)
    for pid in ranks.pids:
        os.kill(pid, signal.SIGINT)
    runs = ranks.end()
    # A rank may learn of the end of the job before its own signal arrives.
    ends = ("KeyboardInterrupt", "the job ended", "PipeworkerError: interrupted")
    assert all(any(end in run.stderr for end in ends) for run in runs)
    until(lambda: not processes_of(jobs.folder))
    assert runs[0].summary["status"] == "interrupted"


SAVES = """
    import signal

    class Interrupting(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            if rank == 1 and Path("saves").exists() and not Path("interrupted").exists():
                Path("interrupted").touch()
                os.kill(os.getpid(), signal.SIGINT)
            return super().state_dict()

    with pipeworker.Pipeline(
        model,
        loss=loss,
        optimizer=optimizer,
        scheduler=lambda optimizer: Interrupting(optimizer, 1),
        run_dir="run",
    ) as pipe:
        pipe.step(next(data()))
        Path("saves").touch()
        pipe.save()
"""


def test_an_interrupt_while_a_rank_saves_does_not_lose_its_answer(
    jobs: Jobs, scripts: Scripts
) -> None:
    """The coordinator waits for it, and the other ranks for the coordinator."""
    ranks = scripts.start(script(JOB, SAVES), 2)
    runs = ranks.end(30)
    assert (ranks.run_dir.parent / "interrupted").exists()
    assert "KeyboardInterrupt" in runs[1].stderr
    assert runs[0].summary["status"] == "interrupted"
    assert runs[0].checkpoint.manifest.step == 1
    until(lambda: not processes_of(jobs.folder))


UNCLOSED = """
    import time
    pipe = pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir="run")
    pipe.step(next(data()))
    if rank == 0:
        Path("stepped").touch()
    if rank == 1 and os.environ.get("RAISE"):
        while not Path("stepped").exists():  # else it is the step of rank 0 that fails
            time.sleep(0.02)
        raise ValueError("of my own")
"""


def test_the_end_of_a_script_closes_its_pipeline(scripts: Scripts) -> None:
    run = scripts.start(script(JOB, UNCLOSED), 2).end()[0]
    assert run.summary["status"] == "done"
    assert len(run.weights) == 6


def test_a_script_that_ends_with_an_exception_fails_the_job(scripts: Scripts) -> None:
    first, second = scripts.start(script(JOB, UNCLOSED), 2, RAISE="yes").end()
    message = "the script of stage 1 raised ValueError: of my own"
    assert f"error: {message}" in first.stderr
    assert "ValueError: of my own" in second.stderr
    assert second.status == 1
    assert first.summary["status"] == "failed"
    assert message in first.summary["error"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("Pipeline(model, loss=3, optimizer=optimizer)", "pipeworker.Pipeline(): loss is an int"),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, colour=1)",
            "colour: no such option; use one of",
        ),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, steps=1)",
            "steps: the script's own loop decides it; leave it out",
        ),
        ("Pipeline(3, loss=loss, optimizer=optimizer)", "pipeworker.Pipeline(): model is an int"),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, recompute='some')",
            "--recompute some: must be one of auto, always, except_first, never",
        ),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, seed='0')",
            "--seed '0': must be of type int, not str",
        ),
        (
            "train(model, loss=loss, optimizer=optimizer, data=None)",
            "pipeworker.train(): data is a NoneType",
        ),
        (
            "train(model, loss=loss, optimizer=optimizer, data=data, run_dir=5)",
            "pipeworker.train(): run_dir is an int; make it a path",
        ),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, run_dir='a\\0b')",
            "pipeworker.Pipeline(): run_dir is 'a\\x00b'; a path has no null character",
        ),
        (
            "train(model, loss=loss, optimizer=optimizer, data=data, run_dir='')",
            "pipeworker.train(): run_dir is ''; make it a path that is not empty",
        ),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, resume='runs/a')",
            "pipeworker.Pipeline(): resume is 'runs/a'; make it True or False, and run_dir the run",
        ),
        (
            "train(model, loss=loss, optimizer=optimizer, data=data, auto_resume='no')",
            "pipeworker.train(): auto_resume is 'no'; make it True or False",
        ),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, names=torch.ones(2))",
            "pipeworker.Pipeline(): names is a Tensor; make it a dict",
        ),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, resume=True, allow_change=5)",
            "pipeworker.Pipeline(): allow_change is an int; make it a list of names of options",
        ),
    ],
)
def test_mistakes_are_reported_before_the_job_starts(
    scripts: Scripts, call: str, message: str
) -> None:
    (run,) = scripts.start(script(JOB, f"pipeworker.{call}"), 1, alone=True).end()
    assert run.status == 1
    assert message in run.stderr
    assert not run.path.exists()
    assert not (run.path.parent / "runs").exists()


def test_a_mistake_on_rank_0_is_raised_on_the_others(scripts: Scripts) -> None:
    loop = """
        Path("taken").mkdir(exist_ok=True)
        Path("taken", "notes.txt").touch()
        try:
            pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir="taken")
        except pipeworker.UsageError as error:
            report(error=str(error))
        with pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir="run") as pipe:
            pipe.step(next(data()))
    """
    ranks = scripts.start(script(JOB, loop), 2)
    ranks.succeed()
    assert ranks.reported(0) == ranks.reported(1)
    assert "run directory taken: exists already" in ranks.reported(1)["error"]


def test_a_computing_rank_is_not_killed_when_another_fails(scripts: Scripts) -> None:
    loop = """
        import time
        class Slow(nn.Linear):
            calls = 0

            def forward(self, x):
                self.calls += 1
                while self.calls == 2 and not Path("run/summary.json").exists():
                    time.sleep(0.02)
                time.sleep(1.0 if self.calls == 2 else 0.0)  # longer than a stuck process may wait
                return super().forward(x)

        def model():
            return nn.Sequential(Slow(8, 8), nn.Linear(8, 3))

        def loss(output, target):
            raise ValueError("of my own")

        def data():
            yield torch.zeros(2, 8), torch.zeros(2).long()

        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=2, recompute="never", run_dir="run"
        ) as pipe:
            try:
                pipe.step(next(data()))
            except pipeworker.PipeworkerError as error:
                report(error=str(error))
    """
    ranks = scripts.start(script(JOB, loop), 2, PIPEWORKER_TIMINGS="stuck=0.2")
    ranks.succeed()
    assert "loss() raised ValueError: of my own" in ranks.reported(0)["error"]


def test_an_incomplete_environment_is_reported(scripts: Scripts) -> None:
    (run,) = scripts.start(script(JOB, LOOP), 1, alone=True, RANK="0", WORLD_SIZE="2").end()
    assert "'MASTER_ADDR' is not set" in run.stderr


THREADS = """
    import threading

    calls, errors = [], []

    def attempt(call):
        try:
            call()
        except pipeworker.UsageError as error:
            errors.append(str(error))

    def calls_others(output, target):
        while calls:
            thread = threading.Thread(target=attempt, args=(calls.pop(),))
            thread.start()
            thread.join()
        return loss(output, target)

    def make(name, loss=loss):
        return pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir=name)

    batch = next(data())
    with make("run", calls_others) as first, make("second") as second:
        calls += [lambda: make("third"), lambda: second.step(batch)]
        before = first.step(batch).loss
        after = second.step(batch).loss
    report(errors=errors, losses=[before, after])
"""


def test_pipelines_in_two_threads_do_not_share_random_streams(scripts: Scripts) -> None:
    started = scripts.start(script(JOB, THREADS), 1, alone=True)
    started.succeed()
    found = started.reported(0)
    assert found["losses"][0] == found["losses"][1]
    assert len(found["errors"]) == 2
    assert all("a pipeline in another thread is busy" in text for text in found["errors"])
