"""Images in the place of a text."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import assert_close
from random_models import random_params

from attnlab import heads
from attnlab.models import FFN, Embedding, Images, ModelConfig, OutputHead
from attnlab.models.embed import image_features

IMAGES = Images(height=6, width=15, channels=2, patch_height=3, patch_width=5)
VIT = ModelConfig(
    kind="encoder", embedding=Embedding(images=IMAGES), vocab_size=32, max_len=7, width=12,
    num_layers=2, heads=heads.Standard(num_heads=3), ffn=FFN(width=10),
    output=OutputHead(kind="none", pooler="first_plain", num_classes=4),
)  # fmt: skip


def test_the_first_layer_reads_a_convolution_and_a_class_token():
    """The table is the kernel of a patch, the class token and the bias; features are the same."""
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 15, 2)), jnp.float32)
    params, model = random_params(VIT), VIT.build()
    assert params["embedding"].shape == (3 * 5 * 2 + 2, 12)
    run = jax.jit(lambda x: model.apply({"params": params}, x, capture=("embeddings", "probs")))
    outputs = run(images)
    jax.tree.map(np.testing.assert_array_equal, outputs, run(image_features(images, IMAGES)))
    kernel = params["embedding"][:-2].reshape(3, 5, 2, 12)
    convolved = jax.lax.conv_general_dilated(
        images, kernel, (3, 5), [(0, 0)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    token, bias = params["embedding"][-2:]
    first = jnp.broadcast_to(token, (2, 1, 12))
    expected = jnp.concatenate([first, convolved.reshape(2, 6, 12) + bias], axis=1)
    assert_close(outputs.captured["embeddings"], expected + params["positions"])
    assert_close(outputs.pooled, outputs.hidden[:, 0])
    classes = outputs.hidden[:, 0] @ params["classifier"] + params["classifier_bias"]
    assert_close(outputs.classes, classes)
    assert outputs.captured["probs"].shape == (2, 2, 3, 7, 7)
