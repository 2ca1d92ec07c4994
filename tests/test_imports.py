"""Imports go one way, and `import attnlab` is light."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

# file -> the attnlab files it may import; the rest of a file's imports are other packages.
LEAVES = {name: set() for name in ("names", "masks", "positions", "relaxed", "sharing", "shard")}
ALLOWED = LEAVES | {
    "layouts": set(),
    "heads": {"layouts", "names", "pointwise"},
    "cache": {"heads", "layouts", "names"},
    "visible": {"masks"},
    "dense": {"visible"},
    "blockwise": {"dense", "visible"},
    "fused": {"dense", "masks", "visible"},
    "attention": {"blockwise", "dense", "fused", "visible"},
    "multihead": {
        "accounting", "attention", "cache", "heads", "layouts", "masks", "names", "positions",
    },
    "stack": {"sharing"},
    "pointwise": {"names"},
    "block": {"cache", "heads", "multihead", "names", "pointwise", "relaxed"},
    "layers": {"block", "cache", "sharing", "stack"},
    "outer": {"pointwise", "positions"},
    "accounting": {"heads", "layouts", "names", "outer", "pointwise", "relaxed"},
    "modules": {"block", "heads", "layers", "multihead", "pointwise", "sharing", "stack"},
    "config": {
        "attention", "block", "cache", "heads", "layouts", "multihead", "names", "outer",
        "pointwise", "sharing",
    },
    "models": {
        "cache", "config", "layers", "masks", "modules", "outer", "pointwise", "positions",
    },
    "conversion": {"heads", "layouts", "multihead", "positions"},
    "pretrained": {"config", "heads", "modules", "names", "outer", "sharing", "surgery"},
    "decode": {"cache"},
    "edges": {"masks"},
    "adapters": {"attention", "heads", "layouts"},
    "surgery": {"conversion", "heads", "layouts", "names", "relaxed", "sharing"},
    "data": set(),
    "tasks": set(),
    "checkpoint": set(),
    "metrics": set(),
    "train": {"checkpoint", "data", "metrics", "shard", "tasks"},
    "plot": set(),
}  # fmt: skip
# who alone may import a package
ONLY = {"flax": {"modules", "models"}, "matplotlib": {"plot"}, "orbax": {"checkpoint"}}
NEVER = {"absl", "ml_collections", "experiments", "torch", "tensorflow"}


def imports_of(name):
    """(attnlab files or folders, other packages) that a file or folder imports anywhere in it."""
    ours, others = set(), set()
    folder = ROOT / "attnlab" / name
    files = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "attnlab":
                ours |= {alias.name for alias in node.names}
            elif module.startswith("attnlab."):
                ours.add(module.split(".")[1])
            else:
                others.add(module.split(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return ours - {name}, others


def test_pretrained_reads_with_numpy_alone():
    """Name tables know no layer and no module, and nobody's loader."""
    _, others = imports_of("pretrained")
    assert not others & (NEVER | set(ONLY) | {"pickle", "transformers", "safetensors"})


def test_every_file_has_a_row():
    files = {p.stem for p in (ROOT / "attnlab").glob("*.py")} - {"__init__"}
    folders = {p.parent.name for p in (ROOT / "attnlab").glob("*/__init__.py")}
    assert files | folders == set(ALLOWED)


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_go_one_way(name):
    ours, others = imports_of(name)
    assert ours <= ALLOWED[name]
    assert not others & NEVER
    for package, users in ONLY.items():
        assert package not in others or name in users
    assert name != "sharing" or not others


def test_every_file_has_tests():
    tested = {p.stem.removeprefix("test_") for p in (ROOT / "tests").glob("test_*.py")}
    # these are tested where they are used
    assert set(ALLOWED) - tested <= {
        "names",
        "shard",
        "modules",
        "layouts",
        "cache",
        "dense",
        "fused",
        "conversion",
        "config",
        "layers",
        "outer",
    }


def test_import_is_light():
    heavy = ("orbax", "matplotlib", "tensorboardX", "rich.progress", "absl.app", "ml_collections")
    code = f"import sys, attnlab; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Flax itself loads orbax where it finds it; nothing of ours does.
    assert set(ast.literal_eval(out.stdout)) <= {"orbax"}


def test_every_public_name_is_documented():
    import attnlab

    for name in attnlab.__all__:
        assert getattr(attnlab, name).__doc__, name
