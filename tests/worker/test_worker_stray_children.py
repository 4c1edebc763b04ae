"""Children that the user's code forks and that return to pipeworker."""

from __future__ import annotations

from support.real_jobs.jobs import Jobs

FORKING = """
    import os, sys
    import torch
    from torch import nn

    forked = set()

    def fork(place):
        \"""Fork once in each process; the child returns, and must end by itself.\"""
        if sys.argv[1:] == ["fork"] and place not in forked:
            forked.add(place)
            if pid := os.fork():
                _, status = os.waitpid(pid, 0)
                if os.waitstatus_to_exitcode(status) != 1:
                    raise RuntimeError(f"{place}: the child ended with {status}")

    fork("file")

    class Forks(nn.Module):
        def forward(self, x):
            if x.requires_grad:
                x.register_hook(lambda _: fork("backward"))
            fork("forward")
            return x

    def model():
        fork("model")
        return nn.Sequential(
            nn.Linear(8, 8), Forks(), nn.Dropout(0.5), nn.Linear(8, 8), Forks(), nn.Linear(8, 3)
        )

    def loss(output, target):
        fork("loss")
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        fork("optimizer")
        return torch.optim.SGD(params, lr=0.1)

    def before_update(params):
        fork("update")

    def data():
        for _ in range(2):
            fork("data")
            yield torch.randn(8, 8), torch.arange(8) % 3

    def evaluation():
        fork("evaluation")
        yield torch.randn(8, 8), torch.arange(8) % 3

    def metrics(output, target):
        fork("metrics")
        return {}

    def on_step(row):
        print("called with step", row["step"])
        fork("hook")
"""


def test_children_that_return_end_and_change_nothing(jobs: Jobs) -> None:
    """A child that the user's code forks in any place does none of the work of its parent."""
    words = ("--stages", "2", "--microbatches", "2", "--evaluate-every", "2")
    quiet = jobs.train(*words, source=FORKING)
    forking = jobs.train(*words, "--", "fork", source=FORKING)
    columns = ("step", "loss", "grad_norm")
    rows = [[[row[name] for name in columns] for row in run.metrics] for run in (quiet, forking)]
    assert rows[0] == rows[1]
    assert len(rows[1]) == 2
    assert forking.log("hooks").count("called with step") == 2
    for name in ("worker-0", "worker-1", "hooks"):
        assert "returned to pipeworker, and ends" in forking.log(name)
