"""Random numbers that are drawn in a backward: by a function's own one, or by a hook.

A backward runs where its schedule and its recompute mode put it, so without a seed of its own it
would draw what the forward of any layer has left. Seeding each layer takes as long as in a forward,
and nearly no layer draws in its backward. So a stage watches the first backwards, and seeds
the others only if one of them has drawn.
"""

from __future__ import annotations

from typing import Any

from pipeworker.worker.stage import rng

WATCHED_BACKWARDS = 64
"""Backwards of a stage that are watched."""


class BackwardStreams:
    """The random streams of a stage's backwards, each seeded as its backward enters a layer."""

    def __init__(self, seed: int, accelerator: rng.Generator | None) -> None:
        self._seed, self._accelerator = seed, accelerator
        self._stream = rng.Stream(accelerator)
        self._watched = WATCHED_BACKWARDS
        self._draws = False
        self._before: Any = None
        self._layer: int | None = None

    def enter(self, step: int, number: int, layer: int) -> None:
        """Seed what the backward of a layer draws; `number` is that of the micro-batch.

        A backward enters a layer by each of its outputs, and the first one counts.
        """
        if (self._watched or self._draws) and layer != self._layer:
            self._layer = layer
            self._look()
            rng.seed_all(rng.backward_seed(self._seed, step, number, layer), self._accelerator)
            if self._watched and not self._draws:
                self._before = self._stream.states()

    def leave(self) -> None:
        """End the backward of a micro-batch."""
        self._layer = None
        self._look()
        self._watched = max(0, self._watched - 1)

    def _look(self) -> None:
        """Compare the states of the generators with those after the last seed."""
        before, self._before = self._before, None
        if before is not None and rng.have_drawn(before, self._stream.states()):
            self._draws = True
