"""Commands that judge runs: `evaluate` by what users turned to, `compare` one with another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from jobs.cli.comparisons import print_comparison, print_evaluation
from jobs.cli.options import (
    DsOption,
    Output,
    OutputOption,
    SetOption,
    guarded,
    maybe_place_option,
    place_option,
    stderr,
)
from jobs.cli.progress import AnyProgress, open_progress
from jobs.running.run_folder import all_receipts, load_plan, plan_path
from jobs.running.run_lock import only_run_of
from jobs.upkeep.run_states import published_plan
from pipelines.catalog.build import is_saved
from pipelines.catalog.items import catalog_dir
from pipelines.evaluation.compare import CompareOptions, Limits, ScoredRun, compare_runs
from pipelines.evaluation.evaluate import EvaluateOptions, evaluate_run
from pipelines.inputs.prepare import prepare_run
from pipelines.inputs.prepared import is_prepared
from pipelines.publish import open_table
from pipelines.storage import files
from schemas.config_file import load_config
from schemas.errors import ComparisonRefusedError, ConfigError, quoted
from schemas.runs import RunPlan, ShardReceipt

DepthsOption = Annotated[
    str | None,
    typer.Option(
        "--k", metavar="1,5,10", help="Cut-offs; default: those of 1, 5, 10, 20 that lists allow."
    ),
]
ByOption = Annotated[
    str | None,
    typer.Option("--by", metavar="COLUMN", help="Also per value of this users column."),
]
UsersOption = Annotated[
    str | None,
    typer.Option(
        "--users",
        metavar="PATH",
        callback=maybe_place_option,
        help="Table with that column; default: the run's own.",
    ),
]


@guarded
def evaluate(
    target: Annotated[
        str,
        typer.Argument(metavar="CONFIG|RUN_DIR", help="A run's folder, or a YAML file."),
    ],
    truth: Annotated[
        str,
        typer.Option(
            "--truth",
            metavar="PATH",
            callback=place_option,
            help="What users turned to: user_id, item_id.",
        ),
    ],
    k: DepthsOption = None,
    by: ByOption = None,
    users: UsersOption = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            callback=maybe_place_option,
            help="Past interactions to count as popularity.",
        ),
    ] = None,
    bootstrap: Annotated[
        int, typer.Option(min=0, max=100_000, help="Samples of users for 95 % intervals; 0: none.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples and the random lists.")] = 0,
    only_run_users: Annotated[
        bool,
        typer.Option(
            "--only-run-users",
            help="Leave out users of the truth that are not in the run, as for a run of a sample.",
        ),
    ] = False,
    ds: DsOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Judge a run's lists by what users turned to later.

    Beside popular and random items.
    """

    plan = _the_run(target, ds, set_)
    options = EvaluateOptions(
        k=_depths(k),
        by=by,
        users=users,
        train=train,
        bootstrap=bootstrap,
        seed=seed,
        only_run_users=only_run_users,
    )
    receipts = _receipts(plan)
    with _progress("evaluate", receipts) as progress:
        _make_again(plan, progress)
        found = evaluate_run(plan, receipts, truth, options, progress.advance)
    print_evaluation(found, output)


def _make_again(plan: RunPlan, progress: AnyProgress) -> None:
    """What `gc` took, or was damaged, of the shards and the catalog: inputs are asked again.

    Raises:
        NightshelfError: the inputs are others by now, or a run of the partition is at work.
    """
    if is_prepared(plan) and (is_saved(catalog_dir(plan)) or "catalog" not in plan.inputs):
        return
    progress.note("the run's shards are not in its folder any more, and are made again")
    with only_run_of(plan):
        prepare_run(plan)


@guarded
def compare(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="Folder of one run.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="Folder of the other run.")],
    k: DepthsOption = None,
    by: ByOption = None,
    users: UsersOption = None,
    rbo_p: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="Persistence of rank-biased overlap.")
    ] = 0.9,
    min_overlap: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Least mean overlap at the largest k.")
    ] = None,
    min_rbo: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Least mean rank-biased overlap.")
    ] = None,
    min_tau: Annotated[
        float | None, typer.Option(min=-1.0, max=1.0, help="Least mean Kendall tau-b.")
    ] = None,
    max_score_shift: Annotated[
        float | None, typer.Option(min=0.0, help="Largest mean absolute difference of scores.")
    ] = None,
    max_item_churn: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Largest share of items not in both.")
    ] = None,
    max_users_lost: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Largest share of A's users not in B.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Compare run B with run A.

    Exit 6 when they differ by more than the limits allow.
    """

    a, b = (ScoredRun(plan, _receipts(plan)) for plan in map(load_plan, (run_a, run_b)))
    limits = Limits(
        min_overlap=min_overlap,
        min_rbo=min_rbo,
        min_tau=min_tau,
        max_score_shift=max_score_shift,
        max_item_churn=max_item_churn,
        max_users_lost=max_users_lost,
    )
    options = CompareOptions(k=_depths(k), rbo_p=rbo_p, by=by, users=users, limits=limits)
    with _progress("compare", a.receipts) as progress:
        found = compare_runs(a, b, options, progress.advance)
    print_comparison(found, output)
    if found.refused:
        raise ComparisonRefusedError(
            "the runs differ by more than the limits allow",
            got="; ".join(gate.words() for gate in found.refused),
            where=f"{found.run_a}, {found.run_b}",
        )


@contextmanager
def _progress(step: str, receipts: list[ShardReceipt]) -> Iterator[AnyProgress]:
    """A bar over the users of a run."""
    with open_progress(stderr()) as progress:
        progress.step(step)
        progress.start(sum(receipt.counts.users_in for receipt in receipts))
        yield progress


def _the_run(target: str, ds: str | None, set_: list[str] | None) -> RunPlan:
    """The run in a folder, or the one that a configuration's readers see.

    Raises:
        ConfigError: --ds or --set for a folder.
        StorageError: there is no run.
    """
    if files.exists(plan_path(target)):
        if ds is not None or set_:
            raise ConfigError(
                "--ds and --set are for a configuration", got=quoted(target), do="Leave them out."
            )
        return load_plan(target)
    config = load_config(target, overrides=set_, ds=ds)
    plan = published_plan(config)
    open_table(config).verify()  # what is judged is what readers see
    return plan


def _receipts(plan: RunPlan) -> list[ShardReceipt]:
    return all_receipts(
        plan,
        "Score the run to its end; of a run that `nightshelf gc` has cleared no rows are left.",
    )


def _depths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            "--k is no list of numbers", expected="1,5,10", got=quoted(text)
        ) from None
