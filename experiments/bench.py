"""Speed compared with other libraries: python -m experiments.bench --suite=attention [--out=DIR]

Suites: `attention` (layers, functions, wide heads, long texts), `train` (a step of a small decoder;
compilation of 24 layers under every sharing plan), `decoding` (wide heads from every cache) and
`accelerator` (the cases for a GPU or TPU, the most informative first). With --out the results are
kept, and the same command continues after a stop; --tiny is a small version of all cases, for
tests. Libraries that are not installed are left out: pip install -e ".[bench]".

attnlab is "not slower" than another library if the interval of the ratio of times (attnlab / other)
begins at 1.00 or below and its median is at most 1.10; see `experiments.benchmarks.measure`.
"""

import importlib.metadata
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from absl import flags

from attnlab.attention import BACKENDS
from attnlab.lab.machine import code_commit, environment
from attnlab.nested import JSON
from experiments import app
from experiments.benchmarks import accelerator, attention, decoding, train
from experiments.benchmarks.measure import FEWEST_ROUNDS, Case, Records, measure_cases, write

SUITES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "attention": attention.cases,
    "train": train.cases,
    "decoding": decoding.cases,
    "accelerator": accelerator.cases,
}


def installed(package: str) -> str:
    """Its version, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def machine() -> JSON:
    """What the numbers depend on."""
    peers = ("torch", "equinox", "dm-haiku", "tokamax")
    versions = {name: installed(name) for name in peers}
    commit = code_commit(Path(__file__).parents[1])
    return environment() | versions | {"commit": commit, "backends": ", ".join(BACKENDS)}


def main() -> None:
    """Measures the cases of a suite and prints their tables."""
    # Torch's waiting threads spin by default, which makes it 2 to 4 times slower where others
    # in the process want the cores (measured). Read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # JAX would take three quarters of a GPU and torch has to live there too: half for each.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    if jax.default_backend() != "cpu":  # there they are interpreted
        import attnlab.contrib  # noqa: F401  (its backends are rows too)
    given = flags.FLAGS
    if given.tiny:  # nobody reads its times
        jax.config.update("jax_disable_most_optimizations", True)
    known = list(SUITES[given.suite](given.tiny))
    try:
        cases = [case for case in known if re.search(given.cases, case.name)]
    except re.error as error:
        raise ValueError(f"--cases={given.cases} is no regular expression: {error}") from None
    if not cases:
        names = "\n  ".join(case.name for case in known)
        raise ValueError(
            f"no case matches --cases={given.cases}; those of this suite are\n  {names}"
        )
    rounds = min(given.rounds, FEWEST_ROUNDS) if given.tiny else given.rounds
    about = machine() | {"suite": given.suite, "tiny": given.tiny, "rounds": rounds}
    folder = Path(given.out) if given.out else None
    records = Records(folder, about | {"load": round(os.getloadavg()[0], 1)})
    print(", ".join(f"{name} {value}" for name, value in records.about.items()), flush=True)
    minutes = math.inf if given.minutes is None else given.minutes
    try:
        left = measure_cases(cases, records, rounds, minutes)
    finally:
        if folder:
            write(folder, records)
    print(f"{left} cases are left; repeat the command to continue" if left else "all cases done")


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_enum("suite", None, list(SUITES), "What to measure.", required=True)
    flags.DEFINE_integer(
        "rounds", 21, "Rounds: how often each library runs each case.", lower_bound=1
    )
    flags.DEFINE_string("cases", "", "Regular expression: only cases whose name matches.")
    flags.DEFINE_float(
        "minutes", None, "Stop after so many minutes; 0 only writes the tables.", lower_bound=0
    )
    flags.DEFINE_bool("tiny", False, "Small versions of all cases, for a CPU.")
    flags.DEFINE_string("out", "", "Folder for results and tables, to continue in; left out: none.")


if __name__ == "__main__":
    define_flags()
    app.start(main)
