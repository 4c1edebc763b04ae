"""What an interpreter does first that has this folder on its path: see ``Jobs.forking``."""

import os

from support.interpreter import SERVER, fork_line_processes

fork_line_processes(b"\0" + os.environ[SERVER].encode())
