"""Images in the place of a text: a token for the whole, then the patches (Dosovitskiy et al. 2021,
arXiv 2010.11929).

A patch is a row of features, as any vector that a model reads through its table (see `embed`).
Behind the numbers of the patch stand two more, which say what the row is: 1, 0 the token for the
whole, with zeros in the place of a patch, and 0, 1 a patch. So the table [features, E] holds the
map of the patches, the vector of that token (ViT's class token) and the bias of the map.
"""

import re
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

WRITTEN = re.compile(r"(\d+)x(\d+)x(\d+)/(\d+)(?:x(\d+))?")


class Images(NamedTuple):
    """What `ModelConfig.images` says."""

    height: int
    width: int
    channels: int
    patch: tuple[int, int]
    """Height and width of a patch"""

    @property
    def grid(self) -> tuple[int, int]:
        """How many patches from top to bottom, and from left to right."""
        return self.height // self.patch[0], self.width // self.patch[1]

    @property
    def num_tokens(self) -> int:
        """The patches and one before them."""
        return 1 + self.grid[0] * self.grid[1]

    @property
    def num_features(self) -> int:
        """Of a row: the numbers of a patch and two."""
        return self.patch[0] * self.patch[1] * self.channels + 2

    def __str__(self):
        sides = "x".join(map(str, self.patch[: 1 + (self.patch[0] != self.patch[1])]))
        return f"{self.height}x{self.width}x{self.channels}/{sides}"


def read_images(text: str) -> Images:
    """`ModelConfig.images` as data: height x width x channels, and the side of a patch, or its
    height x width. Raises ValueError for what is none, or is not cut into whole patches.

    >>> images = read_images("224x224x3/16")
    >>> images.grid, images.num_tokens, images.num_features
    ((14, 14), 197, 770)
    >>> str(read_images("8x12x1/4x2"))
    '8x12x1/4x2'
    """
    found = WRITTEN.fullmatch(text)
    numbers = [int(n) for n in found.groups() if n] if found else [0]
    if not all(numbers):
        raise ValueError(
            f"images {text!r} are not read; write height x width x channels / side of a patch: "
            "'224x224x3/16', or '224x224x3/16x8' for patches 16 high and 8 wide"
        )
    height, width, channels, *patch = numbers
    one = Images(height, width, channels, (patch[0], patch[-1]))
    if height % patch[0] or width % patch[-1]:
        raise ValueError(
            f"images {text!r}: {height} x {width} are no whole patches of {patch[0]} x {patch[-1]};"
            " scale or cut the images"
        )
    return one


def patches(images: Float[Array, "B H W C"], patch: tuple[int, int]) -> Float[Array, "B T F"]:
    """Images as rows of features, patch by patch from left to right and from top to bottom, behind
    the row of the token for the whole. Numbers of a patch are in the order of the image's axes.

    >>> image = jnp.arange(8.0).reshape(1, 2, 4, 1)
    >>> patches(image, (2, 2))[0].astype(int).tolist()
    [[0, 0, 0, 0, 1, 0], [0, 1, 4, 5, 0, 1], [2, 3, 6, 7, 0, 1]]
    """
    (batch, height, width, channels), (p, q) = images.shape, patch
    grid = images.reshape(batch, height // p, p, width // q, q, channels)
    rows = grid.swapaxes(2, 3).reshape(batch, -1, p * q * channels)
    rows = jnp.pad(rows, [(0, 0), (1, 0), (0, 2)])
    return rows.at[:, 0, -2].set(1).at[:, 1:, -1].set(1)


def check_images(config: Any) -> None:
    """Raises ValueError, saying what to set, where a model's sizes are not those of its images."""
    if config.images is None:
        return
    one = read_images(config.images)
    if config.kind == "encoder_decoder":
        raise ValueError("images are read by one stack: set kind='encoder'")
    if config.vocab_size != one.num_features:
        raise ValueError(
            f"images {config.images!r} are rows of {one.num_features} features, those of a patch "
            f"and two: set vocab_size={one.num_features}"
        )
    if config.max_len < one.num_tokens:
        raise ValueError(
            f"images {config.images!r} are {one.num_tokens} tokens, one before the patches: set "
            f"max_len={one.num_tokens}"
        )


def as_features(config: Any, images: Array) -> Array:
    """What the model reads of images [B, H, W, C]: `patches` of the sizes that its config says.

    Raises ValueError with a way out for images of another size or type, and for a model of texts.
    """
    if config.images is None:
        raise ValueError(
            f"tokens {images.shape} are images, and this model reads none; its config has no images"
        )
    one = read_images(config.images)
    expected = (one.height, one.width, one.channels)
    if images.shape[1:] != expected:
        torch = images.shape[1:] == (one.channels, one.height, one.width)
        way_out = "; put the channels last, jnp.moveaxis(images, 1, -1)" if torch else ""
        sizes = ", ".join(map(str, expected))
        raise ValueError(f"images {images.shape} must be [batch, {sizes}]{way_out}")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"images of {images.dtype} must be floats, scaled as the model was trained; of ViT "
            "mostly images / 127.5 - 1"
        )
    return patches(images, one.patch)
