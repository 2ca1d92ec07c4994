"""The commands: every `python -m experiments.NAME` starts here."""

from attnlab.extras import extra

with extra("all"):
    import absl.flags  # noqa: F401
    import ml_collections  # noqa: F401
