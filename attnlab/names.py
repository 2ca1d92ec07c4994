"""Looks up names in a registry, and keywords of functions; an unknown one is an error that lists
those that are known.

An object that no registry has is named by a reference: "package.module:name", or
"/path/file.py:name" of a file that belongs to no package. Every registry reads them; tables of
fixed names do not.
"""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
REFERENCE = re.compile(r".+:[A-Za-z_][\w.]*")
IMPORTING: list[str] = []
"""Files that are being imported."""


def lookup(table: Mapping[str, T], name: str, *, what: str) -> T:
    """`table[name]`, or a ValueError that lists the known names.

    Args:
      table: name -> entry. A dict is a registry: it takes references, whose objects it keeps. Pass
        a fixed table as `types.MappingProxyType`, which has its names alone.
      name: the name to look up, or a reference.
      what: what the names are of, for the error.

    >>> lookup({"apple": 1, "pear": 2}, "aple", what="fruit")
    Traceback (most recent call last):
    ValueError: unknown fruit 'aple': did you mean 'apple'? known: apple, pear
    """
    if isinstance(name, str) and name in table:
        return table[name]
    if isinstance(name, str) and isinstance(table, dict) and REFERENCE.fullmatch(name):
        found: T = load(name)
        table[name] = found
        return found
    raise ValueError(f"unknown {what} {name!r}: {known_names(str(name), table)}")


def known_names(name: str, known: Iterable[str]) -> str:
    """What an error says of an unknown name: the one that it is near to, and all known ones.

    >>> known_names("wid", ["standard", "wide"])
    "did you mean 'wide'? known: standard, wide"
    """
    known = list(known)
    near = nearest(name, known)
    hint = f"did you mean {near!r}? " if near else ""
    return f"{hint}known: {', '.join(one or repr(one) for one in known)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, or None if none is near.

    >>> nearest("wid", ["standard", "wide"]), nearest("rope", ["none", "rotary"])
    ('wide', None)
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)), None)


def name_in(table: Mapping[str, object], thing: object, *, what: str) -> str:
    """The name under which a registry has an object, else its reference. Raises ValueError."""
    return next((n for n, one in table.items() if one is thing), None) or reference(thing, what)


def reference(thing: object, what: str = "an object") -> str:
    """The reference of a class, a function or another object that is a variable of a module.

    Raises:
      ValueError: it is none: another process could not import it.

    >>> reference(nearest), load("attnlab.names:nearest") is nearest
    ('attnlab.names:nearest', True)
    """
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    name = getattr(thing, "__qualname__", "")
    if module is None or _attribute(module, name) is not thing:
        holders = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
        found = [(m, n) for m in holders for n, one in list(vars(m).items()) if one is thing]
        module, name = found[0] if found else (None, "")
    place = module and module_reference(module)
    if not place:
        raise ValueError(
            f"{what} {getattr(thing, '__name__', repr(thing)[:60])} cannot be imported by another "
            "process; give it a name at the top of a module or a script (in a notebook: write "
            "it to a file with %%writefile and import that)"
        )
    return f"{place}:{name}"


def module_reference(module: ModuleType) -> str:
    """What `import_module` imports it by: its name in a package, else its file, else ""."""
    spec = module.__spec__
    if spec is not None and (spec.parent or spec.submodule_search_locations):
        return spec.name
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve()) if file else ""


def load(reference: str) -> Any:
    """The object of a reference.

    Raises:
      ValueError: there is no such module or file, or it has no such object.
    """
    module, colon, name = reference.rpartition(":")
    if not (module and colon and name):
        raise ValueError(f"{reference!r} must be package.module:name or file.py:name")
    try:
        found = _attribute(import_module(module), name)
    except (ImportError, FileNotFoundError) as error:
        raise ValueError(f"cannot import {reference!r}: {error}") from None
    if found is None:
        raise ValueError(f"cannot import {reference!r}: {module} has no {name}")
    return found


def import_module(name: str) -> ModuleType:
    """A module by its name, or a file by its path; a file is run once, also the main script.

    The folder of a file is added to the import path, since the file may import others in it.
    """
    main = sys.modules["__main__"]
    if not name.endswith(".py"):
        is_main = main.__spec__ is not None and main.__spec__.name == name
        return main if is_main else importlib.import_module(name)
    path = Path(name).resolve()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).name == path.name and Path(file).resolve() == path:
            return module
    own = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[own] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    IMPORTING.append(name)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own]
        raise
    finally:
        IMPORTING.remove(name)
    return module


def import_those(modules: Iterable[str]) -> None:
    """Imports what there is of these modules.

    A name that a missing one registers stays unknown. One whose names are registered already, as by
    a copy of the file, raises ValueError; those stay what they are.
    """
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError, FileNotFoundError, ValueError):
            import_module(module)


def _attribute(thing: object, path: str) -> Any:
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing


def check_keywords(function: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first name of `names` that is not in `known`.

    >>> check_keywords("attend", ["masked"], ["mask", "scale"])
    Traceback (most recent call last):
    TypeError: attend() got an unknown keyword 'masked': did you mean 'mask'? known: mask, scale
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            words = known_names(name, known)
            raise TypeError(f"{function}() got an unknown keyword {name!r}: {words}")
