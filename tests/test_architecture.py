"""The arrows of the house: which room may import which, and what no file may import.

Read from the syntax trees, so that a forbidden import is found even inside a function that no test
calls.

- Top floor (`strategies`, `plugins`, `callbacks`, `datamodules`, `cli`, `demos`): the only
  rooms that import Lightning.
- Middle rooms never import Lightning, nor each other, but for the exceptions below.
- Ground floor: imports nothing from above.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "lightning_dlres"
ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

TOP = {"strategies", "plugins", "callbacks", "datamodules", "cli", "demos"}
MIDDLE = {"pipeline", "memory", "mirror", "paramserver", "gradsync", "prefetch"}
GROUND = {"codecs", "kernels", "core"}
MAY_IMPORT_ROOMS = {
    **dict.fromkeys(TOP, TOP | MIDDLE | GROUND),
    **{room: {room} | GROUND for room in MIDDLE},
    "pipeline": {"pipeline", "memory", "gradsync"} | GROUND,
    "paramserver": {"paramserver", "mirror"} | GROUND,
    "codecs": {"codecs", "kernels", "core"},
    "kernels": {"kernels", "core"},
    "core": {"core"},
}
MOST_FILES, MOST_LINES = 15, 450
FORBIDDEN_WORDS = re.compile(r"\bMethods? [A-E]\b|\b[Dd]atum\b|\bVMs?\b|\b[Vv]irtual machines?\b")
CONCERNS_LIGHTNING = re.compile(
    r"Lightning|Trainer|lightning\.pytorch|training[_ ]step|[Uu]ser code|the user's|DataLoader"
)
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve"}
# The only files that may hold private names of torch or Lightning, each name with its reason. The
# first may import Lightning, so rooms below the top floor use the second, which has names of torch.
COMPAT = {f"{PACKAGE}/_compat.py", f"{PACKAGE}/core/_compat.py"}


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is module `a.b`, name `c`; `import a.b` has none."""

    line: int
    module: str
    name: str | None

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def imports(tree: ast.Module, file: Path) -> Iterator[Import]:
    """Yield every import of a file, at any depth, `importlib.import_module("...")` included."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(node.lineno, module, alias.name)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
                yield Import(node.lineno, str(first.value), None)


def room_of(file: Path) -> str | None:
    """Return the room a file lies in; None for files beside the rooms (`__init__`, `_compat`)."""
    parts = file.relative_to(ROOT / PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def room_imported(item: Import) -> str | None:
    """Return the room, or the file beside the rooms, that an import of this package leads to."""
    parts = item.full.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def violations(tree: ast.Module, file: Path) -> list[str]:
    """Return one line for each import of a file that breaks a rule."""
    room, found = room_of(file), []
    for item in imports(tree, file):
        where = f"{relative(file)}:{item.line}"
        if item.top in UNPICKLERS:
            found.append(f"{where}: {item.full}: nothing is pickled here; use core's payload")
        foreign = item.top in LIGHTNING | {"torch"}
        if foreign and any(map(is_private, item.full.split("."))) and relative(file) not in COMPAT:
            found.append(f"{where}: {item.full} is private; only {sorted(COMPAT)} may import it")
        if room not in MIDDLE | GROUND:
            continue
        if item.top in LIGHTNING:
            found.append(f"{where}: {item.full}: {room}/ is below the top floor: no Lightning here")
        if item.top != PACKAGE:
            continue
        target = room_imported(item)
        if target == "_compat" and not compat_imports_lightning():
            continue
        if target not in MAY_IMPORT_ROOMS[room]:
            found.append(f"{where}: {room}/ may not import {item.full}: arrows go down only")
    return found


def compat_imports_lightning() -> bool:
    file = ROOT / PACKAGE / "_compat.py"
    return file.exists() and any(item.top in LIGHTNING for item in imports(parse(file), file))


def test_there_is_a_package_and_every_room_is_known() -> None:
    assert FILES, f"no Python file under {PACKAGE}/"
    rooms = {room for file in FILES if (room := room_of(file)) is not None}
    unknown = rooms - TOP - MIDDLE - GROUND
    assert not unknown, f"new rooms {sorted(unknown)}: give them a floor in this file, and a reason"


def test_imports_follow_the_arrows() -> None:
    found = [line for file in FILES for line in violations(parse(file), file)]
    assert not found, "\n" + "\n".join(found)


def test_files_state_why_they_exist() -> None:
    silent = [relative(file) for file in FILES if not ast.get_docstring(parse(file))]
    assert not silent, f"without a module docstring: {silent}"


@pytest.mark.parametrize(
    ("where", "source", "words"),
    [
        ("core/x.py", "import lightning", "no Lightning"),
        ("pipeline/x.py", "def f():\n    from lightning.pytorch import Trainer", "no Lightning"),
        (
            "pipeline/x.py",
            "from importlib import import_module as i\nimport pytorch_lightning",
            "no Lightning",
        ),
        ("memory/x.py", "import importlib\nimportlib.import_module('lightning')", "no Lightning"),
        ("memory/x.py", "from lightning_dlres.pipeline import stage", "arrows go down"),
        ("memory/x.py", "from ..pipeline.stage import Stage", "arrows go down"),
        ("memory/x.py", "from .. import pipeline", "arrows go down"),
        ("gradsync/x.py", "import lightning_dlres", "arrows go down"),
        ("core/x.py", "from lightning_dlres.codecs import one_bit", "arrows go down"),
        ("kernels/x.py", "from lightning_dlres.memory import pool", "arrows go down"),
        ("pipeline/x.py", "from lightning_dlres.strategies import hetero_pipe", "arrows go down"),
        ("strategies/x.py", "import pickle", "nothing is pickled"),
        ("strategies/x.py", "from torch._C import Tensor", "is private"),
        ("strategies/x.py", "from torch.utils import _pytree", "is private"),
        (
            "strategies/x.py",
            "from lightning.pytorch.trainer.call import _call_lightning_module_hook",
            "is private",
        ),
    ],
)
def test_the_rules_find_what_they_forbid(where: str, source: str, words: str) -> None:
    found = violations(ast.parse(source), ROOT / PACKAGE / where)
    assert len(found) == 1, found
    assert words in found[0]


@pytest.mark.parametrize(
    ("where", "source"),
    [
        (
            "core/x.py",
            "from __future__ import annotations\nimport torch, zmq\nfrom .errors import A",
        ),
        ("core/x.py", "from torch.__future__ import set_swap_module_params_on_conversion"),
        ("pipeline/x.py", "from lightning_dlres.memory import pool\nfrom ..gradsync import hook"),
        ("pipeline/x.py", "from . import schedule\nfrom lightning_dlres import core"),
        ("paramserver/x.py", "from lightning_dlres.mirror.region import Region"),
        ("codecs/x.py", "from lightning_dlres.kernels import pack"),
        ("strategies/x.py", "import lightning\nfrom lightning_dlres.pipeline import runtime"),
        ("_compat.py", "from lightning.pytorch.loops import _TrainingEpochLoop"),
        ("core/_compat.py", "from torch.utils import _pytree"),
    ],
)
def test_the_rules_allow_what_the_design_allows(where: str, source: str) -> None:
    assert violations(ast.parse(source), ROOT / PACKAGE / where) == []


def folder_of(module: str) -> str | None:
    """Return the folder, below the package, in which a module lies; None for other packages."""
    path = ROOT.joinpath(*module.split("."))
    if path.with_suffix(".py").is_file():
        path = path.parent
    elif not path.is_dir():
        return folder_of(module.rpartition(".")[0]) if "." in module else None
    return relative(path).removeprefix(PACKAGE).lstrip("/") if PACKAGE in path.parts else None


def imported_folders() -> dict[str, set[str]]:
    """Return, for every folder of the package, the folders that its files import."""
    edges: dict[str, set[str]] = {}
    # A package's `__init__` may offer names of the folders within it.
    for file in (file for file in FILES if file.name != "__init__.py"):
        folder = relative(file.parent).removeprefix(PACKAGE).lstrip("/")
        for item in imports(parse(file), file):
            target = folder_of(item.full) if item.top == PACKAGE else None
            if target is not None and target != folder and folder and target:
                edges.setdefault(folder, set()).add(target)
    return edges


def test_folders_import_each_other_in_no_circle() -> None:
    """A circle between folders hides which of them stands on which."""
    folders = imported_folders()
    assert "pipeline/profile" in folders["pipeline/plan"], "imports are not found"
    try:
        list(TopologicalSorter(folders).static_order())
    except CycleError as error:
        raise AssertionError(
            f"these folders import each other: {' -> '.join(error.args[1])}"
        ) from None


def test_no_folder_is_crowded() -> None:
    counts = Counter(relative(file.parent) for file in FILES)
    crowded = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    assert not crowded, f"more than {MOST_FILES} files: give a part of them a folder: {crowded}"


def test_no_file_is_long() -> None:
    lines = {relative(file): len(file.read_text().splitlines()) for file in FILES}
    long = {file: count for file, count in lines.items() if count > MOST_LINES}
    assert not long, f"more than {MOST_LINES} lines: split along a seam: {long}"


def test_no_public_class_name_is_used_twice() -> None:
    """A name that two classes share makes a reader guess which one is meant."""
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(relative(file))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not shared, f"class names of two classes: {shared}"


def test_words_of_readers() -> None:
    """Codes of the methods belong to docs/methods.md; a replica is not called a virtual machine."""
    words = {relative(file): FORBIDDEN_WORDS.findall(file.read_text()) for file in FILES}
    found = {file: names for file, names in words.items() if names}
    assert not found, f"words that readers do not know: {found}"


def test_strategies_hold_only_what_concerns_lightning() -> None:
    """What neither imports nor speaks of Lightning belongs to a room below."""
    files = [f for f in FILES if room_of(f) == "strategies" and f.name != "__init__.py"]
    misplaced = [relative(f) for f in files if not CONCERNS_LIGHTNING.search(f.read_text())]
    assert files
    assert not misplaced, f"move these down: {misplaced}"


def test_public_names_exist() -> None:
    import lightning_dlres

    names = lightning_dlres.__all__
    assert len(names) == len(set(names)), "a name is listed twice in __all__"
    missing = [name for name in names if not hasattr(lightning_dlres, name)]
    assert not missing, f"__all__ names what does not exist: {missing}"
