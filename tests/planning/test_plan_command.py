"""The command `plan` on real jobs: it measures, prints, and leaves nothing."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pipeworker.runs.schedule_file import read_schedule
from support.real_jobs.jobs import Jobs, until
from support.real_jobs.sources import JOB, VARIED
from support.slow import slow

PROMISED = {
    *("schedule", "stages", "step_seconds", "samples_per_second", "bubble", "alternatives"),
}
OF_STAGE = {
    *("stage", "worker", "layers", "parameters", "seconds", "memory_bytes", "limit_bytes"),
    "recompute",
}


def planned(jobs: Jobs, *words: str, source: str = JOB) -> str:
    """Return what `plan` prints of a job file."""
    job_file = jobs.write(source)
    before = {path.name for path in jobs.folder.iterdir()}
    done = jobs.pipeworker("plan", *words, str(job_file))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    new = {path.name for path in jobs.folder.iterdir()} - before
    assert new <= {"__pycache__", *(Path(word).name for word in words)}
    return done.stdout


@pytest.mark.parametrize(
    ("source", "layers", "parameters"),
    [
        pytest.param(JOB, 5, [8 * 16 + 16, 0, 16 * 16 + 16, 0, 16 * 3 + 3], marks=slow),
        (
            VARIED,
            10,
            [72, 72, 0, 72, 0, 0, 72, 72, 16, 27],
        ),
    ],
    ids=["sequence", "skips and ties"],
)
def test_the_object_of_a_job(jobs: Jobs, source: str, layers: int, parameters: list[int]) -> None:
    words = ("--stages", "2", "--microbatches", "3", "--json")
    found: dict[str, Any] = json.loads(planned(jobs, *words, source=source))
    assert found.keys() >= PROMISED
    first, last = found["stages"]
    assert first.keys() == last.keys() == OF_STAGE
    assert (first["layers"][0], first["layers"][1], last["layers"][1]) == (
        *(0, last["layers"][0]),
        layers,
    )
    for stage in (first, last):
        assert stage["parameters"] == sum(parameters[slice(*stage["layers"])])
        assert stage["seconds"]["forward"] > 0
        assert stage["seconds"]["backward"] > 0
        assert 0 < stage["memory_bytes"] < stage["limit_bytes"]
    busy = sum(sum(stage["seconds"].values()) for stage in found["stages"])
    assert found["step_seconds"] >= busy / 2
    assert found["measured"]
    others = {(one["schedule"], one["stages"]): one for one in found["alternatives"]}
    assert ("1f1b", 2) in others
    assert others["gpipe", 1]["bubble"] == pytest.approx(0, abs=1e-9)
    assert "more than the layers" in others["gpipe", 8].get("problem", "more than the layers")


def test_the_lines_of_a_job_with_options_of_a_projects_file(jobs: Jobs) -> None:
    jobs.write("stages = 2\nmicrobatches = 3\nsteps = 7\n", "pipeworker.toml")
    config = str(jobs.write("stages = 2\nmicrobatches = 5\n", "big.toml"))
    output = planned(jobs, "--config", config, "--recompute", "never")
    assert re.match(r"2 stages, 5 micro-batches, gpipe, 2 samples a micro-batch\n", output)
    assert re.search(
        r"^step [\d.]+ [mµ]?s, [\d.]+ samples/s, bubble [\d.]+%$", output, re.MULTILINE
    )
    assert re.search(r"^\*  gpipe +2 ", output, re.MULTILINE)


@slow
def test_counts_are_planned_without_seconds(jobs: Jobs) -> None:
    found = json.loads(planned(jobs, "--stages", "2", "--no-profile", "--json", source=VARIED))
    assert (found["measured"], found["step_seconds"]) == (False, None)
    assert found["bubble"] > 0
    output = planned(jobs, "--stages", "2", "--no-profile", source=VARIED)
    assert "nothing was measured" in output
    assert len(re.findall(r"^stage \d  .*F0", output, re.MULTILINE)) == 2


def test_a_page_and_a_schedule(jobs: Jobs) -> None:
    html = jobs.folder / "plan.html"
    assert planned(jobs, "--stages", "2", "--html", str(html)) == f"{html}: the plan of job.py\n"
    assert "<h2>Stages</h2>" in html.read_text()
    words = ("--stages", "2", "--microbatches", "4", "--schedule", "1f1b")
    own = jobs.folder / "own.txt"
    own.write_text(planned(jobs, *words, "--text"))
    assert own.read_text().startswith("1f1b stages=2 microbatches=4\n")
    assert read_schedule(own).startswith("own.txt stages=2 microbatches=4\n")


def test_what_fits(jobs: Jobs) -> None:
    first, most, fewest = planned(jobs, "--stages", "2", "--fit").splitlines()
    assert re.fullmatch(r"[\d.]+ GB a worker, 2 samples a micro-batch, gpipe", first)
    assert most == "on 2 stages: 256 micro-batches or more fit"
    assert fewest == "8 micro-batches fit on 1 stage or more"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def model():", "def model(:"),
        pytest.param("def loss(", "def lose(", marks=slow),
        ("yield x", "raise ValueError('no'); yield x"),
    ],
)
def test_a_wrong_job_file_is_explained_as_launch_does(jobs: Jobs, old: str, new: str) -> None:
    source = JOB.replace(old, new)
    launched = jobs.run("--stages", "2", source=source)
    job_file = jobs.write(source)
    done = jobs.pipeworker("plan", "--stages", "2", str(job_file))
    assert done.returncode == launched.status != 0
    assert done.stdout == ""
    lasts = (text.strip().splitlines()[-1] for text in (done.stderr, launched.stderr))
    assert next(lasts) == next(lasts)


PLACED = """
import torch
from torch import nn


class Position(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(50, 8))

    def forward(self, x):
        return x + self.table[: x.size(1)]


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(20, 8), Position()
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, x):
        return self.head(self.hidden(self.position(self.embedding(x))).relu())


model = Language


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def data():
    for _ in range(4):
        x = torch.randint(20, (8, 5))
        yield x, x
"""


CHANGING = PLACED.replace("(x)))", "(x.clamp(min=0))))").replace("relu()", "relu_()")


@pytest.mark.parametrize(
    "source", [pytest.param(PLACED, marks=slow), CHANGING], ids=["", "changes its input"]
)
def test_a_unit_with_buffers_alone_is_counted(jobs: Jobs, source: str) -> None:
    output = planned(jobs, "--stages", "2", "--no-profile", source=source)
    assert "cannot be counted" not in output
    assert "from counted operations" in output


@pytest.mark.parametrize("words", [pytest.param((), marks=slow), ("--no-profile",)])
def test_an_error_in_a_layer_names_the_layer(jobs: Jobs, words: tuple[str, ...]) -> None:
    job_file = jobs.write(JOB.replace("nn.Linear(16, 16)", "nn.Linear(17, 16)"))
    done = jobs.pipeworker("plan", "--stages", "2", *words, str(job_file))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "model(): its layers cannot be measured: " in line
    assert "layer 2 (Linear) raised RuntimeError: " in line
    assert "UserCodeError" not in line
    assert ("fake tensors" in line) is bool(words)


PROBABILITIES = """
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x):
        return torch.sigmoid(self.decoder(torch.relu(self.encoder(x.view(-1, 8)))))

def model(): return Autoencoder()

def loss(output, target):
    return nn.functional.binary_cross_entropy(output, torch.ones_like(output))
"""


@slow
@pytest.mark.parametrize("words", [(), ("--no-profile",)])
def test_a_loss_of_probabilities_is_planned(jobs: Jobs, words: tuple[str, ...]) -> None:
    source = dedent(JOB) + PROBABILITIES
    found = json.loads(planned(jobs, "--stages", "2", "--json", *words, source=source))
    assert [stage["layers"] for stage in found["stages"]] == [[0, 1], [1, 2]]


@slow
def test_a_loss_that_raises_is_named_and_the_layers_are_planned(jobs: Jobs) -> None:
    broken = "\ndef loss(output, target): raise ValueError('no loss')\n"
    job_file = jobs.write(dedent(JOB) + broken)
    done = jobs.pipeworker("plan", "--stages", "2", "--json", str(job_file))
    assert done.returncode == 0
    text = "loss() cannot be measured, and the plan counts it as 0 s: loss() raised ValueError"
    assert done.stderr == f"warning: {text}: no loss\n"
    assert len(json.loads(done.stdout)["stages"]) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--steps", "3"), "--steps: an option of launch that changes no plan; leave it out"),
        (("--json", "--fit"), "--json and --fit: choose one"),
        (("--balance", "1,1,3"), "--balance 1,1,3: is for 3 stages, but there are 2"),
        (("--balance", "1,3"), "--balance 1,3: adds up to 4 layers, but model() has 5"),
    ],
)
def test_wrong_options(jobs: Jobs, words: tuple[str, ...], why: str) -> None:
    done = jobs.pipeworker("plan", "--stages", "2", *words, str(jobs.write(JOB)))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {why}")


def test_forms_of_a_model_need_a_job_file(jobs: Jobs) -> None:
    done = jobs.pipeworker("plan", "--stages", "2", "--html", "plan.html")
    assert (done.returncode, done.stderr) == (2, "error: --html: no model is given; add JOB_FILE\n")


def test_an_interrupt_ends_it(jobs: Jobs) -> None:
    source = JOB.replace(
        "for _ in range(6):",
        "import pathlib, time; pathlib.Path('reading').touch(); time.sleep(600)\n"
        "        for _ in range(6):",
    )
    job_file = jobs.write(source)
    process = jobs.python("-m", "pipeworker", "plan", "--stages", "2", str(job_file))
    until((jobs.folder / "reading").exists)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping" in stderr
    assert "Traceback" not in stderr
    assert not (jobs.folder / "runs").exists()
