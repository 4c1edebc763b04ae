"""``pipeworker.Pipeline`` and ``pipeworker.train``: the numbers of ``pipeworker launch``."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, Reference, ended
from support.real_jobs.ranks import LOOP, Scripts, script
from support.real_jobs.sources import DROPOUT, JOB
from support.slow import slow


@pytest.fixture
def launched(reference: Reference) -> Record:
    """Return the launched job that other loops are compared with."""
    return reference("--stages", "1", "--microbatches", "4", source=DROPOUT)


@pytest.mark.parametrize(
    ("stages", "recompute"), [pytest.param(2, "always", marks=slow), (3, "never")]
)
def test_an_own_loop_equals_launch(
    scripts: Scripts, launched: Record, stages: int, recompute: str
) -> None:
    options = json.dumps({"recompute": recompute})
    ranks = scripts.start(script(DROPOUT, LOOP), stages, OPTIONS=options)
    run = ranks.succeed()[0]
    assert_same(run, launched)
    for rank in range(stages):
        assert ranks.reported(rank)["loss"] == [row["loss"] for row in launched.metrics]
        assert ranks.reported(rank)["norm"] == [row["grad_norm"] for row in launched.metrics]
    assert run.summary["status"] == "done"
    assert not (run.path.parent / "runs").exists()


def test_without_an_environment_the_job_is_one_process(scripts: Scripts, launched: Record) -> None:
    assert_same(scripts.start(script(DROPOUT, LOOP), 1, alone=True).succeed()[0], launched)


@slow
def test_train_equals_launch(jobs: Jobs, scripts: Scripts) -> None:
    train = """
        def evaluation():
            yield from list(data())[:2]

        run = pipeworker.train(
            model, loss=loss, optimizer=optimizer, data=data, microbatches=4, steps=5,
            evaluation=evaluation, evaluate_every=2, clip_grad_norm=0.5, run_dir="run",
        )
        report(run=str(run.relative_to(Path.cwd())))
    """
    words = ("--stages", "2", "--microbatches", "4", "--steps", "5", "--clip-grad-norm", "0.5")
    launched = jobs.train(*words, source=DROPOUT)
    ranks = scripts.start(script(DROPOUT, train), 3)
    run, *others = ranks.succeed()
    assert_same(run, launched)
    assert "step 5/5  loss" in run.stdout
    assert "done: 5 steps" in run.stdout
    assert not any(other.stdout for other in others)
    assert [ranks.reported(rank)["run"] for rank in range(3)] == ["run"] * 3
    assert [row["step"] for row in run.evaluations] == [2, 4]


@slow
def test_train_under_torchrun(jobs: Jobs) -> None:
    train = "pipeworker.train(model, loss=loss, optimizer=optimizer, data=data, run_dir='run')"
    path = jobs.write(script(JOB, train), "loop.py")
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    process = jobs.python(*line)
    run = ended(process, jobs.folder / "run", seconds=90)
    launched = jobs.train("--stages", "1", "--microbatches", "8")
    assert_same(run, launched)


def test_several_mini_batches_make_one_step(jobs: Jobs, scripts: Scripts) -> None:
    loop = """
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run"
        ) as pipe:
            batches = list(data()) if rank == 0 else [None] * 6
            results = [pipe.step(*batches[i : i + 3]) for i in (0, 3)]
        report(samples=[r.samples for r in results])
    """
    words = ("--stages", "1", "--microbatches", "4", "--accumulate", "3", "--steps", "2")
    launched = jobs.train(*words, source=DROPOUT)
    ranks = scripts.start(script(DROPOUT, loop), 2)
    assert_same(ranks.succeed()[0], launched)
    assert ranks.reported(1) == {"samples": [30, 30]}


HOOKS = """
    seen = {}

    def watch(layers):
        def digest(value):
            return sum((i + 1) * x for i, x in enumerate(value.flatten().tolist()))

        for index, layer in layers.items():
            record = seen.setdefault(index, [])
            def after(module, inputs, output, record=record):
                if not pipeworker.is_recomputing():
                    record.append(digest(output))
            layer.register_forward_hook(after)
            def back(module, gradient_in, gradient_out, record=record):
                record.append(digest(gradient_out[0]))
            layer.register_full_backward_hook(back)
            for parameter in layer.parameters():
                def double(gradient, record=record):
                    record.append(digest(gradient))
                    return 2 * gradient
                parameter.register_hook(double)
"""


@slow
def test_hooks_on_layers_and_parameters_work(scripts: Scripts) -> None:
    """Hooks on modules passed by the user, and on a stage's layers."""
    before = """
        torch.manual_seed(0)
        net = model()
        watch(dict(enumerate(net)))
        model = net
    """
    after = """
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run"
        ) as pipe:
            if callable(model) and not isinstance(model, nn.Module):
                watch(pipe.layers)
            for batch in data():
                pipe.step(batch)
        report(**{str(index): record for index, record in seen.items()})
    """
    reports = []
    for stages, first in ((1, before), (1, ""), (2, before), (2, ""), (4, before)):
        ranks = scripts.start(script(JOB, HOOKS, first, after), stages)
        ranks.succeed()
        records = [ranks.reported(rank) for rank in range(stages)]
        whole = {str(i): max((r.get(str(i), []) for r in records), key=len) for i in range(5)}
        # Six steps of four micro-batches: forward, backward, and each parameter's gradient.
        assert [len(whole[str(i)]) for i in range(5)] == [96, 48, 96, 48, 96]
        reports.append(whole)
    assert all(one == reports[0] for one in reports)


EVALUATE = """
    def metrics(output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean()}

    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, microbatches=4, metrics=metrics, run_dir="run"
    ) as pipe:
        batches = list(data())
        losses = [pipe.step(batches[0]).loss]
        looked = [pipe.evaluate(batches[1]), pipe.evaluate(*batches)]
        x = batches[2][0][:7]
        local, all_have = pipe.predict(x), pipe.predict(x, everywhere=True)
        same = local is None or torch.equal(local, all_have)
        all_have.zero_()  # it is the caller's own
        again = pipe.predict(x, everywhere=True)
        losses += [pipe.step(batch).loss for batch in batches[1:]]
        last = rank == pipe.stages - 1
        report(looked=looked, local=local is not None, same=same, last=last, out=again.tolist())
"""


def test_evaluation_and_prediction(scripts: Scripts, launched: Record) -> None:
    reports = []
    for stages in (1, 3):
        ranks = scripts.start(script(DROPOUT, EVALUATE), stages)
        assert_same(ranks.succeed()[0], launched)  # evaluation changes no numbers
        for rank in range(stages):
            one = ranks.reported(rank)
            assert one["local"] == one["last"]
            assert one["same"]
            reports.append((one["looked"], one["out"]))
        rows = [json.loads(line) for line in (ranks.run_dir / "evaluation.jsonl").open()]
        assert [{k: v for k, v in row.items() if k != "step"} for row in rows] == one["looked"]
    assert all(one == reports[0] for one in reports)


def test_a_prediction_equals_the_models_output(jobs: Jobs, scripts: Scripts) -> None:
    predict = """
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=3, run_dir="run"
        ) as pipe:
            x = torch.arange(56.0).reshape(7, 8).sin()
            out = pipe.predict({"x": x, "scale": 2.0}, everywhere=True)
        report(out=out["y"].tolist(), scale=out["scale"])
    """
    layers = """
        class First(nn.Linear):
            def forward(self, value):
                return {"y": super().forward(value["x"]) * value["scale"], "scale": value["scale"]}

        class Second(nn.Linear):
            def forward(self, value):
                return {"y": super().forward(value["y"]), "scale": value["scale"]}

        def model():
            return nn.Sequential(First(8, 4), Second(4, 2))
    """
    ranks = scripts.start(script(JOB, layers, predict), 2)
    run = ranks.succeed()[0]
    weights = run.weights
    x = torch.arange(56.0).reshape(7, 8).sin()
    expected = torch.cat(
        [
            nn.functional.linear(
                nn.functional.linear(part, weights["0.weight"], weights["0.bias"]) * 2.0,
                weights["1.weight"],
                weights["1.bias"],
            )
            for part in x.tensor_split(3)
        ]
    )
    for rank in (0, 1):
        assert torch.equal(torch.tensor(ranks.reported(rank)["out"]), expected)
        assert ranks.reported(rank)["scale"] == 2.0


def test_tokens_are_counted_in_steps_alone(scripts: Scripts) -> None:
    loop = """
        def tokens(batch):
            return (batch[1] >= 0).sum() * 3  # without a target it raises

        parts = dict(loss=loss, optimizer=optimizer)
        try:
            pipeworker.Pipeline(model, tokens=3, run_dir="wrong", **parts)
        except pipeworker.UsageError as error:
            wrong = str(error)
        with pipeworker.Pipeline(model, tokens=tokens, run_dir="run", **parts) as pipe:
            batch = next(data())
            pipe.step(batch)
            pipe.evaluate(batch)
            pipe.predict(batch[0])
            report(wrong=wrong, tokens=pipe.step(batch, batch).tokens, samples=len(batch[0]))
    """
    ranks = scripts.start(script(JOB, loop), 1, alone=True)
    ranks.succeed()
    found = ranks.reported(0)
    assert found["tokens"] == 2 * 3 * found["samples"]
    assert found["wrong"].startswith("pipeworker.Pipeline(): tokens is an int; make it a function")


def test_weights_have_the_names_of_the_script_and_warnings_are_shown(scripts: Scripts) -> None:
    loop = """
        with pipeworker.Pipeline(
            lambda: [*model()], loss=loss, optimizer=optimizer, names={"0": "first"},
            microbatches=20, run_dir="run",
        ) as pipe:
            pipe.step(next(data()))
    """
    (run,) = scripts.start(script(JOB, loop), 1, alone=True).succeed()
    assert {"first.weight", "2.weight"} <= {*run.weights}
    assert run.stderr.startswith("warning: --microbatches 20: the first mini-batch has only 10")


SHARED_BUFFER = """
        class Scale(nn.Linear):
            def __init__(self, table):
                super().__init__(8, 8)
                self.register_buffer("table", table)

            def forward(self, x):
                return super().forward(x) * self.table

        def model():
            table = torch.rand(8)
            return nn.Sequential(Scale(table), Scale(table), Scale(table), nn.Linear(8, 3))
"""
SKIPS = """
        class Down(nn.Linear):
            def forward(self, x):
                pipeworker.stash("x", x)
                return super().forward(x)

        class Up(nn.Linear):
            def forward(self, x):
                return super().forward(x) + pipeworker.pop("x")

        def model():
            return nn.Sequential(Down(8, 8), nn.ReLU(), Up(8, 8), nn.Linear(8, 3))
"""


@pytest.mark.parametrize(
    ("layers", "stages", "advice"),
    [
        (SHARED_BUFFER, (1, 3), "or pass a sample to pipeworker.Pipeline if no forward"),
        pytest.param(SKIPS, (1, 2, 4), "pass a sample to pipeworker.Pipeline", marks=slow),
    ],
    ids=["a shared buffer", "skips"],
)
def test_what_several_stages_share_needs_a_sample(
    scripts: Scripts, layers: str, stages: tuple[int, ...], advice: str
) -> None:
    loop = """
        options = {"sample": torch.zeros(1, 8)} if os.environ.get("SAMPLE") else {}
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run", **options
        ) as pipe:
            losses = [pipe.step(batch).loss for batch in data()]
            report(losses=losses, out=pipe.predict(next(data())[0], everywhere=True).tolist())
    """
    reports = []
    for count in stages:
        ranks = scripts.start(script(JOB, layers + loop), count, SAMPLE="yes")
        ranks.succeed()
        reports.append(ranks.reported(0))
    assert all(one == reports[0] for one in reports[1:])
    runs = scripts.start(script(JOB, layers + loop), stages[-1]).end()
    assert any(advice in run.stderr for run in runs)
    assert all(run.status for run in runs)
