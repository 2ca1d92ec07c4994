"""Speed compared with other libraries: python -m experiments.bench --suite=attention [--out=DIR]

Suites: `attention` (layers, functions, wide heads, long sequences), `train` (a step of the small
decoder), `nanogpt` (a whole run), `plans` (compilation time and memory of 24 layers under every
sharing plan), `accelerator` (the cases for a GPU or TPU, the most informative first, for --minutes;
repeat the command to continue; --tiny is a small version of all cases, for a CPU). Libraries that
are not installed are left out: pip install -e ".[bench]".

attnlab is "not slower" than another library if the interval of the ratio of times (attnlab / other)
begins at 1.00 or below and its median is at most 1.10; see `experiments.benchmarks.measure`.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from absl import flags

import attnlab.contrib  # noqa: F401  (its backends are rows too)
from attnlab.attention import BACKENDS
from attnlab.lab.machine import environment
from attnlab.lab.workdir import hold
from attnlab.nested import JSON
from attnlab.training.provenance import code_commit
from experiments import app
from experiments.benchmarks import accelerator, attention, plans, train
from experiments.benchmarks import accelerator_page as report
from experiments.benchmarks.ledger import Ledger, go_through
from experiments.benchmarks.measure import Case, Measurement, fastest_peer, judge, measure, table
from experiments.benchmarks.peers.systems import installed

SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "attention": attention.cases,
    "train": train.step_cases,
    "plans": plans.cases,
    "nanogpt": lambda: train.whole_run_cases(flags.FLAGS.data),
}


ACCELERATOR = "accelerator"
FLAGS_OF = {"tiny": ACCELERATOR, "minutes": ACCELERATOR, "data": "nanogpt"}
"""Flag -> the only suite that reads it."""


def machine(*packages: str) -> JSON:
    """What the numbers belong to, with the versions of these packages."""
    versions = {name: installed(name) or "missing" for name in packages}
    return environment() | versions | {"commit": code_commit(Path(__file__).parents[1])}


def chosen(cases: Iterator[Case], pattern: str) -> list[Case]:
    """The cases whose name matches the pattern. Raises ValueError where none does."""
    known = list(cases)
    try:
        found = [case for case in known if re.search(pattern, case.name)]
    except re.error as error:
        raise ValueError(f"--cases={pattern} is no regular expression: {error}") from None
    if not found:
        others = ", ".join(f"--suite={name}" for name in suites_with(pattern))
        where = f"there are some in {others}" if others else "nor does one of another suite"
        names = "\n  ".join(case.name for case in known)
        raise ValueError(
            f"no case of this suite matches --cases={pattern}; {where}. Its cases are\n  {names}"
        )
    return found


def suites_with(pattern: str) -> list[str]:
    """The suites that have a case whose name matches the pattern."""
    cases = SUITES | {
        "nanogpt": lambda: train.whole_run_cases("PATH"),  # names do not depend on its data
        ACCELERATOR: accelerator.cases,
    }
    return [name for name, made in cases.items() if any(re.search(pattern, c.name) for c in made())]


def run(cases: Sequence[Case], rounds: int, folder: str, name: str) -> None:
    """Prints the table of each case; writes all of them and their numbers to `folder`.

    Table and numbers are written after every case, so that a long run may be stopped.
    """
    about = machine("equinox", "torch") | {"load": round(os.getloadavg()[0], 1)}
    report: JSON = {"machine": about, "cases": []}
    texts = [", ".join(f"{k} {v}" for k, v in report["machine"].items())]
    print(texts[0], flush=True)
    place = Path(folder) / name
    if folder:
        place.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        taken = min(rounds, case.most_rounds or rounds)
        measured = measure(case.build(), taken, warm=case.warm)
        texts.append(table(case, measured, taken))
        print(f"\n{texts[-1]}", flush=True)
        report["cases"].append(_record(case, measured))
        if folder:
            place.with_suffix(".md").write_text("\n\n".join(texts) + "\n")
            place.with_suffix(".json").write_text(json.dumps(report, indent=1))


def _record(case: Case, measured: Sequence[Measurement]) -> JSON:
    peer = fastest_peer(measured)
    return {
        "name": case.name,
        "tokens": case.tokens,
        "load": round(os.getloadavg()[0], 1),
        "fastest_peer": peer[0] if peer else None,
        "bars": [judge(bar, measured) for bar in case.bars],
        "rows": [one.to_dict() for one in measured],
    }


def run_accelerator(folder: str, *, tiny: bool, pattern: str, rounds: int, minutes: float) -> None:
    """Goes on with suite accelerator in `folder`, and writes its page there.

    Raises ValueError without a folder, and where that holds numbers of something else.
    """
    if not folder:
        raise ValueError(
            "suite accelerator needs a folder to write to and to resume from: add --out=DIR"
        )
    place, design = Path(folder), accelerator.DESIGNS["tiny" if tiny else "full"]
    if tiny:  # nobody reads its times
        jax.config.update("jax_disable_most_optimizations", True)
    cases = list(accelerator.cases(design))
    some = chosen(iter(cases), pattern)
    about = machine("torch", "tokamax")
    about |= {"tiny": tiny, "backends": list(BACKENDS), "cases": len(cases)}
    place.mkdir(parents=True, exist_ok=True)
    with hold(place):
        ledger = Ledger(place, about)
        work = functools.partial(accelerator.work, rounds=min(rounds, 3) if tiny else rounds)
        say = functools.partial(print, flush=True)
        try:
            left = go_through(some, ledger, work, minutes=minutes, say=say)
        finally:
            print(f"page: {report.write(place, ledger.about, ledger.records)}")
    print(
        f"{left} cases are left; repeat the command to continue" if left else "all cases are done"
    )


def check_flags(suite: str) -> None:
    """Raises ValueError for a flag that has no effect on this suite."""
    for name, its_suite in FLAGS_OF.items():
        if flags.FLAGS[name].present and suite != its_suite:
            raise ValueError(
                f"--{name} is of --suite={its_suite} alone; leave it out with --suite={suite}"
            )


def main() -> None:
    """Runs a suite."""
    check_flags(flags.FLAGS.suite)
    # Torch's waiting threads spin by default, which makes it 2 to 4 times slower where others
    # in the process want the cores (measured). Read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # JAX would take three quarters of a GPU and torch has to live there too: half for each.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    given = flags.FLAGS
    if given.suite == ACCELERATOR:
        run_accelerator(
            given.out,
            tiny=given.tiny,
            pattern=given.cases,
            rounds=given.rounds,
            minutes=given.minutes,
        )
        return
    cases = chosen(SUITES[given.suite](), given.cases)
    run(cases, given.rounds, given.out, given.suite)


if __name__ == "__main__":
    flags.DEFINE_enum("suite", None, [*SUITES, ACCELERATOR], "What to measure.")
    flags.DEFINE_integer(
        "rounds", 21, "Rounds: how often each library runs each case.", lower_bound=1
    )
    flags.DEFINE_string("cases", "", "Regular expression: only cases whose name matches.")
    flags.DEFINE_string("data", "", "Folder or file of Tiny Shakespeare, for suite nanogpt.")
    flags.DEFINE_float(
        "minutes",
        20.0,
        "Suite accelerator stops after so many minutes; 0 only writes its page.",
        lower_bound=0,
    )
    flags.DEFINE_bool("tiny", False, "Suite accelerator in small sizes, for a CPU.")
    flags.DEFINE_string("out", "", "Folder for table and numbers; none if left out.")
    flags.mark_flag_as_required("suite")
    app.start(main)
