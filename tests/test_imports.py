"""Imports point downwards, heavy packages stay lazy, and a few packages have few importers."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

# From the bottom up: a file imports its own package and those below it.
LAYERS = (
    {"names", "broadcast", "products", "remat", "eager", "extras", "tap", "atomic", "nested"},
    {"fields"},
    {"norms", "attention", "sharing"},
    {"heads"},
    {"models"},
    {"transforms"},
    {"interpret"},
    {"pretrained", "adapters"},
)
# `data` knows no model. `training` takes a model as an
# argument, `lab` runs everything, `report` reads its results.
APART = {
    "data": {"names", "fields", "extras", "atomic"},
    "training": {
        "names",
        "fields",
        "nested",
        "attention",
        "extras",
        "atomic",
        "data",
        "models",
        "sharing",
    },
    "load": {
        "names",
        "nested",
        "atomic",
        "data",
        "models",
        "training",
        "sharing",
        "interpret",
        "pretrained",
        "tap",
        "transforms",
        "lab",
    },
    "lab": {
        "extras",
        "fields",
        "names",
        "nested",
        "atomic",
        "data",
        "models",
        "training",
        "sharing",
        "heads",
        "interpret",
        "pretrained",
        "load",
        "tap",
        "transforms",
    },
    "report": {"extras", "atomic", "nested", "lab", "training", "load"},
    "contrib": {"extras", "remat", "attention"},
}
# Who alone may import a package.
ONLY = {
    "flax": {"models.modules", "models.transformer"},
    "matplotlib": {
        f"report.{name}" for name in ("curves", "intervals", "labels", "maps", "scatter", "style")
    },
    "orbax": {"training.checkpoint"},
}
NEVER = {"absl", "ml_collections", "experiments", "torch", "tensorflow"}

ATTNLAB = {
    ".".join(path.relative_to(ROOT / "attnlab").with_suffix("").parts): path
    for path in sorted((ROOT / "attnlab").rglob("*.py"))
}
FILES = {name: path for name, path in ATTNLAB.items() if path.name != "__init__.py"}


def is_for_types(condition):
    return isinstance(condition, ast.Name) and condition.id == "TYPE_CHECKING"


def imports_of(path, *, lazy=True):
    """(attnlab files, other packages) that a file imports; without `lazy` when it is imported.
    Other packages that only a type checker loads do not count."""
    ours, others = set(), set()
    tree = ast.parse(path.read_text())
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and is_for_types(n.test)]
    for_types = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            first, _, rest = node.module.partition(".")
            if first != "attnlab":
                others |= set() if id(node) in for_types else {first}
                continue
            for alias in node.names:
                full = f"{rest}.{alias.name}".strip(".")
                whole = f"{rest}.__init__".strip(".")
                candidates = (full, f"{full}.__init__", rest, whole)
                ours.add(next(n for n in candidates if n in ATTNLAB))
    return ours, others


def package_of(name):
    """The entry of LAYERS or APART that a file belongs to."""
    entries = [entry for layer in (*LAYERS, APART) for entry in layer]
    found = [e for e in entries if name == e or name.startswith(f"{e}.")]
    assert found, f"attnlab/{name} is in no layer: add its package to LAYERS"
    return max(found, key=len)


@pytest.mark.parametrize("name", FILES)
def test_imports_point_downwards(name):
    ours, others = imports_of(FILES[name])
    package = package_of(name)
    number = next((i for i, layer in enumerate(LAYERS) if package in layer), None)
    below = APART[package] if number is None else set().union(*LAYERS[:number])
    for other in ours - {"__init__"}:
        assert package_of(other.removesuffix(".__init__")) in below | {package}, other
    assert not others & NEVER
    for library, users in ONLY.items():
        assert library not in others or name in users


KNOWN_CIRCLES = (
    {"heads.layout", "heads.shapes"},
    {
        f"models.{name}"
        for name in (
            "config", "embeddings", "forward", "head_weights", "mismatch", "modules", "output",
            "parameters", "transformer",
        )
    },
)  # fmt: skip
"""Files of attnlab that import each other, until `ModelConfig.build` imports nothing."""


def files_imported(path):
    """Files of attnlab and experiments that a file names in an import: in functions and for type
    checkers, too."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [(node.module, alias.name) for alias in node.names]
    for module, name in modules:
        bases = [ROOT.joinpath(*full.split(".")) for full in (f"{module}.{name}", module)]
        candidates = [p for b in bases for p in (b.with_suffix(".py"), b / "__init__.py")]
        found = next((p for p in candidates if p.is_file()), None)
        if found not in (None, path) and found.is_relative_to(ROOT):
            yield found


def test_no_two_files_import_each_other_in_a_circle():
    circle = {
        ROOT / "attnlab" / f"{name.replace('.', '/')}.py": f"circle {i}"
        for i, names in enumerate(KNOWN_CIRCLES)
        for name in names
    }
    graph = {}
    for package in ("attnlab", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            node = circle.get(path, path)
            imported = {circle.get(other, other) for other in files_imported(path)}
            graph.setdefault(node, set()).update(imported - {node})
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_pretrained_reads_with_numpy_alone():
    """Weight-name tables import no layer, no module and no other loader."""
    for path in (ROOT / "attnlab" / "pretrained").glob("*.py"):
        assert not imports_of(path)[1] & (NEVER | set(ONLY) | {"pickle", "transformers"})


def test_import_is_light_and_lazy_packages_load_on_first_use():
    heavy = ("orbax", "matplotlib", "tensorboardX", "rich.progress", "absl.app", "ml_collections")
    code = (
        f"import sys, attnlab; print([m for m in {heavy} if m in sys.modules]); "
        "before = 'attnlab.interpret' in sys.modules; "
        "print(before, attnlab.interpret.head_statistics.__name__, hasattr(attnlab, 'interpreted'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, lazy = out.stdout.splitlines()
    # Flax itself loads orbax where it finds it; nothing of ours does.
    assert set(ast.literal_eval(loaded)) <= {"orbax"}
    assert lazy.split() == ["False", "head_statistics", "False"]


def test_a_worker_imports_no_statistics_and_no_figures(tmp_path):
    """Of a sweep without runs. Checkpoints import orbax, and a report the others."""
    heavy = ("scipy.stats", "scipy.optimize", "matplotlib", "pandas", "orbax", "jinja2")
    (tmp_path / "specs.json").write_text("[]")
    code = (
        "import sys, flax.linen; before = set(sys.modules); import attnlab.lab.__main__ as worker; "
        f"code = worker.main([{str(tmp_path)!r}]); "
        f"print(code, [m for m in {heavy} if m in set(sys.modules) - before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split(maxsplit=1) == ["0", "[]\n"]


def test_every_public_name_is_documented():
    import attnlab

    for name in set(dir(attnlab)) - {"__version__"}:
        assert getattr(attnlab, name).__doc__, name


def test_dir_is_what_a_module_offers():
    import attnlab

    for module in (attnlab.masks, attnlab.positions):
        values = vars(module).items()
        own = {n for n, a in values if getattr(a, "__module__", "") == module.__name__}
        assert {name for name in own if name[0] != "_"} <= {*dir(module)} <= {*vars(module)}
        assert {"jax", "jnp", "Array"}.isdisjoint(dir(module))

    assert dir(attnlab.adapters) == [
        "attention_fn", "heads_from_linen", "heads_from_nnx", "heads_to_linen",
    ]  # fmt: skip
