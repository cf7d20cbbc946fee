"""What prepare leaves for workers: where it is, whether it is whole, and its rows, held to what was
written.
"""

from __future__ import annotations

import pyarrow as pa

from pipelines.inputs.unchanged import check_inputs
from pipelines.storage import files
from pipelines.storage.files import Written
from pipelines.storage.seals import break_seal, is_written, read_seal, write_seal
from schemas.errors import DamagedFileError
from schemas.runs import RunPlan, Shard

_seals: dict[str, dict[str, Written]] = {}  # of the runs that this process reads


def candidate_sets_path(plan: RunPlan) -> str:
    """Where candidate sets that are not per user are."""
    return files.join(plan.run_dir, "candidate_sets.parquet")


def shards_of(plan: RunPlan) -> list[Shard]:
    """The shards of a run, in order."""
    if plan.config.inputs.self_contained:
        return [Shard(index=i, path=file.path) for i, file in enumerate(plan.inputs["users"].files)]
    return [
        Shard(index=i, path=files.join(plan.run_dir, "shards", f"shard-{i:05d}.parquet"))
        for i in range(plan.num_shards)
    ]


def is_prepared(plan: RunPlan) -> bool:
    """Whether the run's shards and candidate sets are all there, by name and size. Their content is
    looked at by whoever reads them.
    """
    seal = read_seal(_folder(plan))
    if seal is None:
        return False
    copied = () if plan.config.inputs.self_contained else shards_of(plan)
    if not {_name(plan, shard.path) for shard in copied} <= seal.keys():
        return False
    there = {f"shards/{n}": size for n, size in files.list_sizes(_folder(plan)).items()}
    there |= files.list_sizes(plan.run_dir)
    return all(there.get(name) == one.bytes for name, one in seal.items())


def mark_prepared(plan: RunPlan, written: dict[str, Written]) -> None:
    """Every file is written: `written`, by path.

    Raises:
        ChangedError: an input is not what was planned with; what was written is not kept.
    """
    check_inputs(plan)
    write_seal(_folder(plan), {_name(plan, path): one for path, one in written.items()})
    _seals.pop(plan.run_dir, None)


def forget_prepared(plan: RunPlan) -> None:
    """Let the next `prepare` write everything again."""
    break_seal(_folder(plan))
    _seals.pop(plan.run_dir, None)


def read_prepared(plan: RunPlan, path: str, columns: list[str] | None = None) -> pa.Table:
    """A shard, or the candidate sets.

    Raises:
        StorageError: it is missing, or is not what prepare wrote.
    """
    try:
        return files.read_parquet(path, columns, proof=_proof(plan, path))
    except DamagedFileError:
        _seals.pop(plan.run_dir, None)  # it may have been written again since
        return files.read_parquet(path, columns, proof=_proof(plan, path))


def is_intact(plan: RunPlan, shard: Shard) -> bool:
    """Whether what a worker reads for a shard is what prepare wrote."""
    seal = read_seal(_folder(plan))
    if seal is None:
        return False
    wanted = (_name(plan, path) for path in (shard.path, candidate_sets_path(plan)))
    return all(
        is_written(files.join(plan.run_dir, name), seal[name]) for name in wanted if name in seal
    )


def _proof(plan: RunPlan, path: str) -> Written:
    if plan.run_dir not in _seals:
        _seals[plan.run_dir] = read_seal(_folder(plan)) or {}
    proof = _seals[plan.run_dir].get(_name(plan, path))
    if proof is None:
        raise DamagedFileError(
            "nothing says what this file was when it was written",
            where=path,
            do="Prepare the run again.",
        )
    return proof


def _folder(plan: RunPlan) -> str:
    return files.join(plan.run_dir, "shards")


def _name(plan: RunPlan, path: str) -> str:
    return path.removeprefix(plan.run_dir).lstrip("/")
