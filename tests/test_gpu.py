"""On accelerators: the same promises, where there is a CUDA device."""

from __future__ import annotations

import pytest
import torch

from pipeworker.worker.device.accelerator import accelerator_for
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.link import MemoryLink
from support.compare import assert_same
from support.jobs import Jobs
from support.mapped import between_processes
from support.sources import DROPOUT_JOB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this host"),
]


def test_stages_on_accelerators_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6", "--device", "cuda")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    assert base.plan["stages"][0]["device"].startswith("cuda")
    for stages in ("2", "4"):
        for mode in ("always", "never"):
            more = ("--stages", stages, "--recompute", mode)
            run = jobs.train(*more, *words, source=DROPOUT_JOB)
            assert_same(base, run)
            for stage in range(int(stages)):
                assert "pass through the host" not in run.log(f"stage-{stage}")


def test_tensors_that_pass_through_the_host_are_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6", "--device", "cuda")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    more = ("--stages", "3", "--backend", "gloo")
    assert_same(base, jobs.train(*more, *words, source=DROPOUT_JOB))


def test_a_device_takes_tensors_from_another_process(jobs: Jobs) -> None:
    """Both share it; the same as in test_transport_mapped.py, by CUDA's own means."""
    between_processes(jobs, "cuda")


def test_a_channel_through_the_host_waits_for_the_device() -> None:
    """Streams, events and pinned memory of the device itself, both ends in this process."""
    accelerator = accelerator_for(torch.device("cuda", 0))
    link, courier = MemoryLink(), Courier()
    sender = Sender(link, 4, courier, accelerator=accelerator)
    receiver = Receiver(link, 4, accelerator=accelerator)
    slow, results = torch.eye(4096, device="cuda"), []
    for step in range(3):
        sender.begin(0)
        receiver.begin(0, range(16))
        for m in range(16):
            late = (slow @ slow)[0, 0]  # what is not waited for is not there yet
            sender.send(m, torch.full((1 << 20,), float(step * 16 + m), device="cuda") * late)
            results.append(receiver.receive(m).sum())
            receiver.release(m)
        sender.flush()
    courier.close()
    assert [float(result) for result in results] == [float(n << 20) for n in range(48)]
