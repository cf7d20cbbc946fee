"""What `evaluate` and `compare` found, as tables or one JSON line."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from jobs.cli.options import Output, stdout
from jobs.cli.printing import percent
from schemas.evaluations import Comparison, Estimate, Evaluation, Metrics

_NAMES = {
    "run": "this run",
    "popularity": "most popular",
    "random": "random",
}


def print_evaluation(found: Evaluation, output: Output) -> None:
    """How good a run's lists are."""
    if output is Output.json:
        record = found.model_dump(mode="json")
        record["users"]["coverage"] = found.users.coverage
        typer.echo(json.dumps({"status": "evaluated", **record}))
        return
    console = stdout()
    for line in _about(found):
        console.print(line, highlight=False)
    table = Table(title=f"evaluation of run {found.run_id}", title_justify="left")
    table.add_column("metric")
    for method in found.methods:
        table.add_column(_NAMES[method], justify="right")
    for name in _ordered(found.methods["run"], found.k):
        cells = [found.methods[method][name] for method in found.methods]
        last_of_k = name.startswith("coverage")
        table.add_row(name, *(_interval(cell) for cell in cells), end_section=last_of_k)
    console.print(table)
    if found.bootstrap:
        console.print(f"in brackets: 95 % intervals of {found.bootstrap:,} bootstrap samples")
    if found.by is not None:
        _print_segments(console, found)


def _about(found: Evaluation) -> list[str]:
    """Whom and what the figures are about, in words."""
    users, truth = found.users, found.truth
    lines = [
        f"{users.with_truth:,} users with truth: {users.with_list:,} got a list "
        f"({percent(users.coverage)}), the others count as 0 "
        f"({users.with_truth - users.in_run:,} of them are not in the run); "
        f"{users.without_truth:,} users of the run have no truth and are left out",
        f"{truth.pairs:,} relevant items: {percent(truth.pairs_reachable / truth.pairs)} could "
        f"have been recommended, {truth.pairs_unknown:,} are not in the catalog",
    ]
    left_out = {
        "null": truth.rows_null,
        "of weight 0": truth.rows_weightless,
        "repeated": truth.rows_repeated,
    }
    if any(left_out.values()):
        words = ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
        lines.append(f"rows of the truth that do not count: {words}")
    if found.popularity_from is None:
        lines.append(
            "popularity is not known: no novelty, no popularity baseline; the catalog has no such "
            "column, and --train names no interactions"
        )
    return lines


def _ordered(metrics: Metrics, ks: tuple[int, ...]) -> list[str]:
    """Metrics that are known, all of one cut-off together."""
    names = [name for name, cell in metrics.items() if cell.value is not None]
    return sorted(names, key=lambda name: ks.index(int(name.partition("@")[2])))


def _interval(cell: Estimate) -> str:
    if cell.value is None:
        return "-"
    if cell.low is None or cell.high is None:
        return f"{cell.value:.4f}"
    return f"{cell.value:.4f} [{cell.low:.4f}, {cell.high:.4f}]"


def _print_segments(console: Console, found: Evaluation) -> None:
    k = found.k[-1]
    names = [f"{name}@{k}" for name in ("recall", "ndcg", "mrr", "hit_rate", "coverage")]
    table = Table(title=f"by {found.by}", title_justify="left")
    table.add_column(str(found.by))
    for name in ("users", *names):
        table.add_column(name, justify="right")
    for segment in found.segments:
        cells = [segment.methods["run"][name] for name in names]
        label = "(unknown)" if segment.segment is None else segment.segment
        table.add_row(label, f"{segment.users:,}", *(_number(cell.value) for cell in cells))
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def print_comparison(found: Comparison, output: Output) -> None:
    """What differs between two runs."""
    if output is Output.json:
        status = "refused" if found.refused else "compared"
        typer.echo(json.dumps({"status": status, **found.model_dump(mode="json")}))
        return
    console, users, items = stdout(), found.users, found.items
    table = Table(
        title=f"A {found.run_a}\nB {found.run_b}", title_justify="left", show_header=False
    )
    rows = [
        ("users with a list", f"{users.a:,} in A, {users.b:,} in B, {users.both:,} in both"),
        ("  gained, lost", f"{users.gained:,}, {users.lost:,}"),
        ("  same list", f"{users.same_list:,} ({percent(_share(users.same_list, users.both))})"),
        *((f"overlap@{k}", _number(share)) for k, share in found.agreement.overlap.items()),
        (f"rank-biased overlap (p {found.rbo_p:g})", _number(found.agreement.rbo)),
        ("Kendall tau-b", f"{_number(found.agreement.tau)} ({found.agreement.tau_users:,} users)"),
        ("score shift, B - A", _shift(found)),
        ("items shown", f"{items.a:,} in A, {items.b:,} in B"),
        ("  gained, lost", f"{items.gained:,}, {items.lost:,}"),
        ("  churn", percent(items.churn)),
        ("  exposure shift", percent(items.exposure_shift)),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if found.by is not None:
        _print_changes(console, found)
    for gate in found.gates:
        verdict = "holds" if gate.passed else "REFUSED"
        console.print(f"{verdict}: {gate.words()}", highlight=False)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _shift(found: Comparison) -> str:
    shift = found.score_shift
    if shift is None:
        return "not measured: the runs' scores mean different things"
    if shift.mean is None or shift.median is None or shift.mean_abs is None:
        return "no item in common"
    return (
        f"mean {shift.mean:+.3g}, median {shift.median:+.3g}, mean absolute {shift.mean_abs:.3g}, "
        f"largest {shift.max_abs:.3g} ({shift.pairs:,} items)"
    )


def _print_changes(console: Console, found: Comparison) -> None:
    k = found.k[-1]
    table = Table(title=f"by {found.by}", title_justify="left")
    table.add_column(str(found.by))
    for name in ("users in both", "gained", "lost", f"overlap@{k}", "rbo", "tau"):
        table.add_column(name, justify="right")
    for segment in found.segments:
        users, agreement = segment.users, segment.agreement
        figures = (agreement.overlap[k], agreement.rbo, agreement.tau)
        table.add_row(
            "(unknown)" if segment.segment is None else segment.segment,
            *(f"{count:,}" for count in (users.both, users.gained, users.lost)),
            *(_number(figure) for figure in figures),
        )
    console.print(table)
