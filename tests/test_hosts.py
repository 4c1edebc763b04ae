"""Two hosts on one machine: cables pulled out, interfaces, firewalls, and what differs."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator

import pytest

from support.compare import assert_same
from support.hosts import CABLES, Host
from support.interpreter import PRELOAD
from support.jobs import Jobs, Run, until
from support.pretend import VARIABLE as PRETEND
from support.sources import CALM, DROPOUT_JOB, JOB
from support.torchrun import TOKEN, Torchrun

pytestmark = pytest.mark.root
WORDS = ("--microbatches", "4", "--steps", "3")
HURRIED = "reach=4.5"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, uuid.uuid4().hex)


def other(how: str) -> tuple[dict[str, str], dict[str, str]]:
    """The environments of two hosts, of which the second pretends to be another."""
    return {}, {PRELOAD: "support.pretend", PRETEND: how}


def rows(run: Run) -> int:
    metrics = run / "metrics.jsonl" if not isinstance(run, Run) else run.path / "metrics.jsonl"
    return metrics.read_text().count("\n")


def test_a_short_cut_clocks_apart_and_a_named_interface_change_no_bit(
    jobs: Jobs, torchrun: Torchrun, hosts: tuple[Host, Host]
) -> None:
    words = ("--microbatches", "4", "--steps", "150", "--interface", "second")
    source = CALM.replace("import torch", "import torch\n    WIDE = 512", 1)
    both = torchrun.nodes(
        *words, hosts=hosts, ranks=1, source=source, envs=other("clock=3600")
    )
    both[0].training()
    hosts[0].cut("second")
    metrics = both[0].path / "metrics.jsonl"
    time.sleep(0.3)  # what was under way has come to its end
    before = metrics.read_bytes()
    time.sleep(1.5)
    assert metrics.read_bytes() == before  # nothing passes
    hosts[0].plug("second")
    head, tail = (started.end(90) for started in both)
    assert head.status == tail.status == 0, head.stderr + tail.stderr
    assert f"bound to tcp://{CABLES['second'][0]}:" in head.log("coordinator")
    assert hosts[0].sent("second") > 10 * hosts[0].sent("cable")
    assert_same(head, jobs.train("--stages", "2", *words[:4], source=source))
