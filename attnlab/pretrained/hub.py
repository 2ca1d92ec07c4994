"""From the name of a model on the Hugging Face Hub to a folder, by the library huggingface_hub."""

import os
import re
from pathlib import Path

from attnlab.extras import extra

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Names that the hub may have: "org/name", or "name" alone for the oldest models."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
FILES = ("config.json", GENERATION, TOKENIZER, *WEIGHTS)
"""Files to fetch: no code and no pickle."""


def find_folder(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: `name` itself if it is a folder, else the files of a hub repository.

    Files are kept in the cache of huggingface_hub and fetched once. Its environment variables hold
    here too: HF_HOME and HF_HUB_CACHE (where the cache is), HF_HUB_OFFLINE=1 (use the cache alone),
    HF_TOKEN (or `hf auth login`, for private models), HF_HUB_DISABLE_PROGRESS_BARS, HF_ENDPOINT.

    Args:
      name: a folder, or the name of a model on the hub.
      revision: a branch, tag or commit on the hub; None is its main branch.

    Raises:
      ValueError: no folder and no name of the hub, or the hub has no such model or revision.
      ConnectionError: the hub cannot be reached and its cache does not hold the model.
    """
    path = Path(os.path.expanduser(name))  # as it is where there is no such user
    if os.path.isdir(path):  # False, not an error, where the name is too long
        if revision is not None:
            raise ValueError(f"{name} is a folder, which has no revisions; leave revision out")
        return path
    if os.path.exists(path):
        raise ValueError(f"{str(name)[:200]!r} is a file; pass the folder that holds it")
    if isinstance(name, Path) or not REPOSITORY.fullmatch(name) or ".." in name:
        raise ValueError(
            f"there is no folder {str(name)[:200]!r}, and this is no name of a model on the "
            "Hugging Face Hub either; write the path of a folder with config.json and "
            'model.safetensors, or a name such as "openai-community/gpt2"'
        )
    return _fetch(name, revision)


def _fetch(name: str, revision: str | None) -> Path:
    with extra("pretrained"):
        from huggingface_hub import errors, snapshot_download
    what = f"{name!r} at revision {revision!r}" if revision else repr(name)
    log_in = "log in by `hf auth login` or set HF_TOKEN"
    why: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{what} asks for consent before it can be read: open its page on "
        f"the Hugging Face Hub, then {log_in}",
        errors.RepositoryNotFoundError: f"there is no folder {name!r} here, and no such model on "
        f"the Hugging Face Hub, or a private one: check the name, or {log_in}",
        errors.RevisionNotFoundError: f"{name!r} on the Hugging Face Hub has no branch, tag or "
        f"commit {revision!r}; leave revision out for its main branch",
        errors.HFValidationError: f"{name!r} is no name of a model",
    }
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except tuple(why) as error:
        raise ValueError(next(why[kind] for kind in why if isinstance(error, kind))) from error
    except (OSError, errors.HTTPError) as error:  # no network, a server that fails, or offline
        raise ConnectionError(
            f"there is no folder {name!r} here, and {what} could not be fetched from the Hugging "
            f"Face Hub ({_first_line(error)}), nor is it whole in the cache: check the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
    if not any(path.name in WEIGHTS[:2] for path in folder.iterdir()):
        raise ValueError(
            f"{what} on the Hugging Face Hub has no model.safetensors; a pickle can run code and "
            "is never opened: look for a revision with safetensors (often refs/pr/1), or save it "
            "as safetensors where you trust it"
        )
    return folder


def _first_line(error: Exception) -> str:
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
