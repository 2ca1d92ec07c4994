"""What every test relies on: 8 virtual devices, one tolerance helper, tiny runs."""

import collections
import contextlib
import ctypes
import gc
import itertools
import os
import shutil
import tempfile
from pathlib import Path

from commands import command, quick_xla_flags, user_environment  # noqa: F401  (some use these)

os.environ["XLA_FLAGS"] = quick_xla_flags()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What one worker or one command has compiled, all of this session read; set the variable to
    # keep it between sessions. Goes with the process that made it.
    programs = tempfile.TemporaryDirectory(prefix="attnlab-programs-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

jax.config.update("jax_num_cpu_devices", 8)
# Tests compile hundreds of tiny programs that run once: less optimising, four times as fast.
# Those that compare bits take the fixture `optimized`.
jax.config.update("jax_disable_most_optimizations", True)

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared" / "data"
# Tracing makes garbage in small pieces, and looking for it after every 700 takes a tenth of it.
gc.set_threshold(20_000, 20, 50)

# Largest difference allowed, relative to the largest expected value.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def assert_close(got, expected, *, loosen=1.0):
    """Equal up to the rounding of the coarser dtype, relative to the largest expected value."""
    got_leaves, expected_leaves = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got_leaves) == len(expected_leaves)
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        assert a.shape == b.shape
        tolerance = max(TOLERANCE.get(str(x.dtype), 0) for x in (a, b)) * loosen
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        scale = max(np.max(np.abs(b), initial=0), 1e-30)
        assert np.max(np.abs(a - b), initial=0) <= tolerance * scale


def value_and_grads(run, *arrays):
    """Output of run(*arrays), and the gradients of a loss that weighs every entry differently."""

    def loss(*arrays):
        out = run(*arrays)
        return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32)))), out

    numbers = tuple(range(len(arrays)))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, numbers, has_aux=True))(*arrays)
    return out, grads


def value_and_gradient(run, *arrays):
    """The same with all gradients as one vector: that of a key bias is zero but for rounding."""
    out, grads = value_and_grads(run, *arrays)
    return out, ravel_pytree(grads)[0].astype(out.dtype)


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def two_devices():
    """A mesh of two, by the name "data"."""
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((2,), ("data",), axis_types=(auto,), devices=jax.devices()[:2])


def deep(values, *kept):
    """Parameters of a test, all but those `kept` slow: depth that a change rarely needs."""
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]


def diagonal(*axes, of=None):
    """Every combination; those beside a diagonal that meets each value of each axis are slow. `of`:
    all are whose first value is not among these."""
    axes = [list(axis) for axis in axes]
    count = max(map(len, axes))
    kept = {tuple(axis[i % len(axis)] for axis in axes) for i in range(count)}
    kept = {values for values in kept if of is None or values[0] in of}
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(*c, marks=marks[c in kept]) for c in itertools.product(*axes)]


def product_flops(jaxpr):
    """2 x multiply-adds of all matrix products in a jaxpr, scans counted by their length; what is
    the same operation on the same values counts once, as a compiler makes it."""
    total, same, seen = 0, {}, {}
    name = lambda v: str(v) if hasattr(v, "val") else same.get(v, v)
    for equation in jaxpr.eqns:
        key = equation.primitive.name, str(equation.params), *map(name, equation.invars)
        made = seen.setdefault(key, equation.outvars)
        if made is not equation.outvars:
            same |= {ours: same.get(a, a) for ours, a in zip(equation.outvars, made, strict=True)}
            continue
        inner = [v for v in equation.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for body in inner:
            total += times * product_flops(getattr(body, "jaxpr", body))
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            summed = 1
            for axis in contracted:
                summed *= left[axis]
            total += 2 * summed * equation.outvars[0].aval.size
    return total


# What takes seconds a test: trains, starts a command, compiles as in a run, reads real data.
HEAVY = {"tmp_path", "tmp_path_factory", "optimized", "shared_data"}
# Files of whole models, programs and pages, and tests of many draws: seconds each, too.
LONG = {
    "test_adapters", "test_atlas", "test_bad_input", "test_bench",
    "test_circuits", "test_decoding", "test_documents", "test_extras", "test_flags",
    "test_importance", "test_inspect_model", "test_models",
    "test_notebooks", "test_model_capture", "test_optimizers", "test_plans",
    "test_pruning", "test_rank_bound", "test_resharing", "test_panels", "test_residual_terms",
    "test_objectives", "test_train", "test_jax_transforms",
    "test_random_calls_are_right_or_refused_by_name",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`pytest -m quick`: of every light test the case in the middle of its parameters."""
    cases = collections.defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "parity", "browser", "slurm"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        item = of_one_test[len(of_one_test) // 2]
        names = {item.path.stem, item.originalname}
        if not HEAVY & set(item.fixturenames) and not LONG & names:
            item.add_marker("quick")


# Their programs come again in the next training, so they keep them all, as commands do.
TRAIN = {"experiments", "head_width", "lab", "training"}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Other tests keep what takes long to compile: reading and writing takes time, too."""
    seconds = 0 if item.path.parent.name in TRAIN else 0.3
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def resident():
    """Bytes of memory that this process holds; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


HELD = {"after the last clearing": resident()}


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Small programs come again in other tests; all that were ever compiled take gigabytes."""
    if resident() < HELD["after the last clearing"] + 1200 * 2**20:
        return
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    HELD["after the last clearing"] = resident()


@pytest.fixture
def x64():
    """float64 within one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def optimized():
    """Compiled as in a run."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OFFLINE = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """A Chromium: that of the environment, or the first on the PATH; skips without one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs .[browser]")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip("no Chromium on the PATH; set CHROMIUM to one")
    with playwright.sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=OFFLINE)
        yield running
        running.close()


@pytest.fixture(scope="session")
def nine_letters(tmp_path_factory):
    """The path of a text of nine letters, each one to three behind the one before it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    symbols = np.random.default_rng(0).integers(1, 4, 9000).cumsum() % 9 + 97
    path.write_bytes(symbols.astype(np.uint8).tobytes())
    return path


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real data that may stand beside the checkout; skips without it."""
    if not SHARED.exists():
        pytest.skip("no shared/data beside the checkout")
    return SHARED
