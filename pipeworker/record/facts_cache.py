"""Facts of layers that earlier jobs of this user have measured, in a file. Imports no torch.

The file is in the user's cache folder. It is only an aid: without it, or if it cannot be read or
written, layers are measured again. Two jobs that end at once may lose one's facts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.record.files.atomic_file import no_link, write_bytes
from pipeworker.record.files.bounded_file import load_json

log = logging.getLogger(__name__)
_VERSION = 4
_NAME = "layers.json"
MOST_ENTRIES = 4096
"""Facts that are kept; the oldest ones are left out first."""
_MOST_BYTES = 8 << 20
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_folder() -> Path | None:
    """Return the folder of pipeworker in the user's cache folder; None if there is no home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if chosen and Path(chosen).is_absolute():
        return Path(chosen) / "pipeworker"
    try:
        return Path.home() / ".cache" / "pipeworker"
    except RuntimeError:
        return None


class FactsCache:
    """The file of facts in a folder, or no file without one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self) -> dict[str, LayerFacts]:
        """Return the facts by digest, the oldest first; none if there is no file to be trusted."""
        if self._folder is None:
            return {}
        try:
            self._check(os.lstat(self._folder))
            with os.fdopen(no_link(self._folder / _NAME, os.O_RDONLY), "rb") as file:
                self._check(os.fstat(file.fileno()))
                data = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.info("facts of earlier jobs are not read: %s", error)
            return {}
        try:
            content = msgspec.convert(load_json(data), dict[str, Any])
            if content.get("version") != _VERSION:
                return {}
            found = msgspec.convert(content.get("facts"), dict[str, LayerFacts])
        except (ValueError, RecursionError) as error:  # damaged: it is written anew
            log.info("facts of earlier jobs are damaged: %.200s", error)
            return {}
        return {digest: facts for digest, facts in found.items() if facts.is_possible}

    def add(self, facts: Mapping[str, LayerFacts]) -> None:
        """Add facts to the file."""
        if self._folder is None:
            return
        found = self.read()
        for digest in facts:
            found.pop(digest, None)
        found.update(facts)
        kept = list(found.items())[-MOST_ENTRIES:]
        content = {
            "version": _VERSION,
            "facts": {digest: dataclasses.asdict(one) for digest, one in kept},
        }
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check(os.lstat(self._folder))
            # The umask of many systems lets the user's group write, and such a file is not read.
            write_bytes(self._folder / _NAME, json.dumps(content).encode(), mode=0o600)
        except OSError as error:
            log.info("the facts of layers are not kept for later jobs: %s", error)

    def _check(self, found: os.stat_result) -> None:
        """Raise PermissionError unless only this user can have written a file or a folder."""
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_MAY_WRITE:
            raise PermissionError(f"{self._folder}: another user may write there")
