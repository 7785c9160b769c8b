"""Imports point one way, and what a rank needs is a short list: read from the sources, whatever runs or not.

`cli, jobs → job, data → fleet → engine → model → cache, parallel → ops → kernels`. `LLM` and
the benches stand above the fleet, `errors`, `config`, `chat`, `toy` and `svg` beside it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "deepinfer_ray"

LEAVES = {"errors"}
OPS = LEAVES | {"kernels", "ops", "config"}
MODEL = OPS | {"cache", "parallel", "model"}
ENGINE = MODEL | {"engine"}
FLEET = ENGINE | {"fleet"}
JOB = FLEET | {"job", "chat", "svg", "__version__"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "svg": set(),
    "config": LEAVES | {"config"},
    "toy": LEAVES | {"toy"},
    "chat": LEAVES | {"config", "chat"},
    "kernels": LEAVES | {"kernels"},
    "ops": OPS,
    "cache": OPS | {"cache"},
    "parallel": OPS | {"parallel"},
    "model": MODEL | {"toy"},  # synthetic checkpoints come with a tokenizer
    "engine": ENGINE,
    "llm": FLEET | {"llm", "chat"},
    "fleet": FLEET,
    "job": JOB,
    "data": JOB | {"data"},
    "bench": JOB | {"bench", "llm"},
    "bench.kills_driver": JOB | {"cli"},  # a process of its own: the command line that is killed
    "cli": JOB | {"cli", "bench", "data", "toy"},
    "jobs": {"cli", "bench", "errors"},
    "__init__": {"llm", "engine"},
}
"""What the modules of a package may import of this project; a name stands for everything below it too."""

RANK_PACKAGES = ("engine", "model", "cache", "parallel", "ops", "kernels")
RANK_LIBRARIES = {"torch", "numpy", "safetensors", "tokenizers", "pydantic"}
OPTIONAL = {
    "kernels": {"tilelang"},
    "ops": {"tilelang", "deep_gemm", "flash_mla", "tile_kernels"},
    "parallel": {"deep_ep"},
    "engine": {"xgrammar"},
}
"""Imported inside functions only: whoever lacks one does without."""


def sources() -> list[tuple[str, Path]]:
    """(line of `ALLOWED`, file) of every module: its own if it has one, else its package's."""
    found = [("jobs", path) for path in ROOT.glob("jobs/*.py")]
    found += [("kernels", path) for path in ROOT.glob("kernels/**/*.py")]
    for path in (ROOT / PACKAGE).rglob("*.py"):
        inner = path.relative_to(ROOT / PACKAGE)
        own = ".".join(inner.with_suffix("").parts)
        found.append((own if own in ALLOWED else inner.parts[0], path))
    return sorted(found)


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether it is imported with the file) of every import; `from a import b` is `a.b`."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    inner = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or _for_types(scope)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno, id(node) not in inner


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def upward_imports() -> list[str]:
    wrong = []
    for package, path in sources():
        for module, line, _ in imports(path):
            inner = module.removeprefix(PACKAGE + ".")
            if inner != module and not is_within(inner, ALLOWED.get(package, set())):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {package} imports {inner}")
    return wrong


def foreign_imports() -> list[str]:
    wrong = []
    for package, path in sources():
        if package not in RANK_PACKAGES:
            continue
        for module, line, at_start in imports(path):
            name = module.split(".")[0]
            if name == PACKAGE or name in sys.stdlib_module_names or name in RANK_LIBRARIES:
                continue
            if at_start or name not in OPTIONAL.get(package, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {package} imports {name}")
    return wrong


def test_every_package_has_its_line() -> None:
    assert {package for package, _ in sources()} == set(ALLOWED)


def test_imports_point_one_way() -> None:
    assert upward_imports() == []


def test_no_two_packages_import_each_other() -> None:
    graph = {name: {each.split(".")[0] for each in below} - {name} for name, below in ALLOWED.items()}
    reached = {name: set(below) for name, below in graph.items()}
    for _ in graph:
        for below in reached.values():
            below |= {deeper for name in below for deeper in reached.get(name, set())}
    loops = {name for name, below in reached.items() if name in below}
    assert loops == set()


def test_a_rank_needs_few_libraries() -> None:
    assert foreign_imports() == []


@pytest.mark.parametrize(
    ("package", "code", "report"),
    [
        ("model", "from deepinfer_ray.engine.request import Request", "model imports engine.request.Request"),
        ("engine", "def f():\n    import deepinfer_ray.fleet.router", "engine imports fleet.router"),
        ("cache", "from deepinfer_ray.model import v41", "cache imports model.v41"),
        ("parallel", "import ray", "parallel imports ray"),
        ("ops", "import tilelang", "ops imports tilelang"),
        ("model", "def f():\n    import ray.util", "model imports ray"),
    ],
)
def test_a_wrong_import_is_found(
    package: str, code: str, report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / PACKAGE / package
    folder.mkdir(parents=True)
    (folder / "new.py").write_text(code + "\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (found,) = upward_imports() + foreign_imports()
    assert found.endswith(report)
