"""Commands as a user types them, each in a process of its own that need not import the libraries.

Importing them takes longer than most commands that tests start. A server imports them once, before
JAX has started any backend, and forks a process for each command.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT = 600
LIBRARIES = ("attnlab.lab", "attnlab.report", "matplotlib.pyplot", "orbax.checkpoint")


def user_environment():
    """The environment without what tests of this process set."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_NUM"))}


def quick_xla_flags():
    """Those of the environment, and without fusion emitters, which take half of the time to
    compile. Later versions of XLA cannot be told."""
    flags = os.environ.get("XLA_FLAGS", "")
    if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):
        flags += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    return flags


@functools.cache
def server():
    words = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import commands"]
    words[-1] += "; commands.serve()"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    words.append(str(Path(__file__).parent))
    process = subprocess.Popen(words, cwd=ROOT, env=user_environment(), **pipes)
    atexit.register(process.communicate)  # ends with its input
    return process


def command(module, *flags, optimized=False):
    """`python -m module flags`, or `python module flags` of a file; never raises.

    Compiled with little optimising, as tests are, unless its bits are compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (str(Path(folder, name)) for name in ("out", "err"))
        job = dict(module=str(module), flags=flags, optimized=optimized, out=out, err=err)
        print(json.dumps(job), file=server().stdin, flush=True)
        code = int(server().stdout.readline())
        texts = (Path(path).read_text() for path in (out, err))
        return subprocess.CompletedProcess([module, *flags], code, *texts)


def serve():
    """A line in, a process, its exit code as a line out."""
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):  # extras
            importlib.import_module(library)
    importlib.import_module("attnlab.training.loggers").summary_writer()
    gc.freeze()  # a collection in a child would touch, and so copy, all that was imported
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(module, flags, optimized, out, err):
    """This process is the command from here on."""
    import jax

    signal.alarm(TIMEOUT)
    for number, (path, mode) in enumerate(((os.devnull, "r"), (out, "w"), (err, "w"))):
        with open(path, mode) as file:
            os.dup2(file.fileno(), number)
    if not optimized:
        os.environ["XLA_FLAGS"] = quick_xla_flags()
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of processes that it starts
    sys.argv = [module, *flags]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()
