"""What a run was started with: command line, git commit and changes, installed packages."""

import functools
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PROVENANCE = "provenance.json"
CHANGES = "changes.diff"


def describe_process(directory: Path | None = None) -> tuple[dict[str, object], bytes]:
    """What a run was started with.

    Args:
      directory: in the git repository whose commit is recorded; None: the working directory.

    Returns:
      As JSON: "argv", "directory", "python", "platform", "git" (commit, branch and files that
      differ from it; None outside a repository) and "packages" (name -> version of all installed
      distributions). And `git diff HEAD`, empty without changes; files that git does not know are
      named in "git" alone.
    """
    directory = directory or Path.cwd()
    commit = _git(directory, "rev-parse", "HEAD")
    git, changes = None, b""
    if commit is not None:
        changed = _git(directory, "status", "--porcelain") or b""
        changes = _git(directory, "diff", "HEAD") or b""
        branch = _git(directory, "rev-parse", "--abbrev-ref", "HEAD") or b""
        git = {
            "commit": commit.decode().strip(),
            "branch": branch.decode().strip(),
            "changed": changed.decode(errors="replace").splitlines(),
        }
    about: dict[str, object] = {
        "argv": sys.argv,
        "directory": str(directory),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": git,
        "packages": dict(_packages()),
    }
    return about, changes


def code_commit(root: Path) -> str:
    """The commit of a clone of this code, with "+changes" where files differ from it; "unknown"
    outside a git repository."""
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    changed = _git(root, "status", "--porcelain", "attnlab", "experiments")
    return head.decode().strip() + ("+changes" if changed else "")


@functools.cache
def _packages() -> tuple[tuple[str, str], ...]:
    """Names and versions; reading them takes a second, so a process does it once."""
    return tuple(sorted((d.name, d.version) for d in metadata.distributions() if d.name))


def _git(directory: Path, *words: str) -> bytes | None:
    try:
        return subprocess.run(
            ["git", "-C", str(directory), *words],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
