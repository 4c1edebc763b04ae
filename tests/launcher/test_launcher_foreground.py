"""Tests of a job of one worker that is this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher import foreground
from pipeworker.display.style import Style
from pipeworker.errors import PipeworkerError
from pipeworker.ranks.coordinator_process import REPORTED_BY_CALLER
from pipeworker.runs.begin import RunRequest
from pipeworker.session import session


def test_a_coordinator_that_did_not_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: object, job: object, request: RunRequest, *, listen: Any) -> None:
        prepared = request.prepare()
        listen(prepared)(REPORTED_BY_CALLER)
        prepared.close()
        raise PipeworkerError("the coordinator did not start")

    monkeypatch.setattr(session, "Session", fail)
    with pytest.raises(PipeworkerError, match="did not start"):
        foreground.run(RunRequest(str(tmp_path / "job.py"), 1, {}, tmp_path / "run"), Style())
