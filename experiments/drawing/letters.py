"""Axes of weights as the letters of the layout atlas."""

from attnlab.heads.weights import Axes

LETTERS = {
    "width": "D", "num_heads": "N", "num_kv_heads": "K", "head_dim": "H", "value_dim": "V",
    "slice_width": "C", "key_width": "E", "value_width": "W", "out_width": "O", "latent_dim": "M",
    "query_latent_dim": "Q", "query_width": "Q", "rotary_dim": "P", "query_rank": "X",
    "key_rank": "Y", "value_rank": "Z", "num_score_maps": "N", "queries_per_key": "G",
}  # fmt: skip
"""Field or property of a layout -> its letter."""


def letters(axes: Axes) -> str:
    """Axes as text.

    >>> letters(("width", "num_heads", "head_dim"))
    'D N H'
    """
    return " ".join(str(LETTERS.get(str(axis), axis)) for axis in axes)
