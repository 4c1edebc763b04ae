"""Own loops and training scripts that resume from a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Reference
from support.real_jobs.ranks import Scripts, script
from support.real_jobs.sources import DROPOUT, DROPOUT_JOB, JOB
from support.slow import slow

SAVES = """
    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, microbatches=4, precision="fp16", run_dir="run"
    ) as pipe:
        batches = list(data())
        for batch in batches[:2]:
            pipe.step(batch)
        saved = pipe.save()
        again = pipe.save()
        pipe.step(batches[5])  # which comes to nothing: what is loaded is of before
        loaded = pipe.load(saved)
        results = [pipe.step(batch) for batch in batches[2:4]]
    report(saved=str(saved), same=saved == again, loaded=loaded, steps=[r.step for r in results])
"""
LOADS = """
    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, microbatches=4, precision="fp16", run_dir="run"
    ) as pipe:
        loaded = pipe.load(os.environ["FROM"])
        results = [pipe.step(batch) for batch in list(data())[loaded:]]
    report(loaded=loaded, rows=[[r.step, r.loss, r.loss_scale] for r in results])
"""


@slow
def test_a_checkpoint_is_loaded_by_any_number_of_ranks(jobs: Jobs, scripts: Scripts) -> None:
    words = ("--microbatches", "4", "--precision", "fp16")
    launched = jobs.train("--stages", "1", *words, source=DROPOUT)
    first = scripts.start(script(DROPOUT, SAVES), 2)
    path = first.succeed()[0].path
    for rank in range(2):
        reported = first.reported(rank)
        assert reported["saved"] == str(path.resolve() / "checkpoints/step-00000002")
        assert (reported["same"], reported["loaded"], reported["steps"]) == (True, 2, [3, 4])
    for ranks in (1, 3):
        run = scripts.start(script(DROPOUT, LOADS), ranks, FROM=str(path))
        end = run.succeed()[0]
        rows = [[row["step"], row["loss"], row["loss_scale"]] for row in launched.metrics[4:]]
        assert all(run.reported(r) == {"loaded": 4, "rows": rows} for r in range(ranks))
        for key, value in launched.weights.items():
            assert value.equal(end.weights[key]), key


GOES_BACK = """
    factor = 1e6  # no gradient is finite: the scale falls

    def steep(output, target):
        return factor * loss(output, target)

    def pipeline(**options):
        return pipeworker.Pipeline(
            model, loss=steep, optimizer=optimizer, microbatches=4, keep=1, run_dir="run",
            precision="fp16", **options
        )

    pipe = pipeline()
    batches = list(data())
    pipe.step(batches[0])
    early = Path("early")
    shutil.copytree(pipe.save(), early)
    scales = [pipe.step(batch).loss_scale for batch in batches[1:4]]
    pipe.save()
    pipe.load(early)
    factor = 1.0
    scales.append(pipe.step(batches[4]).loss_scale)
    saved = pipe.save().exists()
    pipe.step(batches[5])
    pipe.save()
    with torch.no_grad():
        pipe.layers[0].weight.mul_(0.5)  # close() saves it too
    pipe.close()
    again = pipeline(resume=True)
    same = torch.equal(again.layers[0].weight, pipe.layers[0].weight)
    report(saved=saved, resumed=again.steps_done, same=same, scales=scales)
"""


def test_a_run_continues_from_what_a_loop_saved_after_it_went_back(scripts: Scripts) -> None:
    run = scripts.start("import shutil\n" + script(DROPOUT, GOES_BACK), 1)
    run.succeed()
    scales = run.reported(0).pop("scales")
    assert run.reported(0) == {"saved": True, "resumed": 3, "same": True, "scales": scales}
    assert scales[3] == scales[0] > scales[1] > scales[2]


def test_train_resumes(reference: Reference, scripts: Scripts) -> None:
    train = """
        for steps in (3, 6):
            pipeworker.train(
                model, loss=loss, optimizer=optimizer, data=data, microbatches=4, steps=steps,
                run_dir="run", resume=steps > 3,
            )
    """
    launched = reference("--stages", "1", "--microbatches", "4", source=DROPOUT)
    assert_same(scripts.start(script(DROPOUT, train), 2).succeed()[0], launched)


INTERRUPTED = """
    forwards = 0

    class Stops(nn.Module):
        def forward(self, x):
            global forwards
            forwards += 1
            if forwards == 10 and os.environ["STOPS"]:  # within step 2 or 3
                os.kill(os.getpid(), 2)
            return x

    def model(before=model):
        return [*before(), Stops]

    def on_checkpoint(path):
        Path("seen").write_text(path.name)

    def train(**options):
        pipeworker.train(
            model, loss=loss, optimizer=optimizer, data=data, microbatches=4, run_dir="run",
            on_checkpoint=on_checkpoint, balance="even", recompute="always", **options
        )

    if os.environ["STOPS"]:
        try:
            train()
        except (KeyboardInterrupt, pipeworker.PipeworkerError) as error:
            raised = type(error).__name__
        if rank == 0:
            summary = json.loads(Path("run/summary.json").read_text())
            seen = Path("seen").read_text()
            report(raised=raised, status=summary["status"], steps=summary["steps"], seen=seen)
        else:
            report(raised=raised)
        train(resume=True)
    else:
        right = model

        def model():
            os.kill(os.getpid(), 2)
            raise AssertionError("the interrupt waits for the first step")

        try:
            train()
        except KeyboardInterrupt:
            model = right
            Path("run").rename("interrupted")
        train()
"""


def test_an_interrupt_of_train_saves_the_step_that_runs(scripts: Scripts) -> None:
    source = script(DROPOUT, INTERRUPTED)
    stopped = scripts.start(source, 2, STOPS="yes")
    (whole,) = scripts.start(source, 1, alone=True, STOPS="").succeed()
    run, _ = stopped.succeed()
    reported = stopped.reported(0)
    assert stopped.reported(1) == {"raised": "KeyboardInterrupt"}
    assert (reported["raised"], reported["status"]) == ("PipeworkerError", "interrupted")
    assert reported["steps"] in (2, 3)
    assert reported["seen"] == f"step-0000000{reported['steps']}"
    assert "pipeworker.train(..., resume=True, run_dir='run')" in run.stdout
    assert_same(run, whole)


FAILS = """
    from torch.utils.data import DataLoader, TensorDataset

    forwards = 0

    class Fails(nn.Module):
        def forward(self, x):
            global forwards
            forwards += self.training and not pipeworker.is_recomputing()
            last = rank == int(os.environ["WORLD_SIZE"]) - 1
            if os.environ["FAILS"] == str(forwards) and last:  # in step 4, of two mini-batches
                raise ValueError("as asked")
            return x

    def model(before=model):
        return [*before(), Fails]

    torch.manual_seed(0)
    pairs = TensorDataset(torch.randn(20, 8), torch.randint(0, 3, (20,)))
    generator = torch.Generator().manual_seed(1)

    class Stateful:
        at = 0

        def __iter__(self):
            while self.at < 5:
                x, target = pairs[4 * self.at : 4 * self.at + 4]
                self.at += 1
                yield x * torch.rand(()), target

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def loader():
        if os.environ["DATA"] == "stateful":
            return Stateful()
        return DataLoader(pairs, batch_size=4, shuffle=True, generator=generator)

    def train(**options):
        pipeworker.train(
            model, loss=loss, optimizer=optimizer, scheduler=scheduler, run_dir="run",
            data=loader, microbatches=2, accumulate=2, epochs=2,
            **json.loads(os.environ["OPTIONS"]), **options
        )

    if os.environ["FAILS"]:
        try:
            train()
        except pipeworker.PipeworkerError as error:
            summary = json.loads(Path("run/summary.json").read_text()) if rank == 0 else {}
            report(raised=str(error), steps=summary.get("steps"))
        train(resume=True)
    else:
        train()
"""


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("loader", {}),
        pytest.param("stateful", {"replicas": 2, "shard_optimizer": True}, marks=slow),
        pytest.param(
            "loader",
            {"replicas": 2, "shard_optimizer": True, "data_reader": "first"},
            marks=slow,
        ),
    ],
)
def test_train_saves_its_last_whole_step_after_an_error(
    scripts: Scripts, data: str, options: dict[str, Any]
) -> None:
    """Two ranks, of which the last one fails: two stages, or two replicas of one."""
    source, replicas = script(DROPOUT_JOB, FAILS), options.get("replicas", 1)
    values = {"DATA": data, "OPTIONS": json.dumps(options)}
    failed = scripts.start(source, 2, also=values, FAILS=f"{14 // replicas}")
    (whole, *_) = scripts.start(source, replicas, also=values, FAILS="").succeed()
    run, _ = failed.succeed()
    assert "layer 8 (Fails) raised ValueError: as asked" in failed.reported(1)["raised"]
    assert "Pipeline(" not in failed.reported(1)["raised"]  # a script's own loop would continue so
    assert failed.reported(0)["steps"] == 3
    assert "step-00000003" in run.stdout
    assert_same(run, whole)


def test_weights_are_compared_in_the_step_after_a_save(scripts: Scripts) -> None:
    """Otherwise the next comparison would be before update 8."""
    loop = """
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, replicas=2, run_dir="run"
        ) as pipe:
            for number, batch in enumerate(data(), 1):
                pipe.step(batch)
                if number == 4:
                    for parameter in pipe.layers[0].parameters():
                        parameter.data += rank
                    pipe.save()
    """
    ranks = scripts.start(script(JOB, loop), 2)
    assert "differs between the replicas" in "".join(run.stderr for run in ranks.end())
