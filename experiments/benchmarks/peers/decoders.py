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
        lm_head = nn.Dense(c.vocab_size, use_bias=False, dtype=d, name="lm_head")
        return lm_head(x).astype(jnp.float32)


def linen_params(ours: Any, model: LinenDecoder) -> Any:
    """The weights of our decoder in the tree of `model`."""
    heads, ffn = ours["layers"]["attention"], ours["layers"]["ffn"]
    names = zip(("query", "key", "value", "out"), "qkvo", strict=True)
    layers = {
        "attention_norm": heads["norm"],
        "attention": {n: {"kernel": heads[m], "bias": heads[f"{m}_bias"]} for n, m in names},
        "ffn_norm": ffn["norm"],
        **{n: {"kernel": ffn[n], "bias": ffn[f"{n}_bias"]} for n in ("up", "down")},
    }
    rows = range(model.config.num_layers)
    loop = {f"layer_{i}": jax.tree.map(lambda a, i=i: a[i], layers) for i in rows}
    return ({"layers": layers} if model.scan else loop) | {
        "embedding": {"embedding": ours["embedding"]},
        "positions": {"embedding": ours["positions"]},
        "final_norm": ours["final_norm"],
        "lm_head": {"kernel": ours["lm_head"]},
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


def torch_params(ours: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Tensors (weight, bias) of what surrounds the layers, and of each layer; torch keeps a matrix
    as [out, in], and q, k and v are one matrix."""
    both = lambda kernel, bias: (on_torch.trained(kernel.T), on_torch.trained(bias))
    norm = lambda w: (on_torch.trained(w["scale"]), on_torch.trained(w["bias"]))
    ours = jax.tree.map(np.asarray, ours)
    whole = {name: on_torch.trained(ours[name]) for name in ("embedding", "positions")}
    whole |= {"lm_head": on_torch.trained(ours["lm_head"].T), "norm": norm(ours["final_norm"])}
    layers = []
    for i in range(len(ours["layers"]["ffn"]["up"])):
        w = jax.tree.map(lambda a, i=i: a[i], ours["layers"])
        h, f = w["attention"], w["ffn"]
        kernel = np.concatenate([h[n].reshape(len(h[n]), -1) for n in "qkv"], axis=1)
        bias = np.concatenate([h[f"{n}_bias"].ravel() for n in "qkv"])
        layer = {"qkv": both(kernel, bias)}
        layer["out"] = both(h["o"].reshape(-1, h["o"].shape[-1]), h["o_bias"])
        layer |= {n: both(f[n], f[f"{n}_bias"]) for n in ("up", "down")}
        layers.append(layer | {f"{n}_norm": norm(w[n]["norm"]) for n in w})
    return whole, layers


def torch_logits(config: ModelConfig, whole: Any, layers: Any, tokens: Any) -> Any:
    """The model in eager torch: tokens [B, T] -> logits [B, T, vocab]."""
    F = on_torch.load().nn.functional
    norm = lambda x, w: F.layer_norm(x, (config.width,), *w, eps=config.norm.eps)
    x = F.embedding(tokens, whole["embedding"]) + whole["positions"][: tokens.shape[1]]
    for w in layers:
        qkv = F.linear(norm(x, w["attention_norm"]), *w["qkv"])
        qkv = qkv.unflatten(-1, (3, config.heads.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).flatten(2), *w["out"])
        y = F.gelu(F.linear(norm(x, w["ffn_norm"]), *w["up"]), approximate="tanh")
        x = x + F.linear(y, *w["down"])
    return F.linear(norm(x, whole["norm"]), whole["lm_head"])


def torch_step(config: ModelConfig, trains: training.TrainConfig, ours: Any, tokens: Any) -> Any:
    """(a call that does one step and returns its loss, number of parameters). On all cores, or on
    CUDA. Raises ImportError where torch is missing."""
    torch = on_torch.load()
    whole, layers = torch_params(ours)
    parameters, trained = jax.tree.leaves((whole, layers)), trains.optimizer
    groups: list[dict] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": trained.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 1.0, (trained.beta1, trained.beta2), fused=True)
    rates = np.asarray(training.make_optimizer(trains).schedule(jnp.arange(trains.steps + 1)))
    rate = lambda step: float(rates[min(step, trains.steps)])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    rows = on_torch.tensor(np.asarray(tokens, np.int64))
    narrow = config.compute.dtype == "bfloat16"

    def step() -> float:
        with torch.autocast(on_torch.device(), torch.bfloat16, enabled=narrow):
            logits = torch_logits(config, whole, layers, rows[:, :-1])
        logits, targets = logits.flatten(0, 1).float(), rows[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, trained.clip_norm)
        optimizer.step()
        schedule.step()
        return loss.item()

    return step, sum(p.numel() for p in parameters)
