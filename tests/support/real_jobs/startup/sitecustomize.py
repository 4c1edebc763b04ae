"""Start-up of an interpreter that has this folder on its import path: see ``Jobs.forking``."""

import os
import sys

from support.processes.interpreter import NAMESPACE, SERVER, fork_line_processes

address = b"\0" + os.environ[SERVER].encode()
if "pipeworker.host.agent" in sys.orig_argv:  # which ssh or srun has started
    from support.processes.forked import stand_for

    stand_for(address, os.environ.pop(NAMESPACE, ""))
fork_line_processes(address)
