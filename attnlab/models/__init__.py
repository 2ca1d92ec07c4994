"""Models: config, layers, embeddings, LM and classifier heads, and the Flax modules."""

from attnlab.models.budget import Match, match_budget, with_layout
from attnlab.models.config import EncoderConfig, LayerOverrides, LayerSpec, ModelConfig
from attnlab.models.cost import (
    applied_parameters,
    cache_bytes_per_token,
    flops_per_token,
    num_parameters,
    parameters_by_uses,
    weight_flops,
)
from attnlab.models.describe import describe, describe_attention, explain_model
from attnlab.models.ffn import feed_forward
from attnlab.models.flags import from_dict, from_json, to_dict, to_json
from attnlab.models.flax import (
    Decoder,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LayerStack,
    MultiHeadAttention,
)
from attnlab.models.forward import ModelInputs, Outputs, model_values, run_model
from attnlab.models.generate import Sampling, generate, limit_logits, prefill, stream
from attnlab.models.head_similarity import head_distance, identical_heads
from attnlab.models.layer import (
    LayerInputs,
    LayerOutputs,
    Source,
    init_layer,
    layer_values,
    transformer_layer,
)
from attnlab.models.params import check_params, matrix_axes, param_shapes, shard_axes
from attnlab.models.specs import (
    FFN,
    Alibi,
    Attention,
    Compute,
    Dropout,
    Embedding,
    Experts,
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
from attnlab.models.stack import LayersOfType, StackOutputs, captured_per_layer, run_layers

__all__ = [
    "FFN", "Alibi", "Attention", "Compute", "Decoder", "Dropout", "Embedding", "Encoder",
    "EncoderConfig", "EncoderDecoder", "Experts", "FeedForward", "Images", "Init", "LayerInputs",
    "LayerOutputs", "LayerOverrides", "LayerSpec", "LayerStack", "LayersOfType", "Learned", "Match",
    "ModelConfig", "ModelInputs", "MultiHeadAttention", "NoPositions", "Norm", "OutputHead",
    "Outputs", "Relative", "Rotary", "Sampling", "Sinusoidal", "Source", "StackOutputs",
    "applied_parameters", "cache_bytes_per_token", "captured_per_layer", "check_params", "describe",
    "describe_attention", "explain_model", "feed_forward", "flops_per_token", "from_dict",
    "from_json", "generate", "head_distance", "identical_heads", "init_layer", "layer_values",
    "limit_logits", "match_budget", "matrix_axes", "model_values", "num_parameters", "param_shapes",
    "parameters_by_uses", "prefill", "run_layers", "run_model", "shard_axes", "stream", "to_dict",
    "to_json", "transformer_layer", "weight_flops", "with_layout",
]  # fmt: skip
