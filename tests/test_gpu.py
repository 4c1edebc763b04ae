"""The same promises on accelerators: tests that need one, most of any kind, some of CUDA."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipeworker.host.task_thread import TaskThread
from pipeworker.worker.device.accelerator import accelerator_for
from pipeworker.worker.device.numerics import before_start, deterministic_mode
from pipeworker.worker.transport.channel import Receiver, Sender
from support.devices.mapped import between_processes
from support.in_process.transport import MemoryLink
from support.real_jobs.compare import assert_same, plain_loop
from support.real_jobs.jobs import Jobs, Record, ended, steps_of, until
from support.real_jobs.sources import DROPOUT_JOB, JOB

_FOUND = torch.accelerator.current_accelerator(check_available=True)
DEVICE = "" if _FOUND is None else _FOUND.type
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("users_device"),
    pytest.mark.skipif(not DEVICE, reason="no accelerator on this host"),
]
cuda = pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device on this host")
WORDS = ("--microbatches", "4")
before_start()  # the plain loop in this process is deterministic where a test requires it


def test_any_number_of_stages_computes_what_the_plain_loop_does_on_the_device(jobs: Jobs) -> None:
    losses, weights, _ = plain_loop(jobs.write(JOB), microbatches=4, steps=6, device=DEVICE)
    for stages in ("1", "2", "4"):
        run = jobs.train("--stages", stages, *WORDS, source=JOB)
        assert [row["loss"] for row in run.metrics] == losses
        assert all(torch.equal(value, weights[name]) for name, value in run.weights.items())


NETWORK = """
    import torch
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(64, 64, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    class Passes(nn.Module):  # what it receives leaves its stage unchanged
        def forward(self, x):
            return x.view(x.shape)

    def layers():
        {layers}

    def model():
        return nn.Sequential(*layers())

    def loss(output, target):
        return nn.functional.mse_loss(output, target)

    def optimizer(params):
        return torch.optim.Adam(params, lr=1e-3)

    def data():
        generator = torch.Generator().manual_seed(7)
        for _ in range(4):
            x = torch.randn({shape}, generator=generator)
            yield x, torch.zeros_like(x)
"""
NETWORKS = {
    "transformer": (
        "return [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(4)]",
        "32, 128, 64",
    ),
    "convolutions": (
        "return [part for _ in range(4) for part in (nn.Conv2d(64, 64, 3, padding=1),"
        " nn.BatchNorm2d(64), nn.GELU(), nn.AvgPool2d(3, 1, 1))]",
        "32, 64, 28, 28",
    ),
    "recurrent": (
        "return [Recurrent(), Recurrent(), Recurrent(), nn.Linear(64, 64)]",
        "64, 32, 64",
    ),
    "unchanged": (
        "return [nn.Linear(1024, 1024), *(Passes() for _ in range(6)), nn.Linear(1024, 1024)]",
        "16384, 1024",
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_any_network_computes_what_the_plain_loop_does(jobs: Jobs, name: str) -> None:
    layers, shape = NETWORKS[name]
    source = NETWORK.format(layers=layers, shape=shape)
    with deterministic_mode(lambda: True):
        losses, weights, _ = plain_loop(jobs.write(source), microbatches=8, steps=4, device=DEVICE)
    for stages, schedule, recompute in (
        *(("1", "gpipe", "never"), ("2", "1f1b", "always"), ("4", "gpipe", "never")),
        *(("4", "1f1b", "offload"), ("2", "zbv", "never")),
    ):
        words = ("--schedule", schedule, "--recompute", recompute, "--microbatches", "8")
        run = jobs.train("--stages", stages, *words, "--deterministic", source=source)
        assert [row["loss"] for row in run.metrics] == losses, (stages, schedule, recompute)
        assert all(torch.equal(value, weights[name]) for name, value in run.weights.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_gives_the_same_bits(jobs: Jobs, precision: str) -> None:
    words = (*WORDS, "--precision", precision, "--clip-grad-norm", "0.5")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    for more in (("--recompute", "always"), ("--schedule", "1f1b", "--recompute", "never")):
        assert_same(base, jobs.train("--stages", "2", *more, *words, source=DROPOUT_JOB))


@pytest.mark.parametrize(
    "schedule", ["interleaved-1f1b", "zbv", "zb-h1", "v-half", "v-min", "dualpipev"]
)
def test_any_schedule_gives_the_same_bits(jobs: Jobs, schedule: str) -> None:
    base = jobs.train("--stages", "1", *WORDS, source=DROPOUT_JOB)
    run = jobs.train("--stages", "2", "--schedule", schedule, *WORDS, source=DROPOUT_JOB)
    assert_same(base, run)


MODULE = """
    import torch
    from torch import nn

    class Network(nn.Module):  # is cut: its forward masks and adds positions between its layers
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(32, 64)
            self.places = nn.Embedding(16, 64)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(4)
            )
            self.head = nn.Linear(64, 32)

        def forward(self, words):
            count = words.shape[1]
            mask = torch.ones(count, count, device=words.device, dtype=torch.bool).triu(1)
            x = self.words(words) + self.places(torch.arange(count, device=words.device))
            for layer in self.layers:
                x = layer(x, src_mask=mask, is_causal=True)
            return self.head(x).float()

    model = Network

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-3)

    def data():
        generator = torch.Generator().manual_seed(7)
        for _ in range(4):
            words = torch.randint(32, (8, 16), generator=generator)
            yield words, words.roll(-1, 1)
"""


def test_a_module_that_is_cut_computes_what_the_plain_loop_does(jobs: Jobs) -> None:
    """Its data may be on the device, too."""
    with deterministic_mode(lambda: True):
        losses, weights, _ = plain_loop(jobs.write(MODULE), microbatches=4, steps=4, device=DEVICE)
    moved = MODULE.replace(
        "yield words,", f"words = words.to('{DEVICE}')\n            yield words,"
    )
    for stages, source, precision in (
        *(("1", MODULE, "fp32"), ("2", moved, "fp32"), ("4", MODULE, "fp32")),
        *(("1", MODULE, "bf16"), ("3", MODULE, "bf16")),
    ):
        words = ("--stages", stages, "--precision", precision, "--deterministic")
        run = jobs.train(*words, *WORDS, source=source)
        if precision == "fp32":
            assert [row["loss"] for row in run.metrics] == losses
            assert all(torch.equal(value, weights[name]) for name, value in run.weights.items())
        elif stages == "1":
            base = run
        else:
            assert_same(base, run)


BACKWARD = JOB.replace(
    "def model",
    """
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (1 + torch.rand_like(gradient))

    class Noisy(nn.Module):  # draws in its backward
        def forward(self, x):
            return Noise.apply(x)

    def model""",
).replace("nn.Tanh()", "Noisy(), nn.Tanh()")
COUNTS = JOB.replace(
    "return nn.functional.cross_entropy(output, target)",
    "return nn.functional.cross_entropy(output, target, reduction='sum'), (target > 0).sum()",
)


@pytest.mark.parametrize("source", [BACKWARD, COUNTS])
def test_any_order_of_actions_gives_the_same_bits(jobs: Jobs, source: str) -> None:
    """Numbers are drawn in a thread of torch's own, and gradients are divided by counts."""
    words = (*WORDS, "--clip-grad-norm", "0.1")
    base = jobs.train("--stages", "1", *words, source=source)
    for more in (("--recompute", "never"), ("--schedule", "zb-h1", "--recompute", "never")):
        assert_same(base, jobs.train("--stages", "2", *more, *words, source=source))


BUFFERS = JOB.replace(
    "def model",
    """
    class Counts(nn.Module):  # its buffer stays on the host
        def __init__(self):
            super().__init__()
            self.register_buffer("count", None)

        def forward(self, x):
            if self.training:
                self.count = torch.zeros(1) if self.count is None else self.count + 1
            return x

    def model""",
).replace("nn.Tanh()", "nn.BatchNorm1d(16), Counts(), nn.Tanh()")


def test_replicas_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--replicas", "2", "--shard-optimizer", *WORDS)
    for source in (JOB, BUFFERS):
        one, two = (jobs.train("--stages", k, *words, source=source) for k in "12")
        assert_same(one, two)


def test_a_lost_worker_is_replaced_and_the_run_resumed(jobs: Jobs) -> None:
    base = jobs.train("--stages", "1", *WORDS, source=DROPOUT_JOB)
    slow = DROPOUT_JOB.replace("x = torch", "__import__('time').sleep(0.2)\n            x = torch")
    words = ("--snapshot-every", "1", "--steps", "4", *WORDS)
    process, path = jobs.start("--stages", "2", *words, source=slow)
    until(lambda: steps_of(path) >= 2)
    os.kill(Record(path).plan["stages"][1]["pid"], signal.SIGKILL)
    assert ended(process, path, seconds=90).summary["restarts"] == 1
    more = jobs.pipeworker("launch", "--resume", str(path), "--stages", "1", "--steps", "5")
    assert more.returncode == 0, more.stderr
    assert_same(base, Record(path))


def test_stages_on_accelerators_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    assert base.plan["stages"][0]["device"].startswith(DEVICE)
    for stages in ("2", "4"):
        for mode in ("always", "never", "offload"):
            more = ("--stages", stages, "--recompute", mode)
            run = jobs.train(*more, *words, source=DROPOUT_JOB)
            assert_same(base, run)
            for stage in range(int(stages)):
                assert "pass through the host" not in run.log(f"worker-{stage}")


def test_tensors_through_the_host_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    more = ("--stages", "3", "--backend", "gloo")
    assert_same(base, jobs.train(*more, *words, source=DROPOUT_JOB))


def test_data_may_overwrite_what_it_has_on_the_device(jobs: Jobs) -> None:
    made = f"memory = torch.empty(10, 8, device='{DEVICE}')\n        for _ in"
    source = JOB.replace("for _ in", made)
    source = source.replace("yield x,", "memory.copy_(x)\n            yield memory,")
    assert_same(*(jobs.train("--stages", "2", *WORDS, source=one) for one in (JOB, source)))


LOOPED = """
    import json
    from pathlib import Path
    import pipeworker

    if __name__ == "__main__":
        memory, losses = torch.empty(10, 8), []
        with pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, microbatches=4) as pipe:
            for x, y in data():
                memory.copy_(x)
                losses.append(pipe.step((memory, y)).loss)
                memory.fill_(float("nan"))
        Path("losses.json").write_text(json.dumps(losses))
"""


def test_a_loop_may_overwrite_its_mini_batch_after_a_step(jobs: Jobs) -> None:
    base = jobs.train("--stages", "1", *WORDS, source=JOB)
    process = jobs.python(str(jobs.write(JOB + LOOPED, "loop.py")))
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    losses = json.loads((jobs.folder / "losses.json").read_text())
    assert losses == [row["loss"] for row in base.metrics]


def test_two_threads_submit_work_to_a_stream_at_once() -> None:
    accelerator = accelerator_for(torch.device(DEVICE, 0))
    assert accelerator
    before = accelerator.current

    def submit() -> float:
        with accelerator.using(accelerator.sends):
            x = torch.zeros(1000, device=accelerator.device)
        for _ in range(1000):
            with accelerator.using(accelerator.sends):
                x += 1
        accelerator.event(accelerator.sends).synchronize()
        return float(x.sum())

    with ThreadPoolExecutor(2) as pool:
        assert [task.result() for task in [pool.submit(submit) for _ in range(2)]] == [1e6, 1e6]
    assert accelerator.current == before


@cuda
def test_a_device_receives_tensors_from_another_process(jobs: Jobs) -> None:
    """Both processes share the device; test_transport_devices.py checks the same without CUDA."""
    between_processes(jobs, "cuda")


@cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two CUDA devices")
def test_tensors_by_nccl_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6", "--device", "cuda", "--backend", "nccl")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    assert_same(base, jobs.train("--stages", "2", *words, source=DROPOUT_JOB))


@cuda
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="each stage has a CUDA device of its own")
def test_nccl_between_stages_that_share_a_device_is_an_error(jobs: Jobs) -> None:
    words = ("--stages", "2", "--device", "cuda", "--backend", "nccl", "--steps", "1")
    failed = jobs.run(*words, source=DROPOUT_JOB)
    assert failed.status == 2
    assert "nccl: each worker needs an accelerator of its own" in failed.stderr


@cuda
def test_a_channel_through_the_host_waits_for_the_device() -> None:
    """It uses streams, events and pinned memory of the device; both ends are in this process."""
    accelerator = accelerator_for(torch.device("cuda", 0))
    link, send_thread = MemoryLink(), TaskThread("send")
    sender = Sender(link, 4, send_thread, accelerator=accelerator)
    receiver = Receiver(link, 4, accelerator=accelerator)
    slow, results = torch.eye(4096, device="cuda"), []
    for step in range(3):
        sender.begin(0)
        receiver.begin(0, range(16))
        for m in range(16):
            late = (slow @ slow)[
                0, 0
            ]  # the tensor is late: a channel that does not wait sends other bytes
            sender.send(m, torch.full((1 << 20,), float(step * 16 + m), device="cuda") * late)
            results.append(receiver.receive(m).sum())
            receiver.release(m)
        sender.flush()
    send_thread.close()
    assert [float(result) for result in results] == [float(n << 20) for n in range(48)]


@cuda
def test_compiled_layers_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "3", "--device", "cuda", "--compile")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB, timeout=300)
    # The second one takes its layers from torch's cache, and splits their backwards.
    for more in ((), ("--schedule", "zb-h1", "--recompute", "never")):
        run = jobs.train("--stages", "2", *more, *words, source=DROPOUT_JOB, timeout=300)
        assert_same(base, run)


LARGE = """
    import torch
    from torch import nn

    class Adds(nn.Linear):  # adds in any order, unless the job is deterministic
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
LARGE_WORDS = ("--microbatches", "8", "--steps", "8", "--device", "cuda", "--deterministic")


@cuda
def test_deterministic_jobs_give_the_same_bits(jobs: Jobs) -> None:
    base = jobs.train("--stages", "1", *LARGE_WORDS, source=LARGE)
    for stages, mode in (("1", "always"), ("2", "always"), ("2", "offload")):
        words = ("--stages", stages, "--recompute", mode, *LARGE_WORDS)
        assert_same(base, jobs.train(*words, source=LARGE))


@cuda
@pytest.mark.parametrize("mode", ["always", "never", "offload"])
def test_a_step_after_the_first_ones_allocates_no_memory_of_the_driver(
    jobs: Jobs, mode: str
) -> None:
    run = jobs.train("--stages", "2", "--recompute", mode, *LARGE_WORDS, source=LARGE)
    for worker in ("worker-0", "worker-1"):
        logged = [line for line in run.log(worker).splitlines() if "driver" in line]
        layers = len(logged) // 8
        assert len(set(logged[3 * layers :])) == 1, logged
    if mode == "offload":
        never = jobs.train("--stages", "2", "--recompute", "never", *LARGE_WORDS, source=LARGE)
        peaks = (one.summary["peak_memory_bytes"] for one in (run, never))
        assert all(less < more for less, more in zip(*peaks, strict=True))


@cuda
def test_more_stages_than_devices_share_them_with_a_warning(jobs: Jobs) -> None:
    stages = 2 * torch.cuda.device_count()
    words = ("--stages", str(stages), "--microbatches", "4", "--steps", "2", "--device", "cuda")
    run = jobs.train(*words, source=LARGE)
    assert run.stderr.count("fewer accelerators than workers: stage 0, stage ") == 1
    assert " share cuda:0 on " in run.stderr


@cuda
def test_a_device_without_enough_memory_is_one_clear_error(jobs: Jobs) -> None:
    bound = "torch.cuda.set_per_process_memory_fraction(1e-3)\n\n    def model"
    source = JOB.replace("def model", bound)
    source = source.replace("nn.Linear(16, 16)", "nn.Linear(16, 1 << 22), nn.Linear(1 << 22, 16)")
    run = jobs.run("--stages", "1", "--device", "cuda", source=source)
    assert "out of memory" in run.stderr
    assert "--recompute always or offload, to keep less of them" in run.stderr
    assert "Traceback" not in run.stderr.partition("out of memory")[0]
