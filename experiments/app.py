"""What the commands have in common: flags of config files, errors in one line, exit codes."""

import contextlib
import functools
import os
import re
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.tuple_parser import TupleParser

from attnlab.lab.sweep import SweepFailed
from attnlab.lab.workdir import RunInUse
from attnlab.lab.worker import STOPPED
from attnlab.models import config_dict
from attnlab.names import import_module, nearest
from attnlab.nested import flatten
from attnlab.training.interrupts import Stopped

T = TypeVar("T")
LOG = "error.log"
TEXT_FLAGS = ("text", "source", "title", "end_of_document")
"""Flags whose values are texts, in which ~ stays."""


class _OrNone(flags.ArgumentParser):  # type: ignore[misc]
    """A parser of a config field that also reads None."""

    def __init__(self, parser: Any) -> None:
        self.parser, self.syntactic_help = parser, parser.syntactic_help

    def parse(self, argument: object) -> object:
        return None if argument in (None, "None") else self.parser.parse(argument)

    def flag_type(self) -> str:
        return str(self.parser.flag_type())


for _kind, _parser in {
    int: flags.IntegerParser(),
    float: flags.FloatParser(),
    bool: flags.BooleanParser(),
    str: flags.ArgumentParser(),
    tuple: TupleParser(),  # itself it would add up repeated flags
}.items():
    config_flags.register_flag_parser_for_type(_kind, _OrNone(_parser))
_DEBUG = flags.DEFINE_bool("debug", False, "Print the traceback of an error.")
_IMPORT = flags.DEFINE_multi_string(
    "import", [], "A Python file to run first, such as one that registers a head layout."
)


def define_config(*, required: bool = True) -> None:
    """The flag --config of `ml_collections.config_flags`; each field of the config is a flag."""
    config_flags.DEFINE_config_file(
        "config", help_string="A config file, or file.py:PRESET.", lock_config=True
    )
    if required:
        flags.mark_flag_as_required("config")


def define_run() -> None:
    """The flags of commands that train."""
    define_config()
    flags.DEFINE_string(
        "workdir", None, "Folder of everything that the command writes.", required=True
    )
    flags.DEFINE_integer(
        "threads",
        None,
        "CPU threads of a run. The last bits of results depend on them, so a resumed run keeps "
        "their number. Left out: as many as cores (a sweep: cores / runs).",
        lower_bound=1,
    )
    flags.DEFINE_list("loggers", [], "Loggers besides metrics.jsonl: tensorboard, wandb, or both.")
    flags.DEFINE_string("profile", "", "FIRST:LAST steps of each run to profile.")


def config() -> ConfigDict:
    """The config of --config with the fields that flags set."""
    found: ConfigDict = flags.FLAGS["config"].value
    return found


def config_file() -> tuple[Path, str]:
    """The file of --config and the preset behind its colon."""
    path, _, preset = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return Path(path), preset


def overrides() -> dict[str, object]:
    """Field -> value, of the fields that flags set."""
    return dict(config_flags.get_override_values(flags.FLAGS["config"]))


def config_module() -> ModuleType:
    """The module of --config, as config_flags loaded it."""
    return sys.modules["config_config"]


def jax_flags() -> dict[str, str]:
    """The --jax_ flags of this command, as variables of the environment: JAX reads both."""
    found = [f for f in map(flags.FLAGS.__getitem__, flags.FLAGS) if f.name.startswith("jax_")]
    return {f.name.upper(): str(f.value) for f in found if f.present}


def given_command() -> str:
    """This command, as it was typed."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def check_one_model() -> None:
    """Raises ValueError unless one of --workdir and --path names a model."""
    if bool(flags.FLAGS.workdir) == bool(flags.FLAGS.path):
        found = "two models" if flags.FLAGS.path else "no model"
        raise ValueError(f"{found}; give --workdir=RUN, or --path=FOLDER of a published model")
    check_seed()


def check_seed() -> None:
    """Raises ValueError where --seed is given without a run."""
    if flags.FLAGS.seed is not None and not flags.FLAGS.workdir:
        raise ValueError(
            "--seed selects a seed of --workdir; leave it out with --path, which holds one model"
        )


def start(main: Callable[..., None], *, takes_words: bool = False) -> NoReturn:
    """Parses the flags and calls `main`, with `takes_words` on a list of the words that are no
    flags.

    An error that the user can correct is one line and exit code 1; 75 after a signal, and where
    another process holds the workdir. With --debug it has its traceback, and any other error has
    one always. Where there is a --workdir, its error.log has the traceback in any case.
    """
    logging.set_verbosity(logging.WARNING)
    jax.config.config_with_absl()
    parse = functools.partial(_parse, takes_words=takes_words)
    app.run(
        lambda argv: _or_exit(lambda: main(argv[1:]) if takes_words else main()),
        flags_parser=lambda argv: _or_exit(lambda: parse(argv)),
    )
    raise AssertionError("app.run does not return")


def import_files(argv: list[str]) -> None:
    """Runs the files of --import, before other flags are known: they register layouts, extras and
    datasets that a config or a stored run has. Raises ValueError."""
    first = flags.FlagValues()
    first.set_gnu_getopt(True)
    flags.DEFINE_multi_string(_IMPORT.name, [], "", flag_values=first)
    first(argv, known_only=True)
    for path in first[_IMPORT.name].value or []:
        if not path.endswith(".py") or not Path(path).is_file():
            raise ValueError(f"no Python file {path!r}; --import is path.py")
        import_module(path)


def _parse(argv: list[str], *, takes_words: bool) -> list[str]:
    argv = _with_home(argv)
    import_files(argv)
    sys.argv = argv = _config_first(argv)  # config_flags reads the former
    if {"--help", "-h", "-help", "--helpshort"} & set(argv):
        _print_help(argv)
        sys.exit(0)
    _check_config_path(argv)
    try:
        rest: list[str] = flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # of config_flags, for a field that is not there
        if "config_config" in sys.modules and not hasattr(config_module(), "get_config"):
            path = _given_config(argv).partition(":")[0]
            raise ValueError(
                f"{path} has no function get_config() that returns the config"
            ) from None
        raise ValueError(_wrong_field(argv, str(error))) from None
    except flags.UnrecognizedFlagError as error:
        raise ValueError(_unknown_flag(argv, error.flagname)) from None
    except flags.IllegalFlagValueError as error:
        raise ValueError(_wrong_field(argv, _in_words(str(error)))) from None
    _check_not_empty()
    _check_workdir()
    if len(rest) > 1 and not takes_words:
        raise ValueError(f"unexpected argument {rest[1]!r}; flags start with --")
    return rest


def _check_not_empty() -> None:
    """Raises ValueError for an empty value, as of --workdir=$UNSET, of a flag without a default."""
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        if flag.present and flag.default is None and flag.value == "":
            raise ValueError(f"--{name} is empty; give a value or leave it out")


def _check_workdir() -> None:
    """Raises ValueError where --workdir is a file, or lies in one."""
    given = flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else None
    for name in [given] if isinstance(given, str) else given or []:
        path = Path(name)
        if file := next(filter(Path.is_file, (path, *path.parents)), None):
            raise ValueError(f"--workdir={name}: {file} is a file; name a folder")


def _with_home(argv: list[str]) -> list[str]:
    """The flags with ~ as the home folder at the start of every value but texts: shells leave the
    one of --workdir=~/x as it is."""
    return [
        re.sub(r"(?<=[=,:])~[\w-]*(?=[/,]|$)", lambda found: os.path.expanduser(found[0]), word)
        if word.startswith("-") and word.lstrip("-").partition("=")[0] not in TEXT_FLAGS
        else word
        for word in argv
    ]


def _config_first(argv: list[str]) -> list[str]:
    """The same flags with --config before those of its fields, as config_flags needs it."""
    for i, word in enumerate(argv):
        if word.startswith(("--config=", "-config=")):
            return [argv[0], word, *argv[1:i], *argv[i + 1 :]]
        if word in ("--config", "-config"):
            return [argv[0], *argv[i : i + 2], *argv[1:i], *argv[i + 2 :]]
    return argv


def _given_config(argv: list[str]) -> str:
    for one, following in zip(argv, [*argv[1:], ""], strict=True):
        if one.lstrip("-").startswith("config=") and one.startswith("-"):
            return one.partition("=")[2]
        if one in ("--config", "-config"):
            return following
    return ""


def _check_config_path(argv: list[str]) -> None:
    if config_flag := _given_config(argv):
        path = config_flag.partition(":")[0]
        if not path.endswith(".py") or not Path(path).is_file():
            raise ValueError(f"no config file {path!r}; --config is path.py or path.py:PRESET")


def _in_words(error: str) -> str:
    """An error of absl: which flags are missing, with examples of the docstring, or which type."""
    missing = re.findall(r"^flag --(\w+)=None: Flag --\1 must have a value", error, re.MULTILINE)
    if missing:
        usage = sys.modules["__main__"].__doc__ or ""
        examples = [found[0] for name in missing if (found := re.search(rf"--{name}=\S+", usage))]
        names = ", ".join(f"--{name}" for name in missing)
        example = f"; for example {' '.join(examples)}" if examples else ""
        return f"{names} {'is' if len(missing) == 1 else 'are'} missing{example}"
    error = re.sub(r"invalid literal for int\(\) with base 10: .*", "give a whole number", error)
    return re.sub(r"could not convert string to float: .*", "give a number", error)


def _unknown_flag(argv: list[str], name: str) -> str:
    """Which config fields have the name of an unknown flag, and which flags the command has."""
    config_flag = _given_config(argv)
    fields = flatten(_load(config_flag).to_dict()) if config_flag else {}
    known = [flag.name for flag in _own_flags()]
    near = nearest(name, known)
    hint = f": did you mean --{near}?" if near else ";"
    return f"unknown flag --{name}{_of_that_name(fields, name) or hint} known: {_joined(known)}"


def _of_that_name(fields: Iterable[str], name: str) -> str:
    """The config fields that end in a name; "" where there are none."""
    found = [f"config.{path}" for path in fields if path.rpartition(".")[2] == name]
    return f"; config fields of that name: {_joined(found)};" if found else ""


def _joined(names: Iterable[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _own_flags() -> list[flags.Flag]:
    """The flags of the command and those of every command."""
    found = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    return [*found, *flags.FLAGS.get_key_flags_for_module(__name__)]


def _wrong_field(argv: list[str], error: str) -> str:
    """Which fields there are beside the one that is not, or below one that is no value."""
    if not (config_flag := _given_config(argv)):
        return error
    config = _load(config_flag).to_dict()
    known = list(flatten(config))
    for word in argv:
        name = word.removeprefix("--").partition("=")[0].removeprefix("no")
        if word.startswith("--config.") and name.removeprefix("config.") not in known:
            path = name.removeprefix("config.")
            if below := [one for one in known if one.startswith(f"{path}.")]:
                below = _beside(f"{path}.", config, argv) or below
                return f"config field {path!r} is no value; set one of {', '.join(below)}"
            near = _beside(path, config, argv) or known
            last = {one.rpartition(".")[2]: one for one in near}  # "*" of records
            closest = last.get(nearest(path.rpartition(".")[2], last) or "")
            hint = f": did you mean {closest!r}?" if closest else ";"
            if not closest:
                hint = _of_that_name(known, path.rpartition(".")[2]) or hint
            return f"no config field {path!r}{hint} known: {', '.join(near)}"
    return error


def _beside(path: str, config: Mapping[str, object], argv: list[str]) -> list[str]:
    """The fields of the record that `path` would be in; of heads those of the chosen layout."""
    outer = path.split(".")[:-1]
    record: object = config
    for name in outer:
        record = record.get(name) if isinstance(record, Mapping) else None
    if not isinstance(record, Mapping):
        return []
    chosen = dict(record)
    for word in argv:
        name, _, value = word.removeprefix(f"--config.{'.'.join(outer)}.").partition("=")
        if name in ("layout", "kind"):
            chosen[name] = value
    names = config_dict.own_fields(outer[-1] if outer else "", chosen)
    paths = [".".join([*outer, n]) for n in names]
    return [
        f"{path}.*" if isinstance(record.get(n), Mapping) else path
        for path, n in zip(paths, names, strict=True)
    ]


def _load(config_flag: str) -> ConfigDict:
    """The config of a file and preset. Raises what its get_config raises."""
    parser = config_flags.config_flags.ConfigFileFlagParser("config")
    try:
        found: ConfigDict = parser.parse(config_flag)
    except ValueError as error:  # its message is a traceback
        raise error.__context__ or error from None
    return found


def _print_help(argv: list[str]) -> None:
    """The docstring of the command, its flags, and the fields and presets of --config."""
    print(sys.modules["__main__"].__doc__)
    fields: dict[str, object] = {}
    if config_flag := _given_config(argv):
        _check_config_path(argv)
        fields = flatten(_load(config_flag).to_dict())
        module = config_module()
        print(f"{config_flag.partition(':')[0]}: {module.__doc__ or ''}")
        if hasattr(module, "VARIANTS"):
            from experiments.configs import byte_lm

            print("Presets after the colon, separated by commas:")
            for name, text in byte_lm.presets(module.VARIANTS).items():
                print(textwrap.fill(f"{name}: {text}", 78, initial_indent="  ",
                                    subsequent_indent="    "))  # fmt: skip
    print("\nflags:")
    for flag in _own_flags():
        print(textwrap.fill(f"--{flag.name}: {flag.help}", 96, initial_indent="  ",
                            subsequent_indent="      "))  # fmt: skip
    if fields:
        print("\nfields of the config, each a flag (value in this config):")
        for path, value in fields.items():
            print(f"  --config.{path}={value!r}")


def _or_exit(call: Callable[[], T]) -> T:
    known = (ValueError, OSError, SweepFailed, flags.Error, ModuleNotFoundError)
    try:
        result = call()
        sys.stdout.flush()
        return result
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except BrokenPipeError:  # the reader of the output, as `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (Stopped, RunInUse) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(STOPPED)
    except known as error:
        _log()
        if (flags.FLAGS.is_parsed() and _DEBUG.value) or not _is_ours(error):
            raise
        sys.exit(f"error: {error}")
    except Exception:
        _log()
        raise


def _is_ours(error: BaseException) -> bool:
    """Was it raised by a check of this code (or by the operating system), not inside a library?

    A ValueError of NumPy or JAX is a bug here, whose traceback is needed.
    """
    if not isinstance(error, ValueError) or isinstance(error, flags.Error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return "site-packages" not in frames[-1].filename or "absl" in frames[-1].filename


def _log() -> None:
    """Writes the traceback to error.log in --workdir, where that is a folder."""
    given = flags.FLAGS
    folder = given["workdir"].value if given.is_parsed() and "workdir" in given else None
    if isinstance(folder, str) and os.path.isdir(folder):
        with contextlib.suppress(OSError), open(Path(folder) / LOG, "a", encoding="utf-8") as file:
            file.write(f"{' '.join(sys.argv)}\n{traceback.format_exc()}\n")
