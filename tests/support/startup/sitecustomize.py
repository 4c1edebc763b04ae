"""What an interpreter does first that has this folder on its path: see ``Jobs.forking``."""

import os
import sys

from support.interpreter import SERVER, fork_line_processes

address = b"\0" + os.environ[SERVER].encode()
if "pipeworker.host.forkserver" in sys.orig_argv:  # which ssh or srun has started
    from support.forked import stand_for

    stand_for(address)
fork_line_processes(address)
