"""The folder where torch keeps compiled kernels, which it loads and runs."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from stat import S_IWOTH

from pipeworker.errors import UsageError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's environment variable for the folder."""


def keep_private() -> None:
    """Have torch use a folder into which no other user can write, unless the user chose one.

    Another user of the host can make torch's default folder first. Torch would then run the kernels
    that it finds there; if that user made a file, torch's modules could not be imported.

    Raises:
        UsageError: the default cannot be used, and there is no home folder to use instead.
    """
    try:
        default = default_folder()
    except FileNotFoundError:  # no folder of temporary files can be written
        default = ""
    if os.environ.get(VARIABLE, default) == default and not (default and _make_private(default)):
        try:
            home = Path.home()
        except RuntimeError:  # the user is not known to the system, and HOME is not set
            found = f"{default} cannot be used" if default else "there are no temporary folders"
            raise UsageError(
                f"{VARIABLE}: {found}, and there is no home folder; set it to a folder that you "
                "alone may write to"
            ) from None
        os.environ[VARIABLE] = str(home / ".cache" / "torchinductor")


def default_folder() -> str:
    """Return torch's default, without importing its own function, which takes a second."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{name}")  # noqa: PTH118 (as torch)


def _make_private(path: str) -> bool:
    """Make the folder if it is missing; return whether only this user can change it."""
    folder = Path(path)
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        found = folder.stat()
        owners = {folder.lstat().st_uid, found.st_uid}
        return owners == {os.geteuid()} and not found.st_mode & S_IWOTH
    return False
