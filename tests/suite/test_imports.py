"""Purity, start-up and private names of torch, read from the source and once at run time.

The direction of imports between rooms is checked by import-linter's contracts (``setup.cfg``).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pipeworker

ROOT = Path(pipeworker.__file__).parents[1]
TESTS = Path(__file__).parents[1]
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
"""Clocks, files, sockets, processes, environment, randomness: a decision may not depend on them."""
BUILTIN_SHELLS = {"open", "input", "print", "exec", "eval", "__import__"}

LIGHT = [
    *("pipeworker.errors", "pipeworker.version", "pipeworker.timings", "pipeworker.exact_sum"),
    *("pipeworker.environment", "pipeworker.facts", "pipeworker.plan", "pipeworker.wire"),
    *("pipeworker.coordinator", "pipeworker.runs", "pipeworker.display", "pipeworker.host"),
    *("pipeworker.job.options", "pipeworker.job.option_parsing", "pipeworker.job.resume_options"),
    *(
        "pipeworker.record.rundir",
        "pipeworker.record.checkpoint.manifest",
        "pipeworker.record.lock",
    ),
    "pipeworker.record.run_record",
    *("pipeworker.record.files.atomic_file", "pipeworker.record.checkpoint.snapshot_memory"),
    *("pipeworker.record.weights.weight_files", "pipeworker.record.metrics"),
    "launcher",
]
"""Modules that run where torch is not installed, or must start at once."""
HEAVY = [
    "pipeworker.host.agent",
    *("launcher.foreground", "launcher.torchrun", "launcher.machine", "launcher.templates"),
    "launcher.node",
]
"""Modules of these rooms that import torch: they run workers, or show what torch finds."""
PURE = [
    *("pipeworker.errors", "pipeworker.timings", "pipeworker.exact_sum"),
    *("pipeworker.facts", "pipeworker.plan", "pipeworker.coordinator"),
    *("pipeworker.job.options", "pipeworker.job.resume_options"),
    *("pipeworker.wire.messages", "pipeworker.wire.codec", "pipeworker.wire.lines"),
    *("pipeworker.display.text", "pipeworker.display.figures", "pipeworker.display.summary"),
    "pipeworker.display.plan",
    *("launcher.spec", "launcher.supervisor"),
    *("launcher.engines.pod", "launcher.engines.manifests"),
]
"""Modules that decide: a result depends on the arguments alone."""
SHELL = ["pipeworker.coordinator.service", "pipeworker.coordinator.io"]
"""Modules of these rooms that act: sockets, files and clocks of the coordinator."""

PRIVATE = {
    *("_C", "_buffers", "_parameters", "_modules", "_version", "_base", "_cdata", "_call_impl"),
    *("_forward_hooks", "_forward_pre_hooks", "_post_accumulate_grad_hooks", "_execution_engine"),
    *("_get_default_store", "_get_default_group", "_distributed_c10d", "_storage_Use_Count"),
    *("_share_cuda_", "_new_shared_cuda"),
    *("_pytree", "_dynamo", "_subclasses", "_functorch", "_unsafe_view", "_backward_hooks"),
    "_iterator",
    "_shutdown_workers",
}
"""Private names of torch, as attributes of anything but ``self``."""
MAKERS = {
    *(
        "empty",
        "zeros",
        "ones",
        "full",
        "arange",
        "tensor",
        "as_tensor",
        "asarray",
        "scalar_tensor",
    ),
    *("rand", "randn", "randint", "randperm", "normal", "eye", "linspace", "empty_strided"),
}
"""Functions of torch whose tensors are on the default device, which a job file may set."""
INTERNALS = "pipeworker.worker.internals"
"""The one module that uses them."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(module)))


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module that run when it is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from run_at_import(child)


@cache
def imports(module: str, *, lazy: bool = True) -> set[str]:
    """Return what a module imports, with `lazy` also in functions and for type hints."""
    found = set()
    for node in nodes_of(module) if lazy else run_at_import(tree_of(module)):
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


@cache
def loads(module: str, *, lazy: bool) -> list[str]:
    """Return what the imports of a module load: the packages of ours, and names of others."""
    found = []
    for name in imports(module, lazy=lazy):
        parents = [name.rsplit(".", n)[0] for n in range(name.count("."), 0, -1)]
        found += [*parents, name] if name in MODULES else [name.partition(".")[0]]
    return list(dict.fromkeys(found))


def reaches(start: str) -> dict[str, str]:
    """Return every module that an import of `start` loads, each with the one that imports it.

    Imports within functions count for `start` itself alone: those of other modules run later.
    """
    ways = {start: ""}
    queue = [start]
    while queue:
        module = queue.pop()
        for step in loads(module, lazy=module == start):
            if step not in ways:
                ways[step] = module
                if step in MODULES:
                    queue.append(step)
    return ways


def path_to(name: str, ways: dict[str, str]) -> str:
    """Show the imports through which a module is loaded."""
    path = [name]
    while ways.get(path[0]):
        path.insert(0, ways[path[0]])
    return " -> ".join(path)


def within(rooms: list[str]) -> list[str]:
    return [m for m in MODULES if any(m == room or m.startswith(f"{room}.") for room in rooms)]


def test_the_files_are_found() -> None:
    rooms = {module.rpartition(".")[0] for module in MODULES}
    assert {"launcher", "pipeworker.plan", "pipeworker.wire", "pipeworker.coordinator"} <= rooms
    assert all(within([room]) for room in [*LIGHT, *HEAVY, *PURE, *SHELL])
    assert "zmq" in imports("pipeworker.wire.sockets")  # a forbidden import would be seen
    assert "torch" in reaches("pipeworker.worker.worker")
    assert reaches("pipeworker.coordinator.service")["secrets"] in {
        *("pipeworker.wire.keys", "pipeworker.wire.sockets", "pipeworker.record.files.atomic_file"),
        "pipeworker.record.checkpoint.folder",
    }


def test_torch_stays_out() -> None:
    for module in sorted({*within(LIGHT)} - {*within(HEAVY)}):
        ways = reaches(module)
        assert "torch" not in ways, path_to("torch", ways)
        assert not [name for name in ways if name.startswith("pipeworker.worker")], module


def test_torch_stays_out_of_a_running_coordinator() -> None:
    code = (
        "import pipeworker.coordinator.service, pipeworker.job.options, sys; "
        "print(*(m for m in ('torch', 'numpy', 'pipeworker.worker') if m in sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr


def private_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the private names of torch that the nodes of a module use."""
    found, torchs = set(), set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{source}.{alias.name}".removeprefix(".")
                if name.partition(".")[0] == "torch":
                    torchs.add((alias.asname or alias.name).partition(".")[0])
                    found |= {name} if is_private(name) else set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            listed = (node.attr in PRIVATE or node.attr.startswith("_foreach_")) and not ours
            if listed or first_name(node) in torchs:
                dotted = ast.unparse(node)
                found |= {dotted} if listed or is_private(dotted) else set()
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            found.add(repr(node.value))  # for getattr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("_find", "resolve_name"):
            found |= {ast.literal_eval(arg) for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def first_name(node: ast.expr) -> str:
    """Return the name with which an expression of attributes and calls begins, or an empty one."""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute() | ast.Subscript():
                node = node.value
            case ast.Call():
                node = node.func
            case _:
                return ""
    return node.id


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def test_the_private_names_of_torch_are_in_one_module() -> None:
    used = {module: private_names(nodes_of(module)) for module in MODULES}
    assert {module for module, names in used.items() if names} == {INTERNALS}, used


def test_a_worker_checks_each_private_name_of_torch() -> None:
    """The last part of each is in a name that ``torch_check`` tests, or that is looked up."""
    from pipeworker.worker import internals, torch_check

    looked_up = re.findall(r'_find\(\s*"(.+?)"\s*\)', Path(internals.__file__).read_text("utf-8"))
    checked = " ".join([*torch_check.BEHAVIOURS, *torch_check.COMPILER, *looked_up])
    typed = {"Store", "PrefixStore", "TCPStore", "Work"}  # for the type checker only
    names = {re.findall(r"\w+", name)[-1] for name in private_names(nodes_of(INTERNALS))}
    assert {name for name in names - typed if name not in checked} == set()


def test_private_names_would_be_seen() -> None:
    seen = private_names(nodes_of(INTERNALS))
    assert {"torch._C._storage_Use_Count", "torch._dynamo", "torch._foreach_mul_"} <= seen
    assert {"'_buffers'", "'_version'", "target._backward_hooks"} <= seen
    assert {"dist.distributed_c10d._get_default_store", "torch._dynamo.config"} <= seen
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
    assert private_names([*ast.walk(ast.parse(text))]) == {
        *("torch.utils._pytree", "torch._C._distributed_c10d.Store", "nn.modules._functions"),
        *("F._canonical_mask", "'_buffers'"),
    }


def decisions() -> list[str]:
    return sorted({*within(PURE)} - {*within(SHELL)} - {"pipeworker.coordinator"})


def test_a_decision_depends_on_its_arguments_alone() -> None:
    """Neither the module nor any module of ours that it imports may act."""
    for module in decisions():
        ways = reaches(module)
        impure = sorted(SHELL_ONLY & ways.keys())
        assert not impure, path_to(impure[0], ways)
        calls = {
            node.func.id
            for node in nodes_of(module)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & BUILTIN_SHELLS, module


def test_no_test_module_imports_another() -> None:
    """Helpers that several test modules share are in ``tests/support``."""
    line = re.compile(r"^ *(?:from|import) (?:.*[. ])?(?:conftest|test_\w+)\b.*", re.MULTILINE)
    assert line.match("    from support.test_jobs import Jobs")
    assert line.match("import test_resume as resume")
    found = {path.name: line.findall(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_tensor_is_made_on_the_default_device() -> None:
    calls = [
        (module, node)
        for module in MODULES
        if not module.startswith("launcher.templates.")  # job files
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    made = {
        f"{module}: {ast.unparse(node)}"
        for module, node in calls
        if isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in MAKERS
        and not any(word.arg in ("device", None) for word in node.keywords)
        and module != "pipeworker.worker.torch_check"  # it runs before a job file is loaded
    }
    assert not made
