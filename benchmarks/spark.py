"""What Spark costs: the scoring stage through Spark's launcher and through the local one.

Both launchers run the same prepared shards with as many workers, taking turns. The *cost of a
shard* is the time from one receipt to the next once the first fifth of them is there; the rest of
the stage, workers and engines that start, is paid once. With the fake backend a shard takes almost
no time, so that its cost is the launcher's; with torch the ratio of the two costs says what Spark
adds to real work. *Between* is the time of a worker between two shards, from that cost and the
seconds in the receipts: the launcher's alone, and steadier on a machine that others use. Spark's
session is started once and apart, as a run starts it once. stdout: a table, then one JSON document
as the last line.

    python -m benchmarks.spark
    python -m benchmarks.spark --workers 2 --repeats 5 --json spark.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.pipeline import Tables, write_tables
from jobs.local.launcher import LocalLauncher
from jobs.running.launcher import Launcher
from jobs.running.run_folder import plan_path
from pipelines.inputs.prepare import prepare_run
from pipelines.planning.plan import plan_run
from pipelines.storage import files
from schemas.config_file import load_config
from schemas.runs import RunPlan, Shard

_FIRST = 5  # one in so many shards is done before the clock of the others starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One launcher on one backend, medians over the repeats."""

    backend: str
    launcher: str
    shards: int
    users_per_shard: int
    stage_s: float  # of all the shards, from nothing: workers and engines start in it
    start_s: float  # of it what does not grow with the shards
    shard_s: float  # what one shard more takes
    shards_per_s: float
    inside_s: float  # of a worker, in one shard
    between_s: float  # of a worker, between two


class _Quiet:
    """Progress that nobody watches."""

    def step(self, name: str) -> None:
        """Nothing."""

    def start(self, users: int) -> None:
        """Nothing."""

    def advance(self, users: int) -> None:
        """Nothing."""

    def note(self, message: str) -> None:
        """A shard that failed, or an attempt that was repeated, would spoil the figures."""
        raise RuntimeError(message)


def _prepared(
    folder: Path, engine: dict[str, Any], shards: int, users: int, history: int, workers: int
) -> tuple[RunPlan, list[Shard]]:
    codes = engine.pop("codes", 256)
    tables = Tables(users=shards * users, codes=codes, history=history)
    path = write_tables(folder, tables, engine, users)
    plan = plan_run(load_config(str(path), overrides=[f"run.workers={workers}"]))
    files.write_json(plan_path(plan.run_dir), plan.model_dump(mode="json"))
    return plan, prepare_run(plan)


def _timed(launcher: Launcher, plan: RunPlan, shards: list[Shard]) -> tuple[float, float, float]:
    """Seconds of a stage from nothing, from one receipt to the next, of a worker in a shard."""
    for name in ("receipts", "staged", "attempts"):
        shutil.rmtree(Path(plan.run_dir) / name, ignore_errors=True)
    started = time.perf_counter()
    failed = launcher.launch(plan, shards, _Quiet())
    stage = time.perf_counter() - started
    if failed:
        raise RuntimeError(f"shards failed: {failed}")
    found = sorted(
        (path.stat().st_mtime, float(json.loads(path.read_text())["seconds"]))
        for path in (Path(plan.run_dir) / "receipts").glob("*.json")
    )
    kept = found[len(found) // _FIRST :]
    inside = statistics.fmean(seconds for _, seconds in kept[1:])
    return stage, (kept[-1][0] - kept[0][0]) / (len(kept) - 1), inside


def costs(
    launchers: dict[str, Launcher],
    plan: RunPlan,
    shards: list[Shard],
    users: int,
    repeats: int,
    workers: int,
) -> list[Cost]:
    """Every launcher's cost, the launchers taking turns."""
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in launchers}
    for _ in range(repeats):
        for name, launcher in launchers.items():
            times[name].append(_timed(launcher, plan, shards))
    found = []
    for name, pairs in times.items():
        stage, shard, inside = (statistics.median(column) for column in zip(*pairs, strict=True))
        found.append(
            Cost(
                backend=plan.config.engine.backend,
                launcher=name,
                shards=len(shards),
                users_per_shard=users,
                stage_s=round(stage, 3),
                start_s=round(stage - shard * len(shards), 3),
                shard_s=round(shard, 5),
                shards_per_s=round(1 / shard, 2),
                inside_s=round(inside, 4),
                between_s=round(shard * workers - inside, 4),
            )
        )
    return found


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="of either launcher")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fake-shards", type=int, default=100)
    parser.add_argument("--torch-shards", type=int, default=20)
    parser.add_argument("--users", type=int, default=32, help="of a torch shard")
    parser.add_argument("--hidden", type=int, default=256, help="width of the torch model")
    parser.add_argument("--json", type=Path, help="also write the document here")
    return parser.parse_args(argv)


def _torch_engine(folder: Path, hidden: int) -> dict[str, Any]:
    """A small random model: a shard of it takes about a second on a core."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import Qwen3Config, Qwen3ForCausalLM

    codes, words = 64, 16
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=words + 3 * codes,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=2048,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.add_tokens(
        [AddedToken(f"<{level}_{c}>", normalized=False) for level in "abc" for c in range(codes)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return {"backend": "torch", "model": str(folder), "device": "cpu", "codes": codes}


def main(argv: list[str] | None = None) -> None:
    """Run it."""
    asked = arguments(argv)
    from jobs.spark.launch import SparkLauncher
    from jobs.spark.session import SparkApp

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        f"--master local[{asked.workers}] --conf spark.ui.enabled=false "
        "--conf spark.ui.showConsoleProgress=false pyspark-shell"
    )
    found: list[Cost] = []
    with tempfile.TemporaryDirectory(prefix="nightshelf-bench-") as temporary, SparkApp() as app:
        root = Path(temporary)
        launchers: dict[str, Launcher] = {"local": LocalLauncher(), "spark": SparkLauncher(app)}
        work = {
            "fake": ({"backend": "fake"}, asked.fake_shards, 4, 20),
            "torch": (_torch_engine(root / "model", asked.hidden), asked.torch_shards,
                      asked.users, 100),
        }  # fmt: skip
        session_s = 0.0
        for name, (engine, num, users, history) in work.items():
            folder = root / name
            folder.mkdir()
            plan, shards = _prepared(folder, engine, num, users, history, asked.workers)
            if not session_s:
                started = time.perf_counter()
                app.session(plan.config)
                session_s = time.perf_counter() - started
            found += costs(launchers, plan, shards, users, asked.repeats, asked.workers)
    _print(found, session_s, asked)


def _print(found: list[Cost], session_s: float, asked: argparse.Namespace) -> None:
    row = "{:8} {:8} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}"
    print(row.format("backend", "launcher", "shards", "stage s", "start s", "s/shard", "shards/s",
                     "inside s", "between s"))  # fmt: skip
    for one in found:
        print(row.format(one.backend, one.launcher, one.shards, *(f"{value:.3f}" for value in (
            one.stage_s, one.start_s, one.shard_s, one.shards_per_s, one.inside_s, one.between_s,
        ))))  # fmt: skip
    by = {(one.backend, one.launcher): one for one in found}
    ratios = {
        backend: {
            "shard": round(by[backend, "spark"].shard_s / by[backend, "local"].shard_s, 3),
            "stage": round(by[backend, "spark"].stage_s / by[backend, "local"].stage_s, 3),
        }
        for backend in dict.fromkeys(one.backend for one in found)
    }
    print(f"Spark over local, torch: {ratios['torch']['shard']} per shard, "
          f"{ratios['torch']['stage']} for the stage; session {session_s:.1f} s")  # fmt: skip
    document = {
        "costs": [asdict(one) for one in found],
        "spark_over_local": ratios,
        "session_s": round(session_s, 2),
        "workers": asked.workers,
        "repeats": asked.repeats,
    }
    if asked.json is not None:
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
