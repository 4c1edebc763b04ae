"""Loggers name a run in another program, which a resumed run continues, and say how it ended."""

from __future__ import annotations

import hashlib
import json

from pipeworker.record.run_record import RunRecord, read_summary

EVALUATION = "evaluation/"
"""A prefix of the figures of evaluation passes."""
_LENGTH = 16


def identity(record: RunRecord) -> str:
    """Return a text that is equal for a run, also if it was resumed, and differs for others."""
    first = {name: record.content.get(name) for name in ("started", "host", "pid", "command")}
    return hashlib.sha256(json.dumps(first).encode()).hexdigest()[:_LENGTH]


def status(record: RunRecord) -> str:
    """Return how a run ended: ``done``, ``failed``, ``interrupted`` or ``lost``."""
    summary = read_summary(record.run_dir) or {}
    return str(summary.get("status", "lost"))
