"""What is learnt from. `SOURCES`: name -> its fields and how it is read."""

from attnlab.training.sources.dataset import Dataset
from attnlab.training.sources.endpoints import Endpoints
from attnlab.training.sources.graph import Nodes
from attnlab.training.sources.labelled import Labelled
from attnlab.training.sources.pairs import Pairs
from attnlab.training.sources.source import BYTES, Batch, Data, Sizes, Source
from attnlab.training.sources.synthetic import Recall
from attnlab.training.sources.text import Text
from attnlab.training.sources.vectors import Farthest, Maxima

SOURCES: dict[str, type[Data]] = {
    "text": Text,
    "pairs": Pairs,
    "labelled": Labelled,
    "recall": Recall,
    "endpoints": Endpoints,
    "farthest": Farthest,
    "maxima": Maxima,
    "graph": Nodes,
    "grain": Dataset,
}
"""Name -> a dataclass with the fields of a source, and how it is loaded."""

__all__ = [
    "BYTES",
    "SOURCES",
    "Batch",
    "Data",
    "Dataset",
    "Endpoints",
    "Farthest",
    "Labelled",
    "Maxima",
    "Nodes",
    "Pairs",
    "Recall",
    "Sizes",
    "Source",
    "Text",
]
