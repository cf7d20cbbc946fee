"""What was planned is what is read: inputs and model are held to the plan after they were read.

A plan names each input file with its version, and each file of the model with size, time and place
beside the hash of all of them. Compared *after* a read, they say that what was read is what was
planned, whatever happened in between.
"""

from __future__ import annotations

from pipelines.catalog.readers import catalog_version
from pipelines.sources.input_files import file_version
from pipelines.storage import files
from pipelines.storage.seals import version_of
from schemas.errors import AccessError, ChangedError, EngineError, MissingFileError, StorageError
from schemas.runs import RunPlan

_AGAIN = "Nothing was published. Run again, which plans anew, or put it back as it was."


def check_inputs(plan: RunPlan, *tables: str) -> None:
    """Hold the inputs, or some of them, to the plan.

    Raises:
        ChangedError: naming the file that is gone or another one.
    """
    for name in tables or plan.inputs:
        for file in plan.inputs[name].files:
            try:
                now = (catalog_version if name == "catalog" else file_version)(file.path)
            except MissingFileError:
                now = "it is gone"
            if now != file.version:
                raise ChangedError(
                    f"{name}: a file has changed since the run was planned",
                    expected=file.version,
                    got=now,
                    where=file.path,
                    do=_AGAIN,
                )


def check_model(plan: RunPlan) -> None:
    """Hold the model and the projector to the plan. Files that were touched are read: one with the
    same content may take another's place.

    Raises:
        ChangedError: naming a file.
    """
    for name, path in _folders(plan):
        planned = plan.model_files.get(name)
        now = folder_versions(path, f"engine.{name}")
        if planned is not None and now == planned:
            continue
        if hash_model(path, f"engine.{name}")[0] != plan.hashes[name]:
            before = planned or {}
            touched = sorted(n for n in {*before, *now} if before.get(n) != now.get(n))
            raise ChangedError(
                f"the {name} has changed since the run was planned",
                where=files.join(path, touched[0]) if before and touched else path,
                do=_AGAIN,
            )


def _folders(plan: RunPlan) -> list[tuple[str, str]]:
    engine = plan.config.engine
    found = (("model", engine.model), ("projector", engine.projector))
    return [(name, path) for name, path in found if path is not None]


def hash_model(path: str | None, setting: str) -> tuple[str, dict[str, str]]:
    """Hash of a model folder, and the version of each of its files when it had that content.

    Raises:
        EngineError: it cannot be read, or changes while it is.
    """
    if path is None:
        return "", {}
    for _ in range(3):
        before = folder_versions(path, setting)
        try:
            digest = files.hash_folder(path)
        except StorageError as err:
            raise EngineError(f"{setting} cannot be read", got=str(err), where=path) from err
        if folder_versions(path, setting) == before:
            return digest, before
    raise EngineError(f"{setting} changes while it is read", where=path, do="Let it be written.")


def folder_versions(path: str, setting: str) -> dict[str, str]:
    """The version of each file of a model folder, by name."""
    try:
        return {name: version_of(files.join(path, name)) for name in files.find_visible(path)}
    except MissingFileError:  # of a file that went after the listing
        return {}
    except (StorageError, AccessError) as err:
        raise EngineError(f"{setting} cannot be read", got=str(err), where=path) from err
