"""What a report says in words and rows, from the manifest and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipelines.report.figures import Figures
from schemas.gates import GateResult
from schemas.runs import RunManifest

_SHARDS = 8
_FAILED = 20
_ORDER = ("refused", "warned", "passed", "nothing to compare", "no limit")
_MEASURES = {  # gates that give a detail only of what is wrong
    "conservation": "every user and every candidate is accounted for",
    "staged_files": "staged files are those of the receipts, by their hashes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the run ended."""

    kind: str  # good, warn, bad
    word: str
    says: str
    list: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A count among others. `key` names it in the numbers of the page."""

    label: str
    count: int
    share: float | None
    level: int
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number with its name."""

    label: str
    key: str | None
    note: str = ""
    digits: int = 0
    percent: bool = False
    none: str = ""  # said where there is no number


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowShard:
    """A shard and its time."""

    name: str
    users: int
    seconds: float
    engine: float  # share of the time
    share: float  # of the slowest shard's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Everything the template needs besides what was measured."""

    numbers: dict[str, Any]
    verdict: Verdict
    partial: str
    sections: tuple[tuple[str, str], ...]
    tiles: tuple[Fact, ...]
    user_rows: tuple[Row, ...]
    candidate_rows: tuple[Row, ...]
    gates: tuple[GateResult, ...]
    failed: tuple[tuple[str, str], ...]
    work: tuple[Fact, ...]
    slowest: tuple[SlowShard, ...]
    widths: dict[int, int]
    ran: tuple[tuple[str, str], ...]
    measures: dict[str, str]


def tell(manifest: RunManifest, figures: Figures, people: int) -> Told:
    """Words, rows and tiles of the page."""
    numbers = page_numbers(manifest, figures)
    gates = manifest.audit.gates if manifest.audit else ()
    failed = sorted(manifest.failed_shards.items())[:_FAILED]
    return Told(
        numbers=numbers,
        verdict=_verdict(manifest),
        partial=_partial(manifest),
        sections=_sections(manifest, figures, people),
        tiles=_tiles(manifest, numbers),
        user_rows=_user_rows(manifest, figures),
        candidate_rows=_candidate_rows(manifest),
        gates=tuple(sorted(gates, key=lambda gate: _ORDER.index(gate.verdict))),
        failed=tuple((f"shard-{index:05d}", why) for index, why in failed),
        work=_work(manifest, numbers),
        slowest=_slowest(manifest),
        widths=numbers["beam_widths"] or {},
        ran=_ran(manifest),
        measures=_MEASURES,
    )


def page_numbers(manifest: RunManifest, figures: Figures) -> dict[str, Any]:
    """Every number of the page by name: of the manifest, its summary, and what was measured."""
    shard_seconds = sum(receipt.seconds for receipt in manifest.shards)
    exposure, before = figures.exposure, figures.before
    summary = manifest.summary()
    measured = {
        "item_coverage": exposure.coverage if exposure else None,
        "recommended_items": exposure.recommended_items if exposure else None,
        "catalog_items": exposure.catalog_items if exposure else None,
        "gini": exposure.gini if exposure else None,
        "top_share": exposure.top_share if exposure else None,
        "overlap": before.mean if before else None,
        "users_per_device_s": manifest.counts.users_in / shard_seconds if shard_seconds else None,
        "tokens_per_engine_s": _per(manifest.counts.prompt_tokens, summary["engine_seconds"]),
        "engine_share": _per(summary["engine_seconds"], shard_seconds),
    }
    return {**manifest.counts.model_dump(), **summary, **measured}


def _per(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _verdict(manifest: RunManifest) -> Verdict:
    if manifest.status == "failed":
        failed, shards = len(manifest.failed_shards), manifest.plan.num_shards
        says = f"{failed:,} of {shards:,} shards failed. Nothing was published."
        says += " Running it again continues it."
        return Verdict(kind="bad", word="Failed", says=says)
    audit = manifest.audit
    if manifest.status == "refused":
        says = "The audit refused it. Nothing was published; what was published before stays."
        lines = tuple(gate.words() for gate in audit.refused) if audit else ()
        return Verdict(kind="bad", word="Refused", says=says, list=lines)
    rows = manifest.published.rows if manifest.published else 0
    partition = manifest.published.partition if manifest.published else ""
    warned = audit.warned if audit else ()
    says = f"{rows:,} rows in {partition}."
    if not rows:
        says = f"An empty partition, {partition}: no user got anything."
    lines = tuple(f"Warning: {gate.words()}" for gate in warned)
    return Verdict(
        kind="warn" if warned or not rows else "good", word="Published", says=says, list=lines
    )


def _partial(manifest: RunManifest) -> str:
    done, shards = len(manifest.shards), manifest.plan.num_shards
    if done == shards:
        return ""
    return f"All figures are those of the {done:,} finished shards of {shards:,}."


def _sections(manifest: RunManifest, figures: Figures, people: int) -> tuple[tuple[str, str], ...]:
    found = [("flow", "Rows"), ("audit", "Audit")]
    if figures.prompt_tokens is not None:
        found.append(("lists", "Lists" if manifest.plan.config.task.gives_lists else "Prompts"))
    if people:
        found.append(("users", "Users"))
    return (*found, ("quarantine", "Quarantine"), ("work", "Throughput"), ("ran", "What ran"))


def _tiles(manifest: RunManifest, numbers: dict[str, Any]) -> tuple[Fact, ...]:
    c, task = manifest.counts, manifest.plan.config.task
    key, label = ("users_recommended", "Users with a list")
    if not task.gives_lists:
        key, label = ("users_embedded", "Users embedded")
    share = _per(numbers[key], c.users_in)
    of_users = f"{100 * share:.1f} % of {c.users_in:,}" if share is not None else "no user"
    aside = f"{c.rows_quarantined:,} rows in quarantine"
    tiles = [
        Fact(label=label, key=key, note=of_users),
        Fact(label="Rows published", key="rows_published", note=f"{c.rows_staged:,} staged"),
        Fact(label="Users set aside", key="users_quarantined", note=aside),
    ]
    if task.searches_catalog:
        tiles.append(_share("Exact lists", "exact_share", numbers, "proven to be the top k"))
    if numbers["item_coverage"] is not None:
        note = f"{numbers['recommended_items']:,} of {numbers['catalog_items']:,} items"
        tiles.append(_share("Item coverage", "item_coverage", numbers, note))
    if task.gives_lists:
        note = "of a list, since the run before"
        tiles.append(_share("Unchanged", "overlap", numbers, note, "no run before"))
    tiles.append(_rate(numbers))
    if numbers["cost"] is not None:
        per = f"{numbers['cost_per_million_users']:,.2f} per million users"
        tiles.append(Fact(label="Cost", key="cost", digits=_cents(numbers["cost"]), note=per))
    return tuple(tiles)


def _share(label: str, key: str, numbers: dict[str, Any], note: str, none: str = "none") -> Fact:
    known = numbers[key] is not None
    return Fact(label=label, key=key if known else None, note=note, percent=True, none=none)


def _rate(numbers: dict[str, Any]) -> Fact:
    known = numbers["users_per_device_s"] is not None
    hours = numbers["device_hours"]
    took = f"{3600 * hours:,.0f} s" if hours < 1 else f"{hours:,.1f} hours"
    note = f"of a device, which took {took}"
    key = "users_per_device_s" if known else None
    return Fact(label="Users per second", key=key, digits=1, note=note, none="no shard")


def _cents(cost: float | None) -> int:
    """Digits behind the point that say something of a price."""
    return 4 if cost is not None and cost < 1 else 2


def _user_rows(manifest: RunManifest, figures: Figures) -> tuple[Row, ...]:
    c = manifest.counts

    def row(label: str, count: int, level: int, key: str | None = None) -> Row:
        share = _per(count, c.users_in)
        return Row(label=label, count=count, share=share, level=level, key=key)

    rows = [row("in the input", c.users_in, 0, "users_in")]
    gives_lists = manifest.plan.config.task.gives_lists
    if not gives_lists:
        rows.append(row("embedded", c.users_embedded, 1, "users_embedded"))
    else:
        rows.append(row("recommended", c.users_recommended, 1, "users_recommended"))
        short = [(why, n) for status, why, n in figures.outcomes if status == "recommended" and why]
        rows += [row(f"with a short list: {why.replace('_', ' ')}", n, 2) for why, n in short]
    rows.append(row("quarantined", c.users_quarantined, 1, "users_quarantined"))
    users = [rule for rule in figures.rules if rule.table == "users"]
    rows += [row(rule.rule.replace("_", " "), rule.rows, 2) for rule in users]
    if gives_lists:
        key = "users_without_eligible"
        rows.append(row("nothing eligible", c.users_without_eligible, 1, key))
        empty = [(why, n) for status, why, n in figures.outcomes if status == "nothing_eligible"]
        rows += [row((why or "no reason kept").replace("_", " "), n, 2) for why, n in empty]
    return tuple(rows)


def _candidate_rows(manifest: RunManifest) -> tuple[Row, ...]:
    if not manifest.plan.config.task.uses_candidates:
        return ()
    counts = manifest.counts.model_dump()
    labels = {
        "candidates_in": "in the input",
        "candidates_scored": "scored",
        "candidates_excluded": "excluded",
        "candidates_ineligible": "not eligible",
        "candidates_unknown": "not in the catalog",
        "candidates_duplicate": "repeated",
        "candidates_unused": "of users that were not scored",
    }
    return tuple(
        Row(
            label=label,
            count=counts[key],
            share=_per(counts[key], counts["candidates_in"]),
            level=int(key != "candidates_in"),
            key=key,
        )
        for key, label in labels.items()
    )


def _work(manifest: RunManifest, numbers: dict[str, Any]) -> tuple[Fact, ...]:
    price = "set run.price_per_hour"
    facts = [
        Fact(label="Time, s", key="seconds", digits=1, note="in which shards were at work"),
        Fact(
            label="Command, s", key="command_seconds", digits=1, note="the one that ended the run"
        ),
        Fact(label="Device hours", key="device_hours", digits=4, note="shards, start to receipt"),
        Fact(label="Time in the engine", key="engine_share", percent=True),
        Fact(label="Users per device second", key="users_per_device_s", digits=1),
        Fact(label="Cost", key="cost", digits=_cents(numbers["cost"]), none=price),
        Fact(label="Cost per million users", key="cost_per_million_users", digits=2, none=price),
        Fact(label="Prompt tokens", key="prompt_tokens"),
        Fact(label="Prompt tokens per engine second", key="tokens_per_engine_s"),
        Fact(label="reused", key="reused_tokens", note="shared by all, forwarded once"),
        Fact(label="cut", key="truncated_tokens", note="of the oldest history, to fit"),
        Fact(label="Unknown history items", key="unknown_history_items", note="left out"),
        Fact(label="of all history items", key="unknown_history_share", percent=True),
        Fact(label="Rows in the user's own history", key="history_rows_share", percent=True),
        Fact(label="Distinct lists", key="distinct_lists", percent=True, note="of a sample"),
        Fact(label="Prefixes per user", key="nodes_per_user", digits=1, note="that a search read"),
        Fact(label="Rounds per user", key="rounds_per_user", digits=1, note="passes of a search"),
        Fact(label="Searches that ended as beams", key="stopped_share", percent=True),
        Fact(label="Rows through the model", key="rows_forwarded"),
        Fact(label="if sent one by one", key="rows_naive"),
        Fact(label="Sharing", key="sharing", digits=1, note="times fewer rows"),
    ]
    return tuple(fact for fact in facts if fact.none or numbers[fact.key or ""] is not None)


def _slowest(manifest: RunManifest) -> tuple[SlowShard, ...]:
    ordered = sorted(manifest.shards, key=lambda receipt: -receipt.seconds)[:_SHARDS]
    most = ordered[0].seconds if ordered else 0.0
    return tuple(
        SlowShard(
            name=f"shard-{receipt.shard:05d}",
            users=receipt.counts.users_in,
            seconds=receipt.seconds,
            engine=_per(receipt.engine_seconds, receipt.seconds) or 0.0,
            share=_per(receipt.seconds, most) or 0.0,
        )
        for receipt in ordered
    )


def _ran(manifest: RunManifest) -> tuple[tuple[str, str], ...]:
    plan = manifest.plan
    config = plan.config
    task = config.task
    lists = f", {task.k} items, score_norm {task.score_norm}" if task.gives_lists else ""
    engine = config.engine
    found = {
        "run": plan.run_id,
        "date, surface": f"{plan.ds}, {plan.surface}",
        "task": " and ".join(task.asked) + lists,
        "prompt": config.prompt.template,
        "model": engine.model or "none",
        "backend": f"{engine.backend}, {engine.dtype}, device {engine.device}",
        "launcher": manifest.launcher or "not known",
        "shards": f"{plan.num_shards:,}",
        "started": manifest.started_at,
        "finished": manifest.finished_at,
        "table": f"{config.output.path} ({config.output.format}, {config.output.layout})",
        "run folder": plan.run_dir,
    }
    return tuple(found.items())
