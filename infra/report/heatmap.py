"""A matrix of errors as a small PNG: colour by logarithm, so that 0.01 and 1 are both seen."""

import io
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from infra.report.figures import INK, SOFT

LOWEST, HIGHEST = 1e-3, 1.0
"""Errors outside are drawn as the nearest of the two."""
MOST_NUMBERS = 12
"""Columns up to which each cell gets its number."""


def heatmap(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], title: str, across: str
) -> bytes:
    """Draw a matrix.

    Args:
        values: relative errors [rows][columns]; NaN leaves a cell empty.
        rows: labels, top to bottom.
        columns: labels, left to right.
        title: what is shown.
        across: what the columns are.
    """
    figure = Figure(figsize=(8.0, 1.5 + 0.36 * len(rows)), dpi=120, facecolor="white",
                    layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))  # fmt: skip
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    clipped = np.clip(np.array(values, dtype=float), LOWEST, HIGHEST)
    image = axes.imshow(clipped, aspect="auto", cmap="YlOrRd", norm=LogNorm(LOWEST, HIGHEST))
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=8)
    axes.set_yticks(range(len(rows)), rows)
    every = max(1, math.ceil(len(columns) / MOST_NUMBERS))
    axes.set_xticks(range(0, len(columns), every), columns[::every])
    axes.tick_params(colors=SOFT, labelsize=8, length=0)
    axes.set_xlabel(across, color=SOFT, fontsize=8.5)
    axes.spines[:].set_visible(False)
    if len(columns) <= MOST_NUMBERS:
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                if not math.isnan(value):
                    axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=7.5, color=INK)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.ax.tick_params(colors=SOFT, labelsize=7.5, length=0)
    bar.outline.set_visible(False)
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", facecolor="white")
    Image.open(drawn).convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()
