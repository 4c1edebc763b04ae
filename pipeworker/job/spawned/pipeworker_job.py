"""The package of a job file, for the processes that ``multiprocessing`` spawns in a worker.

A spawned process, as of a ``DataLoader`` under the start method ``spawn`` or ``forkserver``,
imports the module of each class and function that it receives. It has the worker's import path,
whose first folders are those of the job file.
"""

import sys

__path__ = sys.path
