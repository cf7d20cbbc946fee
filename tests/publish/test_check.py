"""What is said before a run, rather than after it."""

from __future__ import annotations

import sys

import pytest

from pipelines.publish import check_output, open_table
from schemas.errors import ConfigError
from tests.publish.runs import config_of, publish


def test_a_good_output_passes_and_nothing_is_created(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    check_output(config)
    assert not (tmp_path / "out").exists()
    publish(config, "a")
    check_output(config)


@pytest.mark.parametrize("format", ["iceberg", "delta"])
@pytest.mark.parametrize("change", ["layout", "task"])
def test_a_table_of_other_columns_is_refused(tmp_path, format, change):
    publish(config_of(tmp_path, format), "a")
    other = (
        config_of(tmp_path, format, output={"layout": "wide"})
        if change == "layout"
        else config_of(tmp_path, format, task={"embed": {}})
    )
    with pytest.raises(ConfigError, match=r"the table has other columns.*a table each"):
        check_output(other)


@pytest.mark.parametrize(("format", "package"), [("iceberg", "pyiceberg"), ("delta", "deltalake")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, format, package):
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"pipelines.publish.{format}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'nightshelf\[{format}\]'"):
        check_output(config_of(tmp_path, format))


def test_a_table_with_other_partitions_is_refused(tmp_path):
    import pyarrow as pa
    from deltalake import DeltaTable

    config = config_of(tmp_path, "delta")
    schema = pa.schema({"ds": pa.string(), "surface": pa.string()})
    DeltaTable.create(str(tmp_path / "out"), schema=schema, partition_by=["ds"])
    with pytest.raises(ConfigError, match="other partitions: expected partitioned by ds, surface"):
        check_output(config)


def test_an_iceberg_table_that_is_not_partitioned_is_refused(tmp_path):
    import pyarrow as pa
    from pyiceberg.catalog import load_catalog

    root = tmp_path / "out"
    root.mkdir()
    catalog = load_catalog(
        "nightshelf", type="sql", uri=f"sqlite:///{root}/catalog.db", warehouse=f"file://{root}"
    )
    catalog.create_namespace("nightshelf")
    catalog.create_table(
        "nightshelf.recommendations", pa.schema({"ds": pa.string(), "surface": pa.string()})
    )
    catalog.close()
    with pytest.raises(ConfigError, match="other partitions"):
        check_output(config_of(tmp_path, "iceberg"))


def test_a_catalog_and_a_table_of_ones_own(tmp_path):
    output = {
        "table": "shop.home",
        "catalog": {"name": "mine", "type": "sql", "uri": f"sqlite:///{tmp_path}/mine.db"},
    }
    config = config_of(tmp_path, "iceberg", output=output)
    published = publish(config, "a")
    assert published.table == "shop.home"
    assert (tmp_path / "mine.db").exists()
    assert all(f"{tmp_path}/out/" in path for path in published.files)
    assert open_table(config).current() == published


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"catalog": {"type": "rest", "token": "hunter2"}}, "catalog.token looks like a cred"),
        ({"catalog": {"s3.secret-access-key": "hunter2"}}, "looks like a credential"),
        ({"catalog": {"uri": "postgresql://me:hunter2@host/db"}}, "catalog.uri looks like"),
        ({"catalog": {"auth": {"password": "hunter2"}}}, "catalog.auth is not one value"),
        ({"table": "recommendations"}, "names no table: expected namespace.table"),
        ({"format": "delta", "table": "a.b"}, "output.table is for Iceberg"),
        ({"format": "parquet", "catalog": {"type": "rest"}}, "output.catalog is for Iceberg"),
    ],
)
def test_settings_that_cannot_be(tmp_path, output, message):
    with pytest.raises(ConfigError, match=message) as error:
        config_of(tmp_path, "iceberg", output=output)
    assert "hunter2" not in str(error.value), "a secret is not repeated"


def test_a_remote_iceberg_table_needs_a_catalog(tmp_path):
    config = config_of(tmp_path, "iceberg", output={"path": "memory://bucket/table"})
    with pytest.raises(ConfigError, match=r"output\.catalog is missing"):
        check_output(config)


def test_a_path_that_delta_would_misread(tmp_path):
    config = config_of(tmp_path, "delta", output={"path": str(tmp_path / "100%")})
    with pytest.raises(ConfigError, match="percent sign"):
        check_output(config)


@pytest.mark.parametrize("name", ["a?b", "a#b"])
def test_a_path_that_pyiceberg_would_misread(tmp_path, name):
    config = config_of(tmp_path, "iceberg", output={"path": str(tmp_path / name)})
    with pytest.raises(ConfigError, match=r"where pyiceberg ends the path.*Name another folder"):
        check_output(config)


def test_the_surface_that_means_null(table_format, tmp_path):
    config = config_of(tmp_path, table_format, surface="__HIVE_DEFAULT_PARTITION__")
    with pytest.raises(ConfigError, match="null"):
        check_output(config)
