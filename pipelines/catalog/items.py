"""The items of a run, however its configuration names them: by semantic IDs or by text."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from engine.prompts.tokenizer import Tokenizer, bind_space, load_tokenizer, vocab_size
from pipelines.catalog.build import Catalog, open_catalog, read_catalog, read_text_catalog
from pipelines.catalog.readers import describe_catalog, list_catalog
from pipelines.sources import input_files
from pipelines.sources.input_columns import Piece, Wanted, batches
from pipelines.sources.locate import Located, locate_input
from pipelines.storage import files
from schemas.eligibility import attributes
from schemas.errors import ConfigError, NightshelfError
from schemas.input_tables import FolderInput
from schemas.runs import InputFile, RunPlan
from schemas.settings import RunConfig
from schemas.tables import TableContract, catalog_contract, text_catalog_contract


def catalog_path(config: RunConfig) -> str:
    """`inputs.catalog`; `ConfigError` where there is none."""
    path = config.inputs.paths["catalog"]
    if path is None:
        raise ConfigError("inputs.catalog is missing", expected="the table of items")
    return path


def catalog_dir(plan: RunPlan) -> str:
    """Where the run's catalog is saved."""
    return files.join(plan.run_dir, "catalog")


def list_items(config: RunConfig) -> Located:
    """The catalog's files."""
    path = catalog_path(config)
    named_by_path = isinstance(config.inputs.catalog, str | FolderInput)
    if config.sid is None or not named_by_path:
        return locate_input(config, "catalog")
    snapshots: list[str | None] = []

    def parquet() -> list[str]:
        found = locate_input(config, "catalog")
        snapshots.append(found.snapshot)
        return found.files

    listed = list_catalog(path, parquet)
    return Located(listed, snapshots[0] if snapshots else None)


def describe_items(config: RunConfig, file: str) -> tuple[InputFile, pa.Schema]:
    """Size, rows, version and schema of one of them."""
    if config.sid is None:
        return input_files.describe_file(file, "catalog")
    return describe_catalog(file, config.space, lambda: bind_space(config, load_tokenizer(config)))


def items_contract(config: RunConfig) -> TableContract:
    """Columns that the catalog must and may have."""
    if config.text is not None:
        return text_catalog_contract(config.text.column, _attributes(config))
    return catalog_contract(_attributes(config))


def longest_text(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Tokens of the longest text that names an item; 0 where the catalog cannot be read, which is
    another's to say, or where no list is made.
    """
    if config.text is None or not config.task.gives_lists:
        return 0
    wanted = [Wanted(config.text.column, config.text.column, pa.string())]
    most = 0
    try:
        for path in list_items(config).files:
            for batch in batches("catalog", Piece(path, 0), wanted):
                texts = pc.drop_null(batch.column(0)).to_pylist()
                most = max(most, *map(len, tokenizer.encode_items(texts)), 0)
    except NightshelfError:
        return 0
    return most


def _attributes(config: RunConfig) -> tuple[str, ...]:
    """Columns of the catalog to keep: what the eligibility reads, and the titles."""
    rule, title = config.task.eligible, config.report.title_column
    names = (*(attributes(rule) if rule else ()), *((title,) if title else ()))
    return tuple(dict.fromkeys(names))


def read_items(config: RunConfig, paths: list[str]) -> Catalog:
    """Read and check the catalog.

    Raises:
        TableError, CatalogError: it cannot be used.
    """
    tokenizer = load_tokenizer(config)
    if config.text is not None:
        vocab = vocab_size(config)
        return read_text_catalog(paths, config.text, tokenizer, vocab, _attributes(config))
    assert config.sid is not None, "the configuration names items one way or the other"
    return read_catalog(
        paths,
        config.space,
        lambda: bind_space(config, tokenizer),
        _attributes(config),
        end_after=config.sid.end_after,
    )


def title_column(config: RunConfig, catalog: Catalog) -> str | None:
    """The catalog's column that names items to people: `report.title_column`, else title or text.

    A catalog that was prepared before the setting changed may not have it.
    """
    text = config.text.column if config.text is not None else "text"
    wanted = (config.report.title_column, "title", text)
    return next((name for name in wanted if name in catalog.table.column_names), None)


def titles(config: RunConfig, catalog: Catalog, items: pa.Array) -> pa.Array:
    """The title of each item id, as text; null where there is none."""
    name = title_column(config, catalog)
    if name is None:
        return pa.nulls(len(items), pa.string())
    at = catalog.positions(items.cast(catalog.item_ids.type))
    column = catalog.table.column(name).combine_chunks()
    found = column.take(pa.array(at, mask=at < 0))
    if pa.types.is_nested(found.type):  # a list of genres is a title too
        return pa.array([None if x is None else str(x) for x in found.to_pylist()], pa.string())
    return found.cast(pa.string())


def open_items(plan: RunPlan) -> Catalog | None:
    """The prepared catalog of a run; None where it needs none."""
    return open_catalog(catalog_dir(plan)) if "catalog" in plan.inputs else None
