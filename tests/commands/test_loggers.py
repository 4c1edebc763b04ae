"""Loggers of real jobs: wandb and MLflow where they are installed, Prometheus, and callbacks."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeworker.errors import UsageError
from pipeworker.job import options
from pipeworker.runs.begin import RunRequest
from support.real_jobs.jobs import Jobs, until
from support.real_jobs.sources import JOB
from support.slow import slow

ROOT = Path(__file__).parents[2]
EVALUATION = """
    def evaluation():
        return [(torch.ones(4, 8), torch.ones(4, dtype=torch.long))]
"""
MEMORY = "pipeworker_worker_memory_bytes"
WORDS = ("--stages", "2", "--microbatches", "4", "--evaluate-every", "2")


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[loggers]'")


def logged(jobs: Jobs, *words: str) -> None:
    """Run four steps, and two more when they are resumed, without a warning of a hook."""
    path = jobs.write(JOB + EVALUATION)
    for steps, more in (("4", ()), ("6", ("--resume",))):
        command = ("launch", *WORDS, "--steps", steps, "--run-dir", "run", *more)
        done = jobs.pipeworker(*command, *(() if more else words), str(path))
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, (jobs.folder / "run/logs/hooks.log").read_text()


def test_wandb_offline(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(jobs, "--wandb", "network")
    files = [*jobs.folder.glob("run/wandb/offline-run-*/run-*.wandb")]
    assert len({file.name for file in files}) == 1  # one run, which the second start continues
    assert b"evaluation/loss" in b"".join(file.read_bytes() for file in files)


def test_mlflow_in_a_folder(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:mlruns")
    logged(jobs, "--mlflow", "network")
    (run,) = [path.parent for path in jobs.folder.glob("mlruns/*/*/metrics")]
    rows = (run / "metrics" / "loss").read_text().splitlines()
    assert [row.split()[2] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    rows = (run / "metrics" / "evaluation" / "loss").read_text().splitlines()
    assert [row.split()[2] for row in rows] == ["2", "4", "6"]
    assert (run / "tags" / "pipeworker.checkpoint").read_text().endswith("step-00000006")
    assert (run / "params" / "microbatches").read_text() == "4"
    assert "status: 3" in (run / "meta.yaml").read_text()  # finished
    fails = jobs.write(JOB + EVALUATION + "\n    def loss(*_):\n        raise ValueError\n")
    words = ("launch", *WORDS, "--steps", "8", "--run-dir", "run", "--resume", str(fails))
    assert jobs.pipeworker(*words).returncode == 1
    assert "status: 4" in (run / "meta.yaml").read_text()  # failed


def figures(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return what Prometheus would get: the labels and values of each sample by its name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def knows_the_memory(port: int) -> bool:
    with suppress(OSError):  # it is not served yet
        return all(size > 0 for _, size in figures(port).get(MEMORY, [({}, 0.0)]))
    return False


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
        return port


def test_prometheus_gets_the_figures_of_a_running_job(jobs: Jobs) -> None:
    port = free_port()
    words = (*WORDS, "--steps", "100000", "--metrics-port", str(port))
    process, path = jobs.start(*words, "--checkpoint-every", "50", source=JOB + EVALUATION)
    until(lambda: (path / "checkpoints").exists() and any((path / "checkpoints").iterdir()))
    until(lambda: knows_the_memory(port))
    found = figures(port)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    ((_, steps),) = found["pipeworker_steps_total"]
    assert 2 <= steps <= len(rows)
    ((_, loss),) = found["pipeworker_loss"]
    assert loss in [row["loss"] for row in rows]
    ((_, samples),) = found["pipeworker_samples_total"]
    by_step = [row["samples"] for row in rows]
    assert samples in (sum(by_step[: int(steps)]), sum(by_step[: int(steps) - 1]))
    workers = {labels["stage"]: labels for labels, _ in found[MEMORY]}
    assert workers.keys() == {"0", "1"}
    assert workers["0"] == {"stage": "0", "replica": "0", "host": socket.gethostname()}
    assert all(size > 1e6 for _, size in found[MEMORY])
    assert not any("step" in labels for samples in found.values() for labels, _ in samples)
    page = (ROOT / "docs" / "howto" / "hooks.md").read_text()
    own = {name for name in found if name.startswith("pipeworker_")}
    documented = set(re.findall(r"`(pipeworker_\w+)`", page))
    plain = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in own}
    assert {name for name in plain if f"{name}_total" not in documented} <= documented
    dashboard = (ROOT / "deploy" / "prometheus" / "grafana.json").read_text()
    asked = set(re.findall(r"pipeworker_\w+", json.dumps(json.loads(dashboard)["panels"])))
    assert asked <= own
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    with pytest.raises(OSError, match="refused"):
        figures(port)


@slow
def test_a_port_that_is_taken_is_a_warning_and_the_job_goes_on(jobs: Jobs) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = jobs.train(*WORDS, "--steps", "3", "--metrics-port", port, source=JOB + EVALUATION)
    assert run.summary["steps"] == 3
    assert "--metrics-port: raised OSError" in run.stderr
    assert "the job continues without it" in run.stderr


def test_a_package_that_is_missing_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(options.LOGGERS, "wandb", "no_such_package_of_anybody")
    asked = {"microbatches": 1, "wandb": "project"}
    request = RunRequest(str(tmp_path / "job.py"), 1, asked, tmp_path / "run")
    with pytest.raises(UsageError, match=r"--wandb: the package no_such_.* is missing; pip inst"):
        request.prepare()
    assert not (tmp_path / "run").exists()


CALLBACKS = """
    class Notes:
        def __init__(self, name):
            self.name = name

        def on_step(self, row):
            with open(f"{self.name}.txt", "a") as file:
                file.write(f"{row['step']} ")
            if self.name == "b" and row["step"] == 2:
                raise ValueError("no")

        def close(self):
            with open(f"{self.name}.txt", "a") as file:
                file.write("closed")

    callbacks = [Notes("a"), Notes("b")]
"""


def test_every_callback_gets_every_row_and_is_closed(jobs: Jobs) -> None:
    run = jobs.train("--stages", "1", "--steps", "3", source=JOB + CALLBACKS)
    for name in "ab":
        assert (jobs.folder / f"{name}.txt").read_text() == "1 2 3 closed"
    assert run.stderr.count("Notes 2.on_step(): raised ValueError: no after step 2") == 1
