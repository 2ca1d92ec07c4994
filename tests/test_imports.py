"""The floors of the house: imports go down only, and `import attnlab` is light."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

# From the ground up: a file imports its own room and the floors below it.
FLOORS = (
    {"names", "remat", "extras"},
    {"observe", "tokenizer"},
    {"norms", "attention", "sharing.plan"},
    {"heads", "sharing.named", "sharing.dictionary"},
    {"sharing.stack", "sharing.delta"},
    {"model"},
    {"conversion", "sharing.removal"},
    {"sharing.surgery", "inspect"},
    {"pretrained", "adapters"},
)
# Not on the stairs: `training` takes its model as an argument, `plot` takes arrays,
# `runs` needs what trained to read what was trained, `lab` runs many trainings.
APART = {
    "training": {"names", "attention", "extras", "tokenizer"},
    "plot": {"extras"},
    "runs": {"training", "model", "sharing.plan"},
    "lab": {"training", "model", "names"},
}
# Who alone may import a package.
ONLY = {
    "flax": {"model.modules", "model.models"},
    "matplotlib": {"plot.frame", "plot.joint", "plot.labels", "plot.maps", "plot.series"},
    "orbax": {"training.checkpoint"},
}
NEVER = {"absl", "ml_collections", "experiments", "torch", "tensorflow"}
EXPERIMENTS = ({"running", "configs", "benchmarks", "drawing"}, {"reporting"})

ATTNLAB = {
    ".".join(path.relative_to(ROOT / "attnlab").with_suffix("").parts): path
    for path in sorted((ROOT / "attnlab").rglob("*.py"))
}
FILES = {name: path for name, path in ATTNLAB.items() if path.name != "__init__.py"}


def imports_of(path):
    """(attnlab files, other packages) that a file imports anywhere in it."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            first, _, rest = node.module.partition(".")
            if first != "attnlab":
                others.add(first)
                continue
            for alias in node.names:
                full = f"{rest}.{alias.name}".strip(".")
                whole = f"{rest}.__init__".strip(".")
                ours.add(next(n for n in (full, f"{full}.__init__", rest, whole) if n in ATTNLAB))
    return ours, others


def room_of(name):
    """The entry of FLOORS or APART that a file belongs to."""
    entries = [entry for floor in (*FLOORS, APART) for entry in floor]
    found = [e for e in entries if name == e or name.startswith(f"{e}.")]
    assert found, f"attnlab/{name} stands on no floor: add it to FLOORS"
    return max(found, key=len)


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down(name):
    ours, others = imports_of(FILES[name])
    room = room_of(name)
    number = next((i for i, floor in enumerate(FLOORS) if room in floor), None)
    below = APART[room] if number is None else set().union(*FLOORS[:number])
    for other in ours:
        assert room_of(other.removesuffix(".__init__")) in below | {room}, other
    assert not others & NEVER
    for package, users in ONLY.items():
        assert package not in others or name in users
    assert name != "sharing.plan" or others <= {"collections", "typing"}


def test_no_circle():
    """Of files: a folder's own files name each other, never the folder."""
    graph = {name: imports_of(path)[0] for name, path in ATTNLAB.items()}
    TopologicalSorter(graph).prepare()


def test_experiments_import_downwards():
    """`reporting` reads what `running` wrote; nobody imports what a person types."""
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        parts = path.relative_to(ROOT / "experiments").parts
        if len(parts) == 1:
            continue
        level = next(i for i, rooms in enumerate(EXPERIMENTS) if parts[0] in rooms)
        below = set().union(*EXPERIMENTS[: level + 1])
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            names = {a.name for a in node.names} if module == "experiments" else set()
            if module.startswith("experiments."):
                names = {module.split(".")[1]}
            assert names <= below, (path, names)


def test_no_file_outgrows_a_sitting():
    folders = ("attnlab", "experiments", "colab", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [str(p) for p in files if len(p.read_text().splitlines()) > 400] == []


def test_pretrained_reads_with_numpy_alone():
    """Name tables know no layer and no module, and nobody's loader."""
    for path in (ROOT / "attnlab" / "pretrained").glob("*.py"):
        assert not imports_of(path)[1] & (NEVER | set(ONLY) | {"pickle", "transformers"})


def test_import_is_light():
    heavy = ("orbax", "matplotlib", "tensorboardX", "rich.progress", "absl.app", "ml_collections")
    code = f"import sys, attnlab; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Flax itself loads orbax where it finds it; nothing of ours does.
    assert set(ast.literal_eval(out.stdout)) <= {"orbax"}


def test_rooms_are_there_once_they_are_asked_for():
    code = (
        "import sys, attnlab; before = 'attnlab.inspect' in sys.modules; "
        "print(before, attnlab.inspect.head_statistics.__name__, hasattr(attnlab, 'inspected'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "head_statistics", "False"]


def test_every_public_name_is_documented():
    import attnlab

    for name in attnlab.__all__:
        assert getattr(attnlab, name).__doc__, name
