"""What the commands have in common: flags, errors in one line, quiet libraries."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from attnlab.training.fit import Stopped
from experiments.running.lock import Busy

AGAIN = 75
"""The exit code that means: the same command goes on later (sysexits.h calls it EX_TEMPFAIL)."""


def define_config() -> None:
    """The flags --config and --workdir. Every field of the config is a flag too."""
    config_flags.DEFINE_config_file("config", None, "A config file, with :words.")
    flags.DEFINE_string("workdir", None, "The folder that holds everything of this run.")
    flags.mark_flags_as_required(["config", "workdir"])


def config() -> tuple[str, Any, dict[str, Any]]:
    """The config file with its words, the config, and what flags override in it."""
    flag = flags.FLAGS["config"]
    filename = config_flags.get_config_filename(flag)
    return filename, flags.FLAGS.config, config_flags.get_override_values(flag)


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
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}; flags start with --")
    if "config" in flags.FLAGS:
        _ = flags.FLAGS.config  # raises what went wrong while the file was loaded
    return rest


def _or_exit(call: Callable, *args: Any) -> Any:
    try:
        return call(*args)
    except (Stopped, Busy) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(AGAIN)
    except (ValueError, OSError, flags.Error) as error:
        sys.exit(f"error: {_one_message(error)}")
    except AttributeError as error:
        if "Did you mean" not in str(error):  # not ml_collections' word for an unknown field
            raise
        sys.exit(f"error: unknown config field {' '.join(error.args[0].args[0].split())}")


def _one_message(error: BaseException) -> str:
    """What a config file raised comes wrapped in its whole traceback: keep the last line."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1].partition("Error: ")[2]
    return text
