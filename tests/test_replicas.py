"""``--replicas`` for real: processes, sockets and files; the numbers depend on R alone."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from support.compare import assert_same
from support.forked import Server
from support.jobs import Jobs, Run, processes_of, until
from support.ranks import LOOP, Scripts, script
from support.sources import CALM, DIES, DROPOUT_JOB, JOB, NESTED_JOB

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
"""Everything random, batch norm, a scheduler, and evaluation."""


def evaluations(run: Run) -> list[object]:
    return [json.loads(line) for line in (run.path / "evaluation.jsonl").open()]


@pytest.mark.parametrize("replicas", ["2", "3"])
def test_the_numbers_are_the_same_for_any_number_of_stages(jobs: Jobs, replicas: str) -> None:
    words = (*WORDS, "--evaluate-every", "2", "--steps", "7", "--replicas", replicas)
    ways = (("1", "never"), ("2", "always"), ("3", "except_first"))
    runs = [
        jobs.train("--stages", stages, "--recompute", mode, *words, source=RICH)
        for stages, mode in ways[: 3 if replicas == "2" else 2]
    ]
    for run in runs[1:]:
        assert_same(run, runs[0])
        assert evaluations(run) == evaluations(runs[0])
    last = runs[-1]
    count = int(replicas) * len(last.plan["balance"])
    assert len(last.summary["peak_memory_bytes"]) == len(last.plan["stages"]) == count
    assert f"{replicas} replicas of " in last.stdout
    assert last.log(f"replica-{int(replicas) - 1}-stage-0") == ""


def test_another_number_of_replicas_comes_close(jobs: Jobs) -> None:
    words = ("--stages", "2", "--microbatches", "4")
    one, two = (jobs.train(*words, "--replicas", r, source=JOB) for r in ("1", "2"))
    for a, b in zip(one.metrics, two.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert (a["samples"], a["epoch"]) == (b["samples"], b["epoch"])
    for name, weight in one.weights.items():
        assert torch.allclose(weight, two.weights[name], rtol=1e-4, atol=1e-6)


def test_micro_batches_are_four_a_stage_of_each_replica(jobs: Jobs) -> None:
    run = jobs.train("--stages", "2", "--replicas", "2", "--steps", "1", source=JOB)
    assert json.loads((run.path / "run.json").read_text())["options"]["microbatches"] == 16
    assert run.plan["microbatches"] == 10  # as many as there are samples
    assert run.metrics[0]["samples"] == 10  # of which there are fewer


@pytest.mark.parametrize(
    "words",
    [
        ("--precision", "fp16", "--deferred-batch-norm"),
        ("--precision", "bf16", "--accumulate", "2", "--clip-grad-value", "0.01"),
        ("--backend", "gloo"),
        ("--backend", "tls"),
    ],
    ids=" ".join,
)
def test_whatever_else_is_asked_for(jobs: Jobs, words: tuple[str, ...]) -> None:
    """Five mini-batches of eleven samples: a step of two ends with the data."""
    runs = [
        jobs.train("--stages", k, "--replicas", "2", *WORDS, *words, source=DROPOUT_JOB)
        for k in ("1", "2")
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
        kept = target >= 0
        given = nn.functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum"
        )
        return given, kept.sum()

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-2)

    def data():
        for size in (9, 8, 1, 2):
            yield torch.randint(0, 11, (size, 4)), torch.randint(-1, 11, (size, 4))
"""


def test_tied_weights_and_a_loss_with_a_count(jobs: Jobs) -> None:
    """Also with mini-batches of which a replica has nothing."""
    runs = [
        jobs.train("--stages", k, "--replicas", "3", *WORDS, source=TOKENS) for k in ("1", "2", "4")
    ]
    for run in runs[1:]:
        assert_same(run, runs[0])
    one = jobs.train("--stages", "2", *WORDS, source=TOKENS)
    for a, b in zip(one.metrics, runs[0].metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


LOST = ("--stages", "2", "--replicas", "2", "--microbatches", "4", "--steps", "7")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Run:
    """Without a fault."""
    return Jobs(tmp_path_factory.mktemp("quiet"), server).train(*LOST, source=DIES)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_lost_worker_of_any_replica_is_replaced(jobs: Jobs, quiet: Run, rank: int) -> None:
    process, path = jobs.start(*LOST, source=CALMER)
    rows = path / "metrics.jsonl"
    until(lambda: rows.exists() and len(rows.read_text().splitlines()) > 2)
    pid = json.loads((path / "plan.json").read_text())["stages"][rank]["pid"]
    os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    run = Run(process.returncode or 0, "", stderr, path)
    assert process.returncode == 0, stderr
    assert run.summary["restarts"] == 1
    (cause,) = run.summary["causes"]
    assert f"the worker of stage 1 of replica {rank // 2} was killed by signal 9" in cause
    assert_same(run, quiet)


CALMER = DIES.replace("import torch\n", "import time\n    import torch\n", 1).replace(
    "length = random", "time.sleep(0.3); length = random"
)
"""Long enough for someone to be killed."""


def test_one_that_dies_by_itself_is_named_with_its_replica(jobs: Jobs, quiet: Run) -> None:
    run = jobs.train(*LOST, "--", "kill", source=DIES)
    assert (jobs.folder / "died").exists()
    assert_same(run, quiet)
    assert re.search(r"the worker of stage \d of replica \d was killed", run.summary["causes"][0])


def test_a_run_goes_on_with_as_many_replicas(jobs: Jobs) -> None:
    words = ("--replicas", "2", "--microbatches", "4")
    whole = jobs.train("--stages", "2", *words, "--steps", "6", source=DROPOUT_JOB)
    part = jobs.train("--stages", "2", *words, "--steps", "3", source=DROPOUT_JOB)
    names = {file.name for file in (part.checkpoint.path).iterdir()}
    assert {"model-00002-of-00002.safetensors"} <= names, names
    line = ("launch", "--run-dir", str(part.path), "--resume", str(jobs.folder / "job.py"))
    refused = jobs.pipeworker(*line, "--replicas", "1", "--steps", "6")
    assert refused.returncode == 2
    assert "--replicas: 2, now 1" in refused.stderr
    assert "--allow replicas" in refused.stderr
    done = jobs.pipeworker(*line, "--stages", "3", "--steps", "6")
    assert done.returncode == 0, done.stderr
    assert_same(Run(0, "", "", part.path), whole)
    other = jobs.pipeworker(*line, "--replicas", "1", "--allow", "replicas", "--steps", "8")
    assert other.returncode == 0, other.stderr


UNLIKE = JOB.replace("import torch", "import os\n    import torch", 1).replace(
    "yield x,", "x = x + (os.getpid() if generator.initial_seed() and _ == 2 else 0)\n"
    "            yield x,"
)  # fmt: skip
"""The third mini-batch is another in each process."""


def test_replicas_that_read_other_data_are_told_so(jobs: Jobs) -> None:
    run = jobs.run("--stages", "2", "--replicas", "2", "--microbatches", "4", source=UNLIKE)
    assert run.status == 1
    assert "data() gave replica 1 another mini-batch for step 3 than replica 0" in run.stderr
    until(lambda: not processes_of(jobs.folder), 10)


ONCE = ("--replicas", "2", "--microbatches", "4", "--read-data", "once")


def test_replica_0_may_read_for_all(jobs: Jobs) -> None:
    """The numbers are those of reading in every replica; data may then be any."""
    for words, source in (
        (("--steps", "7"), DROPOUT_JOB),
        (("--accumulate", "2"), NESTED_JOB),
        (("--replicas", "3", "--accumulate", "2"), TOKENS),
    ):
        every = jobs.train("--stages", "2", *ONCE[:-2], *words, source=source)
        for stages in ("1", "2"):
            once = jobs.train("--stages", stages, *ONCE, *words, source=source)
            assert_same(once, every)
    run = jobs.train("--stages", "2", *ONCE, source=UNLIKE)
    assert len(run.metrics) == 6


def test_what_replica_0_reads_is_gone_on_with(jobs: Jobs, quiet: Run) -> None:
    run = jobs.train(*LOST, "--read-data", "once", "--", "kill", source=DIES)
    assert (jobs.folder / "died").exists()
    assert run.summary["restarts"] >= 1
    assert_same(run, quiet)


def test_what_one_rank_of_a_script_is_given_is_for_all(jobs: Jobs, scripts: Scripts) -> None:
    local = jobs.train("--stages", "2", "--replicas", "2", "--microbatches", "4", source=JOB)
    loop = LOOP.replace("pipe.step(batch)", "pipe.step(batch if rank == 0 else None)")
    options = json.dumps({"replicas": 2, "read_data": "once"})
    ranks = scripts.start(script(JOB, loop), 4, OPTIONS=options)
    ranks.succeed()
    for rank in range(4):
        assert ranks.told(rank)["loss"] == [row["loss"] for row in local.metrics]


def test_a_replica_that_is_gone_as_a_whole_is_replaced(jobs: Jobs, quiet: Run) -> None:
    """All of its workers at once; what they are replaced with has the other one's state."""
    process, path = jobs.start(*LOST, source=CALMER)
    rows = path / "metrics.jsonl"
    until(lambda: rows.exists() and len(rows.read_text().splitlines()) > 2)
    stages = json.loads((path / "plan.json").read_text())["stages"]
    for stage in stages:
        if stage["replica"] == 0:
            os.kill(stage["pid"], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    run = Run(0, "", stderr, path)
    assert run.summary["restarts"] == 1
    assert_same(run, quiet)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--replicas", "0"), "--replicas 0: must be 1 or more"),
        (("--replicas", "300"), "--replicas 300: must be 256 or less"),
        (("--replicas", "4", "--microbatches", "3"), "there must be 4 or more"),
    ],
)
def test_a_number_that_cannot_be(jobs: Jobs, words: tuple[str, ...], said: str) -> None:
    run = jobs.run("--stages", "2", *words, source=JOB)
    assert run.status == 2
    assert said in run.stderr
    assert not run.path.exists()


def test_a_sparse_gradient_is_said_to_be_one(jobs: Jobs) -> None:
    sparse = TOKENS.replace("nn.Embedding(11, 8)", "nn.Embedding(11, 8, sparse=True)")
    sparse = sparse.replace('tied = [("0.weight", "3.weight")]', "")
    run = jobs.run("--stages", "2", "--replicas", "2", *WORDS, source=sparse)
    assert run.status == 2
    assert "the gradient of 0.weight is sparse" in run.stderr


SHARDED = ("--replicas", "2", "--microbatches", "4", "--shard-optimizer")


def test_the_state_of_the_optimizer_may_be_sharded(jobs: Jobs) -> None:
    """The numbers stay; each worker keeps, and writes, its part of the state."""
    words = ("--steps", "6", "--clip-grad-norm", "0.5")
    whole = jobs.train("--stages", "2", *SHARDED[:-1], *words, source=DROPOUT_JOB)
    runs = [jobs.train("--stages", k, *SHARDED, *words, source=DROPOUT_JOB) for k in ("1", "3")]
    for run in runs:
        assert_same(run, whole)
    shards = runs[1].checkpoint.shards()
    assert len(shards) == 6
    sizes = [shard.optimizer.stat().st_size for shard in shards]
    assert max(sizes) < sum(s.optimizer.stat().st_size for s in whole.checkpoint.shards())
    assert all(json.loads(s.state.read_text())["extra"] == {} for s in shards)


def test_sharded_state_is_gone_on_with_by_any(jobs: Jobs) -> None:
    first = ("--steps", "3", "--checkpoint-every", "1")
    whole = jobs.train("--stages", "2", *SHARDED, "--steps", "6", source=DROPOUT_JOB)
    for begin, then in (
        (("--stages", "2", *SHARDED), ("--stages", "3", "--no-shard-optimizer")),
        (("--stages", "3", *SHARDED[:-1]), ("--stages", "1", "--shard-optimizer")),
    ):
        run = jobs.train(*begin, *first, source=DROPOUT_JOB)
        line = ("launch", "--run-dir", str(run.path), "--resume", str(jobs.folder / "job.py"))
        done = jobs.pipeworker(*line, *then, "--steps", "6")
        assert done.returncode == 0, done.stderr
        assert_same(Run(0, "", "", run.path), whole)


def test_sharded_state_is_recovered(jobs: Jobs, quiet: Run) -> None:
    run = jobs.train(*LOST, "--shard-optimizer", "--snapshot-every", "1", "--", "kill", source=DIES)
    assert (jobs.folder / "died").exists()
    assert run.summary["restarts"] >= 1
    assert_same(run, quiet)


def test_a_script_has_replicas_too(jobs: Jobs, scripts: Scripts) -> None:
    """The first stage of each is given the whole mini-batch; all get the same results."""
    local = jobs.train("--stages", "2", "--replicas", "2", "--microbatches", "4", source=JOB)
    ranks = scripts.start(script(JOB, LOOP), 4, OPTIONS=json.dumps({"replicas": 2}))
    ranks.succeed()
    for rank in range(4):
        told = ranks.told(rank)
        assert told["loss"] == [row["loss"] for row in local.metrics]
        assert told["norm"] == [row["grad_norm"] for row in local.metrics]
    (saved,) = Path(ranks.run_dir).glob("checkpoints/step-*")
    assert len(list(saved.glob("model-*"))) == 2


def test_what_a_script_asks_of_its_replicas(scripts: Scripts) -> None:
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
            tell(where=[pipe.replica, pipe.replicas, pipe.stage, pipe.stages], seen=seen["loss"],
                 out=out.tolist(), loss=first)
    """
    losses = set()
    for ranks, shard in ((2, ""), (4, ""), (4, "1")):
        started = scripts.start(script(JOB, loop), ranks, SHARD=shard)
        started.succeed()
        told = [started.told(rank) for rank in range(ranks)]
        where = [[r, 2, k, ranks // 2] for r in range(2) for k in range(ranks // 2)]
        assert [one.pop("where") for one in told] == where
        assert all(one == told[0] for one in told)
        losses.add(told[0]["loss"])
    assert len(losses) == 1


def test_processes_that_cannot_be_divided(scripts: Scripts) -> None:
    ranks = scripts.start(script(JOB, LOOP), 3, OPTIONS=json.dumps({"replicas": 2}))
    for run in ranks.end():
        assert run.status == 1
        assert "--replicas 2: there are 3 processes" in run.stderr


def test_an_interrupt_saves_what_there_is(jobs: Jobs) -> None:
    words = ("--stages", "2", "--replicas", "2", "--microbatches", "4", "--steps", "100000")
    process, path = jobs.start(*words, source=CALM)
    rows = path / "metrics.jsonl"
    until(lambda: rows.exists() and rows.read_text())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list((path / "checkpoints").glob("step-*/manifest.json"))
