"""Datasets and tokenizers. `DATASETS`: name -> its config, which loads it."""

from attnlab.data.dataset import BYTES, Batch, DataConfig, Dataset, DataSizes, DeviceBatches
from attnlab.data.files import keep_in
from attnlab.data.prepare import PreparePlan, prepare
from attnlab.data.rows import HuggingFace, Rows
from attnlab.data.synthetic import Endpoints, Farthest, Recall
from attnlab.data.text import Text
from attnlab.data.text_rows import Labelled, Pairs
from attnlab.data.token_files import TokenFiles
from attnlab.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer

DATASETS: dict[str, type[DataConfig]] = {
    "text": Text,
    "tokens": TokenFiles,
    "huggingface": HuggingFace,
    "pairs": Pairs,
    "labelled": Labelled,
    "recall": Recall,
    "endpoints": Endpoints,
    "farthest": Farthest,
    "rows": Rows,
}
"""Name -> a dataclass with the fields of a dataset; `load` returns the `Dataset`."""

__all__ = [
    "BYTES", "DATASETS", "Batch", "DataConfig", "DataSizes", "Dataset", "DeviceBatches",
    "Endpoints", "Farthest", "HuggingFace", "Labelled", "Pairs", "PreparePlan",
    "Recall", "Rows", "Text", "TokenFiles", "Tokenizer", "keep_in", "load_tokenizer",
    "make_tokenizer", "prepare",
]  # fmt: skip
