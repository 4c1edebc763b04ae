"""A job of one worker that is this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher import foreground
from pipeworker.errors import PipeworkerError
from pipeworker.session import session
from pipeworker.session.begin import Asked
from pipeworker.session.head import UNSAID
from pipeworker.session.show.view import View


def test_that_its_coordinator_did_not_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(place: object, job: object, asked: Asked, *, listen: Any) -> None:
        begun = asked.begin()
        listen(begun)(UNSAID)
        begun.close()
        raise PipeworkerError("the coordinator did not start")

    monkeypatch.setattr(session, "Session", dead)
    with pytest.raises(PipeworkerError, match="did not start"):
        foreground.run(Asked(str(tmp_path / "job.py"), 1, {}, tmp_path / "run"), View())
