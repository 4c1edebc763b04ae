"""What the user sees of an exception: whose fault, where, and only their own frames."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeworker.errors import PeerLost, PipeworkerError, UsageError
from pipeworker.job import file as job_file
from pipeworker.wire.messages import Cause, Phase, Position
from pipeworker.worker.failures import failure_of, subject, user_traceback
from pipeworker.worker.position import Tracker
from pipeworker.worker.stage import Stage

FORWARD = Position(Phase.FORWARD, 3, 1, 5)


@pytest.mark.parametrize(
    ("error", "phase", "cause", "message"),
    [
        (UsageError("write it so"), Phase.FORWARD, Cause.USAGE, "write it so"),
        (PeerLost("closed"), Phase.WAITING, Cause.PEER, "closed"),
        (PipeworkerError("a set cannot pass"), Phase.WAITING, Cause.USER, "a set cannot pass"),
        (ValueError("no"), Phase.FORWARD, Cause.USER, "layer 5 (Linear) raised ValueError: no"),
        (ValueError("no"), Phase.LOADING, Cause.USAGE, "the job file raised ValueError: no"),
        (ValueError("no"), Phase.BUILDING, Cause.USAGE, "building layer 5 (Linear) raised"),
        (ValueError("no"), Phase.READING, Cause.USER, "data() raised ValueError: no"),
        (ValueError("no"), Phase.LOSS, Cause.USER, "loss() raised ValueError: no"),
        (ValueError("no"), Phase.UPDATE, Cause.USER, "the optimizer raised ValueError: no"),
        (ValueError("no"), Phase.WAITING, Cause.INTERNAL, "a defect in pipeworker: ValueError: no"),
        (ValueError("no"), Phase.CONNECTING, Cause.INTERNAL, "a defect in pipeworker"),
        (SystemExit(3), Phase.LOADING, Cause.USAGE, "the job file raised SystemExit: 3"),
        (KeyError(), Phase.FORWARD, Cause.USER, "layer 5 (Linear) raised KeyError"),
    ],
)
def test_whose_fault(error: BaseException, phase: Phase, cause: Cause, message: str) -> None:
    position = Position(phase, 3, 1, 5)
    failure = failure_of(error, 2, position, "Linear")
    assert failure.cause is cause
    assert failure.message.startswith(message)
    assert (failure.rank, failure.position, failure.layer_class) == (2, position, "Linear")


def test_what_the_layer_was_given_is_added() -> None:
    failure = failure_of(ValueError("no"), 0, FORWARD, "Linear", "its input was Tensor[2]")
    assert failure.message == "layer 5 (Linear) raised ValueError: no (its input was Tensor[2])"


@pytest.mark.parametrize(
    ("position", "layer_class", "expected"),
    [
        (Position(Phase.BACKWARD, 1, 0, 4), "Tanh", "layer 4 (Tanh)"),
        (Position(Phase.RECOMPUTE, 1, 0, 4), "", "layer 4"),
        (Position(Phase.BUILDING), "", "model()"),
        (Position(Phase.BUILDING, layer=0), "", "building layer 0"),
        (Position(Phase.BACKWARD), "", "the job"),
    ],
)
def test_who_raised(position: Position, layer_class: str, expected: str) -> None:
    assert subject(position, layer_class) == expected


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error


def test_only_frames_of_the_user_are_shown() -> None:
    stage = Stage([Broken()], 0, seed=0, device=torch.device("cpu"), tracker=Tracker())
    stage.begin(1, [1.0], frozenset())
    stage.put_input(0, torch.ones(1), [False])
    with pytest.raises(ValueError, match="outer") as caught:
        stage.forward(0)
    shown = user_traceback(caught.value)
    assert Path(__file__).name in shown
    assert "worker/stage.py" not in shown
    assert "KeyError: 'inner'" in shown
    assert "direct cause" in shown
    assert shown.rstrip().endswith("ValueError: outer")


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


def test_a_syntax_error_shows_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("x = 1\ny = = 2\n")
    with pytest.raises(SyntaxError) as caught:
        job_file.load(path, ())
    assert "y = = 2" in user_traceback(caught.value)


def test_a_defect_of_ours_shows_all_frames() -> None:
    def ours() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        ours()
    failure = failure_of(caught.value, 0, Position(Phase.WAITING), "")
    assert "in ours" in failure.traceback


def test_an_echo_and_a_mistake_have_no_traceback() -> None:
    for error in (PeerLost("closed"), UsageError("write it so")):
        assert failure_of(error, 0, FORWARD, "").traceback == ""


def test_an_error_that_is_its_own_context_is_shown_once() -> None:
    error = ValueError("loop")
    error.__context__ = KeyError("other")
    error.__context__.__context__ = error
    assert "ValueError: loop" in user_traceback(error)


def test_a_message_of_any_length_still_fits_a_frame() -> None:
    position = Position(Phase.FORWARD, 1, 0, 2)
    failure = failure_of(ValueError("x" * (17 << 20)), 0, position, "Linear")
    assert len(failure.message) + len(failure.traceback) < 50_000
    assert "characters ..." in failure.message
