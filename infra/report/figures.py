"""The report's figures, as small PNGs on a white ground.

Figures are drawn with matplotlib's object interface: no global state, so any thread or process may draw.
"""

import base64
import io
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from infra.report.wording import PROMPTS, headline, most_in_flight, percent, ratio, speed_runs
from infra.results import Acceptance, Report, TrainPoint

INK, SOFT, GRID = "#1f2933", "#5f6b7a", "#e4e8ee"
GREY, BLUE, ORANGE = "#a9b4c2", "#2f6db5", "#e08a3c"
STEPS = ("#1d4f91", "#3f8fc5", "#2a9d8f", "#8ab17d", "#c9a227", "#b5651d")
"""One colour a draft step; further steps begin again."""
SMOOTH_FROM = 40
"""From so many points on, curves are running means over faint single points."""
LOWEST, HIGHEST = 1e-3, 1.0
"""Errors outside are drawn as the nearest of the two."""
MOST_NUMBERS = 12
"""Columns up to which each cell gets its number."""


def all_figures(report: Report) -> dict[str, bytes]:
    """Every figure of a report, by name (``training``, ``acceptance``, ``throughput``), as PNG bytes."""
    training = report.training
    return {
        "training": training_figure(training.history, training.validation),
        "acceptance": acceptance_figure(report),
        "throughput": throughput_figure(report),
    }


def data_uri(png: bytes) -> str:
    """A PNG as a ``data:`` URI, for markdown that has no file beside it."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def training_figure(history: Sequence[TrainPoint], validation: Sequence[TrainPoint] = ()) -> bytes:
    """Loss and joint accuracy over the training steps, fit to be drawn while training runs, even before it logged.

    Args:
        history: points logged on training packs.
        validation: points measured on held-out samples, drawn as markers.
    """
    figure, (left, right) = _figure(panels=2)
    _title(left, "Loss")
    _title(right, "Joint accuracy")
    _curve(left, _series(history, None), STEPS[0], "training")
    _markers(left, _series(validation, None), STEPS[0], "validation")
    depth = max((len(point.accuracy) for point in (*history, *validation)), default=0)
    for position in range(depth):
        colour = STEPS[position % len(STEPS)]
        _curve(right, _series(history, position), colour, f"draft step {position}")
        _markers(right, _series(validation, position), colour, "_nolegend_")
    left.set_ylabel("loss")
    right.set_ylabel("tokens guessed right")
    right.yaxis.set_major_formatter(_PERCENT)
    right.set_ylim(0, max(0.05, right.get_ylim()[1]) if depth else 1)
    for axes in (left, right):
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if history or validation:
            axes.legend(**_LEGEND)
        else:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "no step logged yet", transform=axes.transAxes, ha="center", color=SOFT)
    if validation and depth:
        right.plot([], [], "o", color="white", markeredgecolor=SOFT, label="validation")
        right.legend(**_LEGEND)
    return _png(figure)


def acceptance_figure(report: Report) -> bytes:
    """Acceptance rate by position: predicted, live on held-out, live on evaluation prompts."""
    series: list[tuple[str, str, Acceptance]] = [("predicted, held-out", GREY, report.evaluation.predicted.acceptance)]
    for prompts, name, colour in (("heldout", "held-out", BLUE), ("evaluation", "evaluation", ORANGE)):
        measured = report.live(prompts)
        if measured is not None:
            series.append((f"live, {name}", colour, measured.acceptance))
    figure, (axes,) = _figure()
    _title(axes, "Acceptance rate by position")
    width = 0.8 / len(series)
    for index, (label, colour, acceptance) in enumerate(series):
        offset = (index - (len(series) - 1) / 2) * width
        places = [position + offset for position in range(len(acceptance.by_position))]
        name = f"{label}: acceptance length {acceptance.length:.2f}"
        bars = axes.bar(places, acceptance.by_position, width * 0.92, color=colour, label=name)
        axes.bar_label(bars, [percent(share) for share in acceptance.by_position], padding=2, fontsize=7.5, color=INK)
    depth = max(len(acceptance.by_position) for _, _, acceptance in series)
    top = max((share for _, _, acceptance in series for share in acceptance.by_position), default=0.0)
    axes.set_xticks(range(depth), [f"position {position}" for position in range(depth)])
    axes.set_xlim(-0.6, max(depth, 2) - 0.4)
    axes.set_ylim(0, max(top * 1.12, 0.05))
    axes.set_ylabel("acceptance rate")
    axes.yaxis.set_major_formatter(_PERCENT)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    figure.legend(loc="outside lower center", ncols=len(series), **_LEGEND)
    return _png(figure)


def throughput_figure(report: Report) -> bytes:
    """Output tokens a second without and with the draft: one panel, with its own scale, for each load."""
    runs = speed_runs(report)
    best = headline(report)
    figure, panels = _figure(panels=max(len(runs), 1))
    figure.suptitle(
        f"Throughput on {PROMPTS[best.prompts]}, output tokens / s" if best else "Throughput was not measured",
        x=0.02,
        ha="left",
        fontsize=10.5,
        fontweight="bold",
        color=INK,
    )
    labels, colours = ("without the draft", "with the draft"), (GREY, BLUE)
    for axes, run in zip(panels, runs, strict=False):
        values = [run.plain.tokens_per_second, run.draft.tokens_per_second]
        bars = axes.bar((0, 1), values, 0.86, color=colours, label=labels)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=9, color=INK)
        axes.set_ylim(0, max(*values, 1e-9) * 1.15)
        axes.set_xlabel(f"up to {most_in_flight(run)} in flight: {ratio(run):.2f} x")
    air = 2.5 if len(panels) == 1 else 1.0
    for axes in panels:
        axes.set_xlim(-air, 1 + air)
        axes.set_xticks([])
        axes.set_yticks([])
    if runs:
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, **_LEGEND)
    return _png(figure)


def heatmap(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], title: str, across: str
) -> bytes:
    """Draw a matrix of errors: colour by logarithm, so that 0.01 and 1 are both seen.

    Args:
        values: relative errors [rows][columns]; NaN leaves a cell empty.
        rows: labels, top to bottom.
        columns: labels, left to right.
        title: what is shown.
        across: what the columns are.
    """
    figure = _canvas(1.5 + 0.36 * len(rows))
    axes = figure.subplots()
    clipped = np.clip(np.array(values, dtype=float), LOWEST, HIGHEST)
    image = axes.imshow(clipped, aspect="auto", cmap="YlOrRd", norm=LogNorm(LOWEST, HIGHEST))
    _title(axes, title)
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
    return _png(figure)


_PERCENT = PercentFormatter(1.0, decimals=0, symbol=" %")
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": INK}


def _canvas(height: float) -> Figure:
    figure = Figure(
        figsize=(8.0, height), dpi=120, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    FigureCanvasAgg(figure)
    return figure


def _figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    figure = _canvas(3.3)
    grid = figure.subplots(1, panels, squeeze=False)
    axes = list(grid[0])
    for item in axes:
        item.spines[["top", "right", "left"]].set_visible(False)
        item.spines["bottom"].set_color(SOFT)
        item.grid(axis="y", color=GRID, linewidth=0.8)
        item.set_axisbelow(True)
        item.tick_params(colors=SOFT, labelsize=8, length=0)
        item.xaxis.label.set(color=SOFT, fontsize=8.5)
        item.yaxis.label.set(color=SOFT, fontsize=8.5)
    return figure, axes


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=8)


def _series(points: Sequence[TrainPoint], position: int | None) -> tuple[list[int], list[float]]:
    """Steps and values: the loss (``None``) or the accuracy at a draft step, of the points that have it."""
    if position is None:
        return [point.step for point in points], [point.loss for point in points]
    known = [point for point in points if len(point.accuracy) > position]
    return [point.step for point in known], [point.accuracy[position] for point in known]


def _curve(axes: Axes, series: tuple[list[int], list[float]], colour: str, label: str) -> None:
    steps, values = series
    if len(values) >= SMOOTH_FROM:
        axes.plot(steps, values, color=colour, alpha=0.18, linewidth=0.7)
        values = running_mean(values, len(values) // 40)
    marker = "." if len(values) < 3 else ""
    axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, label=label)


def _markers(axes: Axes, series: tuple[list[int], list[float]], colour: str, label: str) -> None:
    if series[0]:
        axes.plot(
            *series,
            "o",
            color="white",
            markeredgecolor=colour,
            markeredgewidth=1.5,
            markersize=5.5,
            label=label,
            zorder=3,
        )


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and up to ``reach`` neighbours on each side (fewer at the ends)."""
    sums = list(accumulate(values, initial=0.0))
    means = []
    for index in range(len(values)):
        first, end = max(index - reach, 0), min(index + reach + 1, len(values))
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def _png(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", facecolor="white")
    # A palette of 64 colours is enough for flat charts and makes the file a third as large.
    small = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()
