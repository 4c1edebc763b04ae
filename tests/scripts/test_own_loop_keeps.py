"""A user's own loop keeps what it has learned: wrong calls change nothing; errors save first."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import pipeworker
from support.processes.forked import Server
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record
from support.real_jobs.ranks import Scripts, script
from support.real_jobs.sources import DROPOUT_JOB, JOB
from support.slow import slow

NORMED = DROPOUT_JOB.replace("def scheduler", "def _scheduler")
"""With dropout and batch norm, whose buffers each forward changes."""

OFTEN_WRONG = """
    fails = {"in": ""}

    class Picky(nn.Module):
        def forward(self, x):
            if not self.training and fails["in"] == "layer":
                raise ValueError("as asked")
            return x

    def model(before=model):
        layers = before()
        layers[4] = Picky  # in place of Noise
        return layers

    def metrics(output, target):
        if fails["in"] == "metrics":
            raise ValueError("as asked")
        return {"first": output[0, 0]}

    def scalar(output, target):
        return {"first": output}

    raised = []

    def attempt(call, *args, within="", **named):
        fails["in"] = within
        try:
            call(*args, **named)
            raised.append("nothing")
        except pipeworker.PipeworkerError as error:
            raised.append(f"{type(error).__name__}: {error}")
            own = isinstance(error, pipeworker.LayerError)
            assert isinstance(error.__cause__, ValueError) is own
        fails["in"] = ""

    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, metrics=metrics, microbatches=4, run_dir="run"
    ) as pipe:
        torch.manual_seed(0)
        batches = [next(data()) for _ in range(5)]
        wrong = [
            lambda: attempt(pipe.step),
            lambda: attempt(pipe.step, batch, batch[0]),
            lambda: attempt(pipe.evaluate, batch, (batch[0], batch[1][:3])),
            lambda: attempt(pipe.predict, None, everywhere=True),
            lambda: attempt(pipe.load, "nowhere"),
            lambda: attempt(pipe.load, None),
            lambda: attempt(pipe.predict, batch[0], everywhere="yes"),
            lambda: attempt(pipe.evaluate, batch, batch, within="layer"),
            lambda: attempt(pipe.predict, batch[0], everywhere=True, within="layer"),
            lambda: attempt(pipe.evaluate, batch, within="metrics"),
        ]
        results = []
        for number, batch in enumerate(batches):
            if os.environ["WRONG"]:
                for call in wrong if number == 2 else wrong[number::5]:
                    call()
            results.append(pipe.step(batch))
        output = pipe.predict(batch[0], everywhere=True)
    report(raised=raised, losses=[r.loss for r in results], output=output.tolist())
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=slow)])
def test_calls_that_fail_change_nothing(scripts: Scripts, ranks: int) -> None:
    source = script(NORMED, OFTEN_WRONG)
    right = scripts.start(source, ranks, WRONG="")
    wrong = scripts.start(source, ranks, WRONG="yes")
    expected, run = right.succeed()[0], wrong.succeed()[0]
    assert_same(run, expected)
    for rank in range(ranks):
        one, other = wrong.reported(rank), right.reported(rank)
        assert (one["losses"], one["output"]) == (other["losses"], other["output"])
        assert other["raised"] == []
        assert len(one["raised"]) == 18
        open_still = "\n  the pipeline stays open: the call has changed nothing"
        assert all(text.endswith(open_still) for text in one["raised"])
        texts = "\n".join(one["raised"])
        assert "UsageError: step(): there is no mini-batch" in texts
        assert "UsageError: step(batch): was given a Tensor" in texts
        assert "UsageError: evaluate(batch): was given tensors that disagree in dim 0" in texts
        assert "UsageError: predict(input): was given an input without a tensor" in texts
        assert "UsageError: nowhere: no complete checkpoint is there" in texts
        assert "UsageError: load(): checkpoint is a NoneType; make it a path" in texts
        assert "UsageError: predict(): everywhere is 'yes'; make it True or False" in texts
        assert "layer 4 (Picky) raised ValueError: as asked" in texts
        assert "metrics() raised ValueError: as asked" in texts
        assert ("LayerError" in texts) == (rank in (ranks // 2, ranks - 1))
        assert texts.count("\n  in prediction: stage ") == 2 * (rank == ranks // 2)
        assert ("PipeworkerError" in texts) == (ranks > 1)
    rows = (run.path / "evaluation.jsonl").exists()
    assert not rows
    assert run.summary["status"] == "done"


ENDED = """
    class Fails(nn.Module):
        def forward(self, x):
            if self.training and Path("fail").exists():
                what = os.environ["WHAT"]
                if what == "layer":
                    raise ValueError("as asked")
                if what == "interrupt":
                    os.kill(os.getpid(), 2)
                    Path("late").touch()  # it has waited for the end of the step
            return x

    def model(before=model):
        return [*before(), Fails]

    def before_update(params):
        if os.environ["WHAT"] in ("update", "terminated") and Path("fail").exists():
            Path("fail").unlink()
            os.kill(os.getpid(), 2 if os.environ["WHAT"] == "update" else 15)  # after the update

    torch.manual_seed(0)
    batches = [next(data()) for _ in range(5)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def run(first, **options):
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run",
            before_update=before_update, **options
        ) as pipe:
            assert pipe.steps_done == first
            for number in range(first, 5):
                if number == 3 and not first:
                    Path("fail").touch()
                    if os.environ["WHAT"] == "loop":
                        raise KeyError("of my own")
                    if os.environ["WHAT"] == "everywhere":
                        os.kill(os.getpid(), 2)
                pipe.step(batches[number])

    if os.environ["WHAT"]:
        try:
            run(0)
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"
        Path("fail").unlink(missing_ok=True)
        import time
        while not Path("run/summary.json").exists():
            time.sleep(0.01)
        summary = json.loads(Path("run/summary.json").read_text())
        done = summary["steps"]
        run(done, resume=True)
        late = Path("late").exists()
        report(raised=raised, steps=done, status=summary["status"], late=late)
    else:
        run(0)
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Record:
    """Return a run that nothing interrupts."""
    jobs = Jobs(tmp_path_factory.mktemp("expected"), server)
    with Scripts(jobs) as scripts:
        return scripts.start(script("import signal", NORMED, ENDED), 1, WHAT="").succeed()[0]


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        pytest.param("layer", 1, marks=slow),
        ("layer", 2),
        ("interrupt", 1),
        pytest.param("update", 1, marks=slow),
        pytest.param("terminated", 1, marks=slow),
        pytest.param("loop", 2, marks=slow),
        pytest.param("everywhere", 2, marks=slow),
    ],
)
def test_the_last_whole_step_is_saved_and_resumed(
    scripts: Scripts, expected: Record, what: str, ranks: int
) -> None:
    started = scripts.start(script("import signal", NORMED, ENDED), ranks, WHAT=what)
    runs = started.succeed()
    assert_same(runs[0], expected)
    reported = started.reported(ranks - 1)
    assert reported["steps"] == 3 + (what in ("update", "terminated"))
    assert not reported["late"]
    saved = (
        f"step {reported['steps']} is saved in run/checkpoints/step-0000000{reported['steps']}; "
        "continue in the script: pipeworker.Pipeline(..., resume=True, run_dir='run')"
    )
    if what == "layer":
        assert reported["raised"].startswith("LayerError: layer 8 (Fails) raised ValueError")
        assert reported["raised"].endswith(f"\n  {saved}")
        assert all(saved in started.reported(rank)["raised"] for rank in range(ranks))
    else:
        assert f"pipeworker: {saved}" in runs[0].stderr
        error = "KeyError: 'of my own'" if what == "loop" else "KeyboardInterrupt: "
        assert reported["raised"] == error
    interrupted = what in ("interrupt", "update", "terminated", "everywhere")
    assert reported["status"] == ("interrupted" if interrupted else "failed")


AT_EVERY_LINE = """
    from pipeworker.session.session import Session

    def interrupt_at(count):
        \"""Interrupt the main thread at an event of Session.working, or of what it calls.\"""
        seen = 0
        within = Session.working.__wrapped__.__code__

        def trace(frame, event, _):
            nonlocal seen
            if frame.f_code is not within and frame.f_back.f_code is not within:
                return trace if "threading" in frame.f_code.co_filename else None
            seen += 1
            if seen == count:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)

    batch = next(data())
    interrupted = 0
    for count in range(1, 100):
        with suppress(KeyboardInterrupt), pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir=f"run-{count}"
        ) as pipe:
            pipe.step(batch)
            interrupt_at(count)
            pipe.step(batch)
            sys.settrace(None)
            break
        interrupted += 1
    report(interrupted=interrupted)
"""


@slow
def test_an_interrupt_at_any_line_around_a_step_ends_the_pipeline(scripts: Scripts) -> None:
    """An interrupt within a lock of Python's, such as an Event's, leaves it locked."""
    ranks = scripts.start(script("from contextlib import suppress", NORMED, AT_EVERY_LINE), 1)
    ranks.succeed()
    assert 5 < ranks.reported(0)["interrupted"] < 99


def test_a_pipeline_that_nothing_refers_to_ends(scripts: Scripts) -> None:
    loop = """
        for number in range(2):  # the second assignment ends the first pipeline
            pipe = pipeworker.Pipeline(
                model, loss=loss, optimizer=optimizer, run_dir=f"run-{number}"
            )
            pipe.step(next(data()))
        first = json.loads(Path("run-0/summary.json").read_text())
        report(status=first["status"], open=not Path("run-1/summary.json").exists())
        sys.ps1 = ">>> "  # as in an interactive session, which has shown an error
        sys.last_value = NameError("of a line before")
    """
    ranks = scripts.start(script(NORMED, loop), 1, alone=True)
    ranks.succeed()
    assert ranks.reported(0) == {"status": "done", "open": True}
    summary = json.loads((ranks.run_dir.parent / "run-1/summary.json").read_text())
    assert summary["status"] == "done"


AGAIN = """
    def losses(pipe):
        return [pipe.step(batch).loss for batch in data()]

    def refused(path):
        try:
            pipe.load(path)
        except pipeworker.UsageError as error:
            return str(error)

    options = dict(loss=loss, optimizer=optimizer)
    small = lambda: nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3))
    with pipeworker.Pipeline(small, run_dir="other", **options) as pipe:
        pipe.save()
    with pipeworker.Pipeline(model, run_dir="run", **options) as pipe:
        first = pipe.save()
        before = losses(pipe)
        for layer in pipe.layers.values():
            for parameter in layer.parameters():
                parameter.square().sum().backward()
        damaged = shutil.copytree(first, f"damaged-{rank}")
        weights = next(Path(damaged).glob("model-*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        wrong = [refused(damaged), refused("other")]
        assert pipe.steps_done
        assert pipe.load(first) == pipe.steps_done == 0
        assert not pipe.optimizer.state
        report(before=before, after=losses(pipe), wrong=wrong)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_a_step_begins_with_the_state_that_was_loaded_and_without_gradients(
    scripts: Scripts, ranks: int
) -> None:
    """A checkpoint of step 0 has no state of the optimizer: that of later steps goes.

    One that is damaged or of another model changes nothing.
    """
    adam = JOB.replace("SGD(params, lr=0.1)", "Adam(params, lr=0.1)")
    started = scripts.start(script("import shutil", adam, AGAIN), ranks)
    started.succeed()
    for rank in range(ranks):
        found = started.reported(rank)
        assert found["before"] == found["after"]
        damaged, other = found["wrong"]
        assert "safetensors: cannot be read: it is damaged" in damaged
        assert other.startswith(
            "the checkpoint other/checkpoints/step-00000000 is of another model"
        )
        assert other.endswith("\n  the pipeline stays open: the call has changed nothing")


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (None, "finish"),
        (GeneratorExit(), "finish"),  # a generator that is not read to its end
        (SystemExit(), "finish"),
        (SystemExit(3), "fail"),
        (ValueError(), "fail"),
    ],
)
def test_what_ends_a_block_without_an_error_closes(error: Any, call: str) -> None:
    calls: list[str] = []
    pipe = object.__new__(pipeworker.Pipeline)
    session: Any = SimpleNamespace(
        finish=lambda: calls.append("finish"), fail=lambda _: calls.append("fail")
    )
    pipe._session = session
    pipe.__exit__(type(error), error, None)
    assert calls == [call]
