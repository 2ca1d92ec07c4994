"""Images instead of tokens: a class token, then the patches (Dosovitskiy et al. 2021).

A patch is a row of features, like any vector that a model reads through its embedding table. Two
features after the pixels of the patch are the kind of the row: (1, 0) for the class token, with
zeros for pixels, and (0, 1) for a patch. So the table [features, E] holds the projection of the
patches, the vector of the class token and the bias of the projection. `Images.marks` names the
features; a model may have fewer, or one more for hidden patches.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.models.specs import Images


def patches(
    images: Float[Array, "B H W C"],
    patch_height: int,
    patch_width: int,
    marks: tuple[str, ...] = ("class", "patch"),
) -> Float[Array, "B T F"]:
    """Images as rows of features: the class token, then the patches from left to right and from top
    to bottom. The pixels of a patch are in the order of the axes of the image.

    Args:
      images: [B, H, W, C].
      patch_height, patch_width: of a patch.
      marks: of `Images.marks`; the class token is there if its mark is.

    >>> image = jnp.arange(8.0).reshape(1, 2, 4, 1)
    >>> patches(image, 2, 2)[0].astype(int).tolist()
    [[0, 0, 0, 0, 1, 0], [0, 1, 4, 5, 0, 1], [2, 3, 6, 7, 0, 1]]
    """
    batch, height, width, channels = images.shape
    p, q = patch_height, patch_width
    images = images[:, : height // p * p, : width // q * q]  # the rest fills no patch
    grid = images.reshape(batch, height // p, p, width // q, q, channels)
    rows = grid.swapaxes(2, 3).reshape(batch, -1, p * q * channels)
    first, pixels = int("class" in marks), rows.shape[-1]
    rows = jnp.pad(rows, [(0, 0), (first, 0), (0, len(marks))])
    if first:
        rows = rows.at[:, 0, pixels + marks.index("class")].set(1)
    if "patch" in marks:
        rows = rows.at[:, first:, pixels + marks.index("patch")].set(1)
    return rows


def image_features(images: Array, spec: Images | None) -> Float[Array, "B T F"]:
    """Images [B, H, W, C] as the features that a model with `embedding.images=spec` reads.

    Raises:
      ValueError: the model reads no images, or images of another size or dtype.

    >>> spec = Images(height=2, width=4, channels=1, patch_height=2, patch_width=2)
    >>> image_features(jnp.ones((5, 2, 4, 1)), spec).shape
    (5, 3, 6)
    """
    if spec is None:
        raise ValueError(
            f"tokens {images.shape} are images, and this model reads none; set embedding.images"
        )
    expected = spec.height, spec.width, spec.channels
    if images.shape[1:] != expected:
        torch = images.shape[1:] == (spec.channels, spec.height, spec.width)
        hint = "; put the channels last: jnp.moveaxis(images, 1, -1)" if torch else ""
        sizes = ", ".join(map(str, expected))
        raise ValueError(f"images {images.shape} must be [batch, {sizes}]{hint}")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"images of dtype {images.dtype} must be floats, scaled as the model was trained; for "
            "ViT mostly images / 127.5 - 1"
        )
    return patches(images, spec.patch_height, spec.patch_width, spec.marks)
