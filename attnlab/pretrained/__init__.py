"""Load published checkpoints as (model, params) and save models as checkpoints.

Each family has one table of tensor names. Neither torch nor transformers is needed, and nothing in
a folder is executed.
"""

from attnlab.models.params import param_shapes
from attnlab.pretrained.loading import load, load_config, tokenizer_path
from attnlab.pretrained.published import PUBLISHED, published_config
from attnlab.pretrained.registry import FAMILIES
from attnlab.pretrained.saving import save
from attnlab.pretrained.variables import SYSTEMS, from_variables

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "SYSTEMS",
    "from_variables",
    "load",
    "load_config",
    "param_shapes",
    "published_config",
    "save",
    "tokenizer_path",
]
