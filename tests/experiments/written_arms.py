"""Arm folders written by hand, for tests of reports: nothing is trained."""

import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest

from experiments import report
from experiments.reporting import figures, heads, joint
from experiments.running.machine import PACKAGES

ARMS = {
    ("wide", "separate"): (2.80, 400_000),
    ("standard", "separate"): (2.90, 200_000),
    ("narrow", "albert"): (3.10, 60_000),
}
NOISE = (0.0, 0.011, -0.006)
"""Of the seeds, the same in every arm, so that pairs differ by little."""


BITS = {"name": "bits_per_byte", "unit": "bits per byte", "better": "lower", "digits": 3}


def write_arm(folder, layout, plan, loss, parameters, **changes):
    """An arm as it is left on disk; `changes` are of result.json, or of the corpus."""
    seeds = changes.pop("seeds", [0, 1, 2])
    rate = changes.pop("learning_rate", 0.003)
    match = changes.pop("match", "")
    source = {
        "name": changes.pop("data", "a <script>alert('text')</script> & more"),
        "sha256": changes.pop("sha256", "ab12"),
        "facts": {"bytes": 1_000_000, "held-out bytes": 100_000, "training tokens": 900_000},
    }
    wobble = changes.pop("wobble", 0.001)
    heldout = [loss + NOISE[i] + wobble * math.sin(parameters + i) for i in range(len(seeds))]
    train = {
        "optimizer": "adamw",
        "schedule": "cosine",
        "steps": 800,
        "batch_size": 16,
        "length": 8,
        "warmup_steps": 50,
        "curve_windows": 256,
        "eval_windows": 2048,
        "learning_rate": rate,
        "final_learning_rate": rate / 10,
        "seeds": seeds,
    }
    model = {
        "kind": "decoder",
        "num_layers": 2,
        "width": 64,
        "heads": {"layout": layout, "num_heads": 3},
        "compute": {"dtype": "float32"},
        "sharing": plan,
        "ffn": {"width": 256},
    }
    environment = {"device": "1 x cpu", "machine": "x86_64", "cores": 2}
    environment |= dict.fromkeys(("python", "commit", *PACKAGES), "1.0")
    record = {
        "config": {"task": "causal_lm", "data": {}, "model": model, "train": train},
        "source": source,
        "environment": environment,
    }
    result = {
        "name": folder.name,
        "layout": layout,
        "plan": plan,
        "match": match,
        "model": model,
        "seeds": seeds,
        "steps": 800,
        "length": 8,
        "learning_rate": rate,
        "unique_parameters": parameters,
        "applied_parameters": 400_000,
        "flops_per_token": 2 * parameters,
        "asks": "every next token",
        "metrics": changes.pop("metrics", [BITS]),
        "yardsticks": {"bits_per_byte": {"unigram entropy": 4.765, "gzip -9": 1.894}},
        "attention": {
            "self": {
                "order": {"factored": 1, "absorbed": 2},
                "chosen": {"order": "factored"},
                "implementation": {"dense": "chosen: measured on a CPU", "cudnn": "needs a GPU"},
            },
        },
        "status": "complete",
        "heldout_bits_per_byte": heldout,
        "train_bits_per_byte": [x - 0.1 for x in heldout],
        "tokens_per_second": 12345.6,
        "wall_seconds": 60.0,
    }
    if changes.pop("diverged", False):
        for name in (
            "heldout_bits_per_byte",
            "train_bits_per_byte",
            "tokens_per_second",
            "wall_seconds",
        ):
            del result[name]
        result |= {
            "status": "diverged",
            "message": "the loss of seed 1 is not finite at step 50",
        }
    folder.mkdir(parents=True)
    if changes.pop("curves", True):
        rows = [
            {
                "step": s,
                "eval/bits_per_byte": [x + 100 / s for x in heldout],
                "train/loss": 1,
            }
            for s in (200, 400, 800)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if changes.pop("maps", True) and result["status"] == "complete":
        probs = np.tril(np.ones((2, 3, 8, 8))) / np.arange(1, 9)[:, None]
        tokens = np.frombuffer(b"if a:\n <", np.uint8)
        np.savez_compressed(
            folder / "maps.npz",
            probs=probs.astype(np.float16),
            tokens=tokens,
            written_tokens=r"if a:\n <",
            step=800,
            seed=seeds[0],
        )
    (folder / "result.json").write_text(json.dumps(result | changes))
    (folder / "config.json").write_text(json.dumps(record))


def write_sweep(folder, arms=ARMS, **changes):
    for (layout, plan), (loss, parameters) in arms.items():
        write_arm(folder / f"{layout}-{plan}", layout, plan, loss, parameters, **changes)
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of words and tables: figures take half a second a report."""
    monkeypatch.setattr(figures, "of_panel", lambda panel, name: [])
    monkeypatch.setattr(heads, "section", lambda panels: [])
    monkeypatch.setattr(joint, "section", lambda panels: [])


def written(*folders):
    several = folders[0].parent / "together" if len(folders) > 1 else None
    out = report.write(list(folders), several)
    return [(out / f"report.{kind}").read_text() for kind in ("md", "html")]


class Page(HTMLParser):
    """What a browser would load, and the texts of all cells and paragraphs."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        loading = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        self.loads += [value for name, value in attrs if name in loading]

    def handle_data(self, data):
        self.text.append(data)
