"""Map the command line and the launcher into the package, so that a wheel installs nothing else.

In the repository ``cli.py`` and ``launcher/`` stand at the top; installed, they are in
``pipeworker/_command/``, which ``pipeworker/__main__.py`` puts on the import path.
"""

from setuptools import find_packages, setup

COMMAND = "pipeworker._command"

setup(
    packages=[
        *find_packages(include=["pipeworker", "pipeworker.*"]),
        *(f"{COMMAND}.{name}" for name in find_packages(include=["launcher", "launcher.*"])),
    ],
    py_modules=[f"{COMMAND}.cli"],
    package_dir={COMMAND: "."},
)
