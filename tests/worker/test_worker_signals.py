"""Signals of a worker are its own: what the user's code forks can be terminated."""

from __future__ import annotations

from support.real_jobs.jobs import Jobs

FORKS = """
import multiprocessing, signal, socket
from pipeworker.worker.signals import handle_signals

ours, theirs = socket.socketpair()
for end in (ours, theirs):
    end.setblocking(False)
for _ in range(2):
    handle_signals(wakeup=theirs.fileno())
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
for _ in range(20):
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    child.terminate()
    child.join(20)
    print(child.exitcode)
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
try:
    ours.recv(9)
except BlockingIOError:
    print("nothing")
signal.raise_signal(signal.SIGTERM)
print(list(ours.recv(9)))
"""


def test_a_forked_child_is_terminated_and_its_parent_not_told(jobs: Jobs) -> None:
    # A new interpreter without torch: a fork of a larger process takes longer.
    stdout, stderr = jobs.python("-c", FORKS, cold=True).communicate(timeout=60)
    assert stdout.split("\n") == [*["-15"] * 20, "nothing", "[15]", ""], stderr


POOLED = """
    import multiprocessing

    import torch
    from torch import nn

    def pooled():
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(abs, (-1.0,))

    def model():
        return [nn.Linear(4, 4), nn.Linear(4, int(pooled()))]

    def loss(output, target):
        return (output - target).square().mean()

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        while True:
            yield torch.full((8, 4), pooled()), torch.ones(8, 1)
"""


def test_the_users_code_may_use_a_pool_of_processes(jobs: Jobs) -> None:
    """In the worker, in the process that surveys the model, and in the one that reads data."""
    run = jobs.train("--stages", "2", "--microbatches", "2", "--steps", "1", source=POOLED)
    assert run.summary["restarts"] == 0
