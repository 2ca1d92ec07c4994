"""Images in a config.json and in a file: sizes, and the projection of their patches."""

import dataclasses
from collections.abc import Callable

from attnlab.models.config import ModelConfig
from attnlab.models.specs import Images
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.fields import Field, Source, Values
from attnlab.pretrained.weights import Entry


def _sides(attributes: JSON, name: str, default: int) -> list[int]:
    """Height and width, which may be one number."""
    said = default if attributes[name] is None else attributes[name]
    sides = said if isinstance(said, list) else [said, said]
    if len(sides) != 2 or not all(type(side) is int and 0 < side < 2**16 for side in sides):
        why = "should be a whole number, or height and width, from 1 to 65,535"
        raise bad_value(name, said, why)
    return sides


def _short(height: int, width: int) -> int | list[int]:
    """One number for a square."""
    return height if height == width else [height, width]


@dataclasses.dataclass(frozen=True)
class ImageField(Field):
    """Sizes of images and patches.

    Attributes:
      image_size, patch_size: where config.json has none.
      class_token, bias: as in `Images`.
      mask_token: a tensor that is there if the model has a vector for hidden patches.
      has_mask: an attribute that says whether it has.
    """

    image_size: int = 224
    patch_size: int = 16
    class_token: bool = True
    bias: bool = True
    mask_token: str = ""
    has_mask: str = ""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        known = Attribute("image_size"), Attribute("patch_size"), Attribute("num_channels", 3)
        return (*known, Attribute(self.has_mask, True)) if self.has_mask else known

    def read(self, attributes: JSON, source: Source) -> Values:
        height, width = _sides(attributes, "image_size", self.image_size)
        patch_height, patch_width = _sides(attributes, "patch_size", self.patch_size)
        try:
            images = Images(
                height=height,
                width=width,
                channels=attributes["num_channels"],
                patch_height=patch_height,
                patch_width=patch_width,
                crop=bool(height % patch_height or width % patch_width),
                class_token=self.class_token,
                bias=self.bias,
                mask_token=attributes.get(self.has_mask, self.mask_token in source.tensors),
            )
        except ValueError as error:
            raise ValueError(f"config.json: image_size = {[height, width]}: {error}") from None
        return {
            "embedding.images": images,
            "vocab_size": images.num_features,
            "max_len": images.num_tokens,
        }

    def write(self, config: ModelConfig) -> JSON:
        images = config.embedding.images
        if images is None:
            raise ValueError("it reads images, and this model has none")
        return ({self.has_mask: images.mask_token} if self.has_mask else {}) | {
            "image_size": _short(images.height, images.width),
            "patch_size": _short(images.patch_height, images.patch_width),
            "num_channels": images.channels,
        }


def image_entries(
    projection: str, positions: str = "", **marks: tuple[str, tuple[int, ...]]
) -> Callable[[ModelConfig], list[Entry]]:
    """What `NameTable.special` needs: the tensors of the embedding table.

    Args:
      projection: module of the projection of the patches.
      positions: tensor of the positions where it has an axis of 1 in front.
      **marks: of `Images.marks` but "patch", (tensor, its axes of 1 in front).
    """

    def entries(config: ModelConfig) -> list[Entry]:
        images, table = config.embedding.images, (("embedding",),)
        assert images is not None
        pixels, width = images.num_pixels, config.width
        window = (width, images.channels, images.patch_height, images.patch_width)
        made = [Entry(f"{projection}.weight", table, slice(pixels), "conv2d", stored=window)]
        for place, mark in enumerate(images.marks, pixels):
            name, axes = marks.get(f"{mark}_token", (f"{projection}.bias", ()))
            made.append(Entry(name, table, place, stored=(*axes, width)))
        if positions:
            stored = (1, config.max_len, width)
            made.append(Entry(positions, (("positions",),), stored=stored))
        return made

    return entries
