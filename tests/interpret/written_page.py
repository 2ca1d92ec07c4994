"""Reads a viewer page without its script: what it says and the values it holds."""

import base64
import json
from html.parser import HTMLParser

import numpy as np


def softmax(*shape, seed=0, causal=False):
    """Rows of probabilities; those of later keys are 0 if `causal`."""
    scores = np.random.default_rng(seed).normal(0, 3, shape)
    scores = np.where(np.tri(*shape[-2:], dtype=bool) | (not causal), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Parsed(HTMLParser):
    """Tags with their attributes, scripts by id, and the text that is seen."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts, self.texts = [], {}, []
        self.inside = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id", "code") if tag == "script" else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data
        else:
            self.texts.append(data)

    @property
    def panels(self):
        return json.loads(self.scripts["page"])["panels"]

    def probs(self, panel=0, part=0):
        """[L, N, T, S] of a map, as its bytes say."""
        maps = self.panels[panel]["maps"][part]
        rows, columns = maps["rows"], maps["columns"]
        heads = []
        for layer in range(maps["layers"]):
            for head in range(maps["heads"]):
                kept = base64.b64decode(self.scripts[f"v{panel}-{part}-{layer}-{head}"])
                tops = np.frombuffer(kept[: 4 * rows], "<f4")[:, None]
                steps = np.frombuffer(kept[4 * rows :], np.uint8).astype(np.float32)
                share = (steps - 128) / 127 if maps["signed"] else steps / 255
                whole = np.zeros((rows, columns), np.float32)
                if maps["lower"]:
                    whole[np.tril_indices(rows)] = share
                else:
                    whole[:] = share.reshape(rows, columns)
                heads.append(tops * whole)
        return np.reshape(heads, (maps["layers"], maps["heads"], rows, columns))
