"""The backend "blockwise" with blocks that are small enough for small arrays to need several."""

import functools

from attnlab import BACKENDS
from attnlab.attention.blocks import BlockLimits
from attnlab.attention.blockwise import blockwise

SMALL_BLOCKS = BlockLimits(queries=2, head_scores=6, block_scores=1)
"""2 queries and 3 keys of one group of heads."""
SMALL_STRIPS = BlockLimits(small_queries=2, small_scores=1)
"""All queries and keys in one block, in strips of 2 queries and pieces of one group of heads."""


def divide(monkeypatch, limits):
    """Registers "blockwise" with these limits until the end of the test."""
    run = functools.partial(blockwise, limits=limits)
    monkeypatch.setitem(BACKENDS, "blockwise", BACKENDS["blockwise"]._replace(run=run))
