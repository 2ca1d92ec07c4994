"""nanoGPT's CPU setting in plain torch, a whole run: python -m THIS_MODULE TEXT.

The peer of `byte_lm.py:nanogpt_cpu`, in a process of its own so that start-up counts: 4 layers, 4
heads, width 128, windows of 64 bytes, batch 12, 2,000 steps. Prints the loss on the last 10 % of
TEXT (a file or folder, gzip too), in nats per byte.
"""

import argparse
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from attnlab.data import BYTES, text

WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 128, 4, 4, 64, 12, 2000


class Block(nn.Module):
    """One pre-norm layer without biases."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        """x + attention(norm(x)), then x + ffn(norm(x))."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Learned positions, tied readout."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(BYTES.vocab_size, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, tokens):
        """tokens [B, T] -> logits [B, T, 256]."""
        x = self.embedding(tokens) + self.positions.weight
        return self.norm(self.layers(x)) @ self.embedding.weight.T


def rate(step: int) -> float:
    """Warm-up over 100 steps to 1e-3, cosine to 1e-4."""
    if step < 100:
        return 1e-3 * (step + 1) / 101
    return 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * (step - 100) / (STEPS - 100)))


def loss_of(model: Decoder, rows: np.ndarray) -> torch.Tensor:
    """Mean loss of windows [B, T + 1]."""
    tokens = torch.from_numpy(rows.astype(np.int64))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Trains seed 0 and prints its loss."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("text")
    given = reader.parse_args()
    torch.manual_seed(0)
    corpus, model = text.load_corpus(given.text), Decoder()
    matrices, rest = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = loss_of(model, text.sample(corpus.train, LENGTH, BATCH, seed=0, step=step + 1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    rows, counts = text.windows(corpus.heldout, LENGTH, 0)
    rows = rows[counts.all(axis=1)]
    with torch.no_grad():
        losses = [loss_of(model, part).item() * len(part) for part in np.array_split(rows, 30)]
    print(f"held-out {sum(losses) / len(rows):.4f} nats per byte")


if __name__ == "__main__":
    main()
