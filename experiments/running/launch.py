"""What the commands have in common: flags, errors in one line, quiet libraries."""

import ast
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from attnlab.training.fit import Stopped
from experiments.running.lock import Busy

AGAIN = 75
"""The exit code that means: the same command goes on later (sysexits.h calls it EX_TEMPFAIL)."""


def define_config(*, required: bool = True) -> None:
    """The flag --config; every field of the config that it names is a flag too."""
    flags.DEFINE_string("config", None, "A config file, with :words.", required=required)
    _show_in_help("config")


def define_run() -> None:
    """The flags of what trains: --config, --workdir, --threads."""
    define_config()
    flags.DEFINE_string("workdir", None, "The folder that holds everything.", required=True)
    flags.DEFINE_integer(
        "threads",
        None,
        "Threads that a run computes with on a CPU. Its last bits depend on them, so what began "
        "with some goes on with as many. Left out: as many as cores (a sweep: as cores an arm).",
        lower_bound=1,
    )
    for name in ("workdir", "threads"):
        _show_in_help(name)


def config() -> tuple[str, ConfigDict, dict[str, Any]]:
    """The config file with its words, the config, and what flags override in it."""
    filename = flags.FLAGS.config
    _, found = load(filename)
    given = {path: flags.FLAGS[f"config.{path}"] for path in fields(found)}
    overrides = {path: flag.value for path, flag in given.items() if flag.present}
    found.update_from_flattened_dict(overrides)
    return filename, found, overrides


def load(filename: str, overrides: Mapping[str, Any] = {}) -> tuple[Any, ConfigDict]:
    """`path.py:words` -> the module, and its config for these words.

    Every call makes the module anew. Its own functions read its config with the `overrides`, path
    -> value, so what a sweep computes from widths is of those that flags set.
    """
    path, *words = filename.split(":", 1)
    if not Path(path).is_file() or not path.endswith(".py"):
        raise ValueError(f"no config file {path!r}; --config is path.py or path.py:words")
    module = _module(path)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} has no get_config(), which makes the config of a run")
    if overrides:
        module.__dict__["get_config"] = _with(overrides, module.get_config)
    return module, module.get_config(*words)


def _module(path: str) -> Any:
    """The module of a Python file anywhere, made anew."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with(overrides: Mapping[str, Any], get_config: Callable) -> Callable:
    def of_flags(*words: str) -> ConfigDict:
        config = get_config(*words)
        config.update_from_flattened_dict(overrides)
        return config

    return of_flags


def fields(config: ConfigDict, prefix: str = "") -> dict[str, tuple[type, Any]]:
    """Path -> (type, value) of every field: {"model.width": (int, 128), ...}."""
    found: dict[str, tuple[type, Any]] = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            found |= fields(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = config.get_type(name), value
    return found


def changes(base: ConfigDict, config: ConfigDict) -> dict[str, Any]:
    """Path -> value of every field in which `config` is not as `base`."""
    before = fields(base)
    return {path: new[1] for path, new in fields(config).items() if new[1] != before[path][1]}


def start(main: Callable[[], None]) -> NoReturn:
    """Parses the flags and calls `main`.

    What a user can mend ends in one line and exit code 1; AGAIN after a signal, and where another
    process owns the workdir.
    """
    logging.set_verbosity(logging.WARNING)
    jax.config.config_with_absl()
    app.run(lambda argv: _or_exit(main), flags_parser=lambda argv: _or_exit(_parse, argv))
    raise AssertionError("app.run does not return")


def _parse(argv: list[str]) -> list[str]:
    for path in _imported(argv):
        _module(path)
    if "config" in flags.FLAGS:
        _define_fields(argv)
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}; flags start with --")
    return rest


def _imported(argv: list[str]) -> list[str]:
    """The files of --import, a flag of every command: they register layouts, extras and datasets
    that a run was trained with."""
    flags.DEFINE_multi_string(
        "import", [], "A Python file to run first, such as one that registers a head layout."
    )
    _show_in_help("import")
    paths: list[str] = _early(argv, "import", flags.DEFINE_multi_string, [])
    for path in paths:
        if not Path(path).is_file() or not path.endswith(".py"):
            raise ValueError(f"no Python file {path!r}; --import is path.py")
    return paths


def _early(argv: list[str], name: str, define: Callable, default: Any) -> Any:
    """The value of one flag, wherever it stands, before the others are known."""
    first = flags.FlagValues()
    first.set_gnu_getopt(True)
    define(name, default, "", flag_values=first)
    first(argv, known_only=True)
    return first[name].value


def _define_fields(argv: list[str]) -> None:
    """A flag for every field of the config that the command line names."""
    filename = _early(argv, "config", flags.DEFINE_string, None)
    if filename:
        module, found = load(filename)
        _tell_of(module, filename.partition(":")[0])
        for path, (kind, value) in fields(found).items():
            name, text = f"config.{path}", f"{value!r} in this config."
            if kind in DEFINE:
                DEFINE[kind](name, None, text)
            else:
                flags.DEFINE(_Literal(kind), name, None, text)
            _show_in_help(name)


def _tell_of(module: Any, path: str) -> None:
    """Puts the lab note of a config file, and the words that it knows, into --help."""
    note = f"{path}: {module.__doc__ or ''}"
    if hasattr(module, "VARIANTS"):
        from experiments.configs import byte_lm  # which the file has imported; no report needs it

        lines = [
            textwrap.fill(f"{name}: {text}", 78, initial_indent="  ", subsequent_indent="    ")
            for name, text in byte_lm.words(module.VARIANTS).items()
        ]
        note += "\nWords behind the colon, with commas between them:\n" + "\n".join(lines)
    main = sys.modules["__main__"]
    main.__doc__ = f"{main.__doc__}\n{note}\n"


class _Literal(flags.ArgumentParser):
    """A Python value; of a tuple its one value is enough."""

    syntactic_help = "a Python value"

    def __init__(self, kind: type):
        self._kind = kind

    def parse(self, argument: str) -> Any:
        """The value of "(0, 1)", of "0,1" or of "0"."""
        try:
            value = ast.literal_eval(argument)
        except (SyntaxError, ValueError):
            raise ValueError("not a Python value") from None
        if self._kind is tuple:
            return tuple(value) if isinstance(value, tuple | list) else (value,)
        return value


DEFINE: dict[type, Callable] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}
"""Type of a field -> how its flag is defined, where it is not as a `_Literal`."""


def _show_in_help(name: str) -> None:
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def _or_exit(call: Callable, *args: Any) -> Any:
    try:
        return call(*args)
    except (Stopped, Busy) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(AGAIN)
    except (ValueError, OSError, flags.Error) as error:
        sys.exit(f"error: {error}")
