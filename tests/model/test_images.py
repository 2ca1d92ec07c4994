"""Images in the place of a text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import ModelConfig
from attnlab.model.images import patches
from attnlab.model.outer import check_tokens

VIT = ModelConfig(
    kind="encoder",
    images="6x15x2/3x5",  # 2 x 3 patches of 3 x 5 pixels
    vocab_size=32,
    max_len=7,
    width=12,
    num_layers=2,
    num_heads=3,
    ffn_width=10,
    readout="none",
    pooler="first_plain",
    pooled_classes=4,
)


def test_a_row_of_features_is_a_patch():
    images = np.random.default_rng(0).normal(size=(2, 6, 15, 2)).astype(np.float32)
    rows = np.asarray(patches(jnp.asarray(images), (3, 5)))
    assert rows.shape == (2, 7, 32)
    for i in range(2):
        for j in range(3):
            patch = images[:, 3 * i : 3 * i + 3, 5 * j : 5 * j + 5]
            np.testing.assert_array_equal(rows[:, 1 + 3 * i + j, :30], patch.reshape(2, 30))
    np.testing.assert_array_equal(rows[:, 0, :30], 0)
    np.testing.assert_array_equal(rows[0, :, 30:], [[1, 0]] + [[0, 1]] * 6)


def test_the_first_layer_reads_a_convolution_and_a_class_token():
    """The table is a window's map, the class token and the bias; features are the same model."""
    rng, model = np.random.default_rng(0), VIT.build()
    images = jnp.asarray(rng.normal(size=(2, 6, 15, 2)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), shapes)
    assert params["embedding"].shape == (3 * 5 * 2 + 2, 12)

    @jax.jit
    def run(params, images):
        shown = dict(return_outputs=True, return_probs=True)
        seen, same = (
            model.apply({"params": params}, x, **shown) for x in (images, patches(images, (3, 5)))
        )
        window = params["embedding"][:-2].reshape(3, 5, 2, 12)
        axes = ("NHWC", "HWIO", "NHWC")
        return seen, same, jax.lax.conv_general_dilated(images, window, (3, 5), [(0, 0)] * 2,
                                                        dimension_numbers=axes)  # fmt: skip

    seen, same, convolved = run(params, images)
    whole, bias = params["embedding"][-2:]
    assert convolved.shape == (2, 2, 3, 12)
    expected = jnp.concatenate(
        [jnp.broadcast_to(whole, (2, 1, 12)), convolved.reshape(2, 6, 12) + bias], axis=1
    )
    assert_close(seen.first, expected + params["positions"])
    assert_close(seen.pooled, seen.last[:, 0])
    assert_close(seen.classes, seen.last[:, 0] @ params["classes"] + params["classes_bias"])
    assert seen.probs.shape == (2, 2, 3, 7, 7)
    jax.tree.map(np.testing.assert_array_equal, seen, same)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(images="6x15/3"), "write height x width x channels / side of a patch"),
        (dict(images="6x15x2/0"), "'6x15x2/0' are not read"),
        (dict(images="7x15x2/3x5"), "7 x 15 are no whole patches of 3 x 5; scale or cut"),
        (dict(vocab_size=31), "rows of 32 features, .* set vocab_size=32"),
        (dict(max_len=6), "are 7 tokens, .* set max_len=7"),
        (dict(kind="encoder_decoder", pooler=None, pooled_classes=0), "set kind='encoder'"),
        (dict(kinds="1(images=6x15x2/3) 1()"), "images is of the whole model"),
    ],
)
def test_models_that_read_no_such_images(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(VIT, **fields)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 15, 6, 2), "float32", r"images \(2, 15, 6, 2\) must be \[batch, 6, 15, 2\]$"),
        ((2, 2, 6, 15), "float32", r"channels last, jnp.moveaxis\(images, 1, -1\)"),
        ((2, 6, 15, 2), "uint8", "images of uint8 must be floats, scaled"),
        ((6, 15, 2), "float32", r"tokens of float32 \(6, 15, 2\)"),
    ],
)
def test_images_that_are_refused(shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(VIT, jnp.zeros(shape, dtype))
    with pytest.raises(ValueError, match="this model reads none"):
        check_tokens(ModelConfig(), jnp.zeros((2, 6, 15, 2)))
