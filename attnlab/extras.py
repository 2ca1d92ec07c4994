"""Optional dependencies: a failing import names the extra of attnlab that installs it."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports inside that fail raise ModuleNotFoundError with the command that helps.

    >>> with extra("plot"):
    ...     import drawing_of_nobody
    Traceback (most recent call last):
    ModuleNotFoundError: drawing_of_nobody is missing or too old: pip install "attnlab[plot]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ModuleNotFoundError(
            f'{package} is missing or too old: pip install "attnlab[{name}]"', name=error.name
        ) from None
