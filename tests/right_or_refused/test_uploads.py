"""Uploads in parts that break off: nothing at the final name, no parts behind, a rerun is whole."""

from __future__ import annotations

import polars as pl
import pytest
import tenacity

from pipelines.storage import files, storage_errors
from schemas.errors import StorageError
from tests.factories import write_config, write_inputs
from tests.s3 import environment, s3_server

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

PART = 1 << 10  # bytes, so that files of a test are sent in parts


@pytest.fixture(scope="module")
def server():
    with s3_server(S3_UPLOAD_PART_MIN_SIZE="1") as url:
        yield url


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage_errors, "WAIT", tenacity.wait_none())
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"s3://u-{abs(hash(str(tmp_path))) % 10**12}"
    s3fs.S3FileSystem().mkdir(name)
    yield name
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def small_parts(monkeypatch):
    """Uploads go in parts of `PART` bytes, one after the other."""
    real = s3fs.S3FileSystem._put_file

    async def put(self, *args, **more):
        await real(self, *args, **{**more, "chunksize": PART, "max_concurrency": 1})

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", put)
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps the methods it was made with


class Breaking:
    """Fails a call to the store from the n-th of its kind on, for files below a folder."""

    def __init__(self, monkeypatch, call, number, below):
        self.seen, self.failed, self.off = 0, 0, False
        real = s3fs.S3FileSystem._call_s3

        async def broken(fs, method, *args, **more):
            if not self.off and method == call and below in str(more.get("Key", "")):
                self.seen += 1
                if self.seen >= number:
                    self.failed += 1
                    raise OSError("Connection reset by peer")
            return await real(fs, method, *args, **more)

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", broken)


def uploads_left(bucket):
    pending = s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=bucket[len("s3://") :])
    return pending.get("Uploads") or []


@pytest.mark.parametrize(
    ("where", "call", "number"),
    [("out", "create_multipart_upload", 1), ("out", "upload_part", 1), ("out", "upload_part", 3),
     ("out", "complete_multipart_upload", 2), ("runs", "upload_part", 3),
     ("runs", "complete_multipart_upload", 1)],
)  # fmt: skip
def test_a_run_whose_upload_breaks_off_is_published_by_the_next(
    nightshelf, tmp_path, bucket, monkeypatch, small_parts, call, number, where
):
    write_inputs(tmp_path)
    nightshelf("run", write_config(tmp_path))
    want = pl.read_parquet(tmp_path / "out/**/*.parquet", hive_partitioning=False).drop("run_id")
    changes = {"output__path": f"{bucket}/out", "run__work_dir": f"{bucket}/runs"}
    config = write_config(tmp_path, **changes)
    breaking = Breaking(monkeypatch, call, number, f"{where}/")
    done = nightshelf("run", config, "--output", "json", check=4)
    assert breaking.failed, "it was sent in parts"
    assert "Connection reset by peer" in done.out + done.err
    store = s3fs.S3FileSystem()
    store.invalidate_cache()
    assert uploads_left(bucket) == []
    assert not store.glob(f"{bucket}/out/**/_SUCCESS")
    assert not store.glob(f"{bucket}/out.current/**/0*.json"), "no reader sees any of it"
    breaking.off = True
    nightshelf("run", config)
    store.invalidate_cache()
    (folder,) = store.glob(f"{bucket}/out/ds=*/surface=*")
    frames = []
    for path in store.glob(f"{folder}/*.parquet"):
        with store.open(path, "rb") as handle:
            frames.append(pl.read_parquet(handle.read()))
    found = pl.concat(frames).drop("run_id").sort("user_id", "rank")
    assert found.equals(want.sort("user_id", "rank"))
    assert uploads_left(bucket) == []


@pytest.mark.parametrize("call", ["upload_part", "complete_multipart_upload"])
def test_an_upload_that_breaks_off_leaves_nothing(bucket, monkeypatch, call):
    """Against a server: nothing at the final name, no parts behind, and a second try is whole."""
    path, data = f"{bucket}/folder/large.bin", bytes(range(256)) * (102 << 12)
    calls, real = [], s3fs.S3FileSystem._call_s3

    async def breaking(self, method, *args, **kwargs):
        calls.append(method)
        if method == call:
            raise OSError("Connection reset by peer")
        return await real(self, method, *args, **kwargs)

    monkeypatch.setattr(storage_errors, "WAIT", tenacity.wait_none())
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", breaking)
    with pytest.raises(StorageError) as caught:
        files.write_bytes(path, data)
    assert caught.value.retryable
    assert call in calls, "it was sent in parts"
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", real)
    store = s3fs.S3FileSystem()
    store.invalidate_cache()
    assert not store.exists(path)
    pending = store.call_s3("list_multipart_uploads", Bucket=bucket.removeprefix("s3://"))
    assert not pending.get("Uploads")
    files.write_bytes(path, data)
    assert files.read_bytes(path) == data
