"""Who may import whom: the house of the README, read from the source and once at run time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeworker

ROOT = Path(pipeworker.__file__).parents[1]
FILES = sorted(
    [ROOT / "cli.py", *(ROOT / "launcher").rglob("*.py"), *(ROOT / "pipeworker").rglob("*.py")]
)

SHELL_ONLY = frozenset(
    {
        *("asyncio", "datetime", "glob", "io", "logging", "multiprocessing", "os", "pathlib"),
        *("random", "resource", "secrets", "select", "selectors", "shutil", "signal", "socket"),
        *("ssl", "subprocess", "sys", "tempfile", "threading", "time", "uuid", "zmq", "torch"),
    }
)
"""Clocks, files, sockets, processes, environment, randomness: what a decision may not depend on."""
BUILTIN_SHELLS = {"open", "input", "print", "exec", "eval", "__import__"}

LIGHT = [
    *("pipeworker.plan", "pipeworker.wire", "pipeworker.coordinator"),
    *("pipeworker.job.options", "pipeworker.record.rundir", "pipeworker.errors"),
]
"""What runs where torch is not, or must start at once."""
PURE = [
    *("pipeworker.plan", "pipeworker.coordinator.machine", "pipeworker.coordinator.effects"),
    *("pipeworker.coordinator.blueprint", "pipeworker.coordinator.roster"),
    *("pipeworker.coordinator.calls",),
    *("pipeworker.coordinator.tally", "pipeworker.coordinator.scaler", "pipeworker.job.options"),
    *("pipeworker.coordinator.rendezvous", "pipeworker.wire.messages", "pipeworker.errors"),
]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def statements(node: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    """All of a module, or without `lazy` what runs when it is imported."""
    for child in ast.iter_child_nodes(node):
        if not lazy and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        if lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements(child, lazy=lazy)


def imports(module: str, *, lazy: bool = True) -> set[str]:
    """What a module imports; ``if TYPE_CHECKING`` counts where functions do."""
    found = set()
    for node in statements(MODULES[module], lazy=lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            assert node.module
            found |= {
                name if (name := f"{node.module}.{alias.name}") in MODULES else node.module
                for alias in node.names
            }
    return found


def reaches(start: str) -> dict[str, list[str]]:
    """Everything an import of `start` pulls in, each with one way there.

    What `start` itself imports in a function counts; what others do there runs when they are asked.
    """
    ways = {start: [start]}
    queue = [start]
    while queue:
        module = queue.pop()
        for name in imports(module, lazy=module == start):
            parents = [name.rsplit(".", n)[0] for n in range(name.count("."), 0, -1)]
            for step in [*parents, name] if name in MODULES else [name.partition(".")[0]]:
                if step not in ways:
                    ways[step] = [*ways[module], step]
                    if step in MODULES:
                        queue.append(step)
    return ways


def within(rooms: list[str]) -> list[str]:
    return [m for m in MODULES if any(m == room or m.startswith(f"{room}.") for room in rooms)]


def upward() -> Iterator[tuple[str, str]]:
    """Every import that goes against cli -> launcher -> pipeworker."""
    above = {"cli": set(), "launcher": {"cli"}, "pipeworker": {"cli", "launcher"}}
    for module in MODULES:
        for name in imports(module):
            if name.partition(".")[0] in above[module.partition(".")[0]]:
                yield module, name


def test_the_files_are_found() -> None:
    rooms = {module.rpartition(".")[0] for module in MODULES}
    assert {"launcher", "pipeworker.plan", "pipeworker.wire", "pipeworker.coordinator"} <= rooms
    assert all(within([room]) for room in [*LIGHT, *PURE])
    assert "zmq" in imports("pipeworker.wire.sockets")  # what is looked for would be seen
    assert "torch" in reaches("pipeworker.worker.service")
    assert reaches("pipeworker.coordinator.service")["secrets"][-2] in {
        *("pipeworker.wire.keys", "pipeworker.wire.sockets"),
    }


def test_nothing_imports_upward() -> None:
    """``python -m pipeworker`` is the one door, made to lead up."""
    assert {module for module, _ in upward()} == {"pipeworker.__main__"}


@pytest.mark.parametrize("module", within(LIGHT))
def test_torch_stays_out(module: str) -> None:
    ways = reaches(module)
    assert "torch" not in ways, " -> ".join(ways["torch"])
    assert not [name for name in ways if name.startswith("pipeworker.worker")]


def test_torch_stays_out_of_a_running_coordinator() -> None:
    code = (
        "import pipeworker.coordinator.service, pipeworker.job.options, sys; "
        "print(*(m for m in ('torch', 'numpy', 'pipeworker.worker') if m in sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr


def test_the_fork_server_imports_what_every_worker_would() -> None:
    """A second for each of them: any torch optimizer imports it when it is built."""
    assert "torch._dynamo" in imports("pipeworker.worker.forkserver")


@pytest.mark.parametrize("module", within(PURE))
def test_a_decision_depends_on_its_arguments_alone(module: str) -> None:
    """Directly or through any module of ours that it imports."""
    ways = reaches(module)
    impure = sorted(SHELL_ONLY & ways.keys())
    assert not impure, " -> ".join(ways[impure[0]])
    calls = {
        node.func.id
        for node in ast.walk(MODULES[module])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & BUILTIN_SHELLS


def test_imports_within_the_core_go_one_way() -> None:
    """plan knows nobody; wire and job know errors; only the service joins machine and sockets."""
    ours = {m: {n for n in imports(m) if n.startswith("pipeworker.")} for m in MODULES}
    for module in within(["pipeworker.plan"]):
        assert all(n.startswith(("pipeworker.plan", "pipeworker.errors")) for n in ours[module])
    for module in within(["pipeworker.wire"]):
        assert all(n.startswith(("pipeworker.wire", "pipeworker.errors")) for n in ours[module])
    for module in within(["pipeworker.worker", "pipeworker.record", "pipeworker.job"]):
        assert not [n for n in ours[module] if n.startswith("pipeworker.coordinator")]
    for module in set(MODULES) - set(within(["pipeworker.session"])):
        if module.startswith("pipeworker."):  # the package itself names what a script may call
            assert not [n for n in ours[module] if n.startswith("pipeworker.session")]
