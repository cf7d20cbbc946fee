"""Tables with a log in a store that cannot be had: said as of any other input, whatever library
asks. And an Iceberg table by its folder, with the endpoint and credentials of every other path.
"""

from __future__ import annotations

import pytest
import tenacity

from pipelines.storage import storage_errors
from schemas.errors import AccessError, MissingFileError
from tests.factories import write_config, write_inputs
from tests.s3 import environment, s3_server

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ALLOW_HTTP", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(storage_errors, "WAIT", tenacity.wait_none())
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"s3://l-{abs(hash(str(tmp_path))) % 10**12}"
    s3fs.S3FileSystem().mkdir(name)
    yield name
    s3fs.S3FileSystem.clear_instance_cache()


def users_source(form, tmp_path, bucket, server):
    """A users table in the bucket without u003, as a configuration names it."""
    users = write_inputs(tmp_path)["users"]
    kind, _, how = form.partition(" ")
    if kind == "delta":
        root = f"{bucket}/users"
        deltalake.write_deltalake(root, users, storage_options={"AWS_ALLOW_HTTP": "true"})
        options = {"AWS_ALLOW_HTTP": "true"}
        deltalake.DeltaTable(root, storage_options=options).delete("user_id = 'u003'")
        return root if how == "path" else {"delta": root}
    from pyiceberg.catalog import load_catalog

    properties = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"{bucket}/warehouse",
        "s3.endpoint": server,
        "s3.region": "us-east-1",
    }
    catalog = load_catalog("lake", **properties)
    catalog.create_namespace("db")
    table = catalog.create_table("db.users", schema=users.schema)
    table.append(users)
    table.delete("user_id = 'u003'")
    table = catalog.load_table("db.users")
    root = table.metadata.location
    return {
        "path": root,
        "folder": {"iceberg": root},
        "metadata": {"iceberg": table.metadata_location},
        "name": {"iceberg": "db.users", "catalog": {"name": "lake", **properties}},
    }[how]


FORMS = ["delta path", "delta named", "iceberg path", "iceberg folder", "iceberg metadata",
         "iceberg name"]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_environment_is_enough(nightshelf, tmp_path, bucket, server, form):
    """Endpoint and credentials are those that a Parquet file there needs, and no others."""
    source = users_source(form, tmp_path, bucket, server)
    config = write_config(tmp_path, inputs__users=source)
    assert nightshelf("validate", config, "--output", "json").json["problems"] == []
    assert nightshelf("run", config, "--output", "json").json["users_in"] == 39


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_no_credentials_is_exit_2_with_a_remedy(
    nightshelf, tmp_path, bucket, server, monkeypatch, form, command
):
    source = users_source(form, tmp_path, bucket, server)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    config = write_config(tmp_path, inputs__users=source)
    done = nightshelf(command, config, "--output", "json", check=2)
    assert "Unable to locate credentials" in done.out
    assert "Give the credentials or permission it needs" in done.out
    assert "users" in done.out


@pytest.mark.parametrize("form", FORMS)
def test_a_store_that_is_away_is_exit_4(nightshelf, tmp_path, bucket, server, monkeypatch, form):
    source = users_source(form, tmp_path, bucket, server)
    if form == "iceberg name":
        source["catalog"]["s3.endpoint"] = NOBODY
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    s3fs.S3FileSystem.clear_instance_cache()
    config = write_config(tmp_path, inputs__users=source)
    done = nightshelf("run", config, "--output", "json", check=4)
    assert "the store does not answer" in done.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["path", "named"])
def test_a_bucket_that_is_not_there_is_exit_3(nightshelf, tmp_path, bucket, form):
    write_inputs(tmp_path)
    root = f"{bucket}-not/users"
    config = write_config(tmp_path, inputs__users=root if form == "path" else {"delta": root})
    done = nightshelf("run", config, "--output", "json", check=3)
    assert root in done.out


@pytest.mark.parametrize(
    ("answer", "code"), [("UnauthorizedError", 2), ("ForbiddenError", 2), ("ServerError", 4),
                         ("ServiceUnavailableError", 4), ("NoSuchTableError", 3)],
)  # fmt: skip
def test_what_a_catalog_answers_decides_the_exit_code(
    nightshelf, tmp_path, monkeypatch, answer, code
):
    import pyiceberg.exceptions
    from pyiceberg.catalog.sql import SqlCatalog

    def answers(*args):
        raise getattr(pyiceberg.exceptions, answer)("the catalog's words")

    monkeypatch.setattr(SqlCatalog, "load_table", answers)
    write_inputs(tmp_path)
    named = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": str(tmp_path)}
    config = write_config(tmp_path, inputs__users={"iceberg": "db.users", "catalog": named})
    done = nightshelf("run", config, "--output", "json", check=code)
    assert "the catalog's words" in done.out


@pytest.mark.parametrize(
    ("words", "kind"), [("ACCESS_DENIED", AccessError), ("NO_SUCH_BUCKET", MissingFileError),
                        ("NETWORK_CONNECTION", storage_errors.StoreAwayError),
                        ("SLOW_DOWN", storage_errors.StoreAwayError)],
)  # fmt: skip
def test_what_arrow_s_client_of_s3_says_has_its_kind(words, kind):
    error = OSError(f"AWS Error {words} during HeadObject operation: x")
    found = storage_errors.translate(error, "s3://b/x")
    assert type(found) is kind
