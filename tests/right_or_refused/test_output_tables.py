"""What is known of an output table before the night: its format, features, columns, and whose files
are in its folder. What a publish could not do there is refused with exit 2 before a row is scored.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from pipelines.publish import check_output, open_table, publish_run
from pipelines.storage import files
from schemas.errors import ConfigError, NightshelfError
from tests.factories import write_config, write_inputs
from tests.publish.runs import DS, config_of, expected, publish, read, staged_run

MINE = [
    ("ds", "string"), ("surface", "string"), ("user_id", "string"), ("rank", "integer"),
    ("item_id", "string"), ("score", "float"), ("source", "string"), ("exact", "boolean"),
    ("run_id", "string"),
]  # fmt: skip


def delta_log(path, *, protocol=None, properties=None, fields=None, extra=()):
    """A Delta table as another program may have made it: a log of one version, no files."""
    columns = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in MINE
    ]
    for column in columns:
        column.update((fields or {}).get(column["name"], {}))
    schema = {"type": "struct", "fields": [*columns, *extra]}
    metadata = {
        "id": "5fba94ed-9794-4965-ba6e-6ee3c0d22af9",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema),
        "partitionColumns": ["ds", "surface"],
        "configuration": properties or {},
        "createdTime": 1,
    }
    version = protocol or {"minReaderVersion": 1, "minWriterVersion": 2}
    log = path / "_delta_log"
    log.mkdir(parents=True)
    lines = [{"protocol": version}, {"metaData": metadata}]
    (log / f"{0:020d}.json").write_text("\n".join(json.dumps(line) for line in lines) + "\n")


def feature(*names, reader=()):
    return {
        "minReaderVersion": 3 if reader else 1, "minWriterVersion": 7,
        **({"readerFeatures": list(reader)} if reader else {}), "writerFeatures": list(names),
    }  # fmt: skip


def column(name, kind, **more):
    return {"name": name, "type": kind, "nullable": True, "metadata": {}, **more}


NAMES = {
    name: {"metadata": {"delta.columnMapping.id": n, "delta.columnMapping.physicalName": f"c{n}"}}
    for n, (name, _) in enumerate(MINE, 1)
}
MAPPED = {"delta.columnMapping.maxColumnId": "9"}
REFUSED = {
    "append only": ({"properties": {"delta.appendOnly": "true"}}, "appendOnly"),
    "check": (
        {
            "protocol": {"minReaderVersion": 1, "minWriterVersion": 3},
            "properties": {"delta.constraints.good": "rank < 3"},
        },
        "CHECK constraint good: rank < 3",
    ),
    "names mapped": (
        {
            "protocol": {"minReaderVersion": 2, "minWriterVersion": 5},
            "properties": {"delta.columnMapping.mode": "name", **MAPPED},
            "fields": NAMES,
        },
        "columnMapping.mode = name",
    ),
    "ids mapped": (
        {
            "protocol": {"minReaderVersion": 2, "minWriterVersion": 5},
            "properties": {"delta.columnMapping.mode": "id", **MAPPED},
            "fields": NAMES,
        },
        "columnMapping.mode = id",
    ),
    "deletion vectors": (
        {
            "protocol": feature("deletionVectors", reader=["deletionVectors"]),
            "properties": {"delta.enableDeletionVectors": "true"},
        },
        "deletionVectors",
    ),
    "row tracking": ({"protocol": feature("rowTracking", "domainMetadata")}, "rowTracking"),
    "unheard of": ({"protocol": feature("moonPhases")}, "moonPhases"),
    "invariant": (
        {"fields": {"rank": {"metadata": {"delta.invariants": "rank < 3"}}}},
        "'rank' with an invariant",
    ),
    "generated": (
        {
            "protocol": {"minReaderVersion": 1, "minWriterVersion": 4},
            "fields": {"score": {"metadata": {"delta.generationExpression": "1.0"}}},
        },
        "'score' with a generated value",
    ),
    "long rank": ({"fields": {"rank": {"type": "long"}}}, "'rank' in another type"),
    "a date": ({"fields": {"ds": {"type": "date"}}}, "'ds' in another type"),
    "decimal score": ({"fields": {"score": {"type": "decimal(9,4)"}}}, "'score' in another type"),
    "required": (
        {"extra": [column("country", "string", nullable=False)]}, "needs a value in a column",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_delta_table_that_cannot_be_published_to_is_refused_before_the_run(
    nightshelf, tmp_path, kind
):
    made, message = REFUSED[kind]
    write_inputs(tmp_path)
    delta_log(tmp_path / "out", **made)
    config = write_config(tmp_path, output__format="delta")
    for command in ("plan", "run", "validate"):
        done = nightshelf(command, config, "--output", "json", check=2)
        assert message in done.out + done.err, command
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/staged"))


@pytest.mark.parametrize(
    "made",
    [
        {"properties": {"delta.appendOnly": "false", "delta.enableChangeDataFeed": "true"}},
        {"extra": [column("loaded_at", "timestamp"), column("note", "string")]},
        {"fields": {"user_id": {"nullable": False}, "run_id": {"nullable": False}}},
        {"protocol": feature("appendOnly", "invariants", "checkConstraints", "changeDataFeed")},
    ],
    ids=["properties", "nullable columns of others", "required columns of ours", "features"],
)
def test_a_delta_table_of_others_that_fits_is_published_to(tmp_path, made):
    delta_log(tmp_path / "out", **made)
    config = config_of(tmp_path, "delta")
    check_output(config)
    a, b = staged_run(config, "a"), staged_run(config, "b")
    for run in (a, b):
        publish_run(*run)
        found = read(config)
        assert found.select(expected(run).columns).equals(expected(run))
    others = [name for name in found.columns if name not in expected(a).columns]
    assert all(found[name].null_count() == len(found) for name in others)


def iceberg_table(tmp_path, change=None, properties=None, schema=None, more=None, identifiers=()):
    from pyiceberg.catalog import load_catalog
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.types import BooleanType, FloatType, IntegerType, NestedField, StringType

    types = {
        "string": StringType(), "integer": IntegerType(), "float": FloatType(),
        "boolean": BooleanType(),
    }  # fmt: skip
    fields = [
        NestedField(
            number, name, (change or {}).get(name, types[kind]), required=number in identifiers
        )
        for number, (name, kind) in enumerate(MINE, 1)
    ]
    fields += schema or []
    root = tmp_path / "out"
    root.mkdir()
    catalog = load_catalog(
        "nightshelf", type="sql", uri=f"sqlite:///{root}/catalog.db", warehouse=f"file://{root}"
    )
    catalog.create_namespace("nightshelf")
    spec = PartitionSpec(
        PartitionField(1, 1000, IdentityTransform(), "ds"),
        PartitionField(2, 1001, IdentityTransform(), "surface"),
    )
    table = catalog.create_table(
        "nightshelf.recommendations", Schema(*fields, identifier_field_ids=list(identifiers)),
        partition_spec=spec,
        properties=properties or {},
    )  # fmt: skip
    path = Path(table.metadata_location.removeprefix("file://"))
    path.write_text(json.dumps({**json.loads(path.read_text()), **(more or {})}))
    catalog.close()


def iceberg_refusals():
    from pyiceberg.types import DateType, LongType, NestedField, StringType

    return {
        "long rank": ({"change": {"rank": LongType()}}, "'rank' in another type"),
        "a date": ({"change": {"ds": DateType()}}, "'ds' in another type"),
        "required": (
            {"schema": [NestedField(20, "country", StringType(), required=True)]},
            "needs a value in a column",
        ),
        "version 3": ({"more": {"format-version": 3, "next-row-id": 0}}, "format version 3"),
        "orc": ({"properties": {"write.format.default": "orc"}}, "write.format.default = orc"),
        "wap": ({"properties": {"write.wap.enabled": "true"}}, "write.wap.enabled"),
        "identifiers": ({"identifiers": [3]}, "identifier fields user_id"),
        "snapshot isolation": (
            {"properties": {"write.delete.isolation-level": "snapshot"}}, "isolation-level",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", iceberg_refusals())
def test_an_iceberg_table_that_cannot_be_published_to_is_refused_before_the_run(tmp_path, kind):
    made, message = iceberg_refusals()[kind]
    iceberg_table(tmp_path, **made)
    with pytest.raises(ConfigError, match=message):
        check_output(config_of(tmp_path, "iceberg"))


def test_an_iceberg_table_of_others_that_fits_is_published_to(tmp_path):
    from pyiceberg.types import NestedField, TimestampType

    iceberg_table(tmp_path, schema=[NestedField(20, "at", TimestampType(), required=False)])
    config = config_of(tmp_path, "iceberg")
    check_output(config)
    run = staged_run(config, "a")
    publish_run(*run)
    assert read(config).drop("at").equals(expected(run))


def test_iceberg_files_carry_field_ids(tmp_path):
    published = publish(config_of(tmp_path, "iceberg"), "a")
    schema = pq.read_schema(published.files[0].removeprefix("file://"))
    ids = [int(field.metadata[b"PARQUET:field_id"]) for field in schema]
    assert len(set(ids)) == len(schema)


def lake(tmp_path, kind):
    """The folder of a table that is not ours to touch."""
    out = tmp_path / "out"
    if kind == "delta":
        rows = pa.table({"ds": [DS], "surface": ["home"], "x": [1]})
        write_deltalake(str(out), rows, partition_by=["ds", "surface"])
    elif kind == "hudi":
        (out / ".hoodie").mkdir(parents=True)
    elif kind == "iceberg":
        publish(config_of(tmp_path, "iceberg"), "a")
    else:  # the folder of an Iceberg table of another catalog
        (out / "metadata").mkdir(parents=True)
        (out / "metadata" / "00001-abc.metadata.json").write_text("{}")
    return out


def tree(folder):
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["delta", "hudi", "iceberg", "iceberg metadata"])
def test_parquet_over_a_lake_table_is_refused_and_nothing_is_touched(nightshelf, tmp_path, kind):
    out = lake(tmp_path, kind)
    before = tree(out)
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    for command in ("plan", "run", "validate"):
        done = nightshelf(command, config, check=2)
        assert "the folder is a table of" in done.out + done.err
    assert tree(out) == before


@pytest.mark.parametrize("format", ["parquet", "delta", "iceberg"])
@pytest.mark.parametrize("kind", ["delta", "iceberg metadata"])
def test_a_folder_inside_a_lake_table_is_refused_and_nothing_is_touched(
    nightshelf, tmp_path, kind, format
):
    """Whatever cleans the table removes files that its log does not name."""
    out = lake(tmp_path, kind)
    before = tree(out)
    write_inputs(tmp_path, num_users=6)
    config = write_config(tmp_path, output={"path": str(out / "a" / "b"), "format": format})
    for command in ("validate", "run"):
        done = nightshelf(command, config, "--output", "json", check=2)
        assert f"output.path is inside a table of {kind.split()[0].title()}" in done.out
    assert tree(out) == before


@pytest.mark.parametrize("format", ["delta", "iceberg"])
@pytest.mark.parametrize("there", ["our Parquet table", "foreign files", "the other lake"])
def test_a_lake_table_over_something_else_is_refused(tmp_path, format, there):
    out = tmp_path / "out"
    if there == "our Parquet table":
        publish(config_of(tmp_path, "parquet"), "a")
    elif there == "foreign files":
        out.mkdir()
        pq.write_table(pa.table({"x": [1]}), out / "x.parquet")
    else:
        publish(config_of(tmp_path, {"delta": "iceberg", "iceberg": "delta"}[format]), "a")
    before = tree(out)
    with pytest.raises(ConfigError, match="Nothing was touched|is not empty"):
        check_output(config_of(tmp_path, format))
    with pytest.raises(ConfigError):
        publish(config_of(tmp_path, format), "b")
    assert tree(out).items() >= {k: v for k, v in before.items() if "catalog.db" not in k}.items()


@pytest.mark.parametrize("lost", ["removed", "empty"])
def test_a_lost_catalog_or_log_is_no_new_table(tmp_path, lost):
    for format in ("iceberg", "delta"):
        config = config_of(tmp_path / format, format)
        publish(config, "a")
        place = tmp_path / format / "out" / ("catalog.db" if format == "iceberg" else "_delta_log")
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()
        if lost == "empty":
            place.write_bytes(b"") if format == "iceberg" else place.mkdir()
        word = "register" if format == "iceberg" else "lost"
        if format == "delta" and lost == "empty":
            word = "lost|could not be used"
        with pytest.raises(NightshelfError, match=word):
            check_output(config)
        with pytest.raises(NightshelfError):
            publish(config, "b")


@pytest.mark.parametrize("name", ["theirs.parquet", "part-00000-c000.snappy.parquet", "hour=01"])
def test_foreign_files_in_a_partition_are_named_and_stay(nightshelf, tmp_path, name):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    (folder,) = (tmp_path / "out").rglob("surface=*")
    stray = folder / name
    if "=" in name:
        stray.mkdir()
        stray /= "x.parquet"
    pq.write_table(pa.table({"x": [1]}), stray)
    before = tree(tmp_path / "out")
    for command in ("plan", "run", "validate"):
        done = nightshelf(command, config, "--set", "task.k=2", check=2)
        assert name in done.out + done.err
    assert tree(tmp_path / "out") == before


def test_lost_pointers_are_no_empty_table(tmp_path):
    config = config_of(tmp_path, "parquet")
    publish(config, "a")
    shutil.rmtree(tmp_path / "out.current")
    with pytest.raises(ConfigError, match="no publish wrote"):
        check_output(config)


LINKS = [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES]


@pytest.mark.parametrize("number", LINKS)
def test_a_mount_without_hard_links(tmp_path, monkeypatch, number):
    """Parquet and Iceberg need none; Delta's log does, and says so before the night."""

    def link(*_args, **_more):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    for format in ("parquet", "iceberg"):
        config = config_of(tmp_path / format, format)
        check_output(config)
        for name in "aba":
            run = staged_run(config, name)
            publish_run(*run)
            assert read(config).equals(expected(run))
    folder = tmp_path / "parquet" / "out.current"
    assert not [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size == 0]
    (tmp_path / "delta").mkdir()
    with pytest.raises(ConfigError, match="hard links"):
        check_output(config_of(tmp_path / "delta", "delta"))
    assert files.create(str(tmp_path / "one"), b"1")
    assert not files.create(str(tmp_path / "one"), b"2"), "the name is taken"
    assert (tmp_path / "one").read_bytes() == b"1"


@pytest.mark.parametrize("format", ["parquet", "delta", "iceberg"])
@pytest.mark.parametrize("how", ["same", "inside", "around", "slash"])
def test_the_quarantine_is_no_part_of_the_table(nightshelf, tmp_path, format, how):
    out = str(tmp_path / "shop" / "out")
    paths = {
        "same": out,
        "inside": f"{out}/bad",
        "around": str(tmp_path / "shop"),
        "slash": out + "/",
    }
    quarantine = paths[how]
    if format == "iceberg":
        if how != "same":
            pytest.skip("tables of a catalog have names, not places")
        quarantine = "nightshelf.recommendations"
    write_inputs(tmp_path)
    config = write_config(
        tmp_path, output__path=out, output__format=format, output__quarantine=quarantine
    )
    for command in ("plan", "run", "validate"):
        done = nightshelf(command, config, check=2)
        assert "output.quarantine" in done.out + done.err


def test_a_delta_table_shows_only_what_a_publish_wrote(tmp_path):
    config = config_of(tmp_path, "delta")
    run = staged_run(config, "a")
    publish_run(*run)
    table = DeltaTable(tmp_path / "out")
    assert open_table(config).verify() == 3
    table.delete("user_id = '007'")
    with pytest.raises(NightshelfError, match="not what a run published"):
        open_table(config).verify()


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_vectors_of_two_lengths_are_two_tables(tmp_path, format):
    """The rows at hand have four numbers; the backend gives another count, and the plan knows."""
    task = {"embed": {}}
    publish(config_of(tmp_path, format, task=task), "a")
    other = config_of(tmp_path, format, task=task, surface="mail")
    with pytest.raises(ConfigError, match="vectors of another length.*got 4"):
        check_output(other)
