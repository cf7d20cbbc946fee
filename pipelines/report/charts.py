"""The pictures of a report: matplotlib figures as SVG inside the page.

Figures are drawn in stand-in colours, which become the page's CSS variables, so that one picture
serves the light and the dark theme. Texts stay texts. matplotlib is imported here alone.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipelines.report.distributions import Distribution
from pipelines.report.exposure import Exposure
from pipelines.report.figures import Figures

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home it cannot write to

_COLOURS = {
    "#010101": "var(--muted)",
    "#020202": "var(--line)",
    "#030303": "var(--series-1)",
    "#040404": "var(--series-2)",
    "#050505": "var(--series-3)",
}
_INK, _LINE, _FIRST, _SECOND, _THIRD = _COLOURS
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nightshelf",
    "font.size": 11,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.color": _LINE,
    "ytick.labelcolor": _INK,
    "ytick.left": False,
}
_SIZE = (
    4.6,
    2.7,
)  # inches: 331 units wide, about as wide as a phone, so that texts keep their size
_FEW = 12  # values of a whole number that are shown one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a picture, for its legend and its table."""

    name: str
    mark: str  # area, line, dashes
    colour: int  # 1 to 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture, and the same as a table for those who cannot see it."""

    key: str
    title: str
    says: str  # what it shows of this run, in a sentence
    svg: str
    series: tuple[Series, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def draw_charts(figures: Figures, k: int) -> tuple[Chart, ...]:
    """Every picture there is something for; `k` items were wanted."""
    drawn = []
    with mpl.rc_context(_STYLE):
        if figures.scores is not None:
            drawn.append(_scores(figures, figures.scores))
        if figures.lengths is not None:
            drawn.append(_lengths(figures.lengths, k))
        if figures.exposure is not None and figures.exposure.curve:
            drawn.append(_exposure(figures.exposure))
        if figures.before is not None and figures.before.overlap is not None:
            drawn.append(_overlap(figures.before.overlap, figures.before.run_id))
        if figures.legal_mass is not None:
            drawn.append(_legal_mass(figures.legal_mass))
        if figures.prompt_tokens is not None:
            drawn.append(_prompt_tokens(figures.prompt_tokens))
    return tuple(drawn)


def _axes(xlabel: str, ylabel: str = "share of users") -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE)
    axes = figure.add_axes((0.145, 0.2, 0.79, 0.69))
    axes.set_xlabel(xlabel)
    axes.set_title(ylabel, loc="left", x=-0.165, fontsize="medium")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes.margins(x=0.01)
    return figure, axes


def _svg(figure: Figure, key: str) -> str:
    """The figure as an element of the page: no size of its own, ids of its own, themed colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(
        ("Creator", "Date", "Format", "Type")))  # fmt: skip
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1">', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.S)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", svg)
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, variable)
    return re.sub(r"\s+", " ", svg).replace("> <", "><")


def _bars(axes: Axes, shown: Distribution) -> None:
    axes.stairs(shown.shares, shown.edges, fill=True, color=_FIRST, alpha=0.55)
    axes.stairs(shown.shares, shown.edges, color=_FIRST, linewidth=1.2)


def _whole_bars(axes: Axes, shown: Distribution, least: float, most: float) -> None:
    """Bars of a whole number, one beside the other where there are few; the axis from `least` to
    `most` at least.
    """
    if shown.high - shown.low < _FEW:
        middles = [(low + high) / 2 for low, high in pairwise(shown.edges)]
        axes.bar(middles, shown.shares, width=0.8, color=_FIRST, alpha=0.75)
    else:
        _bars(axes, shown)
    axes.set_xlim(min(least, shown.low) - 0.6, max(most, shown.high) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _table(
    shown: Distribution, *columns: Sequence[int], name: Callable[[float, float], str]
) -> tuple[tuple[str, ...], ...]:
    """A row per bar."""
    names = [name(low, high) for low, high in pairwise(shown.edges)]
    counts = [[f"{count:,}" for count in column] for column in columns]
    return tuple(zip(names, *counts, strict=True))


def _range(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}".replace("-", "−")


def _integers(low: float, high: float) -> str:
    first, last = round(low + 0.5), round(high - 0.5)
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _share_of(low: float, high: float) -> str:
    return f"{50 * (low + high):.0f} %"


def _minus(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _scores(figures: Figures, scores: Distribution) -> Chart:
    figure, axes = _axes("score, nats", "share")
    _bars(axes, scores)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    series = [Series(name="all items", mark="area", colour=1)]
    columns, counts = ["score", "items"], [scores.counts]
    first = np.asarray(figures.first_scores)
    axes.stairs(first / max(first.sum(), 1), scores.edges, color=_SECOND, linewidth=1.6)
    series.append(Series(name="first of each list", mark="line", colour=2))
    columns.append("first of each list")
    counts.append(figures.first_scores)
    if figures.before is not None and figures.before.scores:
        then = np.asarray(figures.before.scores)
        shares = then / max(then.sum(), 1)
        axes.stairs(shares, scores.edges, color=_THIRD, linewidth=1.4, linestyle=(0, (4, 2)))
        series.append(Series(name="all items, run before (sample)", mark="dashes", colour=3))
        columns.append("run before (sample)")
        counts.append(figures.before.scores)
    says = (
        f"Half of the scores lie above {_minus(scores.p50)} nats, nine in ten between "
        f"{_minus(scores.p5)} and {_minus(scores.p95)}."
    )
    return Chart(
        key="scores",
        title="Scores",
        says=says,
        svg=_svg(figure, "scores"),
        series=tuple(series),
        columns=tuple(columns),
        rows=_table(scores, *counts, name=_range),
    )


def _lengths(lengths: Distribution, k: int) -> Chart:
    figure, axes = _axes("items in the list")
    _whole_bars(axes, lengths, 0, k)
    same = lengths.low == lengths.high
    says = (
        f"Every list has {lengths.low:,.0f} items."
        if same
        else f"Lists have {lengths.low:,.0f} to {lengths.high:,.0f} items, half of them at least "
        f"{lengths.p50:,.0f}."
    )
    return _plain("lengths", "List lengths", says, figure, lengths, ("items", "users"), _integers)


def _prompt_tokens(tokens: Distribution) -> Chart:
    figure, axes = _axes("tokens of the prompt")
    _whole_bars(axes, tokens, tokens.low - 3, tokens.high + 3)
    says = (
        f"Every prompt has {tokens.low:,.0f} tokens."
        if tokens.low == tokens.high
        else f"Prompts have {tokens.low:,.0f} to {tokens.high:,.0f} tokens, half of them at most "
        f"{tokens.p50:,.0f}."
    )
    title, columns = "Prompt lengths", ("tokens", "users")
    return _plain("prompt_tokens", title, says, figure, tokens, columns, _integers)


def _legal_mass(mass: Distribution) -> Chart:
    figure, axes = _axes("probability of staying in the catalog")
    _bars(axes, mass)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    says = (
        f"The first token stays in the catalog with probability {mass.p50:.3g} for the user in the "
        f"middle, below {mass.p5:.3g} for one in twenty."
    )
    columns = ("probability", "users")
    return _plain("legal_mass", "Legal mass", says, figure, mass, columns, _range)


def _overlap(shares: Distribution, run_id: str) -> Chart:
    figure, axes = _axes("share of the list that was there before")
    middles = [(low + high) / 2 for low, high in pairwise(shares.edges)]
    axes.bar(middles, shares.shares, width=0.85 * middles[1], color=_FIRST, alpha=0.75)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    says = (
        f"Against run {run_id}: half of the users keep at least {100 * shares.p50:.0f} % of their "
        "list."
    )
    columns = ("share that stayed", "users")
    return _plain(
        "overlap", "Overlap with the run before", says, figure, shares, columns, _share_of
    )


def _plain(
    key: str,
    title: str,
    says: str,
    figure: Figure,
    shown: Distribution,
    columns: tuple[str, ...],
    name: Callable[[float, float], str],
) -> Chart:
    return Chart(
        key=key,
        title=title,
        says=says,
        svg=_svg(figure, key),
        series=(),
        columns=columns,
        rows=_table(shown, shown.counts, name=name),
    )


def _exposure(exposure: Exposure) -> Chart:
    figure, axes = _axes("share of the catalog, most recommended first", "share of all places")
    x, y = zip(*exposure.curve, strict=True)
    axes.fill_between(x, y, color=_FIRST, alpha=0.25, linewidth=0)
    axes.plot(x, y, color=_FIRST, linewidth=1.6)
    axes.plot([0, 1], [0, 1], color=_THIRD, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    gini, top = exposure.gini or 0.0, exposure.top_share or 0.0
    return Chart(
        key="exposure",
        title="Popularity concentration",
        says=f"The most recommended 1 % of the catalog has {100 * top:.1f} % of all places; "
        f"Gini {gini:.3f}.",
        svg=_svg(figure, "exposure"),
        series=(
            Series(name="this run", mark="line", colour=1),
            Series(name="all items alike", mark="dashes", colour=3),
        ),
        columns=("share of the catalog", "share of places"),
        rows=tuple(
            (f"{100 * a:.0f} %", f"{100 * b:.1f} %") for a, b in exposure.curve[:: len(x) // 20]
        ),
    )
