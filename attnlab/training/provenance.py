"""What a run was started with: command line, git commit and changes, installed packages."""

import functools
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from attnlab.atomic import write_atomic

PROVENANCE = "provenance.json"


def write_provenance(folder: Path, hyperparameters: Mapping[str, object]) -> None:
    """Writes `provenance.json` into the folder of a run, unless it is there, and `changes.diff` of
    `git diff HEAD` where there are changes.

    The JSON has the `hyperparameters`, and of this process "argv", "directory", "python",
    "platform", "git" (commit, branch and files that differ from it; None outside a repository) and
    "packages" (name -> version of all installed distributions). Files that git does not know are
    named in "git" alone.
    """
    if (folder / PROVENANCE).exists():
        return
    here = Path.cwd()
    commit, git = _git(here, "rev-parse", "HEAD"), None
    if commit:
        branch = _git(here, "rev-parse", "--abbrev-ref", "HEAD")
        changed = _git(here, "status", "--porcelain").splitlines()
        git = {"commit": commit.strip(), "branch": branch.strip(), "changed": changed}
        if changes := _git(here, "diff", "HEAD"):
            write_atomic(folder / "changes.diff", changes.encode(errors="surrogateescape"))
    about = {
        "hyperparameters": dict(hyperparameters), "argv": sys.argv, "directory": str(here),
        "python": platform.python_version(), "platform": platform.platform(), "git": git,
        "packages": dict(_packages()),
    }  # fmt: skip
    content = json.dumps(about, indent=1, default=str) + "\n"
    write_atomic(folder / PROVENANCE, content.encode())


def code_commit(root: Path) -> str:
    """The commit of a clone of this code, with "+changes" where files differ from it; "unknown"
    outside a git repository."""
    commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
    changed = commit and _git(root, "status", "--porcelain", "attnlab", "experiments")
    return (commit or "unknown") + ("+changes" if changed else "")


@functools.cache
def _packages() -> tuple[tuple[str, str], ...]:
    """Names and versions; reading them takes a second, so a process does it once."""
    return tuple(sorted((d.name, d.version) for d in metadata.distributions() if d.name))


def _git(directory: Path, *words: str) -> str:
    """What git prints; "" where it fails. Bytes that are no text become surrogates."""
    command = ["git", "-C", str(directory), *words]
    try:
        done = subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="surrogateescape")
