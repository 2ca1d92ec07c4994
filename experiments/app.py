"""What the commands have in common: how they start, shared flags, errors, exit codes."""

import contextlib
import os
import re
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
from absl import app, flags, logging

from attnlab.lab.sweep import SweepFailed
from attnlab.lab.workdir import RunInUse
from attnlab.lab.worker import STOPPED
from attnlab.load import LoadedModel, open_folder, open_run
from attnlab.names import import_module
from attnlab.training.interrupts import Stopped
from experiments import config

T = TypeVar("T")
LOG = "error.log"
TEXT_FLAGS = ("text", "source", "title", "end_of_document")
"""Flags whose values are texts, in which ~ stays."""
FIELD = re.compile(r"--?(?P<no>no)?config\.(?P<name>[\w.]+)(=(?P<text>.*))?", re.DOTALL)
"""A flag of a config field; one without a value is on, or with "no" off."""
_DEBUG = flags.DEFINE_bool("debug", False, "Print the traceback of an error.")
_IMPORT = flags.DEFINE_multi_string(
    "import", [], "A Python file to run first, such as one that registers a head layout."
)


def define_config(*, required: bool = True) -> None:
    """The flag --config; each field of the config is a flag."""
    flags.DEFINE_string(
        "config", None, "A config file, or file.py:PRESET,PRESET.", required=required
    )


def define_run() -> None:
    """The flags of commands that train."""
    define_config()
    flags.DEFINE_string(
        "workdir", None, "Folder of everything that the command writes.", required=True
    )
    flags.register_validator("workdir", lambda name: name != "", "name a folder")  # of $UNSET
    flags.DEFINE_integer(
        "threads",
        None,
        "CPU threads of a run. The last bits of results depend on them, so a resumed run keeps "
        "their number. Left out: as many as cores (a sweep: cores / runs).",
        lower_bound=1,
    )
    flags.DEFINE_list("loggers", [], "Loggers besides metrics.jsonl: tensorboard, wandb, or both.")
    flags.DEFINE_string("profile", "", "FIRST:LAST steps of each run to profile.")


def define_prompt(text: str) -> None:
    """The flags of what a model reads; `text` is the help of --text."""
    flags.DEFINE_string("text", "", text)
    flags.DEFINE_string("tokens", "", "The same as numbers: 1,2,3.")
    flags.DEFINE_string("source", "", "Text of the encoder of an encoder-decoder.")
    flags.DEFINE_string("source_tokens", "", "The same as numbers.")


def given_prompt() -> list[str | list[int]]:
    """The text and the source of those flags, each a text or the ids of its tokens; "" where it is
    left out. Raises ValueError."""
    found: list[str | list[int]] = []
    for name, ids in (("text", "tokens"), ("source", "source_tokens")):
        text, numbers = str(flags.FLAGS[name].value), flags.FLAGS[ids].value
        if text and numbers:
            raise ValueError(f"give --{name} or --{ids}, not both")
        try:
            found.append([int(number) for number in numbers.split(",")] if numbers else text)
        except ValueError:
            raise ValueError(f"--{ids}={numbers} must be numbers such as 1,2,3") from None
    return found


def jax_flags() -> dict[str, str]:
    """The --jax_ flags of this command, as variables of the environment: JAX reads both."""
    found = [f for f in map(flags.FLAGS.__getitem__, flags.FLAGS) if f.name.startswith("jax_")]
    return {f.name.upper(): str(f.value) for f in found if f.present}


def given_command() -> str:
    """This command, as it was typed."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def define_model() -> None:
    """The flags that name a model."""
    flags.DEFINE_string("workdir", None, "The folder of a run.")
    flags.DEFINE_string("path", None, "A folder of a published model.")
    flags.DEFINE_integer("seed", None, "Seed of the run; the first if left out.")


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


def given_model() -> LoadedModel:
    """The model that the flags of `define_model` name."""
    check_one_model()
    if flags.FLAGS.path:
        return open_folder(flags.FLAGS.path)
    return open_run(flags.FLAGS.workdir, flags.FLAGS.seed)


def start(main: Callable[..., None], *, takes_words: bool = False) -> NoReturn:
    """Parses the flags and calls `main`: of a command with --config on the `ConfigFile`, with
    `takes_words` on a list of the words that are no flags.

    An error that the user can correct is one line and exit code 1; 75 after a signal, and where
    another process holds the workdir. With --debug it has its traceback, and any other error has
    one always. Where there is a --workdir, its error.log has the traceback in any case.
    """
    logging.set_verbosity(logging.WARNING)
    jax.config.config_with_absl()
    app.run(
        lambda given: _or_exit(lambda: main(*given)),
        flags_parser=lambda argv: _or_exit(lambda: _parse(argv, takes_words)),
    )
    raise AssertionError("app.run does not return")


def _parse(argv: list[str], takes_words: bool) -> list[Any]:
    """What `main` is called with."""
    has_config, fields, words = "config" in flags.FLAGS, dict[str, str | None](), []
    for word in map(_with_home, argv):
        if has_config and (field := FIELD.fullmatch(word)):
            fields[field["name"]] = "False" if field["no"] else field["text"]
        else:
            words.append(word)
    imports, files = _values_of(words, _IMPORT.name, "config")
    for path in imports:  # they register what a config or a stored run has
        if not path.endswith(".py") or not Path(path).is_file():
            raise ValueError(f"no Python file {path!r}; --import is path.py")
        import_module(path)
    if fields and not files:
        raise ValueError(f"--config.{next(iter(fields))} is a field of a file; give --config=FILE")
    file = config.read(files[-1], fields) if has_config and files else None
    if {"--help", "-h", "-help", "--helpshort"} & set(words):
        _print_help(file)
        sys.exit(0)
    try:
        rest: list[str] = flags.FLAGS(words)
    except flags.UnrecognizedFlagError as error:
        known = [*flags.FLAGS, *(f"config.{path}" for path in (file.fields() if file else ()))]
        near = config.hint(error.flagname, known)
        raise ValueError(f"unknown flag --{error.flagname}; {near}") from None
    if takes_words:
        return [rest[1:]]
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}; flags start with --")
    return [file] if has_config else []


def _values_of(words: list[str], *names: str) -> list[list[str]]:
    """The values that some flags are given, whatever other flags there are."""
    first = flags.FlagValues()
    first.set_gnu_getopt(True)
    for name in names:
        flags.DEFINE_multi_string(name, [], "", flag_values=first)
    first(words, known_only=True)
    return [list(first[name].value or ()) for name in names]


def _with_home(word: str) -> str:
    """A flag with ~ as the home folder at the start of every value but a text: shells leave the one
    of --workdir=~/x as it is. In values of config fields, which may be texts, only in ~/x."""
    name = word.lstrip("-").partition("=")[0]
    if not word.startswith("-") or name in TEXT_FLAGS:
        return word
    end = "/" if name == "vary" or name.startswith("config.") else "[/,]|$"
    return re.sub(rf"(?<=[=,:])~[\w-]*(?={end})", lambda found: os.path.expanduser(found[0]), word)


def _print_help(file: config.ConfigFile | None) -> None:
    """The docstring of the command, its flags, and the fields of --config with their values."""
    print(sys.modules["__main__"].__doc__)
    own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    for flag in [*own, *flags.FLAGS.get_key_flags_for_module(__name__)]:
        print(textwrap.fill(f"--{flag.name}: {flag.help}", 96, subsequent_indent="    "))
    if file:
        print(f"\n{file.module.__doc__}")
        for path, value in file.fields().items():
            print(f"--config.{path}={value!r}")


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
