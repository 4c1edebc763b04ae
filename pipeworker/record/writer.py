"""The process that writes checkpoints while its worker trains. Imports no torch.

Standard input and output are pipes to the worker: a request is a JSON array ``[folder, [descriptor,
...], [name, ...]]`` a line, an answer ``[[[name, bytes, checksum], ...], error]``. It ends with its
input. The memories are descriptors that it has inherited.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from pipeworker.errors import RecordError
from pipeworker.record.memory import write

_NICE = 10


def main() -> int:
    """Write what is asked for until input ends."""
    os.nice(_NICE)  # steps come first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # to the whole job
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        folder, handles, names = json.loads(line)
        try:
            files = write(handles, Path(folder), names)
            answer = [[[file.name, file.bytes, file.crc32] for file in files], ""]
        except RecordError as error:
            answer = [[], str(error)]
        print(json.dumps(answer), flush=True)
    return 0
