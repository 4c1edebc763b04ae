"""``--metrics-port``: the figures of a running job, for Prometheus, which asks for them.

Names are those of OpenMetrics: base units, and ``_total`` for what only grows. Figures of a worker
have the labels stage, replica and host; none has the step, which would make a series a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeworker.errors import PipeworkerError
from pipeworker.record import present
from pipeworker.record.checkpoint.folder import step_of
from pipeworker.record.metrics.rows import Row
from pipeworker.record.plan_file import PlanFile
from pipeworker.record.present import Present
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import Request, RunDir

_BUCKETS = tuple(base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5))
"""Seconds of a step."""
_GAUGES = {
    "loss": ("pipeworker_loss", "The loss of the last step."),
    "grad_norm": ("pipeworker_gradient_norm", "The global norm of the last step's gradient."),
    "lr": ("pipeworker_learning_rate", "The learning rate of the last step."),
    "bubble": ("pipeworker_bubble_ratio", "The idle share of the last step, 0 to 1."),
    "epoch": ("pipeworker_epoch", "The epoch of the last step, from 0."),
}
_COUNTERS = {
    "samples": ("pipeworker_samples", "Samples that were trained on."),
    "tokens": ("pipeworker_tokens", "Tokens that were trained on, if data() counts them."),
}
_WORKER = ("stage", "replica", "host")
_FRESH = 1.5
"""Seconds in which the coordinator of a job that runs writes the state of its workers."""


class Prometheus:
    """Serves the figures of a job over HTTP, on all interfaces.

    Raises:
        OSError: the port is not free.
    """

    def __init__(self, port: int, record: RunRecord) -> None:
        registry = CollectorRegistry()
        self._steps = Counter("pipeworker_steps", "Steps that are done.", registry=registry)
        self._seconds = Histogram(
            "pipeworker_step_seconds", "The time of a step.", registry=registry, buckets=_BUCKETS
        )
        self._gauges = {k: Gauge(*named, registry=registry) for k, named in _GAUGES.items()}
        self._counters = {k: Counter(*named, registry=registry) for k, named in _COUNTERS.items()}
        self._flops = Counter(
            "pipeworker_model_flops",
            "Floating-point operations of the model, forward and backward, without recomputation.",
            registry=registry,
        )
        self._run_dir = record.run_dir
        self._evaluation = Gauge(
            "pipeworker_evaluation",
            "A figure of the last evaluation.",
            ("figure",),
            registry=registry,
        )
        self._checkpoint = Gauge(
            "pipeworker_checkpoint_step", "The step of the last checkpoint.", registry=registry
        )
        for gauge in (*self._gauges.values(), self._checkpoint):
            gauge.set(math.nan)  # until it is known
        registry.register(_Workers(record.run_dir))
        self._server, self._thread = start_http_server(port, registry=registry)

    def on_step(self, row: Row) -> None:
        self._steps.inc()
        self._seconds.observe(_number(row.get("seconds")))
        for name, gauge in self._gauges.items():
            gauge.set(_number(row.get(name)))
        for name, counter in self._counters.items():
            counter.inc(_number(row.get(name), 0.0))
        self._flops.inc(self._flops_per_sample * _number(row.get("samples"), 0.0))

    @cached_property
    def _flops_per_sample(self) -> float:
        """The operations of a sample, by the plan, which is there before the first row; or 0."""
        with suppress(OSError, PipeworkerError):
            facts = PlanFile.read(self._run_dir).facts
            return facts.flops_per_sample if facts else 0.0
        return 0.0

    def on_evaluation(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._evaluation.labels(name).set(_number(value))

    def on_checkpoint(self, path: Path) -> None:
        self._checkpoint.set(step_of(path))

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Workers(Collector):
    """The state of each worker, which the coordinator writes when it is asked for."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is is known when it is collected."""
        return ()

    def collect(self) -> Iterable[Metric]:
        now = self._now()
        if now is None:
            return
        yield CounterMetricFamily(
            "pipeworker_worker_losses", "Losses of workers.", value=now.restarts
        )
        memory, silent, computes = (
            GaugeMetricFamily(f"pipeworker_worker_{name}", text, labels=_WORKER)
            for name, text in (
                ("memory_bytes", "Memory that a worker uses, on its device or of its process."),
                ("silent_seconds", "Seconds since the last heartbeat of a worker."),
                ("computing", "1 while a worker computes, 0 while it waits."),
            )
        )
        for one in now.workers:
            labels = (",".join(map(str, one.stages)), str(one.replica), one.host)
            memory.add_metric(labels, one.memory_bytes)
            silent.add_metric(labels, one.silent_seconds)
            computes.add_metric(labels, not one.waits)
        yield from (memory, silent, computes)

    def _now(self) -> Present | None:
        """Return the state of the workers; None if the coordinator does not write it."""
        began, limit = time.time(), time.monotonic() + _FRESH
        with suppress(OSError):
            self._run_dir.request(Request.WATCH)
            while time.monotonic() < limit:
                with suppress(FileNotFoundError, PipeworkerError):
                    found = present.read(self._run_dir)
                    if found.time >= began - 1:
                        return found
                time.sleep(0.05)
        return None


def _number(value: object, otherwise: float = math.nan) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise
