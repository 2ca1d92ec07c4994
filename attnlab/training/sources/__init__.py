"""What is learnt from. `SOURCES`: name -> its fields and how it is read."""

from attnlab.training.sources.source import BYTES, Batch, Data, Sizes, Source
from attnlab.training.sources.text import Text

SOURCES: dict[str, type[Data]] = {"text": Text}
"""Name -> a dataclass with the fields of a source, and how it is loaded."""

__all__ = ["BYTES", "SOURCES", "Batch", "Data", "Sizes", "Source", "Text"]
