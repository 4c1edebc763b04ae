"""One worker through a whole job: whatever raises, the right one is blamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeworker.coordinator.report import place
from pipeworker.wire.codec import encode
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.calls import Wait
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.evaluation import Evaluate, Evaluated
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.position import Phase
from pipeworker.wire.messages.step import Update
from pipeworker.worker.blame import Raised
from pipeworker.worker.device import numerics
from support.alone import Alone, as_it_was

_as_it_was = pytest.fixture(autouse=True)(as_it_was)

BASE = {
    "model": """
class Fine(nn.Linear):
    pass
def model():
    return [Fine(6, 6), nn.Tanh(), nn.Linear(6, 2)]
""",
    "loss": "loss = nn.functional.mse_loss",
    "optimizer": "def optimizer(params): return torch.optim.SGD(params, lr=0.1)",
    "scheduler": "def scheduler(opt): return torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)",
    "data": """
def data():
    while True:
        yield torch.ones(4, 6), torch.ones(4, 2)
""",
    "evaluation": "def evaluation(): return [(torch.ones(4, 6), torch.ones(4, 2))] * 2",
    "metrics": "def metrics(output, target): return {'m': output.mean()}",
    "before_update": "def before_update(params): pass",
    "more": "",
}


def source(**changed: str) -> str:
    parts = {**BASE, **changed}
    return "\n".join(["import torch", "from torch import nn", "", *parts.values(), ""])


def job(folder: Path, text: str, recompute: str = "always") -> Failure | None:
    """Run two steps with all that can come between them; what went wrong, if anything."""
    alone = Alone()
    try:
        _run(alone, folder, text, recompute)
    except BaseException as error:
        return alone.worker.explain(error)
    finally:
        alone.worker.close()
    return None


def _run(alone: Alone, folder: Path, text: str, recompute: str) -> None:
    batch = alone.begin(folder, text, recompute)
    worker = alone.worker
    for step in (1, 2):
        assert batch is not None
        done = alone.step(step, batch)
        assert len(encode(done, 1)) < 250  # two control messages a step, and small ones
        batch = done.batch
        worker.handle(Advance(Evaluate(step), Update(step)))
        worker.handle(Advance(Save(step), Evaluated(1.0)))
        position = worker.position()  # before what is held ready
        assert position is not None
        assert (position["epoch"], position["read"]) == (0, step)
    worker.handle(Advance(Wait()))


def layer_of(body: str, more: str = "") -> dict[str, str]:
    model = f"""
import pipeworker
class Bad(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
{body}
def model():
    return [nn.Linear(6, 6), Bad(), nn.Linear(6, 2)]
"""
    return {"more": more, "model": model}


NO = 'raise ValueError("no")'
FUNCTION = f"""
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        {NO}
"""
CASES: dict[str, tuple[dict[str, str], Cause, str, Phase]] = {
    "job file": ({"more": NO}, Cause.USAGE, "the job file raised ValueError: no", Phase.LOADING),
    "model": (
        {"model": f"def model(): {NO}"},
        Cause.USAGE,
        "model() raised ValueError: no",
        Phase.BUILDING,
    ),
    "layer builder": (
        {"model": f"def bad(): {NO}\ndef model(): return [lambda: nn.Linear(6, 2), bad]"},
        Cause.USAGE,
        "building layer 1 raised ValueError: no",
        Phase.BUILDING,
    ),
    "optimizer": (
        {"optimizer": f"def optimizer(params): {NO}"},
        Cause.USAGE,
        "optimizer() raised ValueError: no",
        Phase.UPDATE,
    ),
    "optimizer step": (
        {
            "optimizer": f"""
class Bad(torch.optim.SGD):
    def step(self, closure=None):
        {NO}
def optimizer(params): return Bad(params, lr=0.1)
"""
        },
        Cause.USER,
        "the optimizer raised ValueError: no",
        Phase.UPDATE,
    ),
    "scheduler": (
        {"scheduler": f"def scheduler(opt): {NO}"},
        Cause.USAGE,
        "scheduler() raised ValueError: no",
        Phase.UPDATE,
    ),
    "scheduler step": (
        {
            "scheduler": f"""
class Bad:
    def step(self):
        {NO}
def scheduler(opt): return Bad()
"""
        },
        Cause.USER,
        "the scheduler raised ValueError: no",
        Phase.UPDATE,
    ),
    "before_update": (
        {"before_update": f"def before_update(params): {NO}"},
        Cause.USER,
        "before_update() raised ValueError: no",
        Phase.UPDATE,
    ),
    "data": (
        {"data": f"def data(): {NO}"},
        Cause.USER,
        "data() raised ValueError: no",
        Phase.READING,
    ),
    "data later": (
        {"data": f"def data():\n    yield torch.ones(4, 6), torch.ones(4, 2)\n    {NO}"},
        Cause.USER,
        "data() raised ValueError: no",
        Phase.READING,
    ),
    "data's iterator": (
        {"data": f"class Data:\n    def __iter__(self):\n        {NO}\ndata = Data()"},
        Cause.USER,
        "data() raised ValueError: no",
        Phase.READING,
    ),
    "data's length": (
        {
            "data": "class Data:\n    def __getitem__(self, i): return None\n"
            f"    def __len__(self):\n        {NO}\ndata = Data()"
        },
        Cause.USER,
        "data() raised ValueError: no",
        Phase.READING,
    ),
    "data's state": (
        {
            "data": "class Data:\n    def __iter__(self): return iter([])\n"
            "    def load_state_dict(self, state): pass\n"
            f"    def state_dict(self):\n        {NO}\ndata = Data()"
        },
        Cause.USER,
        "data() raised ValueError: no",
        Phase.READING,
    ),
    "evaluation": (
        {"evaluation": f"def evaluation(): {NO}"},
        Cause.USER,
        "evaluation() raised ValueError: no",
        Phase.EVALUATION,
    ),
    "metrics": (
        {"metrics": f"def metrics(output, target): {NO}"},
        Cause.USER,
        "metrics() raised ValueError: no",
        Phase.EVALUATION,
    ),
    "loss": (
        {"loss": f"def loss(output, target): {NO}"},
        Cause.USER,
        "loss() raised ValueError: no (its output was Tensor[2, 2] float32, its target Tensor[2, 2]"
        " float32)",
        Phase.LOSS,
    ),
    "loss in evaluation": (
        {
            "loss": "def loss(output, target):\n    if not output.requires_grad:\n"
            f"        {NO}\n    return output.mean()"
        },
        Cause.USER,
        "loss() raised ValueError: no (its output was Tensor[2, 2] float32, its target Tensor[2, 2]"
        " float32)",
        Phase.EVALUATION,
    ),
    "forward": (
        layer_of(f"        {NO}"),
        Cause.USER,
        "layer 1 (Bad) raised ValueError: no (its input was Tensor[2, 6] float32)",
        Phase.FORWARD,
    ),
    "evaluation's forward": (
        layer_of(f"        if self.training: return x\n        {NO}"),
        Cause.USER,
        "layer 1 (Bad) raised ValueError: no (its input was Tensor[2, 6] float32)",
        Phase.EVALUATION,
    ),
    "forward of nested values": (
        {
            "model": f"""
class First(nn.Linear):
    def forward(self, x): return super().forward(x), None
class Bad(nn.Module):
    def forward(self, x):
        {NO}
def model():
    return [First(6, 8), Bad()]
"""
        },
        Cause.USER,
        "layer 1 (Bad) raised ValueError: no (its input was (Tensor[2, 8], None) float32)",
        Phase.FORWARD,
    ),
    "recompute": (
        layer_of(f"        if not pipeworker.is_recomputing(): return x\n        {NO}"),
        Cause.USER,
        "layer 1 (Bad) raised ValueError: no (its input was Tensor[2, 6] float32)",
        Phase.RECOMPUTE,
    ),
    "a Function's backward": (
        layer_of("        return Function.apply(x)", FUNCTION),
        Cause.USER,
        "layer 1 (Bad) raised ValueError: no",
        Phase.BACKWARD,
    ),
    "a hook": (
        layer_of(
            "        x = x * 1\n        x.register_hook(bad)\n        return x * 1",
            f"def bad(gradient): {NO}",
        ),
        Cause.USER,
        "layer 1 (Bad) raised ValueError: no",
        Phase.BACKWARD,
    ),
    "the end of the script": (
        layer_of('        raise SystemExit(3)  # raise ValueError("no")'),
        Cause.USER,
        "layer 1 (Bad) raised SystemExit: 3 (its input was Tensor[2, 6] float32)",
        Phase.FORWARD,
    ),
}


def test_a_job_that_is_right(tmp_path: Path) -> None:
    assert job(tmp_path, source()) is None


def test_what_a_step_says_does_not_grow_with_the_parameters(tmp_path: Path) -> None:
    """Three hundred of them; the size of what is said is looked at in every step."""
    model = """
class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList(torch.full((1,), 1 + 0.1 * n) for n in range(300))
    def forward(self, x):
        for parameter in self.all:
            x = x * parameter
        return x / x.detach()
def model():
    return [nn.Linear(6, 2), Many()]
"""
    assert job(tmp_path, source(model=model)) is None


@pytest.mark.parametrize("name", CASES)
def test_the_user_is_blamed(tmp_path: Path, name: str) -> None:
    changed, cause, message, phase = CASES[name]
    failure = job(tmp_path, source(**changed))
    assert failure is not None
    assert (failure.cause, failure.message) == (cause, message)
    assert failure.position.phase is phase
    assert 'job.py", line' in failure.traceback
    assert NO in failure.traceback
    assert "/pipeworker/" not in failure.traceback
    assert failure.stage in ("stage 0", "rank 0")


@pytest.mark.parametrize(("recompute", "graphs"), [("always", "1 graph"), ("never", "2 graphs")])
def test_who_runs_out_of_memory_learns_what_the_plan_expected(
    tmp_path: Path, recompute: str, graphs: str
) -> None:
    model = """
class Big(nn.Linear):
    def forward(self, x): raise torch.OutOfMemoryError("no")
def model(): return [nn.Linear(6, 6), Big(6, 2)]
"""
    failure = job(tmp_path, source(model=model), recompute)
    assert failure is not None
    first, advice = failure.message.splitlines()
    assert first.startswith("layer 1 (Big) raised OutOfMemoryError: no (its input was Tensor[2, 6]")
    kept = f"the plan has stage 0 keep {graphs} and 2 inputs of micro-batches at once"
    assert advice.startswith(f"  out of memory: {kept}; more --microbatches make each smaller")


PUTS = """
class Puts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone().put_(torch.tensor([0]), torch.ones(1))
class Layer(nn.Module):
    def forward(self, x): return Puts.apply(x)
def model(): return [nn.Linear(6, 2), Layer()]
"""


def test_a_kernel_that_is_not_deterministic_is_named_by_its_layer_where_it_must_be(
    tmp_path: Path,
) -> None:
    """Also where the job file says otherwise."""
    text = source(model=PUTS, more="torch.use_deterministic_algorithms(False)")
    assert job(tmp_path, text) is None
    alone = Alone()
    with numerics.put_back(lambda: True):
        batch = alone.begin(tmp_path, text, deterministic=True)
        assert batch
        with pytest.raises(Raised) as seen:
            alone.step(1, batch)
    failure = alone.worker.explain(seen.value)
    alone.worker.close()
    assert failure.message.startswith("layer 1 (Layer) raised RuntimeError: put_ does not have a")
    assert "leave out --deterministic" in failure.message
    assert place(failure) == "stage 0, layer 1 (Layer), micro-batch 0, step 1"


OURS: dict[str, tuple[str, Phase]] = {
    "pipeworker.worker.step.data._split": ("", Phase.READING),
    "pipeworker.worker.step.flow.Flow.forward": ("always", Phase.WAITING),
    "pipeworker.worker.stage.stage.rng.layer_seed": ("never", Phase.FORWARD),
    "pipeworker.worker.stage.stage.Stage._mark": ("never", Phase.FORWARD),
    "pipeworker.worker.stage.recompute.Buffers.first_forward": ("always", Phase.WAITING),
    "pipeworker.worker.stage.stage.copied": ("always", Phase.WAITING),
    "pipeworker.worker.stage.stage.losses.record": ("never", Phase.LOSS),
    "pipeworker.worker.stage.stage.losses.gradient": ("always", Phase.BACKWARD),
    "pipeworker.worker.stage.stage.Stage._give": ("always", Phase.BACKWARD),
    "pipeworker.worker.update.update._elements": ("always", Phase.WAITING),
    "pipeworker.worker.update.update.Updater._finish_gradients": ("always", Phase.UPDATE),
    "pipeworker.worker.update.update.rng.update_seed": ("always", Phase.UPDATE),
    "pipeworker.worker.step.stream.sizes": ("always", Phase.EVALUATION),
    "pipeworker.worker.step.evaluation._scalar": ("always", Phase.EVALUATION),
    "pipeworker.worker.state.keeper.write": ("always", Phase.SAVING),
    "pipeworker.worker.worker.Executor": ("always", Phase.CONNECTING),
    "pipeworker.worker.model.model._check_apart": ("always", Phase.BUILDING),
    "pipeworker.worker.description.classes_of": ("always", Phase.BUILDING),
}


@pytest.mark.parametrize("name", OURS)
def test_we_are_blamed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: Any, **__: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr(name, defect)
    recompute, phase = OURS[name]
    text = source(model=layer_of("        return x")["model"])
    failure = job(tmp_path, text, recompute or "always")
    assert failure is not None
    assert failure.cause is Cause.INTERNAL, failure.message
    assert failure.message == "a defect in pipeworker: KeyError: 'ours'"
    assert "/pipeworker/worker/" in failure.traceback
    assert "in defect" in failure.traceback
    assert failure.position.phase is phase
