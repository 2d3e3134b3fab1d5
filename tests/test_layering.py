"""Imports point down only, siblings never import each other, and the core needs three packages."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "quatrain"
LAYERS = {
    "files": 1, "statistics": 1, "toml": 1, "formats": 1, "kernels": 2, "nn": 3, "optim": 3, "recipe": 4,
    "telemetry": 4, "models": 4, "data": 4, "checkpoint": 4, "train": 5, "ptq": 5, "export": 5, "evaluate": 5,
    "plan": 5, "report": 5, "integrations": 5, "commands": 6, "cli": 7, "__main__": 8, "__init__": 5,
}  # fmt: skip
CORE = ("formats", "kernels", "nn", "optim", "recipe", "telemetry", "__init__")
CORE_PACKAGES = {"torch", "numpy", "safetensors", "quatrain"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> list[str]:
    """Absolute names imported anywhere in the file, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [
                f"{node.module}.{alias.name}" if node.module == "quatrain" else node.module for alias in node.names
            ]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_upward_or_sideways_import(path: Path) -> None:
    mine = part_of(path)
    assert mine in LAYERS, f"{path} belongs to no layer: add it to the table"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "quatrain" or len(parts) == 1:
            assert name != "quatrain" or LAYERS[mine] >= 5, f"{path} imports the package root"
            continue
        theirs = parts[1]
        if theirs not in LAYERS:  # a public name of the root
            assert LAYERS[mine] >= 5, f"{path} imports quatrain.{theirs} from the root"
            continue
        assert theirs == mine or LAYERS[theirs] < LAYERS[mine], f"{path} ({mine}) imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_core_needs_three_packages(path: Path) -> None:
    import sys

    if part_of(path) not in CORE:
        return
    for name in imports(path):
        top = name.split(".")[0]
        optional = top == "triton" and path.stem.endswith(
            ("_triton", "triton_math")
        )  # imported where a GPU asks for it
        assert optional or top in CORE_PACKAGES or top in sys.stdlib_module_names, f"{path} imports {top}"


def test_the_layering_test_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "x.py"
    bad.write_text("def f():\n    from quatrain.recipe import apply\n    import transformers\n")
    assert imports(bad) == ["quatrain.recipe", "transformers"]


def test_house_rules() -> None:
    """No assert, no environment variable, no unpickling, files of at most 400 lines."""
    for path in modules():
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            assert not isinstance(node, ast.Assert), f"{path}: assert"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("environ", "getenv"), f"{path}: environment variable"
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {"pickle", "dill", "cloudpickle"}, f"{path}: pickle"
