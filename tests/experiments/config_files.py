"""What the config files describe, those of the studies too."""

from pathlib import Path

import small_data
from commands import command

from experiments import reference
from experiments.config import ConfigFile, set_values, setup_of

MODULES = {
    name.removesuffix("/study.py").removesuffix(".py").rpartition("/")[2]:
    reference.config_module(name)
    for name in reference.config_files()
}  # fmt: skip
"""Name of a config file, or of the study whose study.py it is -> the module."""
DATA = {
    "cora": "graph", "neighbours": "graph", "reviews": "labelled", "scan": "rows",
    "shared_encoder_decoder": "pairs", "translation": "pairs",
}  # fmt: skip
"""Which of small_data those read that read files."""


def succeed(module, *flags, **options):
    """The command, which ends well."""
    done = command(module, *flags, **options)
    assert done.returncode == 0, done.stderr
    return done


def everything(folder):
    """Every file of a folder with its bytes, but who had it last."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "lock.json")
    return {p.relative_to(folder): p.read_bytes() for p in files}


def config(name, preset="", folder=None):
    """The config of a file; one that reads files (then with `tiny`) on small data."""
    found = MODULES[name].get_config(preset)
    if name not in DATA:
        return found
    data, _, _ = getattr(small_data, DATA[name])(folder)
    if name == "scan":
        found.data.make, found.model.vocab_size = data.make, 7
    else:
        found.data.path = data.path
    if DATA[name] == "graph":  # one for each device of the tests
        found.train.batch_size = found.train.evaluation.batch_size = 8
    return found


def planned(name, preset="", folder=None, fields=()):
    """What `experiments.sweep` reads of a config file; `fields` that flags set."""
    given = config(name, preset, folder)
    set_values(given, dict(fields))
    return setup_of(ConfigFile(Path(name), preset, MODULES[name], given))


def experiments(name, preset="", folder=None):
    """Title of each variant -> its experiment, as a sweep would run it."""
    specs = planned(name, preset, folder).specs([0])
    return {spec.title: spec.config for spec in specs}
