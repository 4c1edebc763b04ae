"""The package of a job file, for the processes that ``multiprocessing`` spawns in a worker.

A spawned process, as of a ``DataLoader`` under the start method ``spawn`` or ``forkserver``,
imports the module of each class and function that it receives. It has the worker's import path,
whose first folders are those of the job file, and the worker's arguments.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

__path__ = sys.path
_path = Path(sys.argv[0])
if "." in _path.stem:  # an import would look for another file
    _spec = spec_from_file_location(f"{__name__}.{_path.stem.replace('.', '_')}", _path)
    assert _spec
    assert _spec.loader
    _module = sys.modules[_spec.name] = module_from_spec(_spec)
    _spec.loader.exec_module(_module)
