"""Exceptions as the user sees them: whose error, where, and only the user's own frames."""

from __future__ import annotations

import errno
import re
from bdb import BdbQuit
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import torch
from torch import nn

from pipeworker.errors import (
    NoTerminalError,
    PeerLost,
    PipeworkerError,
    ReplicasDiffer,
    SkipError,
    SnapshotLost,
    UsageError,
)
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.worker.blame import (
    JobExit,
    UserCodeError,
    blame_user,
    failure_of,
    layer,
    reject_none,
    user_code,
    user_traceback,
)
from pipeworker.worker.stage.layers import StageConfig
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.stage import Stage

FORWARD = Position(Phase.FORWARD, 3, 1, 5)


def in_step(error: SkipError) -> SkipError:
    error.in_step = True
    return error


def raised_by(
    error: BaseException, function: str, *, early: bool = False, note: str = ""
) -> UserCodeError:
    with pytest.raises(UserCodeError) as caught:
        blame_user(function, error, early=early, note=note)
    assert caught.value.__cause__ is error
    return caught.value


@pytest.mark.parametrize(
    ("error", "step", "cause", "message"),
    [
        (UsageError("write it so"), 3, Cause.USAGE, "write it so"),
        (ReplicasDiffer("they differ"), 3, Cause.DIVERGED, "they differ"),
        (SkipError("popped twice"), 0, Cause.USAGE, "popped twice"),
        (in_step(SkipError("popped twice")), 3, Cause.USER, "popped twice"),
        (NoTerminalError("line 3"), 3, Cause.USAGE, "line 3"),
        (PeerLost("closed"), 3, Cause.PEER, "closed"),
        (SnapshotLost("it is lost"), 3, Cause.SNAPSHOT, "it is lost"),
        (PipeworkerError("a set cannot pass"), 3, Cause.USER, "a set cannot pass"),
        (ValueError("no"), 3, Cause.INTERNAL, "a defect in pipeworker: ValueError: no"),
        (KeyError(), 3, Cause.INTERNAL, "a defect in pipeworker: KeyError"),
        (KeyboardInterrupt(), 3, Cause.USER, "KeyboardInterrupt"),
    ],
)
def test_an_exception_has_a_cause(
    error: BaseException, step: int, cause: Cause, message: str
) -> None:
    position = Position(Phase.FORWARD, step, 1, 5)
    failure = failure_of(error, 2, position, "Linear", "stage 1")
    assert (failure.cause, failure.message) == (cause, message)
    assert (failure.rank, failure.position, failure.layer_class) == (2, position, "Linear")
    assert failure.stage == "stage 1"
    assert bool(failure.traceback) is not isinstance(error, PipeworkerError)
    assert failure.lacks_place is isinstance(error, NoTerminalError)


@pytest.mark.parametrize("kind", [RuntimeError, GeneratorExit, SystemExit])
def test_what_a_signal_handler_of_the_user_raises_is_the_users(kind: type[BaseException]) -> None:
    job = ModuleType("job")
    exec("def handler(kind): raise kind('too late')", vars(job))
    with pytest.raises(kind) as caught:
        vars(job)["handler"](kind)
    failure = failure_of(caught.value, 2, Position(Phase.WAITING, 3), modules=[job])
    assert failure.cause is Cause.USER
    assert re.match("the job file (raised|called) .*too late", failure.message)
    assert failure_of(caught.value, 2, Position()).cause is Cause.INTERNAL


def test_a_request_for_input_while_the_job_file_is_loaded_has_no_place() -> None:
    error = NoTerminalError("line 3")
    assert not failure_of(error, 2, Position(Phase.LOADING)).lacks_place


@pytest.mark.parametrize(
    ("error", "step", "lacks"),
    [
        (UserCodeError("optimizer()", ValueError("no"), early=True, note=""), -1, True),
        (UsageError("optimizer(params) returned an int"), -1, True),
        (JobExit("optimizer()", SystemExit(3)), -1, False),
        (UsageError("the learning rate is 'x'"), 3, False),
    ],
)
def test_a_mistake_in_the_optimizer_of_one_stage_has_the_stage(
    error: BaseException, step: int, lacks: bool
) -> None:
    """Other stages may have called the same function without an error."""
    failure = failure_of(error, 1, Position(Phase.UPDATE, step), stage="stage 1")
    assert failure.lacks_place is lacks


class Silent(RuntimeError):
    """An exception without a text."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "function", "early", "cause", "message"),
    [
        (ValueError("no"), layer(5, "Linear"), False, Cause.USER, "layer 5 (Linear) raised Val"),
        (KeyError(), layer(5, ""), False, Cause.USER, "layer 5 raised KeyError"),
        (ValueError("no"), "the job file", True, Cause.USAGE, "the job file raised ValueError: no"),
        (SystemExit(3), "data()", False, Cause.USER, "data() called sys.exit(3)"),
        (Silent(), "data()", False, Cause.USER, "data() raised Silent: <exception str() failed>"),
    ],
)
def test_an_exception_of_user_code_is_the_users_in_any_phase(
    error: BaseException, function: str, early: bool, cause: Cause, message: str
) -> None:
    for phase in Phase:
        failure = failure_of(raised_by(error, function, early=early), 0, Position(phase, 3))
        assert failure.cause is cause
        assert failure.message.startswith(message)
        assert type(error).__name__ in failure.traceback


WITHOUT_A_MESSAGE = "without a message; remove its sys.exit(), or have it print the reason"


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (3, 3, f"the job file exited with status 3 {WITHOUT_A_MESSAGE}"),
        (None, 0, f"the job file exited with status 0 {WITHOUT_A_MESSAGE}"),
        (-1, 255, f"the job file exited with status 255 {WITHOUT_A_MESSAGE}"),
        ("no data", 1, "no data"),
    ],
)
def test_a_job_file_that_exits_chooses_its_message_and_status(
    code: object, status: int, message: str
) -> None:
    error = raised_by(SystemExit(code), "the job file", early=True)
    failure = failure_of(error, 0, Position(Phase.LOADING))
    assert (failure.cause, failure.status, failure.message) == (Cause.EXIT, status, message)
    assert not failure.traceback


def test_an_error_about_memory_advises_how_to_use_less() -> None:
    with pytest.raises(RuntimeError) as on_the_cpu:
        torch.empty(1 << 46)
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    for error in (
        *(on_the_cpu.value, torch.OutOfMemoryError("CUDA out of memory"), MemoryError()),
        *(torch.AcceleratorError("CUDA error: out of memory"), RuntimeError(cublas)),
    ):
        for seen in (error, raised_by(error, layer(5, "Linear"))):
            failure = failure_of(seen, 0, Position(Phase.FORWARD, 3))
            assert failure.cause is Cause.USER
            assert failure.message.startswith(
                f"{'layer 5 (Linear) raised ' if seen is not error else ''}{type(error).__name__}"
            )
            assert "out of memory: use more --microbatches, to make each smaller" in failure.message
    other = failure_of(raised_by(RuntimeError("no"), "data()"), 0, Position(Phase.READING))
    assert "memory" not in other.message


def test_an_error_about_memory_has_the_expectation_of_the_plan() -> None:
    keeps = "the plan has stage 1 keep 4 graphs and 8 inputs of micro-batches at once"
    for error in (torch.OutOfMemoryError("no"), raised_by(torch.OutOfMemoryError("no"), "layer 5")):
        failure = failure_of(error, 0, Position(Phase.FORWARD, 3), keeps=keeps)
        assert f"  out of memory: {keeps}; use more --microbatches" in failure.message


NO_THREAD = RuntimeError("can't start new thread")
NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    "error",
    [
        NO_THREAD,
        RuntimeError("Resource temporarily unavailable"),  # of a thread in C++
        NO_PROCESS,
        raised_by(NO_PROCESS, "data()"),
        raised_by(NO_THREAD, layer(5, "Linear")),
    ],
)
def test_a_thread_or_process_that_the_system_refuses_is_a_loss(error: BaseException) -> None:
    failure = failure_of(error, 2, FORWARD, "Linear")
    assert failure.cause is Cause.LOST
    assert "defect" not in failure.message
    assert "the system grants no more threads or processes: raise the limit" in failure.message
    (line,) = failure.message.splitlines()
    assert line.startswith(("RuntimeError", "BlockingIOError", "data() raised", "layer 5 (Lin"))


LOADER_KILLED = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


@pytest.mark.parametrize(
    "error",
    [
        LOADER_KILLED,  # torch's signal handler raises it anywhere
        RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
        raised_by(LOADER_KILLED, "data()"),
        raised_by(LOADER_KILLED, layer(5, "Linear")),
    ],
)
def test_a_process_of_a_loader_that_is_gone_is_a_loss(error: BaseException) -> None:
    failure = failure_of(error, 2, FORWARD, "Linear")
    assert failure.cause is Cause.LOST
    assert failure.message.startswith("a process of data() is gone: RuntimeError: DataLoader work")
    assert not failure.traceback


ECC = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize("error", [ECC, raised_by(ECC, layer(5, "Linear"))])
def test_a_device_that_has_failed_is_a_loss(error: BaseException) -> None:
    failure = failure_of(error, 2, FORWARD, "Linear")
    assert failure.cause is Cause.LOST
    assert failure.message.startswith("its device has failed: AcceleratorError: CUDA error: uncorr")


def test_work_that_a_device_could_not_do_is_the_user_s() -> None:
    """It may show at any later call of pipeworker's own."""
    failure = failure_of(torch.AcceleratorError("CUDA error: device-side assert"), 2, FORWARD)
    assert failure.cause is Cause.USER
    assert failure.message == "AcceleratorError: CUDA error: device-side assert"


def test_a_change_in_place_of_what_a_graph_has_saved_is_explained() -> None:
    weight = torch.ones(2, requires_grad=True)
    product = (weight * weight).sum()
    with torch.no_grad():
        weight.clamp_(0, 0.5)
    with pytest.raises(RuntimeError) as seen:
        product.backward()  # type: ignore[no-untyped-call]
    failure = failure_of(raised_by(seen.value, layer(5, "Linear")), 0, FORWARD)
    assert "several micro-batches run forward before the first one runs back" in failure.message


def test_a_change_in_place_of_an_activation_is_explained() -> None:
    hidden = torch.ones(2, requires_grad=True).tanh()
    output = torch.nn.functional.relu(hidden, inplace=True)
    with pytest.raises(RuntimeError) as seen:
        output.sum().backward()  # type: ignore[no-untyped-call]
    failure = failure_of(raised_by(seen.value, layer(5, "Tanh")), 0, FORWARD)
    assert "needs that in backward, use inplace=False, and x = x + y for x += y" in failure.message


def test_a_loss_that_runs_backward_itself_is_explained() -> None:
    """The backward of the last layer raises then, so its error names that layer."""
    output = torch.ones(2, requires_grad=True).square().sum()
    output.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError) as seen:
        output.backward()  # type: ignore[no-untyped-call]
    failure = failure_of(raised_by(seen.value, layer(5, "Linear")), 0, FORWARD)
    assert "\n  a graph that has run backward: call backward() neither in loss(" in failure.message


def test_a_layer_that_cannot_be_offloaded_is_advised_another_mode() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        derived: torch.Tensor = torch.func.grad(lambda v: v.square().sum())(x)
        return derived

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with pytest.raises(RuntimeError) as seen, hooks:
        forward(torch.ones(2))
    failure = failure_of(raised_by(seen.value, "layer 1"), 0, Position(Phase.FORWARD, 3, 1, 1))
    assert failure.message.endswith(
        "\n  --recompute offload: the layer does not support the hooks that move saved tensors; "
        "choose another mode"
    )


def test_batch_norm_on_too_few_samples_names_the_option() -> None:
    with pytest.raises(ValueError, match="more than 1 value") as seen:
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    failure = failure_of(raised_by(seen.value, "layer 1"), 0, Position(Phase.FORWARD, 3, 1, 1))
    assert failure.message.endswith(
        "\n  batch norm: this micro-batch is too small; use fewer --microbatches or larger "
        "mini-batches, and leave out a small last one (drop_last=True)"
    )


def test_a_missing_deterministic_kernel_is_explained() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as seen:
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    failure = failure_of(raised_by(seen.value, "layer 5"), 0, Position(Phase.BACKWARD, 3, 1, 5))
    assert "put_ does not have a deterministic implementation" in failure.message
    assert failure.message.endswith(
        "leave out --deterministic (docs/networks.md explains its purpose)"
    )


def test_leaving_a_debugger_interrupts_the_job() -> None:
    with pytest.raises(KeyboardInterrupt), user_code("layer 3"):
        raise BdbQuit


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no")])
def test_a_layer_that_returned_none_is_named(error: Exception) -> None:
    expected = "layer 2 (Block): returned None, on which layer 3 (Linear) raised"
    with pytest.raises(
        UsageError, match=re.escape(f"{expected} {type(error).__name__}: no; return")
    ):
        reject_none(None, "layer 2 (Block)", "layer 3 (Linear)", error)
    reject_none(torch.ones(1), "layer 2 (Block)", "layer 3 (Linear)", error)


def test_the_input_of_a_layer_is_added() -> None:
    error = raised_by(ValueError("no"), "layer 5 (Linear)", note="its input was Tensor[2]")
    assert str(error) == "layer 5 (Linear) raised ValueError: no (its input was Tensor[2])"


@pytest.mark.parametrize("error", [UsageError("x"), PeerLost("x"), SkipError("x")])
def test_an_error_of_pipeworker_passes_through_user_code(error: PipeworkerError) -> None:
    with pytest.raises(type(error)) as caught, user_code("data()"), user_code("layer 3"):
        raise error
    assert caught.value is error


def test_the_innermost_user_code_is_named() -> None:
    expected = r"^loss\(\) raised ValueError: no$"
    with pytest.raises(UserCodeError, match=expected), user_code("the script"), user_code("loss()"):
        raise ValueError("no")


def test_an_interrupt_is_not_blamed_on_user_code() -> None:
    with pytest.raises(KeyboardInterrupt), user_code("data()"):
        raise KeyboardInterrupt


class Unsaved(nn.Module):
    def state_dict(self, *_: object, **__: object) -> NoReturn:
        raise KeyError("where")


def test_a_layer_that_cannot_be_saved_is_named() -> None:
    stage = Stage(
        [nn.ReLU(), Unsaved()], StageConfig(0, 2, seed=0, device=torch.device("cpu")), Tracker()
    )
    with pytest.raises(
        UserCodeError, match=r"state_dict\(\) of layer 3 \(Unsaved\) raised KeyError"
    ):
        stage.state_dicts()


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error


def test_only_the_users_frames_are_shown() -> None:
    stage = Stage([Broken()], StageConfig(0, 0, seed=0, device=torch.device("cpu")), Tracker())
    stage.begin(1)
    mb = MicroBatch(0, value=torch.ones(1), wants_grad=[False])
    with pytest.raises(UserCodeError, match="ValueError: outer") as caught:
        stage.forward(mb)
    shown = failure_of(caught.value, 0, FORWARD).traceback
    assert Path(__file__).name in shown
    assert "/pipeworker/worker/" not in shown
    assert "KeyError: 'inner'" in shown
    assert "direct cause" in shown
    assert shown.rstrip().endswith("ValueError: outer")


@pytest.mark.usefixtures("as_a_worker")
def test_a_job_file_that_fails_shows_its_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("import math\n\nmath.sqrt(-1)\n")
    with pytest.raises(ValueError, match=r"math domain|nonnegative") as caught:
        job_file.load(path, ())
    shown = user_traceback(caught.value)
    assert 'job.py", line 3' in shown
    assert "math.sqrt(-1)" in shown
    assert "importlib" not in shown
    assert "pipeworker/job" not in shown


@pytest.mark.usefixtures("as_a_worker")
def test_a_syntax_error_shows_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("x = 1\ny = = 2\n")
    with pytest.raises(SyntaxError) as caught:
        job_file.load(path, ())
    assert "y = = 2" in user_traceback(caught.value)


def test_a_defect_of_pipeworker_shows_all_frames() -> None:
    def ours() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        ours()
    failure = failure_of(caught.value, 0, Position(Phase.WAITING), "")
    assert "in ours" in failure.traceback


def test_secondary_failures_and_usage_errors_have_no_traceback() -> None:
    for error in (PeerLost("closed"), UsageError("write it so")):
        assert failure_of(error, 0, FORWARD, "").traceback == ""


def test_an_error_that_is_its_own_context_is_shown_once() -> None:
    error = ValueError("loop")
    error.__context__ = KeyError("other")
    error.__context__.__context__ = error
    assert "ValueError: loop" in user_traceback(error)


def test_a_message_of_any_length_still_fits_a_frame() -> None:
    position = Position(Phase.FORWARD, 1, 0, 2)
    for error in (
        ValueError("x" * (17 << 20)),
        raised_by(ValueError("x" * (17 << 20)), "layer 2 (Linear)"),
        UsageError("x" * (17 << 20)),
    ):
        failure = failure_of(error, 0, position, "Linear")
        _assert_short(failure)


def _assert_short(failure: Failure) -> None:
    assert len(failure.message) + len(failure.traceback) < 50_000
    assert "characters ..." in failure.message
