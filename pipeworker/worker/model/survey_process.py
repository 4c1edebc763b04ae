"""The process that surveys a job's model on fake tensors."""

from __future__ import annotations

import json
import os
import pickle
import signal
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pipeworker.host.lifetime import die_with_parent
from pipeworker.host.position import Tracker
from pipeworker.host.streams import discard_output
from pipeworker.job import file as job_file
from pipeworker.job.options import Options
from pipeworker.worker import stray_children
from pipeworker.worker.internals import preload
from pipeworker.worker.model.classes import classes_of
from pipeworker.worker.model.model import Model, shared_buffers
from pipeworker.worker.model.survey import Found, Survey, mentions_skips
from pipeworker.worker.profile.counts import counting
from pipeworker.worker.profile.outline import Drawing
from pipeworker.worker.signals import handle_signals
from pipeworker.worker.stage.cut.part import plan_of
from pipeworker.worker.stray_children import end_stray_child
from pipeworker.worker.transport.structure import TypeRegistry

_CPU = torch.device("cpu")
_PATIENCE = 5
"""Worker timeouts that a survey may take."""
LEAST = 60.0
"""Seconds that it may take in any case."""


class SurveyProcess:
    """A process that waits to survey a job.

    It is forked when this object is made, before this process starts a thread: a lock that another
    thread holds would stay locked in the forked process.
    """

    def __init__(self) -> None:
        parent = os.getpid()
        self._connection, theirs = Pipe()
        self._has_begun = False
        self._pid = os.fork()
        if not self._pid:
            try:
                self._connection.close()
                _serve(theirs, parent)
            finally:
                os._exit(0)
        theirs.close()

    def begin(self, path: Path, options: Options) -> None:
        """Have it load a job file, while this process loads it too."""
        self._has_begun = True
        with suppress(OSError):  # it has ended: survey() reports that
            self._connection.send_bytes(json.dumps([str(path), options.to_json()]).encode())

    def survey(self, path: Path, options: Options, value: Any, surroundings: str = "") -> Found:
        """Return what it finds in the model of a job file; `value` is a micro-batch's input.

        With `surroundings`, a digest of what costs depend on, it draws the network's outline too.
        """
        if not self._has_begun:
            self.begin(path, options)
        try:
            packed = pickle.dumps(value)
            self._connection.send_bytes(surroundings.encode())
            self._connection.send_bytes(packed)
            limit = max(LEAST, _PATIENCE * options.worker_timeout)
            if not self._connection.poll(limit):  # the first step will name a layer that hangs
                return {"error": f"it took more than {limit:g} s"}
            found: Found = self._connection.recv()
        except (OSError, EOFError):
            return {"error": "its process ended"}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return {"error": f"the input cannot be pickled: {error}"}
        return found

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        # The job file may have waited for all children, or ignore SIGCHLD.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _serve(connection: Connection, parent: int) -> None:
    """Survey one job, in the forked process."""
    handle_signals()
    die_with_parent(parent)
    discard_output()
    torch.set_num_threads(1)
    stray_children.watch()
    path, text = json.loads(connection.recv_bytes())
    found = _survey(Path(path), text, connection)
    end_stray_child()
    connection.send(found)


def _survey(path: Path, text: Any, connection: Connection) -> Found:
    preload()  # fake tensors import it, in a folder that no other user can change
    try:
        options = Options.from_json(text)
        job = job_file.load(path, options.arguments)
        end_stray_child()
        surroundings = connection.recv_bytes().decode()
        value = pickle.loads(connection.recv_bytes())  # once the classes of the job are loaded
        types = classes_of(job_file.modules())
        registry = TypeRegistry(types.values())
        model = Model(
            job,
            options.seed,
            _CPU,
            Tracker(),
            lambda module: (plan_of(module, registry, value), registry),
        )
        ties = model.ties()
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}
    survey = Survey(
        model.entries, options.seed, _CPU, options.precision, is_cut=model.cut is not None
    )
    if not surroundings:
        return survey.on_fakes(value)
    problems: list[str] = []
    count = counting(job, options, problems) if options.no_profile else None
    calls_all = mentions_skips(job_file.modules()) or bool(shared_buffers(model.entries))
    drawing = Drawing(types, surroundings, ties, count, calls_all=calls_all)
    found = survey.on_fakes(value, drawing)
    return {**found, "uncounted": problems[0]} if problems else found
