"""Datasets and tokenizers. `DATASETS`: name -> its config, which loads it."""

from attnlab.data.dataset import BYTES, Batch, DataConfig, Dataset, DataSizes, DeviceBatches
from attnlab.data.endpoints import Endpoints
from attnlab.data.graph import Nodes
from attnlab.data.huggingface import HuggingFace
from attnlab.data.labelled import Labelled
from attnlab.data.pairs import Pairs
from attnlab.data.prepare import PreparePlan, prepare
from attnlab.data.random_access import RandomAccessData
from attnlab.data.recall import Recall
from attnlab.data.text import Text
from attnlab.data.token_files import TokenFiles
from attnlab.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from attnlab.data.vectors import Farthest

DATASETS: dict[str, type[DataConfig]] = {
    "text": Text,
    "tokens": TokenFiles,
    "huggingface": HuggingFace,
    "pairs": Pairs,
    "labelled": Labelled,
    "recall": Recall,
    "endpoints": Endpoints,
    "farthest": Farthest,
    "graph": Nodes,
    "grain": RandomAccessData,
}
"""Name -> a dataclass with the fields of a dataset; `load` returns the `Dataset`."""

__all__ = [
    "BYTES", "DATASETS", "Batch", "DataConfig", "DataSizes", "Dataset", "DeviceBatches",
    "Endpoints", "Farthest", "HuggingFace", "Labelled", "Nodes", "Pairs", "PreparePlan",
    "RandomAccessData", "Recall", "Text", "TokenFiles", "Tokenizer", "load_tokenizer",
    "make_tokenizer", "prepare",
]  # fmt: skip
