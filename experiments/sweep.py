r"""Many runs: python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
    --workdir=runs/first

Runs every arm that the config's `sweep(add)` adds, one folder each, and writes the report; where
the config has `paper()`, with the published numbers beside ours, where it has `claim()`, with what
was expected and whether it came. The same command again skips what is complete, goes on with what
is broken, and renews the report.
Arms run side by side, each in a process of its own: as many as there are cores (or GPUs) for them,
or --jobs of them. --launcher=slurm gives the arms to SLURM instead, --slurm="--time=4:00:00" are
its options; --print_only prints one `experiments.run` command an arm, to start elsewhere, and on
the terminal what an H100 would need for them. See docs/howto/running.md.

Where the config has `pairs(arg)`, the verdicts are about those pairs of arms. --max_seeds=20 adds
seeds to pairs that are not decided, until they are, or more seeds cannot decide them, or they have
so many; the test then is one that may be looked at after every seed. --smallest=0.01 calls arms
equal that differ by less for sure. --tune=7 first tries so many learning rates an arm, with one
seed on the validation part of the data, and more where the best is at an end; the arm is then
trained at the minimum of a parabola through the best ones.
With match=seconds the FFN of every arm is solved for equal seconds a step, measured before the
first arm and kept; --calibrate_only measures and stops, on a machine as those of --launcher=slurm.
--tune_from=runs/first takes the rates that another sweep of the same arms chose, or those in the
table of one (--tune_from=docs/results/heads_and_sharing.csv).
--ladder=3 trains every arm at three sizes, each twice as wide as the one before (--ladder_by=depth:
as deep), and says what an arm is worth at both ends. See docs/explanation/conclusions.md.
"""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from attnlab.names import lookup
from experiments import report
from experiments.reporting import pairs, rates, results, terminal
from experiments.running import arm, clock, jobs, ladder, launch, slurm, workdir

RATE = "train.learning_rate"
SAID = ("paper", "claim", "pairs")
"""What a config file may say of its arms, each a function of its words."""
Run = Callable[[dict[str, Any], Path], dict[str, str]]
"""(configs, the folder that theirs are in) -> how each ended."""
_JOBS = flags.DEFINE_integer(
    "jobs", None, "Arms at once; left out: as many as there is room for.", lower_bound=1
)
_BUSY = flags.DEFINE_enum(
    "busy", "wait", ["wait", "skip"], "What to do with an arm that another process runs, at last."
)
_MAX_SEEDS = flags.DEFINE_integer(
    "max_seeds", 0, "Add seeds to undecided pairs, up to so many an arm.", lower_bound=0
)
_SMALLEST = flags.DEFINE_float(
    "smallest", 0.0, "Smallest difference of interest, in the unit of the scores.", lower_bound=0.0
)
_TUNE = flags.DEFINE_integer(
    "tune", 0, "Choose the learning rate of every arm among so many and more.", lower_bound=0
)
_TUNE_FROM = flags.DEFINE_string(
    "tune_from", "", "A sweep of the same arms, or its results.csv, whose learning rates are taken."
)
_LADDER = flags.DEFINE_list(
    "ladder", [], "Every arm at so many sizes, 1, 2, 4, ...; or at these: 1,1.5,2."
)
_LADDER_BY = flags.DEFINE_enum(
    "ladder_by", "width", list(ladder.FIELDS), "What a size of the ladder multiplies."
)
_LAUNCHER = flags.DEFINE_enum(
    "launcher", "local", ["local", "slurm"], "Who runs the arms: this machine, or arrays of SLURM."
)
_SLURM = flags.DEFINE_string("slurm", "", "Options of sbatch, in one string, for every arm.")
_CALIBRATE_ONLY = flags.DEFINE_bool(
    "calibrate_only", False, "Measure what match=seconds needs, where it is not there, and stop."
)
_PRINT_ONLY = flags.DEFINE_bool(
    "print_only", False, "Print the command of each arm (or write the scripts of SLURM) and stop."
)


class Sweep(NamedTuple):
    """What a config file says beside its base config."""

    arms: dict[str, dict[str, Any]]
    """Folder -> overrides."""
    titles: dict[str, str]
    """Folder -> what the report calls the arm, where the config file names it."""
    paper: dict[str, Any] = {}  # noqa: RUF012
    """The published table that the arms are rows of (see `running/tables.py`), or nothing."""
    pairs: Sequence[tuple[str, str]] = ()
    """Names of the arms that are to be compared, as the report calls them; none: all."""
    claim: dict[str, Any] = {}  # noqa: RUF012
    """What is known beforehand of the arms (see `running/claims.py`), or nothing."""
    ladder: dict[str, Any] = {}  # noqa: RUF012
    """What the arms' sizes multiply, and folder -> size; nothing without a ladder."""


def main() -> None:
    """Checks every arm, then runs them side by side."""
    filename, base, overrides = launch.config()
    folder, plan = Path(flags.FLAGS.workdir), read(filename, overrides)
    _check_flags()
    if _LADDER.value:
        plan = climb(plan, base, ladder.sizes(_LADDER.value), _LADDER_BY.value)
    jax.config.update("jax_platforms", "cpu")  # accelerators are for the arms
    threads = flags.FLAGS.threads or workdir.began_with(folder).get("threads")
    configs = configs_of(plan, base)
    if clock.wanted(configs):
        plan = timed(plan, configs, folder, threads)
        configs = configs_of(plan, base)
    elif _CALIBRATE_ONLY.value:
        raise ValueError("--calibrate_only measures what match=seconds needs; no arm asks for it")
    if _CALIBRATE_ONLY.value:
        return
    tuned_before: dict[str, Any] = {}
    if _TUNE_FROM.value:
        plan, tuned_before = at_rates_of(plan, configs, Path(_TUNE_FROM.value))
        configs = configs_of(plan, base)
    if _PRINT_ONLY.value and _LAUNCHER.value == "local":
        for name, changes in plan.arms.items():
            print(command(filename, overrides | changes, folder / name, flags.FLAGS.threads))
        print(_estimate(configs), file=sys.stderr)
        return
    arms = {name: arm.resolve(config) for name, config in configs.items()}
    if _TUNE.value:
        check_tuning(configs)
    asks = slurm.Asked(_SLURM.value, _JOBS.value, not _PRINT_ONLY.value, jobs.jax_flags())
    if _LAUNCHER.value == "slurm":
        slurm.check(asks)
        room = jobs.Room(_JOBS.value or 0, threads, [], [])
    else:
        room = jobs.divide(len(configs), _JOBS.value, threads)
    environment = {"config": filename, "threads": room.threads}
    _claim(folder, plan, configs, tuned_before, environment)
    print(terminal.header(arms, folder, room), file=sys.stderr, flush=True)

    def run(some: dict[str, Any], place: Path) -> dict[str, str]:
        """How these arms ended, in folders below `place`."""
        if _LAUNCHER.value == "local":
            return jobs.run(longest_first(some), place, room, waits=_BUSY.value == "wait")
        lines = {}
        for name, config in some.items():
            changes = overrides | plan.arms.get(name, {}) | launch.changes(base, config)
            lines[name] = command(filename, changes, place.absolute() / name, threads)
        with workdir.own(folder, patience=60):
            return slurm.run(lines, place, asks)

    _run_and_report(configs, folder, run)


def _check_flags() -> None:
    """Raises ValueError for flags that do not go together."""
    if _SLURM.value and _LAUNCHER.value != "slurm":
        raise ValueError("--slurm are options of sbatch; add --launcher=slurm")
    if _TUNE_FROM.value and _TUNE.value:
        raise ValueError("--tune chooses learning rates, --tune_from takes them; leave one out")


def configs_of(plan: Sweep, base: Any) -> dict[str, Any]:
    """Folder -> the config of the arm."""
    return {name: with_changes(base, changes) for name, changes in plan.arms.items()}


def _claim(
    folder: Path,
    plan: Sweep,
    configs: dict[str, Any],
    tuned_before: dict[str, Any],
    environment: dict[str, Any],
) -> None:
    """Writes what the sweep is, or raises where the folder holds another one."""
    record: dict[str, Any] = {"arms": {n: c.to_dict() for n, c in configs.items()}}
    optional = {
        "titles": plan.titles,
        "paper": plan.paper,
        "tune": _TUNE.value,
        "tuned_before": tuned_before,
        "claim": plan.claim,
        "ladder": plan.ladder,
    }
    record |= {name: value for name, value in optional.items() if value}
    asked = {"limit": _MAX_SEEDS.value, "smallest": _SMALLEST.value, "pairs": plan.pairs}
    with workdir.own(folder, patience=60):
        workdir.claim(folder, record | {"environment": environment})
        workdir.write_json(folder / results.QUESTION, {"question": asked})


def _run_and_report(configs: dict[str, Any], folder: Path, run: Run) -> None:
    """Runs the arms and writes the report; exits with what is not complete."""
    ends, queued = {}, ""
    try:
        ends = rounds(configs, folder, run)
    except slurm.Queued as told:
        queued = str(told)
    if any((folder / name / workdir.RESULT).exists() for name in configs):
        with workdir.own(folder, patience=60):
            report.write([folder])
        print(terminal.ranking(results.read([folder])))
        print(f"report: {folder / 'report.html'}")
    if queued:
        print(queued, file=sys.stderr)
    failed = [f"{n} {end}" for n, end in ends.items() if end not in (arm.COMPLETE, jobs.LEFT)]
    if failed:
        sys.exit(f"error: {len(failed)} of {len(ends)} arms are not complete: {', '.join(failed)}")


def _estimate(configs: dict[str, Any]) -> str:
    """What the arms would cost, where all that they start from is here."""
    try:
        arms = {name: arm.resolve(config) for name, config in configs.items()}
    except (ValueError, OSError) as error:
        return f"not estimated: {error}"
    return terminal.estimate(arms, _TUNE.value)


def read(filename: str, overrides: dict[str, Any]) -> Sweep:
    """What the config file `path.py:words` adds.

    Raises ValueError where a flag sets what the sweep itself varies, and where two arms have one
    name.
    """
    path, _, words = filename.partition(":")
    module, _ = launch.load(filename, overrides)
    if not hasattr(module, "sweep"):
        raise ValueError(f"{path} has no sweep(add, arg); use experiments.run for one run")
    arms: dict[str, dict[str, Any]] = {}
    titles: dict[str, str] = {}

    def add(name: str = "", **changes: Any) -> None:
        values = {f: v for f, v in changes.items() if not name or f == RATE}
        words = [re.sub(r"[^\w.=]+", "-", name), *(_word(f, v) for f, v in values.items())]
        folder = "-".join(filter(None, words))
        if folder in arms:
            raise ValueError(f"{path} has two arms {folder!r}; give each a name of its own")
        arms[folder] = changes
        titles.update({folder: name} if name else {})

    module.sweep(add, words)
    varied = {field for changes in arms.values() for field in changes}
    for field in varied & overrides.keys():
        raise ValueError(f"--config.{field} is what this sweep varies; leave the flag out")
    said = {name: getattr(module, name)(words) for name in SAID if hasattr(module, name)}
    return Sweep(arms, titles, **said)


def climb(plan: Sweep, base: Any, sizes: Sequence[float], by: str) -> Sweep:
    """Every arm at every size, smallest first; folders end in the size: `wide-albert-x2`.

    Raises ValueError where the arms are what someone else knows of arms of that one size.
    """
    for kind, said in (("published table", plan.paper), ("known answer", plan.claim)):
        if said:
            raise ValueError(
                f"--ladder changes the sizes of the arms, which are those of a {kind} here; "
                "use a config that only asks which arm is better"
            )
    arms: dict[str, dict[str, Any]] = {}
    titles: dict[str, str] = {}
    rungs: dict[str, float] = {}
    for size in sizes:
        for name, changes in plan.arms.items():
            folder = "-".join(filter(None, (name, f"x{size:g}")))
            model = with_changes(base, changes).model
            arms[folder] = changes | ladder.scaled(model, by, size)
            rungs[folder] = size
            titles |= {folder: plan.titles[name]} if name in plan.titles else {}
    return plan._replace(arms=arms, titles=titles, ladder={"by": by, "sizes": rungs})


def timed(plan: Sweep, configs: dict[str, Any], folder: Path, threads: int | None) -> Sweep:
    """Every arm with the FFN of equal seconds; measured where that is this machine's to do."""
    measures = _CALIBRATE_ONLY.value or not (_PRINT_ONLY.value or _LAUNCHER.value != "local")
    if measures:
        threads = jobs.divide(len(configs), _JOBS.value, threads).threads
    found = clock.changes(configs, folder, threads, measures=measures)
    return plan._replace(arms={name: plan.arms[name] | found[name] for name in configs})


def check_tuning(configs: dict[str, Any]) -> None:
    """Raises ValueError where rates cannot be chosen: too few, or on no data."""
    if _TUNE.value < 3:
        raise ValueError(f"--tune={_TUNE.value}: a parabola needs at least 3 learning rates")
    sources: dict[tuple[Any, int], str] = {}
    for name, config in configs.items():
        data, length = arm.resolve(config).data, config.train.length
        sources.setdefault((data, length), name)
    for (data, length), name in sources.items():
        if data.load(length).validation is None:
            raise ValueError(
                f"--tune chooses learning rates on a validation part, and the data of {name} have "
                "none: give a text one by --config.data.validation=0.1"
            )


def rounds(configs: dict[str, Any], folder: Path, run: Run) -> dict[str, str]:
    """How every arm ended, those that chose rates and those that added seeds included."""
    ends: dict[str, str] = {}
    if _TUNE.value:
        configs, ends = tune(configs, folder, run)
    ends |= run(configs, folder)
    while _MAX_SEEDS.value and (more := later_seeds(folder, configs, ends)):
        ends |= run(more, folder)
    return ends


def tune(configs: dict[str, Any], folder: Path, run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """The configs with their best learning rates, and how the runs ended that tell them: but for
    those that diverged, which tell enough. Without an arm one of whose rates was not tried to the
    end, since the best may be there."""
    ends: dict[str, str] = {}
    found: dict[str, rates.Tuned] = {}
    place = folder / rates.FOLDER
    asked = {
        name: rates.first_rates(config.train.learning_rate, _TUNE.value)
        for name, config in configs.items()
    }
    while trials := {
        rates.trial(name, rate): at_rate(configs[name], rate, seeds=(rates.SEED,))
        for name, some in asked.items()
        for rate in some
        if rates.trial(name, rate) not in ends
    }:
        ends |= run(trials, place)
        broken = {
            rates.arm_of(trial)
            for trial, end in ends.items()
            if end not in (arm.COMPLETE, arm.DIVERGED)
        }
        found = {n: t for n, t in rates.read(folder).items() if n not in broken}
        asked = {n: [t.wanted] for n, t in found.items() if t.wanted is not None}
    told = {trial: end for trial, end in ends.items() if end != arm.DIVERGED}
    return {n: at_rate(c, found[n].chosen) for n, c in configs.items() if n in found}, told


def at_rates_of(plan: Sweep, configs: dict[str, Any], source: Path) -> tuple[Sweep, dict[str, Any]]:
    """Every arm at the rate that it has in `source`, and what `rates.elsewhere` tells of that.

    Raises ValueError where an arm has no rate there.
    """
    found, told = rates.elsewhere(source)
    if gone := [name for name in configs if name not in found]:
        raise ValueError(f"{source} has no learning rate for {', '.join(gone)}")
    arms = {}
    for name, config in configs.items():
        chosen = at_rate(config, found[name])
        arms[name] = plan.arms[name] | launch.changes(config, chosen)
    return plan._replace(arms=arms), told


def at_rate(config: Any, rate: float, **changes: Any) -> Any:
    """The config with that learning rate, the last one of its schedule in proportion."""
    trains = config.train
    last = trains.final_learning_rate * rate / trains.learning_rate
    changes |= {"learning_rate": rate, "final_learning_rate": last}
    return with_changes(config, {f"train.{name}": value for name, value in changes.items()})


def longest_first(configs: dict[str, Any]) -> dict[str, Any]:
    """The arms as they are started: a long one that begins last leaves other cores idle."""
    flops = {n: terminal.training_flops(arm.resolve(config)) for n, config in configs.items()}
    return {name: configs[name] for name in sorted(configs, key=flops.__getitem__, reverse=True)}


def later_seeds(folder: Path, configs: dict[str, Any], ends: dict[str, str]) -> dict[str, Any]:
    """The arms again with the seeds that `pairs.more_seeds` asks for; none that has ended, since
    asked for again it has failed."""
    if not any((folder / name / workdir.RESULT).exists() for name in configs):
        return {}
    more = {}
    for panel in results.read([folder]):
        for path, seeds in pairs.more_seeds(panel).items():
            if path.name not in configs:  # its rate is not known this time
                continue
            config = with_changes(configs[path.name], {"train.seeds": seeds})
            more[f"{path.name}-seeds{seeds[0]}-{seeds[-1]}"] = config
    return {name: config for name, config in more.items() if name not in ends}


def command(
    filename: str, changes: dict[str, Any], folder: Path, threads: int | None = None
) -> str:
    """The experiments.run command line of one arm."""
    sets = [f"--config.{field}={value}" for field, value in changes.items()]
    words = ["python", "-m", "experiments.run", f"--config={filename}", *sets]
    words += [f"--threads={threads}"] if threads else []
    return shlex.join([*words, f"--workdir={folder}"])


def with_changes(config: Any, changes: dict[str, Any]) -> Any:
    """The config of one arm."""
    known = launch.fields(config)
    for field in changes:
        lookup(known, field, what="config field")
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(changes)
    return copy


def _word(field: str, value: Any) -> str:
    if field == RATE:
        return f"lr{value:g}"
    return str(value) if isinstance(value, str) else ""


if __name__ == "__main__":
    launch.define_run()
    launch.start(main)
