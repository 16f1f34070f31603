"""The house: imports point downwards through the table in CONTRIBUTING.md, in no circle; no room is crowded."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = {"lm_pcfg": REPOSITORY, "flash_inside": REPOSITORY / "kernels"}
MOST_FILES = 14
ROOMY = ("embedded", "benchmarks")  # of many small files by their nature


def source_files() -> dict[str, Path]:
    """Every module of the project and its file."""
    found = {}
    for package, root in SOURCES.items():
        for file in sorted((root / package).rglob("*.py")):
            name = ".".join(file.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = file
    return found


def imported_modules(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms() -> dict[str, int]:
    """Of the table in CONTRIBUTING.md, from the top down: the modules or packages of a row, and its number."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return {name: number for number, row in enumerate(rows) for name in re.findall(r"`([\w.]+)`", row)}


def room_of(module: str, table: dict[str, int]) -> str | None:
    fitting = [room for room in table if f"{module}.".startswith(f"{room}.")]
    return max(fitting, key=len, default=None)


def test_imports_point_downwards_through_the_table():
    table = rooms()
    assert len(table) > 8
    for module, file in source_files().items():
        room = room_of(module, table)
        if module in ("lm_pcfg", "flash_inside"):
            continue
        assert room is not None, f"{module} is in no room of CONTRIBUTING.md"
        for name in imported_modules(file):
            other = room_of(name, table)
            assert other is None or table[other] >= table[room], f"{module} imports {name}, upwards"


def test_no_files_import_each_other_in_a_circle():
    files = source_files()
    imports = {module: {name for name in imported_modules(file) if name in files} for module, file in files.items()}
    for (
        module,
        names,
    ) in imports.items():  # a package that is named on the way to a module is not meant
        imports[module] = {name for name in names if name != module and files[name].name != "__init__.py"}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for name in sorted(imports[module]):
                visit(name, (*above, module))
            done.add(module)

    for module in imports:
        visit(module, ())


def test_no_room_has_more_files_than_one_can_look_at():
    for package, root in SOURCES.items():
        for folder in [root / package, *(path for path in (root / package).rglob("*") if path.is_dir())]:
            files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
            assert folder.name in ROOMY or len(files) <= MOST_FILES, f"{folder} has {len(files)} files"


def test_the_corpus_is_read_without_torch():
    for file in (REPOSITORY / "lm_pcfg/corpus").rglob("*.py"):
        assert not {"torch", "flash_inside"} & {name.split(".")[0] for name in imported_modules(file)}, file


def test_no_file_uses_pickle():
    for file in source_files().values():
        assert not {"pickle", "torch.load", "torch.save"} & imported_modules(file), file
        assert "torch.load(" not in file.read_text(encoding="utf-8"), file
