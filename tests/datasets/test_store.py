"""Tests of datasets in an object store, which may be slow or busy, or refuse requests."""

from __future__ import annotations

import gzip
import math
import os
import pickle
import re
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch
from cluster_programs import workplace
from cluster_programs.stores import ENVIRONMENT, KEY, SECRET, Proxy, object_store
from data_files import PICTURES, rows, write_data_files
from torch.utils.data import DataLoader, Subset
from torchvision import datasets
from torchvision import transforms as v1

import dpex.datasets
from dpex import DpexDataLoader
from dpex.datasets import MNIST, FashionMNIST, ImageFolder, Parquet, from_torchvision
from dpex.datasets import store as store_module
from dpex.datasets.store import Store
from dpex.transforms import MappedDataset

OURS = {"distribute_mode": True, "head_address": "local"}

Same = Callable[[Any, Any], None]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Path]]:
    """Start an S3 server; yield its address, and the folder of its bucket."""
    with workplace() as place, object_store(place) as (address, buckets):
        write_data_files(buckets / "bucket")
        yield address, buckets / "bucket"


@pytest.fixture
def proxy(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server[0])
    enter(monkeypatch, proxy.address)
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    enter(monkeypatch, server[0])
    return server[1]


def signed_in(address: str) -> pyarrow.fs.FileSystem:
    """Return a client with credentials, which the environment of worker processes lacks."""
    return pyarrow.fs.S3FileSystem(
        access_key=KEY, secret_key=SECRET, endpoint_override=address, scheme="http"
    )


def enter(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{address}"}.items():
        monkeypatch.setenv(name, value)


def idx(*shape: int) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(math.prod(shape))


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["s3", "path", "file", "pyarrow", "fsspec"])
def test_folders_are_torchvisions(scheme: str, bucket: Path, assert_same: Same) -> None:
    torchs = datasets.ImageFolder(str(bucket / "pictures"), v1.ToTensor(), lambda number: -number)
    uri, filesystem = {
        "s3": ("s3://bucket/pictures", None),
        "path": (bucket / "pictures", None),
        "file": (f"file://{bucket}/pictures", None),
        "pyarrow": (str(bucket / "pictures"), pyarrow.fs.LocalFileSystem()),
        "fsspec": (str(bucket / "pictures"), __import__("fsspec").filesystem("file")),
    }[scheme]
    ours = ImageFolder(uri, v1.ToTensor(), lambda number: -number, filesystem=filesystem)
    assert ours.classes == torchs.classes == ["a", "b", "b-c"]
    assert ours.class_to_idx == torchs.class_to_idx
    assert ours.targets == torchs.targets
    relative = [os.path.relpath(path, bucket / "pictures") for path, _ in torchs.samples]
    assert ours.paths == relative
    if scheme == "path":
        assert ours.samples == ours.imgs == torchs.samples == torchs.imgs
    assert_same([ours[i] for i in range(len(ours))], [torchs[i] for i in range(len(torchs))])
    apart = from_torchvision(ours)
    assert_same(apart[2], torchs[2])


def test_an_oss_store_is_reached_by_variables_of_its_own(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, assert_same: Same
) -> None:
    enter(monkeypatch, "127.0.0.1:9")  # no server listens here
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    for name, value in (
        ("OSS_ENDPOINT", f"http://{server[0]}"),
        ("OSS_ACCESS_KEY_ID", KEY),
        ("OSS_ACCESS_KEY_SECRET", SECRET),
    ):
        monkeypatch.setenv(name, value)
    torchs = datasets.ImageFolder(str(server[1] / "pictures"), v1.ToTensor())
    # Unlike Aliyun's buckets, the buckets of this server have no host names.
    ours = ImageFolder("oss://bucket/pictures?force_virtual_addressing=false", v1.ToTensor())
    assert_same([ours[i] for i in range(len(ours))], [torchs[i] for i in range(len(torchs))])


def test_an_oss_store_is_sent_no_credentials_of_amazons(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("OSS_ACCESS_KEY_ID", KEY),
        ("OSS_ACCESS_KEY_SECRET", SECRET),
        ("OSS_ENDPOINT", "127.0.0.1:9"),
    ):
        with pytest.raises(ValueError, match=f"oss:// needs the environment variable {name}"):
            ImageFolder("oss://bucket/pictures")
        monkeypatch.setenv(name, value)


def test_where_a_bucket_of_amazons_is_amazon_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    asked: list[str] = []

    def region_of(bucket: str) -> str:
        asked.append(bucket)
        return "eu-north-1"

    monkeypatch.setattr(pyarrow.fs, "resolve_s3_region", region_of)  # tests cannot reach Amazon

    def region(uri: str) -> Any:
        return Store(uri)._client()[0].region

    assert region("s3://mine/x") == "eu-north-1"
    assert region("s3://mine/x?region=us-west-2") == "us-west-2"
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    assert region("s3://mine/x") == "ap-south-1"
    monkeypatch.delenv("AWS_REGION")
    Store("s3://mine/x?endpoint_override=127.0.0.1:9")._client()
    assert asked == ["mine"]


@pytest.mark.usefixtures("shared_ray")
def test_workers_read_the_store_themselves(
    bucket: Path, server: tuple[str, Path], assert_same: Same
) -> None:
    dataset = ImageFolder("bucket/pictures", v1.ToTensor(), filesystem=signed_in(server[0]))
    assert len(pickle.dumps(dataset)) < 2_500
    expected = list(DataLoader(datasets.ImageFolder(str(bucket / "pictures"), v1.ToTensor()), 2))
    for loader in (
        DpexDataLoader(dataset, 2, num_workers=2, **OURS),  # type: ignore[arg-type]
        DataLoader(dataset, 2, num_workers=2, multiprocessing_context="fork"),
        DataLoader(dataset, 2, num_workers=1, multiprocessing_context="spawn"),
    ):
        assert_same(list(loader), expected)


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("folder", ["digits", "zipped"])
def test_workers_read_digits_of_the_store(
    folder: str, bucket: Path, server: tuple[str, Path], assert_same: Same
) -> None:
    given: Any = {"train": False, "transform": v1.ToTensor(), "target_transform": float}
    ours = FashionMNIST(f"bucket/{folder}", filesystem=signed_in(server[0]), **given)
    expected = list(DataLoader(datasets.FashionMNIST(str(bucket / "digits"), **given), 40))
    for dataset in (ours, from_torchvision(ours)):
        loader: Any = DpexDataLoader(dataset, 40, num_workers=2, **OURS)
        assert_same(list(loader), expected)


def test_a_batch_reads_its_files_at_the_same_time(
    proxy: Proxy, server: tuple[str, Path], assert_same: Same
) -> None:
    folder = server[1] / "pictures"
    torchs = datasets.ImageFolder(str(folder), v1.ToTensor())
    dataset = ImageFolder("s3://bucket/pictures", v1.ToTensor())
    proxy.first_two = threading.Barrier(2)
    assert_same(dataset.__getitems__([6, -1, 0]), [torchs[i] for i in (6, -1, 0)])
    assert not proxy.first_two.broken
    assert not hasattr(ImageFolder(folder), "__getitems__"), "there is nothing to wait for"


@pytest.mark.usefixtures("shared_ray")
def test_what_a_picture_of_a_store_draws_depends_on_its_place_alone(
    bucket: Path, server: tuple[str, Path], assert_same: Same
) -> None:
    crop = v1.Compose([v1.ToTensor(), v1.RandomCrop(4)])
    dataset = ImageFolder("bucket/pictures", crop, filesystem=signed_in(server[0]))
    drawn = []
    for options in ({"batch_size": 1}, {"batch_size": 3, "num_workers": 2}, {"batch_size": 7}):
        generator = torch.Generator().manual_seed(0)
        options = {"num_workers": 1, "generator": generator, **options}
        loader: Any = DpexDataLoader(dataset, **options, **OURS)
        drawn.append(torch.cat([pictures for pictures, _ in loader]))
    assert_same(drawn[1:], [drawn[0]] * 2)
    assert len({picture.numpy().tobytes() for picture in drawn[0]}) == len(PICTURES)


def test_who_replaces_getitem_is_asked_for_every_sample(bucket: Path) -> None:
    class WithPath(ImageFolder):
        def __getitem__(self, index: Any) -> Any:
            return os.path.relpath(self.samples[index][0], str(self.root))

    loader: Any = DataLoader(WithPath("s3://bucket/pictures"), 2, collate_fn=list)
    assert next(iter(loader)) == ["a/10.png", "a/9.jpeg"]


@pytest.mark.usefixtures("shared_ray")
def test_a_picture_that_cannot_be_read_is_left_out_alone(server: tuple[str, Path]) -> None:
    dataset = ImageFolder("bucket/pictures", v1.ToTensor(), filesystem=signed_in(server[0]))
    dataset.samples[3] = ("bucket/pictures/gone.png", 1)
    loader: Any = DpexDataLoader(dataset, 7, num_workers=1, on_error="skip", max_skipped=1, **OURS)
    [(_, labels)] = loader
    assert labels.tolist() == [*dataset.targets[:3], *dataset.targets[4:]]


@pytest.mark.parametrize("folder", ["digits", "zipped"])
@pytest.mark.parametrize("train", [True, False])
def test_digits_are_torchvisions(folder: str, train: bool, bucket: Path, assert_same: Same) -> None:
    torchs = datasets.FashionMNIST(str(bucket / "digits"), train, v1.ToTensor())
    ours = FashionMNIST(f"s3://bucket/{folder}", train, v1.ToTensor())
    assert_same(ours.targets, torchs.targets)
    assert_same(ours.data, torchs.data)
    for name in ("FashionMNIST", "MNIST"):
        classes = getattr(datasets, name).classes
        assert list(getattr(dpex.datasets, name).classes) == classes
    assert ours.class_to_idx == torchs.class_to_idx
    assert_same(
        [ours[i] for i in range(0, len(ours), 50)], [torchs[i] for i in range(0, len(ours), 50)]
    )
    assert_same(ours[-1], torchs[-1])
    plain = FashionMNIST(f"s3://bucket/{folder}", train)
    assert_same(plain[3], datasets.FashionMNIST(str(bucket / "digits"), train)[3])


def test_rows_are_those_of_the_files(bucket: Path) -> None:
    expected = pa.concat_tables([rows(100 * number, 70) for number in range(3)]).to_pylist()
    dataset = Parquet("s3://bucket/rows")
    assert len(dataset) == 210
    assert dataset.columns == ["number", "share", "name", "tokens", "bytes"]
    order = np.random.default_rng(0).permutation(210)
    for batch in (order[:40], order[:1], [209, 0, 0, -1]):
        for row, index in zip(dataset.__getitems__(batch), batch, strict=True):
            assert row["tokens"].tolist() == expected[index]["tokens"]
            assert {**row, "tokens": 0} == {**expected[index], "tokens": 0}
    assert Parquet("s3://bucket/spark.parquet")[2]["number"] == 7
    some = Parquet(bucket / "rows" / "1.parquet", columns=["share", "number"])
    assert some[3] == {"number": 103, "share": 103 / 7}
    with pytest.raises(IndexError, match=re.escape("index 70 is out of range for 70 rows")):
        some[70]
    [batch] = DataLoader(Subset(some, [5, 1]), 2)
    assert batch["number"].tolist() == [105, 101]


@pytest.mark.usefixtures("shared_ray")
def test_a_batch_reads_a_row_group_once(proxy: Proxy, assert_same: Same) -> None:
    dataset = Parquet(
        "bucket/rows", columns=["number"], kept_groups=1, filesystem=signed_in(proxy.address)
    )
    before = len(proxy.requests)
    dataset.__getitems__([0, 150, 1, 151, 2, 152])
    once = len(proxy.requests) - before
    before = len(proxy.requests)
    for index in (0, 150, 1, 151):
        dataset[index]
    assert len(proxy.requests) - before == 2 * once
    expected = list(DataLoader(dataset, 32))
    ours: Any = DpexDataLoader(dataset, 32, num_workers=2, **OURS)
    assert_same(list(ours), expected)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults", [["busy"] * 2, ["", "short"], ["", "reset", "short"], ["reset", "busy"]], ids=str
)
def test_a_busy_store_is_asked_again(proxy: Proxy, faults: list[str], server: Any) -> None:
    proxy.faults = list(faults)
    content = Store("s3://bucket/pictures").read("b/z.png")
    assert content == (server[1] / "pictures" / "b" / "z.png").read_bytes()
    assert not proxy.faults


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize(
    ("kind", "folder", "batch_size"),
    [(ImageFolder, "pictures", 2), (Parquet, "rows", 32)],
)
def test_workers_read_a_busy_store_to_the_end(
    kind: Any, folder: str, batch_size: int, proxy: Proxy, assert_same: Same
) -> None:
    given = {"columns": ["number"]} if kind is Parquet else {}
    dataset = kind(f"bucket/{folder}", filesystem=signed_in(proxy.address), **given)
    if kind is not Parquet:
        dataset = MappedDataset(dataset, v1.PILToTensor())
    expected = list(DataLoader(dataset, batch_size))
    proxy.faults = ["busy", "short"]  # Arrow's default client sends a request three times
    ours: Any = DpexDataLoader(dataset, batch_size, num_workers=2, **OURS)
    assert_same(list(ours), expected)
    assert not proxy.faults


@pytest.mark.usefixtures("shared_ray")
def test_a_folder_is_listed_once_whoever_reads_it_how_often(proxy: Proxy) -> None:
    dataset = ImageFolder("bucket/pictures", v1.ToTensor(), filesystem=signed_in(proxy.address))
    listings = list(proxy.listings)
    assert listings
    loader: Any = DpexDataLoader(dataset, 2, num_workers=2, shuffle=True, **OURS)
    before = len(proxy.requests)
    for _ in range(2):
        assert sum(len(labels) for _, labels in loader) == len(PICTURES)
    assert proxy.listings == listings
    read = [path for kind, path in proxy.requests[before:] if kind == "GET"]
    assert len(read) == 2 * len(PICTURES), "through the server that counts"


def test_a_store_that_stays_busy_is_an_error(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_ATTEMPTS", 2)
    proxy.faults = ["busy"] * 1_000
    with pytest.raises(OSError, match=r"^s3://bucket/pictures/b/z.png cannot be read: .*503"):
        Store("s3://bucket/pictures").read("b/z.png")
    assert len(proxy.requests) == 2, "dpex does not repeat the client's retries"


@pytest.mark.parametrize("fault", ["denied", "elsewhere"])
def test_a_refusal_is_told_at_once_and_shows_no_secret(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    dataset = ImageFolder("s3://bucket/pictures")
    before = len(proxy.requests)
    proxy.faults = [fault] * 20
    with pytest.raises(OSError, match=r"^s3://bucket/pictures/a/10.png cannot be read") as caught:
        dataset[0]
    assert len(proxy.requests) - before == 1, "asking again does not help"
    proxy.faults = []
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(OSError, match="cannot be read") as refused:
        ImageFolder("s3://bucket/pictures")
    for text in (str(caught.value), str(refused.value), repr(dataset.__dict__)):
        assert "secret" not in text
        assert KEY not in text


@pytest.mark.extended
@pytest.mark.usefixtures("shared_ray")
def test_google_s_store_is_not_asked_for_ever_where_nobody_can_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_ROOT", "127.0.0.1:9")  # no server listens here
    with pytest.raises(OSError, match=r"gs://bucket/pictures cannot be read: .*access token"):
        ImageFolder("gs://bucket/pictures")


def test_a_missing_key_is_named_also_by_a_worker_and_shows_no_secret(
    server: tuple[str, Path], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    dataset = ImageFolder("bucket/pictures", v1.ToTensor(), filesystem=signed_in(server[0]))
    dataset.samples[3] = ("bucket/pictures/gone.png", 1)
    shown = repr(vars(dataset))
    for loader in (DataLoader(dataset, 2), DpexDataLoader(dataset, 2, num_workers=1, **OURS)):  # type: ignore[arg-type]
        said = r"bucket/pictures/gone\.png does not exist"
        with pytest.raises(FileNotFoundError, match=said) as caught:
            list(loader)
        shown += "".join(traceback.format_exception(caught.value))
    printed = capfd.readouterr()
    shown += caplog.text + printed.out + printed.err
    assert "gone.png" in shown
    assert KEY not in shown
    assert SECRET not in shown


def test_a_slow_store_is_waited_for(proxy: Proxy) -> None:
    proxy.delay_s = 3.5  # longer than Arrow's default of 3 s
    assert len(Store("s3://bucket/pictures").read("b/z.png")) > 100
    assert [kind for kind, _ in proxy.requests] == ["HEAD", "GET"]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda _: ImageFolder("s3://key:word@bucket/x"),
            ValueError,
            "must not contain credentials",
        ),
        (lambda _: ImageFolder("s3://bucket/x?key=3"), ValueError, "unknown options ['key']"),
        (
            lambda _: ImageFolder("s3://bucket/rows"),
            FileNotFoundError,
            "Couldn't find any class folder in s3://bucket/rows",
        ),
        (
            lambda _: ImageFolder("s3://bucket/none"),
            FileNotFoundError,
            "s3://bucket/none does not exist",
        ),
        (lambda _: ImageFolder("/none/there"), FileNotFoundError, "directory: '/none/there'"),
        (
            lambda place: ImageFolder(empty_class(place)),
            FileNotFoundError,
            "Found no valid file for the classes eel.",
        ),
        (lambda _: MNIST("s3://bucket/digits"), FileNotFoundError, "MNIST/raw/train-labels"),
        (lambda place: MNIST(write(place, b"\0\0\x09\x01")), ValueError, "begins with 00000901"),
        (lambda place: MNIST(write(place, idx(9, 28, 28))), ValueError, "begins with 00000803"),
        (lambda place: MNIST(write(place, idx(9)[:7])), ValueError, "has 7 bytes"),
        (lambda place: MNIST(write(place, b"plain", ".gz")), ValueError, "cannot be unzipped: Not"),
        (
            lambda place: MNIST(write(place, gzip.compress(idx(9))[:-9], ".gz")),
            ValueError,
            "train-labels-idx1-ubyte.gz cannot be unzipped",
        ),
        (
            lambda place: MNIST(write(place, b"\0\0\x08\x01\0\0\0\x05abc")),
            ValueError,
            "has 3 bytes of content, but its header says [5]",
        ),
        (lambda _: Parquet("s3://bucket/zipped"), FileNotFoundError, "no *.parquet"),
        (
            lambda _: Parquet("s3://bucket/rows", ["nme"]),
            ValueError,
            "columns ['nme'] do not exist",
        ),
        (lambda _: Parquet("s3://bucket/rows", "number"), TypeError, "Pass ['number']"),
        (lambda _: Parquet("s3://bucket/rows", []), ValueError, "at least one name"),
        (lambda _: Parquet("s3://bucket/rows", kept_groups=0), ValueError, ">= 1, got 0"),
        (lambda place: Parquet(unlike(place)), ValueError, "b.parquet has columns ['y']"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_bad_input_is_told_at_once(
    make: Callable[[Path], Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        make(tmp_path)


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (idx(8, 28, 28), "has 8 images, but 9 labels"),
        (idx(10, 28, 28), "has 10 images, but 9 labels"),
        (idx(9), "images-idx3-ubyte is not in IDX format: it begins with 00000801"),
    ],
)
def test_images_that_are_not_those_of_the_labels(images: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images)
    with pytest.raises(ValueError, match=re.escape(says)):
        MNIST(write(tmp_path, idx(9)))


@pytest.mark.parametrize("name", ["my set", "run#3", "q?x", "100%", "data:v2", "a%20b", "é"])
def test_a_path_is_taken_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name / "rows.parquet").parent.mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / name / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    local = pyarrow.fs.LocalFileSystem()
    beside: dict[str, Any] = {"filesystem": fsspec.filesystem("file")}
    for dataset in (
        Parquet(tmp_path / name),
        Parquet(name),
        Parquet((tmp_path / name).as_uri()),
        Parquet(tmp_path / name, filesystem=local),
        Parquet(tmp_path / name, **beside),
        Parquet(name, **beside),
        Parquet(f"file://{tmp_path / name}", **beside),
    ):
        assert [row["x"] for row in dataset.__getitems__([0, 1])] == [1, 2]


def test_a_file_system_in_memory_takes_paths_of_both_kinds() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a/1.pgm", "b/2.pgm"):
        memory.pipe(f"/pictures/{name}", b"P5 1 1 255 x")
    for uri in ("pictures", "/pictures/", "memory://pictures"):
        dataset = ImageFolder(uri, filesystem=memory)
        assert dataset.classes == ["a", "b"]
        assert dataset[1][0].size == (1, 1)
    assert ImageFolder("memory://pictures").classes == ["a", "b"]
    memory.rm("/pictures", recursive=True)


@pytest.mark.parametrize(
    "uri",
    [
        "simplecache::s3://AKIA:hidden-one@bucket/x",
        "zip://a.zip::https://user:hidden-one@host/x",
        "https://hidden-one@host/x",
        "s3://hidden-one@bucket",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(ValueError, match="credentials") as caught:
        Store(uri)
    assert "hidden" not in str(caught.value)


def test_a_signed_uri_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(fsspec.get_filesystem_class("file")):  # type: ignore[misc]
        protocol = "refuses"

        def info(self, path: str, **_: Any) -> Any:
            raise self.error(f"no, {path} with sig=hidden-one")

    fsspec.register_implementation("refuses", Refuses, clobber=True)
    for error in (ValueError, PermissionError):
        monkeypatch.setattr(Refuses, "error", error, raising=False)
        with pytest.raises(OSError, match="…") as caught:
            Store("refuses://host/x?sig=hidden-one").is_file()
        assert "hidden" not in str(caught.value)
        assert caught.value.__suppress_context__, "which has it"
    signed = Store("https://host/x?sig=hidden-one", fsspec.filesystem("https"))
    assert signed.uri == "https://host/x"
    assert repr(signed) == "Store('https://host/x')"
    assert signed._client()[1] == "https://host/x?sig=hidden-one"


def test_hidden_files_are_no_rows_and_a_broken_one_is_named(tmp_path: Path) -> None:
    for name in ("rows", ".ipynb_checkpoints/rows", "_delta/rows", "._rows"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / f"{name}.parquet")
    assert len(Parquet(tmp_path)) == 2
    (tmp_path / "worse.parquet").write_bytes(b"no rows")
    with pytest.raises(pa.ArrowInvalid) as caught:
        Parquet(tmp_path)
    assert caught.value.__notes__ == [f"{tmp_path}/worse.parquet was being read"]


def test_only_an_integer_is_the_number_of_a_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [0, 1, 2]}), tmp_path / "rows.parquet")
    rows = Parquet(tmp_path / "rows.parquet")
    for index in (1, -2, np.int64(1), torch.tensor(1)):
        assert rows[index] == {"a": 1}
    for index in (1.7, np.float32(1), "1"):
        with pytest.raises(TypeError):
            rows[index]


def test_lists_with_nulls_keep_their_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[2**60 + 1, None], [7]]}), tmp_path / "rows.parquet")
    first, second = Parquet(tmp_path).__getitems__([0, 1])
    assert first["ids"] == [2**60 + 1, None]
    assert second["ids"].dtype == np.int64


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["abc", None, "longer than the twelve bytes of a view"], pa.string_view()),
        pa.array([b"abc", b"", None], pa.binary_view()),
        pa.array(["x", "y", "x"]).dictionary_encode(),
        pa.array([{"a": "b"}, None, {"a": None}], pa.struct([("a", pa.string_view())])),
        pa.array([["a"], [], None], pa.list_(pa.string_view())),
    ],
    ids=lambda column: str(column.type),
)
def test_views_and_dictionaries_are_pyarrow_s_values(tmp_path: Path, column: Any) -> None:
    pq.write_table(pa.table({"column": column}), tmp_path / "rows.parquet")
    dataset = Parquet(tmp_path)
    rows = dataset.__getitems__([2, 0, 1])
    expected = pq.read_table(tmp_path)["column"].to_pylist()
    assert [row["column"] for row in rows] == [expected[2], *expected[:2]]


@pytest.mark.extended
def test_a_row_group_may_hold_more_than_arrow_can_join(tmp_path: Path) -> None:
    mebibytes = 48
    parts = [pa.array([bytes([number]) * (mebibytes << 20)], pa.binary()) for number in range(46)]
    table = pa.table({"picture": pa.chunked_array(parts), "number": list(range(46))})
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    assert pq.read_metadata(path).row_group(0).total_byte_size > 2 << 30
    del parts, table
    rows = Parquet(path).__getitems__([45, 0, 20])
    assert [(row["picture"][0], row["number"]) for row in rows] == [(45, 45), (0, 0), (20, 20)]


def test_no_file_is_left_out_for_its_name_or_for_a_link(tmp_path: Path) -> None:
    folder = empty_class(tmp_path)
    strange = os.fsencode(folder) + b"/eel/\xff.png"
    Path(os.fsdecode(strange)).write_bytes((folder / "cat" / "1.png").read_bytes())
    (folder / "eel" / "gone.png").symlink_to("nowhere.png")
    (folder / "link").symlink_to("cat")
    torchs, ours = datasets.ImageFolder(str(folder)), ImageFolder(folder)
    found = {str(Path(path).relative_to(folder)): label for path, label in torchs.samples}
    assert ours.samples == torchs.samples
    assert dict(zip(ours.paths, ours.targets, strict=True)) == found
    place = list(ours.paths).index(os.fsdecode(b"eel/\xff.png"))
    assert ours[place][0].size == ours[0][0].size
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        ours[list(ours.paths).index("eel/gone.png")]


def test_which_files_are_pictures_is_asked_with_the_whole_path(tmp_path: Path) -> None:
    folder = empty_class(tmp_path)
    (folder / "eel" / "1.bin").write_bytes(b"P5 1 1 255 x")
    (folder / "eel" / "2.bin").write_bytes(b"no picture")
    dataset = ImageFolder(folder, is_valid_file=lambda path: Path(path).stat().st_size > 0)
    assert list(dataset.paths) == ["cat/1.png", "eel/1.bin", "eel/2.bin"]
    with pytest.raises(PIL.UnidentifiedImageError) as caught:
        dataset[2]
    assert caught.value.__notes__ == [f"{folder}/eel/2.bin was being read"]


def test_a_class_may_be_empty_where_that_is_said(tmp_path: Path, assert_same: Same) -> None:
    folder = empty_class(tmp_path)
    torchs = datasets.ImageFolder(root=str(folder), allow_empty=True)
    ours = ImageFolder(root=folder, allow_empty=True)
    assert ours.class_to_idx == torchs.class_to_idx == {"cat": 0, "eel": 1}
    assert ours.samples == torchs.samples
    (folder / "cat" / "1.png").unlink()
    assert len(ImageFolder(folder, allow_empty=True)) == 0
    with pytest.raises(FileNotFoundError, match="Couldn't find any class folder"):
        ImageFolder(folder / "cat", allow_empty=True)


def test_too_large_a_picture_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(PIL.Image.DecompressionBombError) as caught:
        ImageFolder(empty_class(tmp_path), allow_empty=True)[0]
    assert caught.value.__notes__ == [f"{tmp_path}/cat/1.png was being read"]


@pytest.mark.usefixtures("shared_ray")
def test_images_that_are_exchanged_travel(bucket: Path, assert_same: Same) -> None:
    torchs = datasets.FashionMNIST(str(bucket / "digits"), transform=v1.ToTensor())
    ours = FashionMNIST(root=bucket / "digits", transform=v1.ToTensor())
    for dataset in (torchs, ours):
        dataset.data, dataset.targets = 255 - dataset.data[:20], dataset.targets[:20]
    expected = list(DataLoader(torchs, 5))
    assert_same(list(DpexDataLoader(ours, 5, num_workers=2, **OURS)), expected)  # type: ignore[arg-type]
    assert torch.equal(pickle.loads(pickle.dumps(ours)).data, torchs.data)


def empty_class(place: Path) -> Path:
    (place / "cat").mkdir()
    (place / "eel").mkdir()
    PIL.Image.new("L", (3, 3)).save(place / "cat" / "1.png")
    return place


def write(place: Path, content: bytes, ending: str = "") -> Path:
    (place / f"train-labels-idx1-ubyte{ending}").write_bytes(content)
    return place


def unlike(place: Path) -> Path:
    for file, column in (("a", "x"), ("b", "y")):
        pq.write_table(pa.table({column: [1]}), place / f"{file}.parquet")
    return place
