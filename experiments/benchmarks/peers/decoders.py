"""The small decoder as users write it in plain Flax Linen and in plain torch: peers to time.

They take the sizes of a `ModelConfig`: pre-norm, learned positions, tanh GELU, biases, own LM head;
and its dtype, in which they multiply: weights are in float32.
Both read our weights, so that a benchmark can check that it times one and the same model.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab import training
from attnlab.models import ModelConfig
from experiments.benchmarks.peers import on_torch


class LinenBlock(nn.Module):
    """One layer; returns a pair because `nn.scan` wants one."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, mask):
        """x + attention(norm(x)), then x + ffn(norm(x))."""
        c, d = self.config, jnp.dtype(self.config.compute.dtype)
        y = nn.LayerNorm(epsilon=c.norm.eps, dtype=d, name="attention_norm")(x)
        heads = nn.MultiHeadDotProductAttention(c.heads.num_heads, dtype=d, name="attention")
        x = x + heads(y, mask=mask)
        y = nn.LayerNorm(epsilon=c.norm.eps, dtype=d, name="ffn_norm")(x)
        y = nn.gelu(nn.Dense(c.ffn.width, dtype=d, name="up")(y))
        return x + nn.Dense(c.width, dtype=d, name="down")(y), None


class LinenDecoder(nn.Module):
    """The layers in `nn.scan` (one compiled body) or in a Python loop (L compiled bodies)."""

    config: ModelConfig
    scan: bool

    @nn.compact
    def __call__(self, tokens):
        """tokens [B, T] -> logits [B, T, vocab]."""
        c, mask = self.config, nn.make_causal_mask(tokens)
        d, places = jnp.dtype(c.compute.dtype), jnp.arange(tokens.shape[1])[None]
        x = nn.Embed(c.vocab_size, c.width, dtype=d, name="embedding")(tokens)
        x = x + nn.Embed(c.max_len, c.width, dtype=d, name="positions")(places)
        if self.scan:
            layers = nn.scan(
                LinenBlock,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=c.num_layers,
            )
            x, _ = layers(c, name="layers")(x, mask)
        else:
            for i in range(c.num_layers):
                x, _ = LinenBlock(c, name=f"layer_{i}")(x, mask)
        x = nn.LayerNorm(epsilon=c.norm.eps, dtype=d, name="final_norm")(x)
        readout = nn.Dense(c.vocab_size, use_bias=False, dtype=d, name="readout")
        return readout(x).astype(jnp.float32)


def linen_params(ours: Any, model: LinenDecoder) -> Any:
    """The weights of our decoder in the tree of `model`."""
    layers = linen_layers(ours["layers"])
    rows = range(model.config.num_layers)
    loop = {f"layer_{i}": jax.tree.map(lambda a, i=i: a[i], layers) for i in rows}
    return ({"layers": layers} if model.scan else loop) | {
        "embedding": {"embedding": ours["embedding"]},
        "positions": {"embedding": ours["positions"]},
        "final_norm": ours["final_norm"],
        "readout": {"kernel": ours["lm_head"]},
    }


def linen_layers(ours: Any) -> Any:
    """The weights of our layers, stacked, in the tree of `LinenBlock`."""
    heads, ffn = ours["attention"], ours["ffn"]
    names = zip(("query", "key", "value", "out"), "qkvo", strict=True)
    return {
        "attention_norm": heads["norm"],
        "attention": {n: {"kernel": heads[m], "bias": heads[f"{m}_bias"]} for n, m in names},
        "ffn_norm": ffn["norm"],
        **{n: {"kernel": ffn[n], "bias": ffn[f"{n}_bias"]} for n in ("up", "down")},
    }


def linen_step(model: LinenDecoder, optimizer: Any, state: Any, tokens: Any) -> Any:
    """(params, opt_state), tokens [B, T + 1] -> the same after one step, loss."""
    params, opt_state = state

    def loss(params):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def torch_decoder(config: ModelConfig) -> Any:
    """The model in eager torch. Raises ImportError where torch is missing."""
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm = nn.LayerNorm(config.width, eps=config.norm.eps)
            self.qkv = nn.Linear(config.width, 3 * config.width)
            self.out = nn.Linear(config.width, config.width)
            self.ffn_norm = nn.LayerNorm(config.width, eps=config.norm.eps)
            self.up = nn.Linear(config.width, config.ffn.width)
            self.down = nn.Linear(config.ffn.width, config.width)

        def forward(self, x):
            qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, config.heads.num_heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(config.vocab_size, config.width)
            self.positions = nn.Embedding(config.max_len, config.width)
            self.layers = nn.Sequential(*(Block() for _ in range(config.num_layers)))
            self.final_norm = nn.LayerNorm(config.width, eps=config.norm.eps)
            self.readout = nn.Linear(config.width, config.vocab_size, bias=False)

        def forward(self, tokens):
            x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
            return self.readout(self.final_norm(self.layers(x)))

    return Decoder()


def torch_params(ours: Any) -> dict[str, np.ndarray]:
    """The weights of our decoder as a state dict: torch keeps a matrix as [out, in]."""
    ours = jax.tree.map(np.asarray, ours)
    state = {
        "embedding.weight": ours["embedding"],
        "positions.weight": ours["positions"],
        "readout.weight": ours["lm_head"].T,
        "final_norm.weight": ours["final_norm"]["scale"],
        "final_norm.bias": ours["final_norm"]["bias"],
    }
    for i in range(len(ours["layers"]["ffn"]["up"])):
        w = jax.tree.map(lambda a, i=i: a[i], ours["layers"])
        h, f = w["attention"], w["ffn"]
        pairs = {
            "qkv": (
                np.concatenate([h[n].reshape(len(h[n]), -1) for n in "qkv"], axis=1),
                np.concatenate([h[f"{n}_bias"].ravel() for n in "qkv"]),
            ),
            "out": (h["o"].reshape(-1, h["o"].shape[-1]), h["o_bias"]),
            **{n: (f[n], f[f"{n}_bias"]) for n in ("up", "down")},
            **{f"{n}_norm": (w[n]["norm"]["scale"], w[n]["norm"]["bias"]) for n in w},
        }
        for n, (kernel, bias) in pairs.items():
            state |= {f"layers.{i}.{n}.weight": kernel.T, f"layers.{i}.{n}.bias": bias}
    return state


def torch_step(config: ModelConfig, trains: training.TrainConfig, ours: Any, tokens: Any) -> Any:
    """(a call that does one step and returns its loss, parameters). On all cores, or on CUDA."""
    torch = on_torch.load()
    model = torch_decoder(config).to(on_torch.device())
    model.load_state_dict({n: torch.tensor(a) for n, a in torch_params(ours).items()})
    parameters, trained = list(model.parameters()), trains.optimizer
    groups: list[dict] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": trained.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 1.0, (trained.beta1, trained.beta2), fused=True)
    rates = np.asarray(
        training.make_optimizer(trains).schedule(jnp.arange(trains.steps + 1))
    ).tolist()
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rates[min(step, trains.steps)]
    )
    rows = on_torch.tensor(np.asarray(tokens, np.int64))

    def step() -> float:
        with torch.autocast(
            on_torch.device(), torch.bfloat16, enabled=config.compute.dtype == "bfloat16"
        ):
            logits = model(rows[:, :-1])
        logits, targets = logits.flatten(0, 1).float(), rows[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, trained.clip_norm)
        optimizer.step()
        schedule.step()
        return loss.item()

    return step, sum(p.numel() for p in parameters)
