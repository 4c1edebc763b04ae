"""``pipeworker evaluate``: the figures that a run has recorded, from its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from launcher import evaluate
from pipeworker.facts.criterion import Criterion
from pipeworker.record.rundir import RunDir
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import DROPOUT_JOB, JOB
from support.slow import slow

SOURCE = (
    "import sys; from beside import SCALE\n"
    + DROPOUT_JOB.replace("    import random", "import random", 1)
    .replace("\n    ", "\n")
    .replace("lr=0.01", "lr=float(sys.argv[1])")
    + """
def evaluation():
    return {"val": [next(data()) for _ in range(2)], "test": data}

def metrics(output, target):
    return {"accuracy": SCALE * (output.argmax(1) == target).float().mean()}

def on_evaluation(row):
    raise RuntimeError("the hook is not for this")
"""
)

WORDS = (
    *("--stages", "2", "--replicas", "2", "--microbatches", "4", "--steps", "4", "--keep", "9"),
    *("--evaluate-every", "2", "--checkpoint-every", "2", "--precision", "bf16"),
    *("--best", "max:loss"),
)


def content(run: Path) -> dict[str, bytes]:
    paths = [path for path in run.rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


@slow
def test_a_checkpoint_has_the_figures_that_were_recorded(jobs: Jobs) -> None:
    jobs.write("SCALE = 0.5\n", "beside.py")
    jobs.write(SOURCE)
    run_dir = jobs.folder / "run"
    line = ("launch", *WORDS, "--run-dir", str(run_dir), "job.py", "--", "0.01")
    done = jobs.pipeworker(*line)
    assert done.returncode == 0, done.stderr
    recorded = [json.loads(line) for line in (run_dir / "evaluation.jsonl").open()]
    before = content(run_dir)
    found = jobs.pipeworker("evaluate", "run", "--json")
    assert (found.returncode, json.loads(found.stdout)) == (0, recorded[1]), found.stderr
    best = max(recorded, key=lambda row: float(row["loss"]))
    found = jobs.pipeworker("evaluate", "--best", "--stages", "3", "--json", "run", "--", "0.01")
    assert json.loads(found.stdout) == best
    # The job file has changed: its copy is used, with the modules beside the file.
    jobs.write(SOURCE.replace("SCALE *", "7 *"))
    found = jobs.pipeworker("evaluate", "run", "--checkpoint", "2", "--stages", "1")
    assert found.stdout.startswith("evaluation after step 2  loss ")
    assert f"test/accuracy {recorded[0]['test/accuracy']:.4f}" in found.stdout
    assert "job.py has changed since; the copy in the run is used" in found.stderr
    assert "hook" not in found.stderr
    assert content(run_dir) == before


OBSERVING = JOB.replace(
    "def model",
    """
    class Observer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("largest", torch.ones(()))

        def forward(self, x):
            self.largest.data.copy_(torch.maximum(self.largest, x.detach().abs().max()))
            return x / self.largest

    def evaluation():
        return [(9 * x, y) for x, y in data()][:3]

    def model""",
).replace("nn.ReLU()", "nn.ReLU(), Observer()")


def test_a_pass_changes_no_buffer(jobs: Jobs) -> None:
    """As the observers of quantization do in eval mode, which a checkpoint after it would have."""
    words = ("--stages", "2", "--microbatches", "2", "--steps", "2")
    plain = jobs.train(*words, "--stages", "1", source=OBSERVING)
    evaluated = jobs.train(*words, "--evaluate-every", "1", source=OBSERVING)
    assert_same(evaluated, plain)
    found = jobs.pipeworker("evaluate", "--stages", "1", "--json", str(evaluated.path))
    assert json.loads(found.stdout) == evaluated.evaluations[-1]


MISTAKES = (
    (("--checkpoint", "7"), "--checkpoint 7: not a checkpoint of run-1; use one of: step-0000"),
    (("--checkpoint", "1", "--best"), "--checkpoint and --best: they exclude each other"),
    (("--best",), "--best: run-1 has no checkpoint with an evaluation"),
)


def test_a_run_without_evaluation_is_evaluated_by_the_file_it_is_resumed_with(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes in the command are named before that."""
    run = jobs.train("--stages", "1", "--steps", "1")
    monkeypatch.chdir(jobs.folder)
    for mistake, text in MISTAKES:
        refused = CliRunner().invoke(cli.main, ["evaluate", "run-1", *mistake])
        assert refused.exit_code == 2
        assert text in refused.output
    found = jobs.pipeworker("evaluate", str(run.path))
    assert found.returncode == 2
    advice = "define it, resume the run with the new file and more --steps, and retry"
    assert "evaluate: job file " in found.stderr
    assert f"has no evaluation(); {advice}\n" in found.stderr
    job = jobs.write(JOB + "\n    evaluation = data\n")
    words = ("--resume", "--run-dir", str(run.path), "--steps", "2", str(job))
    assert jobs.pipeworker("launch", *words).returncode == 0
    found = jobs.pipeworker("evaluate", str(run.path))
    assert found.stdout.startswith("evaluation after step 2  loss"), found.stderr


def test_a_script_evaluates_its_own_runs(tmp_path: Path) -> None:
    record = {"version": 2, "options": {"job_file": "/x.py", "own_loop": True}, "resumed": []}
    (tmp_path / "run.json").write_text(json.dumps(record))
    found = CliRunner().invoke(cli.main, ["evaluate", str(tmp_path)])
    assert "a script is the job of this run" in found.output


def test_a_run_keeps_the_checkpoint_that_is_evaluated(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = JOB + "\n    def evaluation():\n        return [next(iter(data()))]\n"
    words = ("--stages", "1", "--steps", "2", "--checkpoint-every", "1", "--keep", "9")
    run = jobs.train(*words, source=source)
    checkpoints, kept = RunDir(run.path).checkpoints, []

    def prune(*_: object) -> None:
        checkpoints.prune(1, Criterion("loss"))
        kept.extend(checkpoints.steps())

    monkeypatch.setattr(evaluate, "run_aside", prune)
    CliRunner().invoke(cli.main, ["evaluate", "--checkpoint", "1", str(run.path)])
    assert kept == [1, 2]
    prune()
    assert checkpoints.steps() == [2]
