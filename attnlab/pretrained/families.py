"""What a family of published models says about itself."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from attnlab.model.config import ModelConfig
from attnlab.pretrained.rows import Row

Tensors = Mapping[str, np.ndarray | None]
"""What a file holds; None where only the name is known."""


class Family(NamedTuple):
    """One `model_type` of config.json. A new one is a file that ends in such a table."""

    name: str
    settings: dict[str, Any]
    """Attributes that are read, with what they are where config.json says nothing."""
    fields: Callable[[dict[str, Any], Tensors, str], dict[str, Any]]
    """(settings, tensors, architecture) -> the fields of a ModelConfig"""
    describe: Callable[[ModelConfig], tuple[dict[str, Any], str]]
    """config -> (settings, architecture): the inverse, as far as the format can say it"""
    rows: Callable[[ModelConfig, dict[str, Any]], list[Row]]
    """(config, settings) -> the name table"""
    prefix: str = ""
    """Stands before the names of the bare model in the files of its task models."""
    readouts: tuple[str, ...] = ()
    """How the names begin that belong to a task and never have the prefix."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that hold no weight, or one that is stored elsewhere too."""
    ignored_for: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()
    """config -> more such patterns"""
    unused: Callable[[ModelConfig], dict[str, str]] = lambda config: {}
    """config -> tensors that transformers stores and never reads: name -> the one they copy"""
    fixed: dict[str, Any] = {}  # noqa: RUF012
    """Attributes that may only have this value."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(ending of an older checkpoint, ending of today)"""
