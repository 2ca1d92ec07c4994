"""Imports point downwards and in no circle, and some packages have few importers."""

import ast
from functools import cache
from graphlib import TopologicalSorter

from conftest import ROOT

LAYERS = (
    "names ops extras tap atomic nested",
    "fields",
    "attention sharing",
    "heads",
    "models",
    "transforms",
    "interpret",
    "pretrained adapters nnx",
)
"""Packages of attnlab from the bottom up: a file imports its own package and those below it."""
APART = {
    "data": "names fields extras atomic",  # no model
    "training": "names fields nested attention extras atomic data models sharing",
    "load": "names nested atomic data models training sharing interpret pretrained tap transforms",
    "lab": "extras fields names nested atomic data models training sharing heads interpret "
    "pretrained load tap transforms",
    "report": "extras atomic nested data models sharing interpret training load lab",
    "contrib": "extras ops attention",
}
"""Packages beside these layers -> what they may import."""
BELOW = {
    package: {name for below in LAYERS[:i] for name in below.split()}
    for i, layer in enumerate(LAYERS)
    for package in layer.split()
} | {package: set(names.split()) for package, names in APART.items()}
ONLY = {
    "flax": {"models.flax", "nnx"},
    "matplotlib": {"report.heads", "report.style"},
    "orbax": {"training.checkpoint"},
    **dict.fromkeys(
        ("absl", "ml_collections", "torch", "tensorflow", "pickle", "transformers"), ()
    ),
}
"""Other packages -> the files of attnlab that may import them."""


@cache
def imports_of(path):
    """(files of the repository, other packages) that a file imports, in functions too; other
    packages that only a type checker loads do not count."""
    tree, files, others = ast.parse(path.read_text()), set(), set()
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If)]
    blocks = [n for n in blocks if ast.unparse(n.test) == "TYPE_CHECKING"]
    for_types = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            bases = [ROOT.joinpath(*n.split(".")) for n in (module, module.rpartition(".")[0]) if n]
            candidates = [p for b in bases for p in (b.with_suffix(".py"), b / "__init__.py")]
            if file := next((p for p in candidates if p.is_file()), None):
                files.add(file)
            elif id(node) not in for_types:
                others.add(module.partition(".")[0])
    return files - {path}, others


def test_imports_point_downwards():
    assert {p.stem for p in (ROOT / "attnlab").iterdir() if p.stem[0] != "_"} >= {*BELOW}
    wrong = []
    for path in (ROOT / "attnlab").rglob("*.py"):
        parts = path.relative_to(ROOT / "attnlab").with_suffix("").parts
        if parts[-1] == "__init__":
            continue
        assert parts[0] in BELOW, f"attnlab/{parts[0]} is in no layer: add it to LAYERS"
        files, others = imports_of(path)
        for file in files - {ROOT / "attnlab" / "__init__.py"}:
            package = file.relative_to(ROOT).with_suffix("").parts[:2]
            if package not in [("attnlab", name) for name in (parts[0], *BELOW[parts[0]])]:
                wrong.append((path.name, file.name))
        name = ".".join(parts)
        wrong += [(path.name, other) for other in others if name not in ONLY.get(other, [name])]
    assert wrong == []


def test_no_two_files_import_each_other_in_a_circle():
    graph = {}
    for package in ("attnlab", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            graph[path] = imports_of(path)[0]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_dir_is_what_a_module_offers():
    import attnlab

    for module in (attnlab.masks, attnlab.positions, attnlab.adapters):
        values = vars(module).items()
        own = {n for n, a in values if getattr(a, "__module__", "") == module.__name__}
        assert {name for name in own if name[0] != "_"} <= {*dir(module)} <= {*vars(module)}
        assert {"jax", "jnp", "Array"}.isdisjoint(dir(module))
