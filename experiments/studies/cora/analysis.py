"""The page of cora.csv."""

import numpy as np
import pandas
from matplotlib.figure import Figure

from attnlab.lab.stats import paired_difference
from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments.studies.cora.study import MAIN, PUBLISHED, VARIANTS
from experiments.studies.rows import conclusions, render


def page(rows: pandas.DataFrame) -> str:
    """The Markdown page of cora.csv."""
    of = {name: rows[rows.variant == name].set_index("seed") for name in VARIANTS}
    compared = conclusions({name: some.test for name, some in of.items()}, digits=2)
    main, found = of[MAIN].test, paired_difference(of[MAIN].test)
    return render(
        __file__,
        score=f"{found.mean:.1f} ± {main.std():.1f}",
        seeds=len(main),
        interval=f"{found.low:.2f} to {found.high:.2f}",
        published=f"{PUBLISHED[0]} ± {PUBLISHED[1]}",
        says="agrees" if found.low <= PUBLISHED[0] <= found.high else "does not agree",
        minutes=f"{rows.seconds.sum() / 60:.0f}",
        num_compared=len(compared),
        variants=of,
        interval_of=paired_difference,
        compared=compared,
    )


def figure(rows: pandas.DataFrame) -> Figure:
    """Test accuracy by variant."""
    drawn, [axes] = new_axes(1, 3.4)
    for i, name in enumerate(VARIANTS):
        test, y = rows.test[rows.variant == name], len(VARIANTS) - 1 - i
        axes.plot(test, np.full(len(test), y), "o", color=COLOURS[0], alpha=0.5, markersize=4)
        axes.plot([test.mean()] * 2, [y - 0.3, y + 0.3], color=COLOURS[1], linewidth=2)
    axes.axvline(PUBLISHED[0], color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(VARIANTS)), list(VARIANTS)[::-1], fontsize=8)
    axes.set_xlabel("test accuracy, %")
    return drawn
