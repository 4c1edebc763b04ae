"""``pipeworker.Pipeline`` and ``pipeworker.train``, in processes that the test starts itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import JOB, Jobs, Run, processes_of, until
from test_bitwise import assert_same
from torch import nn

PREAMBLE = """
    import json, os, sys
    from pathlib import Path
    import pipeworker
    rank = int(os.environ.get("RANK", "0"))

    def tell(**what):
        Path(f"told-{rank}.json").write_text(json.dumps(what))
"""
DROPOUT = JOB.replace("nn.ReLU(),", "nn.ReLU(), nn.Dropout(0.3),")
LOOP = """
    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, microbatches=4, run_dir=os.environ["RUN_DIR"],
        **json.loads(os.environ.get("OPTIONS", "{}"))
    ) as pipe:
        results = [pipe.step(batch) for batch in data()]
    tell(loss=[r.loss for r in results], norm=[r.grad_norm for r in results])
"""


class Server:
    """A process that forks ranks; see ``ranks.py``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ranks.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def ask(self, what: str, *given: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({what: given}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@dataclass
class Ranks:
    """The processes of a script, one a rank."""

    server: Server
    names: list[str]
    pids: list[int]
    run_dir: Path

    def end(self, seconds: float = 60) -> list[Run]:
        statuses = [self.server.ask("wait", pid, seconds) for pid in self.pids]
        assert None not in statuses, f"not all have ended within {seconds:g} s: {statuses}"
        folder = self.run_dir.parent
        return [
            Run(
                status,
                (folder / f"{name}.out").read_text(),
                (folder / f"{name}.err").read_text(),
                self.run_dir,
            )
            for status, name in zip(statuses, self.names, strict=True)
        ]

    def told(self, rank: int) -> dict[str, Any]:
        """What the script of a rank said with ``tell``, once all have succeeded."""
        told: dict[str, Any] = json.loads((self.run_dir.parent / f"told-{rank}.json").read_text())
        return told


Start = Callable[..., Ranks]


@pytest.fixture
def start(jobs: Jobs, server: Server) -> Start:
    """Start a script on some ranks."""
    count = 0

    def start(source: str, ranks: int = 2, alone: bool = False, **variables: str) -> Ranks:
        nonlocal count
        count += 1
        path = jobs.write(source, f"script-{count}/loop.py")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        made = Ranks(server, [], [], path.parent / "run")
        for rank in range(ranks):
            place = {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1"}
            place |= {"MASTER_PORT": f"{port}"}
            environment = {**({} if alone else place), **variables, "RUN_DIR": "run"}
            made.pids.append(server.ask("fork", str(path), environment))
            made.names.append(environment.get("RANK", "alone"))
        return made

    return start


def script(*parts: str) -> str:
    return "\n".join(textwrap.dedent(part) for part in (PREAMBLE, *parts))


def succeed(ranks: Ranks) -> list[Run]:
    runs = ranks.end()
    for run in runs:
        assert run.status == 0, run.stderr
    return runs


# The numbers.


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_loop_of_ones_own_gives_the_numbers_of_launch(
    jobs: Jobs, start: Start, recompute: str
) -> None:
    launched = jobs.train("--stages", "2", "--microbatches", "4", source=DROPOUT)
    options = json.dumps({"recompute": recompute})
    for stages in (1, 2, 4):
        ranks = start(script(DROPOUT, LOOP), stages, OPTIONS=options)
        run = succeed(ranks)[0]
        assert_same(run, launched)
        for rank in range(stages):
            assert ranks.told(rank)["loss"] == [row["loss"] for row in launched.metrics]
            assert ranks.told(rank)["norm"] == [row["grad_norm"] for row in launched.metrics]
        assert run.summary["status"] == "done"
        assert not (run.path.parent / "runs").exists()


def test_without_an_environment_one_process_is_a_job(jobs: Jobs, start: Start) -> None:
    launched = jobs.train("--stages", "1", "--microbatches", "4", source=JOB)
    assert_same(succeed(start(script(JOB, LOOP), 1, alone=True))[0], launched)


def test_train_gives_the_numbers_of_launch(jobs: Jobs, start: Start) -> None:
    train = """
        def evaluation():
            yield from list(data())[:2]

        run = pipeworker.train(
            model, loss=loss, optimizer=optimizer, data=data, microbatches=4, steps=5,
            evaluation=evaluation, evaluate_every=2, clip_grad_norm=0.5, run_dir="run",
        )
        tell(run=str(run.relative_to(Path.cwd())))
    """
    words = ("--stages", "2", "--microbatches", "4", "--steps", "5", "--clip-grad-norm", "0.5")
    launched = jobs.train(*words, source=DROPOUT)
    for stages in (1, 3):
        ranks = start(script(DROPOUT, train), stages)
        run, *others = succeed(ranks)
        assert_same(run, launched)
        assert "step 5  loss" in run.stdout
        assert "done: 5 steps" in run.stdout
        assert not any(other.stdout for other in others)
        assert [ranks.told(rank)["run"] for rank in range(stages)] == ["run"] * stages
        rows = [json.loads(line) for line in (run.path / "evaluation.jsonl").open()]
        assert [row["step"] for row in rows] == [2, 4]


def test_train_under_torchrun(jobs: Jobs) -> None:
    train = "pipeworker.train(model, loss=loss, optimizer=optimizer, data=data, run_dir='run')"
    path = jobs.write(script(JOB, train), "loop.py")
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    ran = subprocess.run(
        [sys.executable, *line], cwd=jobs.folder, capture_output=True, text=True, timeout=90
    )
    assert ran.returncode == 0, ran.stderr
    launched = jobs.train("--stages", "1", "--microbatches", "8")
    assert_same(Run(0, ran.stdout, ran.stderr, jobs.folder / "run"), launched)


def test_several_mini_batches_make_one_step(jobs: Jobs, start: Start) -> None:
    loop = """
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run"
        ) as pipe:
            batches = list(data()) if rank == 0 else [None] * 6
            results = [pipe.step(*batches[i : i + 3]) for i in (0, 3)]
        tell(samples=[r.samples for r in results])
    """
    words = ("--stages", "1", "--microbatches", "4", "--accumulate", "3", "--steps", "2")
    launched = jobs.train(*words, source=DROPOUT)
    ranks = start(script(DROPOUT, loop), 3)
    assert_same(succeed(ranks)[0], launched)
    assert ranks.told(2) == {"samples": [30, 30]}


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


def test_hooks_on_layers_and_parameters_work(start: Start) -> None:
    """Those on modules given as they are, and those on a stage's layers."""
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
        tell(**{str(index): record for index, record in seen.items()})
    """
    told = []
    for stages, first in ((1, before), (1, ""), (2, before), (2, ""), (4, before)):
        ranks = start(script(JOB, HOOKS, first, after), stages)
        succeed(ranks)
        records = [ranks.told(rank) for rank in range(stages)]
        whole = {str(i): max((r.get(str(i), []) for r in records), key=len) for i in range(5)}
        # Six steps of four micro-batches: forward, backward, and each parameter's gradient.
        assert [len(whole[str(i)]) for i in range(5)] == [96, 48, 96, 48, 96]
        told.append(whole)
    assert all(one == told[0] for one in told)


EVALUATE = """
    def metrics(output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean()}

    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, microbatches=4, metrics=metrics, run_dir="run"
    ) as pipe:
        batches = list(data())
        losses = [pipe.step(batches[0]).loss]
        if os.environ.get("LOOK"):
            looked = [pipe.evaluate(batches[1]), pipe.evaluate(*batches)]
            x = batches[2][0][:7]
            mine, all_have = pipe.predict(x), pipe.predict(x, everywhere=True)
            same = mine is None or torch.equal(mine, all_have)
            all_have.zero_()  # it is the caller's own
            again = pipe.predict(x, everywhere=True)
        losses += [pipe.step(batch).loss for batch in batches[1:]]
        if os.environ.get("LOOK"):
            last = rank == pipe.stages - 1
            tell(looked=looked, mine=mine is not None, same=same, last=last, out=again.tolist())
"""


def test_evaluation_and_prediction(jobs: Jobs, start: Start) -> None:
    plain = succeed(start(script(DROPOUT, EVALUATE)))[0]
    told = []
    for stages in (1, 2, 4):
        ranks = start(script(DROPOUT, EVALUATE), stages, LOOK="yes")
        assert_same(succeed(ranks)[0], plain)  # looking changes nothing
        for rank in range(stages):
            one = ranks.told(rank)
            assert one["mine"] == one["last"]
            assert one["same"]
            told.append((one["looked"], one["out"]))
        rows = [json.loads(line) for line in (ranks.run_dir / "evaluation.jsonl").open()]
        assert [{k: v for k, v in row.items() if k != "step"} for row in rows] == one["looked"]
    assert all(one == told[0] for one in told)


def test_a_prediction_is_the_models_output(jobs: Jobs, start: Start) -> None:
    predict = """
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=3, run_dir="run"
        ) as pipe:
            x = torch.arange(56.0).reshape(7, 8).sin()
            out = pipe.predict({"x": x, "scale": 2.0}, everywhere=True)
        tell(out=out["y"].tolist(), scale=out["scale"])
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
    ranks = start(script(JOB, layers, predict), 2)
    run = succeed(ranks)[0]
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
        assert torch.equal(torch.tensor(ranks.told(rank)["out"]), expected)
        assert ranks.told(rank)["scale"] == 2.0


def test_skips_need_a_sample(start: Start) -> None:
    skips = """
        class Down(nn.Linear):
            def forward(self, x):
                pipeworker.stash("x", x)
                return super().forward(x)

        class Up(nn.Linear):
            def forward(self, x):
                return super().forward(x) + pipeworker.pop("x")

        def model():
            return nn.Sequential(Down(8, 8), nn.ReLU(), Up(8, 8), nn.Linear(8, 3))

        options = {"sample": torch.zeros(1, 8)} if os.environ.get("SAMPLE") else {}
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run", **options
        ) as pipe:
            losses = [pipe.step(batch).loss for batch in data()]
            tell(losses=losses, out=pipe.predict(next(data())[0], everywhere=True).tolist())
    """
    told = []
    for stages in (1, 2, 4):
        ranks = start(script(JOB, skips), stages, SAMPLE="yes")
        succeed(ranks)
        told.append(ranks.told(0))
    assert told[0] == told[1] == told[2]
    runs = start(script(JOB, skips), 4).end()
    assert any("give pipeworker.Pipeline a sample" in run.stderr for run in runs)
    assert all(run.status for run in runs)


# The process is the user's.


def test_the_process_is_left_as_it_was(start: Start) -> None:
    """Random streams, signals, threads, descriptors, grad mode; one job after another."""
    loop = """
        import gc, random, signal, threading
        def mine():
            return [torch.rand(()).item(), random.random()]
        torch.manual_seed(5); random.seed(5)
        drawn, before = [mine()], None
        for attempt in range(3):
            with torch.no_grad(), pipeworker.Pipeline(
                model, loss=loss, optimizer=optimizer, microbatches=4, run_dir=f"run-{attempt}",
                backend=os.environ["BACKEND"]
            ) as pipe:
                drawn.append(mine())
                pipe.step(next(data()))
                drawn.append(mine())
                pipe.evaluate(next(data()))
                assert not torch.is_grad_enabled()
            del pipe
            gc.collect()
            left = (len(os.listdir("/proc/self/fd")), threading.active_count())
            assert before is None or max(left, before) == before, (before, left)
            before = left
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        tell(drawn=drawn, threads=threading.active_count())
    """
    torch.manual_seed(5)
    expected = [torch.rand(()).item() for _ in range(7)]
    for stages, backend in ((1, "auto"), (2, "gloo"), (3, "auto")):
        ranks = start(script(DROPOUT, loop), stages, BACKEND=backend)
        succeed(ranks)
        for rank in range(stages):
            assert [drawn[0] for drawn in ranks.told(rank)["drawn"]] == expected
            assert ranks.told(rank)["threads"] == 1


def test_a_process_group_of_the_users_is_used_and_kept(start: Start) -> None:
    loop = """
        import torch.distributed as dist
        if os.environ.get("PLACE") == "group":  # it alone knows the ranks
            address = f"tcp://127.0.0.1:{os.environ.pop('MASTER_PORT')}"
            world = int(os.environ.pop("WORLD_SIZE"))
            dist.init_process_group("gloo", address, rank=int(os.environ.pop("RANK")),
                                    world_size=world)
            del os.environ["MASTER_ADDR"]
        else:
            dist.init_process_group("gloo")
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run"
        ) as pipe:
            loss = torch.tensor(pipe.step(next(data())).loss)
            dist.all_reduce(loss)
        dist.barrier()
        dist.destroy_process_group()
        tell(loss=loss.item())
    """
    for place in ("environment", "group"):
        ranks = start(script(JOB, loop), 2, PLACE=place)
        assert succeed(ranks)[0].summary["stages"] == 2
        assert ranks.told(0) == ranks.told(1)


def test_modules_of_the_users_come_back_as_they_were(start: Start) -> None:
    """Trained, but without leftovers; and what was left on them before does not count."""
    loop = """
        def train():
            with pipeworker.Pipeline(
                net, loss=loss, optimizer=optimizer, microbatches=4, deferred_batch_norm=True,
                run_dir=f"run-{len(results)}"
            ) as pipe:
                results.append([pipe.step(batch).grad_norm for batch in data()])

        results = []
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        first = {key: value.clone() for key, value in net.state_dict().items()}
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        train()
        assert net[1].track_running_stats and not net[1]._forward_pre_hooks
        assert net[1].num_batches_tracked == 6
        assert all(parameter.grad is None for parameter in net.parameters())
        net.load_state_dict(first)
        train()
        assert net[1].num_batches_tracked == 6
        assert results[0] == results[1]
    """
    succeed(start(script(JOB, loop), 1, alone=True))


# Failures.

FAILING = """
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
            pipe.step(batch)
        while what == "endless":
            pipe.step(batch)
"""


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        (
            "layer",
            "PipeworkerError: layer 3 (Bad) raised ValueError: as asked",
            "LayerError: layer 3 (Bad) raised ValueError: as asked (its input was Tensor[5, 3] "
            "float32)\n  in forward: stage 1, layer 3 (Bad), micro-batch 0, step 1",
        ),
        ("weights", "UsageError: the model's initial weights differ", "UsageError: the model's"),
        (
            "loop",
            "PipeworkerError: the script of stage 1 raised RuntimeError: of my own",
            "RuntimeError: of my own",
        ),
        (
            "calls",
            "UsageError: stage 1 called predict(batch) while stage 0 called step(batch)",
            "UsageError: stage 1 called predict(batch) while stage 0 called step(batch)",
        ),
        (
            "batch",
            "UsageError: step(batch) was given a Tensor: it must be a pair (input, target)",
            "UsageError: step(batch) was given a Tensor",
        ),
        ("none", "UsageError: step(batch) was given a NoneType", "UsageError: step(batch)"),
        (
            "inside",
            "a call of this pipeline was made inside another one",
            "a call of this pipeline was made inside another one",
        ),
        ("sysexit", "PipeworkerError: the script of stage 1 raised SystemExit: 3", "SystemExit: 3"),
        ("exit", "PipeworkerError: the worker of stage 1 (pid ", ""),
        ("closed", "PipeworkerError: the job is over", "PipeworkerError: the job is over"),
    ],
)
def test_a_failure_is_raised_on_every_rank(
    start: Start, what: str, first: str, second: str
) -> None:
    ranks = start(script(JOB, FAILING), 2, WHAT=what)
    runs = ranks.end()
    assert [run.status for run in runs] == [1, 3 if what == "exit" else 1]
    for run, message in zip(runs, (first, second), strict=True):
        assert message in run.stderr.replace(
            "stage 0 called step(batch) while stage 1 called predict(batch)",
            "stage 1 called predict(batch) while stage 0 called step(batch)",
        )
    status = "done" if what == "closed" else "failed"
    assert runs[0].summary["status"] == status
    if what == "layer":
        assert 'raise ValueError("as asked")' in runs[1].stderr
        assert "stage 1, layer 3 (Bad), micro-batch 0, step 1" in runs[0].stderr


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_ends_the_others(jobs: Jobs, start: Start, rank: int) -> None:
    ranks = start(script(JOB, FAILING), 3, WHAT="endless")
    until((ranks.run_dir / "metrics.jsonl").exists)
    until(lambda: (ranks.run_dir / "metrics.jsonl").read_text(), 30)
    os.kill(ranks.pids[rank], signal.SIGKILL)
    runs = ranks.end(20)
    assert [run.status for run in runs] == [-signal.SIGKILL if r == rank else 1 for r in range(3)]
    until(lambda: not processes_of(jobs.folder), 10)
    assert runs[0].summary["status"] == "failed"
    if rank:
        assert f"the worker of stage {rank} (pid " in runs[0].summary["error"]


def test_an_interrupt_is_the_users_own(jobs: Jobs, start: Start) -> None:
    ranks = start(script(JOB, FAILING), 3, WHAT="endless")
    until((ranks.run_dir / "metrics.jsonl").exists)
    until(lambda: (ranks.run_dir / "metrics.jsonl").read_text(), 30)
    for pid in ranks.pids:
        os.kill(pid, signal.SIGINT)
    runs = ranks.end(20)
    assert all("KeyboardInterrupt" in run.stderr or "the job ended" in run.stderr for run in runs)
    until(lambda: not processes_of(jobs.folder), 10)
    assert runs[0].summary["status"] == "interrupted"


UNCLOSED = """
    pipe = pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir="run")
    pipe.step(next(data()))
    if rank == 1 and os.environ.get("RAISE"):
        raise ValueError("of my own")
"""


@pytest.mark.parametrize("end", ["", "with pipe:\n    sys.exit()"])
def test_the_end_of_a_script_closes_its_pipeline(start: Start, end: str) -> None:
    run = start(script(JOB, UNCLOSED, end), 2).end()[0]
    assert run.summary["status"] == "done"
    assert len(run.weights) == 6


def test_a_script_that_ends_by_an_exception_has_failed(jobs: Jobs) -> None:
    """Programs of their own, whose interpreter knows what ended it."""
    path = jobs.write(script(JOB, UNCLOSED), "loop.py")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RAISE": "yes"}
    first, second = [
        subprocess.Popen(
            [sys.executable, str(path)],
            cwd=jobs.folder,
            env={**os.environ, **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=60)[1] for process in (first, second)]
    said = "the script of stage 1 raised ValueError: of my own"
    assert f"error: {said}" in errors[0]
    assert "ValueError: of my own" in errors[1]
    assert second.returncode == 1
    summary = json.loads((jobs.folder / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert said in summary["error"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("Pipeline(model, loss=3, optimizer=optimizer)", "loss in pipeworker.Pipeline() is a int"),
        ("Pipeline(model, loss=loss, optimizer=optimizer, colour=1)", "has no option 'colour'"),
        ("Pipeline(model, loss=loss, optimizer=optimizer, steps=1)", "has no option 'steps'"),
        ("Pipeline(3, loss=loss, optimizer=optimizer)", "model in pipeworker.Pipeline() is a int"),
        (
            "Pipeline(model, loss=loss, optimizer=optimizer, recompute='some')",
            "--recompute some: must be one of auto, always, except_first, never",
        ),
        ("Pipeline(model, loss=loss, optimizer=optimizer, seed='0')", "--seed '0': a str"),
        (
            "train(model, loss=loss, optimizer=optimizer, data=None)",
            "data in pipeworker.train() is a NoneType",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    start: Start, call: str, message: str
) -> None:
    (run,) = start(script(JOB, f"pipeworker.{call}"), 1, alone=True).end()
    assert run.status == 1
    assert message in run.stderr
    assert not run.path.exists()
    assert not (run.path.parent / "runs").exists()


def test_what_is_wrong_on_the_first_rank_is_told_to_the_others(start: Start) -> None:
    loop = """
        Path("taken").mkdir(exist_ok=True)
        try:
            pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir="taken")
        except pipeworker.UsageError as error:
            tell(error=str(error))
        with pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir="run") as pipe:
            pipe.step(next(data()))
    """
    ranks = start(script(JOB, loop), 2)
    succeed(ranks)
    assert ranks.told(0) == ranks.told(1)
    assert "run directory taken exists already" in ranks.told(1)["error"]


def test_a_rank_that_is_busy_when_another_fails_is_not_ended(start: Start) -> None:
    loop = """
        import time
        class Slow(nn.Linear):
            def forward(self, x):
                time.sleep(3.5)  # longer than who is stuck may wait
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
                tell(error=str(error))
    """
    ranks = start(script(JOB, loop), 2)
    succeed(ranks)
    assert "loss() raised ValueError: of my own" in ranks.told(0)["error"]


def test_half_an_environment_is_said(start: Start) -> None:
    (run,) = start(script(JOB, LOOP), 1, alone=True, RANK="0", WORLD_SIZE="2").end()
    assert "'MASTER_ADDR' is not set" in run.stderr
