"""The folder where torch keeps compiled kernels, which it loads and runs."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from stat import S_IWOTH

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's environment variable for the folder."""


def keep_private() -> None:
    """Have torch use a folder into which no other user can write, unless the user chose one.

    Another user of the host can make torch's default folder first. Torch would then run the kernels
    that it finds there; if that user made a file, torch's modules could not be imported.
    """
    default = default_folder()
    if os.environ.get(VARIABLE, default) == default and not _make_private(Path(default)):
        os.environ[VARIABLE] = str(Path.home() / ".cache" / "torchinductor")


def default_folder() -> str:
    """Return torch's default, without importing its own function, which takes a second."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{name}")  # noqa: PTH118 (as torch)


def _make_private(folder: Path) -> bool:
    """Make the folder if it is missing; return whether only this user can change it."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        found = folder.stat()
        owners = {folder.lstat().st_uid, found.st_uid}
        return owners == {os.geteuid()} and not found.st_mode & S_IWOTH
    return False
