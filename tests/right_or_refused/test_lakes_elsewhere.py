"""Tables with a log that lie in a store, or hold deletes in files of their own."""

from __future__ import annotations

import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.factories import write_config, write_inputs
from tests.right_or_refused.lakes import delete_by_position, delete_by_value
from tests.s3 import environment, s3_server

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"s3://b-{abs(hash(str(tmp_path))) % 10**12}"
    s3fs.S3FileSystem().mkdir(name)
    yield name
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def lake(tmp_path):
    from pyiceberg.catalog import load_catalog

    properties = {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    catalog = load_catalog(**properties)
    catalog.create_namespace("db")
    return catalog, properties


def published(folder):
    frame = pl.read_parquet(folder / "out/**/*.parquet", hive_partitioning=False)
    return frame.drop("run_id").sort("user_id", "rank")


@pytest.mark.parametrize("form", ["path", "delta"])
def test_every_table_may_be_a_delta_table_in_a_bucket(nightshelf, tmp_path, bucket, form):
    """The rows are those of plain files; a user that was deleted gets none."""
    tables = write_inputs(tmp_path)
    nightshelf("run", write_config(tmp_path))
    plain = published(tmp_path).filter(pl.col("user_id") != "u003")
    sources = {}
    for name, table in tables.items():
        root = f"{bucket}/lake/{name}"
        deltalake.write_deltalake(root, table)
        sources[f"inputs__{name}"] = root if form == "path" else {"delta": root, "version": 0}
    deltalake.DeltaTable(f"{bucket}/lake/users").delete("user_id = 'u003'")
    if form == "delta":
        sources["inputs__users"]["version"] = 1
    config = write_config(tmp_path, output__path="elsewhere", **sources)
    assert nightshelf("validate", config, "--output", "json").json["problems"] == []
    nightshelf("run", config)
    found = pl.read_parquet(tmp_path / "elsewhere/**/*.parquet", hive_partitioning=False)
    assert found.drop("run_id").sort("user_id", "rank").equals(plain)


def test_an_iceberg_table_in_a_bucket(nightshelf, tmp_path, bucket, server):
    from pyiceberg.catalog import load_catalog

    tables = write_inputs(tmp_path)
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"{bucket}/warehouse",
        "s3.endpoint": server,
        "s3.access-key-id": "somebody",
        "s3.secret-access-key": "a-secret-of-theirs",
        "s3.region": "us-east-1",
    }
    catalog = load_catalog("lake", **properties)
    catalog.create_namespace("db")
    table = catalog.create_table("db.users", schema=tables["users"].schema)
    table.append(tables["users"])
    table.delete("user_id = 'u003'")
    nightshelf("run", write_config(tmp_path))
    plain = published(tmp_path).filter(pl.col("user_id") != "u003")
    # Secrets are the environment's: a configuration is kept with every run.
    named = {key: value for key, value in properties.items() if "key" not in key}
    source = {"iceberg": "db.users", "catalog": {"name": "lake", **named}}
    config = write_config(tmp_path, output__path="elsewhere", inputs__users=source)
    nightshelf("run", config)
    found = pl.read_parquet(tmp_path / "elsewhere/**/*.parquet", hive_partitioning=False)
    assert found.drop("run_id").sort("user_id", "rank").equals(plain)


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_a_delta_table_in_a_bucket_without_credentials(
    nightshelf, tmp_path, bucket, monkeypatch, command
):
    tables = write_inputs(tmp_path)
    deltalake.write_deltalake(f"{bucket}/users", tables["users"])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    config = write_config(tmp_path, inputs__users=f"{bucket}/users")
    done = nightshelf(command, config, "--output", "json", check=2)
    assert "credentials" in done.out


# --- deletes in files of their own ----------------------------------------------------------------


def iceberg_users(lake, tmp_path):
    catalog, _ = lake
    users = write_inputs(tmp_path)["users"]
    table = catalog.create_table(
        "db.users", schema=users.schema, properties={"format-version": "2"}
    )
    table.append(users.slice(0, 25))
    table.append(users.slice(25))
    return catalog.load_table("db.users")


@pytest.mark.parametrize("rows", [[0], [3, 4, 24], list(range(25))], ids=["one", "some", "all"])
def test_rows_deleted_by_position_are_not_read(nightshelf, tmp_path, lake, rows):
    table = iceberg_users(lake, tmp_path)
    nightshelf("run", write_config(tmp_path))
    plain = published(tmp_path)
    file = next(
        task.file.file_path
        for task in table.scan().plan_files()
        if "u000"
        in pq.read_table(task.file.file_path.removeprefix("file://"))["user_id"].to_pylist()
    )
    delete_by_position(table, {file: rows})
    gone = {f"u{at:03d}" for at in rows}
    assert len(lake[0].load_table("db.users").scan().to_arrow()) == 40 - len(rows)
    source = {"iceberg": "db.users", "catalog": lake[1]}
    config = write_config(tmp_path, output__path="elsewhere", inputs__users=source)
    nightshelf("run", config)
    found = pl.read_parquet(tmp_path / "elsewhere/**/*.parquet", hive_partitioning=False)
    want = plain.filter(~pl.col("user_id").is_in(gone))
    assert found.drop("run_id").sort("user_id", "rank").equals(want)


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_deletes_by_value_are_obeyed_or_refused(nightshelf, tmp_path, lake, command):
    delete_by_value(iceberg_users(lake, tmp_path), "user_id", ["u003"])
    source = {"iceberg": "db.users", "catalog": lake[1]}
    config = write_config(tmp_path, inputs__users=source)
    done = nightshelf(command, config, "--output", "json", check=3)
    assert "Iceberg table cannot be read" in done.out
    assert not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table_whose_library_is_missing(nightshelf, tmp_path, lake, monkeypatch, kind, command):
    import sys

    table = iceberg_users(lake, tmp_path)
    source = {"iceberg": table.metadata.location.removeprefix("file://")}
    if kind == "delta":
        deltalake.write_deltalake(str(tmp_path / "lake"), write_inputs(tmp_path)["users"])
        source = {"delta": "lake"}
    module = {"delta": "deltalake", "iceberg": "pyiceberg"}[kind]
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    config = write_config(tmp_path, inputs__users=source)
    done = nightshelf(command, config, "--output", "json", check=2)
    assert f"{module} is not installed" in done.out
    assert f"nightshelf[{kind}]" in done.out
