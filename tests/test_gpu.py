"""On accelerators: the same promises, where there is a CUDA device."""

from __future__ import annotations

import pytest
import torch

from pipeworker.worker.device.accelerator import accelerator_for
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.links.link import MemoryLink
from support.compare import assert_same
from support.jobs import Jobs
from support.mapped import between_processes
from support.sources import DROPOUT_JOB, JOB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this host"),
]


def test_stages_on_accelerators_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6", "--device", "cuda")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    assert base.plan["stages"][0]["device"].startswith("cuda")
    for stages in ("2", "4"):
        for mode in ("always", "never", "offload"):
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
    """Both share it; the same as in test_transport_devices.py, by CUDA's own means."""
    between_processes(jobs, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two CUDA devices")
def test_tensors_that_pass_by_nccl_are_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6", "--device", "cuda", "--backend", "nccl")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    assert_same(base, jobs.train("--stages", "2", *words, source=DROPOUT_JOB))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="each stage has a CUDA device of its own")
def test_stages_that_share_a_device_cannot_have_nccl(jobs: Jobs) -> None:
    words = ("--stages", "2", "--device", "cuda", "--backend", "nccl", "--steps", "1")
    failed = jobs.run(*words, source=DROPOUT_JOB)
    assert failed.status == 2
    assert "nccl needs an accelerator for each worker, and the stages of 0>1" in failed.stderr


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


def test_layers_that_are_compiled_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "3", "--device", "cuda", "--compile")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB, timeout=300)
    assert_same(base, jobs.train("--stages", "2", *words, source=DROPOUT_JOB, timeout=300))


LARGE = """
    import torch
    from torch import nn

    class Adds(nn.Linear):  # in an order of its own, unless it is told otherwise
        def forward(self, x):
            index = torch.arange(x.shape[1], device=x.device) % 16
            return torch.zeros_like(x).index_add(1, index, super().forward(x))

    def model():
        return [layer for _ in range(4) for layer in (Adds(1024, 1024), nn.GELU())]

    loss = nn.functional.mse_loss

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.01)

    def before_update(params):
        stats = torch.cuda.memory_stats()
        print("driver", stats["num_device_alloc"], stats["num_alloc_retries"])

    def data():
        x = torch.randn(4096, 1024)
        while True:
            yield x, x
"""
WORDS = ("--microbatches", "8", "--steps", "8", "--device", "cuda", "--deterministic")


def test_kernels_without_an_order_give_the_same_bits_where_they_are_told_to(jobs: Jobs) -> None:
    base = jobs.train("--stages", "1", *WORDS, source=LARGE)
    for stages in ("1", "2"):
        assert_same(base, jobs.train("--stages", stages, *WORDS, source=LARGE))


@pytest.mark.parametrize("mode", ["always", "never", "offload"])
def test_a_step_after_the_first_ones_takes_no_memory_of_the_driver(jobs: Jobs, mode: str) -> None:
    run = jobs.train("--stages", "2", "--recompute", mode, *WORDS, source=LARGE)
    for stage in ("stage-0", "stage-1"):
        said = [line for line in run.log(stage).splitlines() if "driver" in line]
        layers = len(said) // 8
        assert len(set(said[3 * layers :])) == 1, said
    if mode == "offload":
        never = jobs.train("--stages", "2", "--recompute", "never", *WORDS, source=LARGE)
        peaks = (one.summary["peak_memory_bytes"] for one in (run, never))
        assert all(less < more for less, more in zip(*peaks, strict=True))


def test_more_stages_than_devices_share_them_and_it_is_said(jobs: Jobs) -> None:
    stages = 2 * torch.cuda.device_count()
    words = ("--stages", str(stages), "--microbatches", "4", "--steps", "2", "--device", "cuda")
    run = jobs.train(*words, source=LARGE)
    assert run.stderr.count("fewer accelerators than workers: stage 0, stage ") == 1
    assert " share cuda:0 on " in run.stderr


def test_a_device_that_is_too_small_is_one_clear_message(jobs: Jobs) -> None:
    bound = "torch.cuda.set_per_process_memory_fraction(1e-3)\n\n    def model"
    source = JOB.replace("def model", bound)
    source = source.replace("nn.Linear(16, 16)", "nn.Linear(16, 1 << 22), nn.Linear(1 << 22, 16)")
    run = jobs.run("--stages", "1", "--device", "cuda", source=source)
    assert "out of memory" in run.stderr
    assert "--recompute always or offload keeps less of them" in run.stderr
    assert "Traceback" not in run.stderr.partition("out of memory")[0]
