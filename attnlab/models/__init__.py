"""Models: config, layers, embeddings, output heads, and the Flax modules that own parameters."""

from attnlab.models.config import Encoder as EncoderConfig
from attnlab.models.config import LayerOverrides, LayerSpec, ModelConfig
from attnlab.models.explain import explain_model
from attnlab.models.ffn import feed_forward
from attnlab.models.forward import ModelInputs, Outputs, model_values, run_model
from attnlab.models.layer import (
    LayerInputs,
    LayerOutputs,
    TextInputs,
    init_layer,
    layer_values,
    transformer_layer,
)
from attnlab.models.modules import FeedForward, LayerStack, MultiHeadAttention
from attnlab.models.parameters import check_params, param_shapes
from attnlab.models.specs import (
    FFN,
    Attention,
    Compute,
    Dropout,
    Embedding,
    Images,
    Init,
    Learned,
    NoPositions,
    Norm,
    OutputHead,
    Relative,
    Rotary,
    Sinusoidal,
)
from attnlab.models.stack import (
    LayersOfType,
    StackInputs,
    StackOutputs,
    captured_per_layer,
    run_layers,
)
from attnlab.models.transformer import Decoder, Encoder, EncoderDecoder

__all__ = [
    "FFN", "Attention", "Compute", "Decoder", "Dropout", "Embedding", "Encoder", "EncoderConfig",
    "EncoderDecoder", "FeedForward", "Images", "Init", "LayerInputs", "LayerOutputs",
    "LayerOverrides", "LayerSpec", "LayerStack", "LayersOfType", "Learned", "ModelConfig",
    "ModelInputs", "MultiHeadAttention", "NoPositions", "Norm", "OutputHead", "Outputs", "Relative",
    "Rotary", "Sinusoidal", "StackInputs", "StackOutputs", "TextInputs", "captured_per_layer",
    "check_params", "explain_model", "feed_forward", "init_layer", "layer_values", "model_values",
    "param_shapes", "run_layers", "run_model", "transformer_layer",
]  # fmt: skip
