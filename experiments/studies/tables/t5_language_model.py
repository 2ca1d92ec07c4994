r"""How well does T5's decoder alone predict the next byte?

    python -m experiments.sweep --config=experiments/studies/tables/t5_language_model.py:tiny \
        --workdir=runs/t5_language_model

The row "language model" of T5's Table 2 (see `t5.py`): the next token in place of spans, so its
loss cannot be compared with those of the other rows.

Presets after the colon: `tiny`. Without a preset: the decoder of T5 base."""

import dataclasses

from experiments.studies.tables import t5
from experiments.studies.tables.table import Row

TABLE = t5.TABLE._replace(
    rows={"language model": Row({}, 109_628_544)},
    model=dataclasses.replace(t5.TABLE.model, kind="decoder", encoder=None),
)
get_config, variants = TABLE.get_config, TABLE.variants
