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
TESTS = Path(__file__).parent
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

FLOORS = [
    *("pipeworker.errors", "pipeworker", "pipeworker.timings", "pipeworker.environment"),
    "pipeworker.exact",
    *("pipeworker.wire", "pipeworker.plan", "pipeworker.job", "pipeworker.record"),
    "pipeworker.past",
    *("pipeworker.host", "pipeworker.coordinator"),
    *("pipeworker.worker", "pipeworker.worker.internals", "pipeworker.worker.device"),
    *("pipeworker.worker.blame", "pipeworker.worker.console", "pipeworker.worker.control"),
    "pipeworker.worker.transport",
    *("pipeworker.worker.stage", "pipeworker.worker.update", "pipeworker.worker.step"),
    *("pipeworker.worker.settings", "pipeworker.worker.role", "pipeworker.worker.model"),
    *("pipeworker.worker.brought", "pipeworker.worker.description", "pipeworker.worker.held"),
    *("pipeworker.worker.state", "pipeworker.worker.worker", "pipeworker.worker.service"),
    *("pipeworker.host.forkserver", "pipeworker.session", "launcher", "cli"),
    "pipeworker.__main__",
]
"""The house from the ground up: a room, or a module with a floor of its own, imports what is below
it or beside it in its room. The fork server starts workers; ``__main__`` is the door, and leads up.
"""

ROOMS_WITHIN = {
    "pipeworker.wire": [
        "messages",
        "codec",
        "lines",
        "keys",
        "exchange",
        "strangers",
        "sockets",
        "interfaces",
    ],
    "pipeworker.wire.messages": [
        *("limits", "position", "failure", "checkpoint", "presence", "step", "evaluation"),
        *("plan", "calls", "store", "advance", "directions"),
    ],
    "pipeworker.plan": [
        *("actions", "placement", "schedule", "connect", "offload", "orders"),
        *("columns", "network", "kept", "check", "simulate", "shares"),
        *("partition", "skips", "ties"),
    ],
    "pipeworker.job": ["options", "given", "recorded", "sources", "calls", "file"],
    "pipeworker.record": [
        *("manifest", "memory", "writer", "metrics", "rundir", "lock", "run", "resume", "plain"),
        *("image", "source", "tensors", "misfits", "checkpoint", "regroup", "restore", "initial"),
        "export",
    ],
    "pipeworker.record.metrics": ["rows", "table", "tensorboard", "extras"],
    "pipeworker.record.export": ["shards", "weights"],
    "pipeworker.past": ["facts", "page", "table"],
    "pipeworker.host": ["awake", "lifetime", "spawn", "streams", "position", "forkserver"],
    "pipeworker.coordinator": [
        *("scaler", "rendezvous", "roster", "agree", "cause", "events", "effects", "states"),
        *("blueprint", "steps", "report", "restarts", "hands", "generation", "job"),
        *("shell", "service"),
    ],
    "pipeworker.coordinator.steps": ["calls", "tally", "snapshots", "progress", "loop"],
    "pipeworker.coordinator.shell": ["starter", "begin", "files"],
    "pipeworker.worker.transport": [
        *("structure", "frame", "proof", "heap", "credentials", "network", "links", "courier"),
        *("connect", "memories", "pool", "staging", "channel"),
    ],
    "pipeworker.worker.transport.links": [
        "link",
        "arena",
        "shared",
        "mapped",
        "gloo",
        "nccl",
        "tls",
    ],
    "pipeworker.worker.device": [
        *("visible", "device", "stopwatch", "mapping", "nccl", "accelerator", "copies"),
        "numerics",
    ],
    "pipeworker.worker.stage": [
        *("microbatch", "rng", "recompute", "batchnorm", "losses", "skips", "values"),
        *("offload", "split", "boundary", "compiled", "stage"),
    ],
    "pipeworker.worker.update": ["ties", "condense", "replicas", "update"],
    "pipeworker.worker.step": [
        *("generators", "epoch", "data", "deal", "evaluation", "flow", "stream", "tied"),
        *("reduction", "others", "executor"),
    ],
    "pipeworker.worker.model": ["structures", "survey", "model"],
    "pipeworker.worker.state": ["keeper", "remembered", "heirs", "state"],
    "pipeworker.session": [
        *("ask", "place", "processes", "show", "begin", "head", "meet", "session", "pipeline"),
    ],
    "launcher": [
        *("spec", "children", "run", "local", "ssh", "errorfile", "torchrun", "cluster"),
        *("command", "choose", "templates", "options", "defaults", "machine", "view"),
        "foreground",
    ],
    "launcher.cluster": ["slurm", "sbatch", "node", "pod", "kubernetes", "kubectl"],
}
"""Within a room it is so too."""

LIGHT = [
    *("pipeworker.plan", "pipeworker.wire", "pipeworker.coordinator", "pipeworker.environment"),
    *("pipeworker.job.options", "pipeworker.job.given", "pipeworker.job.recorded"),
    *("pipeworker.record.rundir", "pipeworker.record.manifest", "pipeworker.record.lock"),
    *("pipeworker.record.run", "pipeworker.record.resume", "pipeworker.session.begin"),
    *("pipeworker.record.memory", "pipeworker.record.writer", "pipeworker.record.source"),
    *("pipeworker.record.metrics", "pipeworker.record.export.shards", "pipeworker.past"),
    *("pipeworker.host.awake", "pipeworker.host.spawn", "pipeworker.host.lifetime"),
    "pipeworker.host.position",
    *("pipeworker.errors", "pipeworker.timings", "pipeworker.exact"),
    *("launcher.spec", "launcher.cluster.pod", "launcher.cluster.kubernetes"),
    "launcher.cluster.kubectl",
    *("launcher.choose", "launcher.command", "launcher.options", "launcher.defaults"),
    *("launcher.view", "pipeworker.session.show"),
]
"""What runs where torch is not, or must start at once."""
PURE = [
    *("pipeworker.plan", "pipeworker.errors", "pipeworker.timings", "pipeworker.job.options"),
    *("pipeworker.job.recorded", "launcher.spec", "launcher.cluster.pod"),
    "launcher.cluster.kubernetes",
    *("pipeworker.exact", "pipeworker.record.export.shards"),
    *("pipeworker.session.show.figures", "pipeworker.session.show.ending"),
    *("pipeworker.wire.messages", "pipeworker.wire.codec", "pipeworker.wire.lines"),
    *(
        f"pipeworker.coordinator.{name}"
        for name in (
            *("job", "generation", "events", "blueprint", "roster", "steps"),
            *("scaler", "rendezvous", "effects", "report", "states", "cause"),
            *("restarts", "hands", "agree"),
        )
    ),
]
SHELL = {
    *("pipeworker.coordinator", "pipeworker.coordinator.service", "pipeworker.coordinator.shell"),
    *(f"pipeworker.coordinator.shell.{name}" for name in ("starter", "begin", "files")),
}
"""What is left of the coordinator: the rest decides."""

PRIVATE = {
    *("_C", "_buffers", "_parameters", "_modules", "_version", "_base", "_cdata", "_call_impl"),
    *("_forward_hooks", "_forward_pre_hooks", "_post_accumulate_grad_hooks", "_execution_engine"),
    *("_get_default_store", "_get_default_group", "_distributed_c10d", "_storage_Use_Count"),
    *("_share_cuda_", "_new_shared_cuda"),
    *("_pytree", "_dynamo", "_subclasses", "_functorch", "_unsafe_view", "_backward_hooks"),
}
"""Names of torch's own, on whatever they are looked up. Of ``self`` they are ours."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def statements(node: ast.AST, *, lazy: bool, typing: bool) -> Iterator[ast.AST]:
    """All of a module, or without `lazy` what runs when it is imported."""
    for child in ast.iter_child_nodes(node):
        if not typing and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        if lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements(child, lazy=lazy, typing=typing)


def imports(module: str, *, lazy: bool = True, typing: bool | None = None) -> set[str]:
    """What a module imports, with `lazy` in functions and with `typing` for type hints alone."""
    found = set()
    typing = lazy if typing is None else typing
    for node in statements(MODULES[module], lazy=lazy, typing=typing):
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


def floor(module: str) -> str:
    """The most exact of FLOORS that a module is on."""
    found = [f for f in FLOORS if module == f or module.startswith(f"{f}.")]
    return max(found, key=len)


def named_for_scripts(module: str, name: str) -> bool:
    """The package itself names, for the type checker alone, what a script may call."""
    return module == "pipeworker" and name not in imports(module, lazy=False)


def upward() -> Iterator[tuple[str, str]]:
    """Every import, those in functions too, of something on a higher floor."""
    for module in MODULES:
        for name in imports(module) & MODULES.keys():
            if FLOORS.index(floor(name)) > FLOORS.index(floor(module)) and not named_for_scripts(
                module, name
            ):
                yield module, name


def upstairs() -> Iterator[tuple[str, str]]:
    """Every import within a room of something further up in it; type hints may look up."""
    for module in MODULES:
        for name in imports(module, typing=False) & MODULES.keys():
            for room, order in ROOMS_WITHIN.items():
                ends = [m.removeprefix(f"{room}.") for m in (module, name)]
                if all(m.startswith(f"{room}.") for m in (module, name)):
                    here, there = (order.index(end.partition(".")[0]) for end in ends)
                    if there > here:
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


def test_every_module_has_a_floor() -> None:
    assert {floor(module) for module in MODULES} == {*FLOORS}  # and no floor is empty
    assert len({*FLOORS}) == len(FLOORS)
    assert floor("pipeworker.host.forkserver") != floor("pipeworker.host.lifetime")
    alone = {module for module in MODULES if floor(module) == "pipeworker"}
    assert alone == {"pipeworker"}  # nothing has the ground floor for want of its own
    for room, order in ROOMS_WITHIN.items():
        inside = [m.removeprefix(f"{room}.").partition(".")[0] for m in within([room]) if m != room]
        assert {*inside} == {*order}, room


def test_nothing_imports_upward() -> None:
    assert sorted(upward()) == []
    assert FLOORS[-1] == "pipeworker.__main__"  # from where cli and launcher are imported
    assert not [m for m in MODULES if "pipeworker.__main__" in imports(m)]


def test_nothing_within_a_room_imports_upward() -> None:
    """So no two modules need each other to be imported."""
    assert sorted(upstairs()) == []


def test_an_import_upward_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "pipeworker.plan.check": "from pipeworker.wire.codec import Codec",  # below: it may
        "pipeworker.wire.keys": "def late():\n    import pipeworker.plan.check",
        "pipeworker.worker.stage.rng": "from pipeworker.worker.step import executor",
        "pipeworker.coordinator.steps.tally": "from pipeworker.coordinator.steps.loop import Loop",
    }
    for module, text in wrong.items():
        monkeypatch.setitem(MODULES, module, ast.parse(text))
    assert sorted(upward()) == [
        ("pipeworker.wire.keys", "pipeworker.plan.check"),
        ("pipeworker.worker.stage.rng", "pipeworker.worker.step.executor"),
    ]
    assert (
        "pipeworker.coordinator.steps.tally",
        "pipeworker.coordinator.steps.loop",
    ) in upstairs()


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


def private_names(module: str) -> set[str]:
    """What a module uses of torch that torch does not promise."""
    found, torchs = set(), set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{source}.{alias.name}".removeprefix(".")
                if name.partition(".")[0] == "torch":
                    torchs.add((alias.asname or alias.name).partition(".")[0])
                    found |= {name} if is_private(name) else set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if (node.attr in PRIVATE or node.attr.startswith("_foreach_")) and not ours:
                found.add(dotted)
            if dotted.partition(".")[0] in torchs and is_private(dotted):
                found.add(dotted)
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            found.add(repr(node.value))  # for getattr
    return found


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


@pytest.mark.parametrize("module", [m for m in MODULES if m != "pipeworker.worker.internals"])
def test_the_private_names_of_torch_are_in_one_module(module: str) -> None:
    assert not private_names(module)


def test_private_names_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = private_names("pipeworker.worker.internals")
    assert {"torch._C._storage_Use_Count", "torch._dynamo", "torch._foreach_mul_"} <= seen
    assert {"module._buffers", "tensor._version", "target._backward_hooks"} <= seen
    assert {"Variable._execution_engine", "dist.distributed_c10d._get_default_store"} <= seen
    text = """
from torch.utils import _pytree as pytree
from torch import nn, distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import Store
x = nn.modules._functions
y = F._canonical_mask
getattr(z, "_buffers")
self._buffers = dist.init_process_group(self._buffers.__class__)
"""
    monkeypatch.setitem(MODULES, "pipeworker.worker.blame", ast.parse(text))
    assert private_names("pipeworker.worker.blame") == {
        *("torch.utils._pytree", "torch._C._distributed_c10d.Store", "nn.modules._functions"),
        *("F._canonical_mask", "'_buffers'"),
    }


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


def test_what_decides_is_apart_from_what_acts() -> None:
    """Of the coordinator only the service, with what it acts by, is a shell."""
    assert {*within(["pipeworker.coordinator"])} - {*within(PURE)} == SHELL


def test_rooms_beside_each_other_know_nothing_of_each_other() -> None:
    """Below or above on the list is not yet a reason to import: plan knows errors alone."""
    ours = {
        m: {n for n in imports(m) if n.partition(".")[0] in ("pipeworker", "launcher", "cli")}
        for m in MODULES
    }
    for room, knows in (
        ("pipeworker.plan", ["pipeworker.errors"]),
        ("pipeworker.exact", []),
        ("pipeworker.wire", ["pipeworker.errors", "pipeworker.exact", "pipeworker.timings"]),
        ("pipeworker.host.lifetime", []),
        ("pipeworker.host.position", ["pipeworker.wire.messages"]),
        ("pipeworker.job", ["pipeworker.errors", "pipeworker.plan"]),
        ("pipeworker.record", ["pipeworker.errors", "pipeworker.wire"]),
        ("pipeworker.past", ["pipeworker.errors", "pipeworker.job", "pipeworker.record"]),
        ("pipeworker.worker.internals", []),
        ("pipeworker.worker.transport", None),
        ("pipeworker.worker", None),
    ):
        for module in within([room]):
            others = {n for n in ours[module] if not n.startswith((room, *(knows or [])))}
            if knows is None:
                others = {
                    n
                    for n in others
                    if n.startswith(("pipeworker.coordinator", "pipeworker.session"))
                }
            assert not others, module
    for module in within(["pipeworker.session"]):
        decides = {n for n in ours[module] if n.startswith("pipeworker.coordinator")}
        assert decides <= {"pipeworker.coordinator.report"}, module


def test_no_test_module_imports_another() -> None:
    """What they share is in ``tests/support``."""
    wrong = [
        (path.name, name)
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in imported(node)
        if any(part == "conftest" or part.startswith("test_") for part in name.split("."))
    ]
    assert not wrong


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
