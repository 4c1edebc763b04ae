"""One worker through a whole job: for any exception, the right side is blamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeworker.coordinator.report import describe, location
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase
from pipeworker.wire.codec import encode
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import Evaluate, Evaluated, Update, Wait
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.device import numerics
from support.in_process.single_worker import SingleWorker, restored_process

_restored_process = pytest.fixture(autouse=True)(restored_process)

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
    """Run two steps with all that can come between them; return the failure, if any."""
    alone = SingleWorker()
    try:
        _run(alone, folder, text, recompute)
    except BaseException as error:
        return alone.worker.explain(error)
    finally:
        alone.worker.close()
    return None


def _run(alone: SingleWorker, folder: Path, text: str, recompute: str) -> None:
    batch = alone.begin(folder, text, recompute)
    worker = alone.worker
    for step in (1, 2):
        assert batch is not None
        done = alone.step(step, batch)
        assert len(encode(done, 1)) < 250  # two control messages a step, and small ones
        batch = done.batch
        worker.handle(Advance(Evaluate(step), Update(step)))
        worker.handle(Advance(Save(step), Evaluated(1.0)))
        position = worker.connected.position  # before the next mini-batch
        assert position is not None
        assert (position["epoch"], position["read"]) == (0, step)
    worker.handle(Advance(Wait()))


def layer_of(body: str, more: str = "") -> dict[str, str]:
    """Return a job with a layer of this body; one that imports pipeworker is surveyed first."""
    imports = "import pipeworker" if "pipeworker" in body else ""
    model = f"""
{imports}
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
IN_DATA = Cause.USER, "data() raised ValueError: no", Phase.READING
IN_LAYER = Cause.USER, "layer 1 (Bad) raised ValueError: no (its input was Tensor[2, 6] float32)"
IN_LOSS = (
    Cause.USER,
    "loss() raised ValueError: no (its output was Tensor[2, 2] float32, its target Tensor[2, 2]"
    " float32)",
)
CASES: dict[str, tuple[dict[str, str], Cause, str, Phase]] = {
    "job file": (
        {"more": NO},
        Cause.USAGE,
        "the job file job.py raised ValueError: no",
        Phase.LOADING,
    ),
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
    state_dict = load_state_dict = dict
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
    "data": ({"data": f"def data(): {NO}"}, *IN_DATA),
    "data later": (
        {"data": f"def data():\n    yield torch.ones(4, 6), torch.ones(4, 2)\n    {NO}"},
        *IN_DATA,
    ),
    "data's iterator": (
        {"data": f"class Data:\n    def __iter__(self):\n        {NO}\ndata = Data()"},
        *IN_DATA,
    ),
    "data's length": (
        {
            "data": "class Data:\n    def __getitem__(self, i): return None\n"
            f"    def __len__(self):\n        {NO}\ndata = Data()"
        },
        *IN_DATA,
    ),
    "data's state": (
        {
            "data": "class Data:\n    def __iter__(self): return iter([])\n"
            "    def load_state_dict(self, state): pass\n"
            f"    def state_dict(self):\n        {NO}\ndata = Data()"
        },
        *IN_DATA,
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
    "loss": ({"loss": f"def loss(output, target): {NO}"}, *IN_LOSS, Phase.LOSS),
    "loss in evaluation": (
        {
            "loss": "def loss(output, target):\n    if not output.requires_grad:\n"
            f"        {NO}\n    return output.mean()"
        },
        *IN_LOSS,
        Phase.EVALUATION,
    ),
    "forward": (layer_of(f"        {NO}"), *IN_LAYER, Phase.FORWARD),
    "evaluation's forward": (
        layer_of(f"        if self.training: return x\n        {NO}"),
        *IN_LAYER,
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
        *IN_LAYER,
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
        "layer 1 (Bad) called sys.exit(3) (its input was Tensor[2, 6] float32)",
        Phase.FORWARD,
    ),
}


def test_a_correct_job_has_no_failure(tmp_path: Path) -> None:
    assert job(tmp_path, source()) is None


def test_the_message_of_a_step_does_not_grow_with_the_parameters(tmp_path: Path) -> None:
    """The model has 300 parameters; the size of the message is checked in every step."""
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


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
@pytest.mark.parametrize("body", [NO, "return 3"])
def test_a_mistake_of_one_stage_names_the_stage_and_no_layer(
    tmp_path: Path, name: str, body: str
) -> None:
    failure = job(tmp_path, source(**{name: f"def {name}(argument): {body}"}))
    assert failure is not None
    assert describe(failure).splitlines()[1] == "  in making the optimizer: stage 0"


@pytest.mark.parametrize(("recompute", "graphs"), [("always", "1 graph"), ("never", "2 graphs")])
def test_an_error_about_memory_has_the_expectation_of_the_plan(
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
    assert advice.startswith(f"  out of memory: {kept}; use more --microbatches")


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


def test_a_nondeterministic_kernel_is_named_by_its_layer_under_deterministic(
    tmp_path: Path,
) -> None:
    """The option overrides the job file."""
    text = source(model=PUTS, more="torch.use_deterministic_algorithms(False)")
    assert job(tmp_path, text) is None
    alone = SingleWorker()
    with numerics.deterministic_mode(lambda: True):
        batch = alone.begin(tmp_path, text, deterministic=True)
        assert batch
        with pytest.raises(UserCodeError) as seen:
            alone.step(1, batch)
    failure = alone.worker.explain(seen.value)
    alone.worker.close()
    assert failure.message.startswith("layer 1 (Layer) raised RuntimeError: put_ does not have a")
    assert "leave out --deterministic" in failure.message
    assert location(failure) == "stage 0, layer 1 (Layer), micro-batch 0, step 1"


DEFECTS: dict[str, tuple[str, Phase]] = {
    "pipeworker.worker.data.reader.Reader.split": ("always", Phase.READING),
    "pipeworker.worker.step.stage_channels.StageChannels.forward": ("always", Phase.WAITING),
    "pipeworker.worker.stage.rng.layer_seed": ("never", Phase.FORWARD),
    "pipeworker.worker.stage.stage.Layers.run": ("never", Phase.WAITING),
    "pipeworker.worker.stage.recompute.Buffers.first_forward": ("always", Phase.WAITING),
    "pipeworker.worker.stage.stage.aligned_copy": ("always", Phase.WAITING),
    "pipeworker.worker.stage.losses.record": ("never", Phase.LOSS),
    "pipeworker.worker.stage.losses.gradient": ("always", Phase.BACKWARD),
    "pipeworker.worker.stage.stage.Stage.end_action": ("always", Phase.LOSS),
    "pipeworker.worker.update.update.Updater.squares": ("always", Phase.WAITING),
    "pipeworker.worker.update.update.Updater.apply": ("always", Phase.UPDATE),
    "pipeworker.worker.stage.rng.update_seed": ("always", Phase.UPDATE),
    "pipeworker.worker.step.evaluation.sizes": ("always", Phase.EVALUATION),
    "pipeworker.worker.step.averages.parts": ("always", Phase.EVALUATION),
    "pipeworker.worker.state.snapshot_writer.write_files": ("always", Phase.SAVING),
    "pipeworker.worker.phases.Executor": ("always", Phase.CONNECTING),
    "pipeworker.worker.model.model.Model.build": ("always", Phase.BUILDING),
    "pipeworker.worker.worker.classes_of": ("always", Phase.BUILDING),
}
"""Public functions of a worker's parts, with a recompute mode and the phase they run in."""


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_pipeworker_is_reported_as_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: Any, **__: Any) -> Any:
        raise KeyError("ours")

    # The survey runs only if the job file's module is new to this process: with it, a defect could
    # be found earlier in the first test than in later ones.
    monkeypatch.setattr("pipeworker.worker.model.survey.mentions_skips", lambda _: False)
    monkeypatch.setattr(name, defect)
    recompute, phase = DEFECTS[name]
    text = source(model=layer_of("        return x")["model"])
    failure = job(tmp_path, text, recompute)
    assert failure is not None
    assert failure.cause is Cause.INTERNAL, failure.message
    assert failure.message == "a defect in pipeworker: KeyError: 'ours'"
    assert "/pipeworker/worker/" in failure.traceback
    assert "in defect" in failure.traceback
    assert failure.position.phase is phase
