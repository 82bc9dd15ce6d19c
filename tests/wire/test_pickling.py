"""Tests of pickling: the user's own modules, the lifetime of buffers, and images."""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import pickle
import subprocess
import sys
import traceback
import types
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import PIL.Image
import pytest
import torch

from dpex.errors import SerializationError
from dpex.wire.local_modules import by_value
from dpex.wire.mapped_memory import Readers
from dpex.wire.pickling import Pickled, dump, dump_in_band, load

HELPER = """
import numpy
SCALE = 3
def scaled(index):
    return float(numpy.float64(index * SCALE))
"""
MAIN = """
import own_helper
from own_helper import scaled
class Dataset:
    def __getitem__(self, index):
        return scaled(index) + own_helper.SCALE
"""
# A program that unpickles a dataset and reads a sample, but cannot import the dataset's modules.
READ = "import pickle, sys; print(pickle.load(sys.stdin.buffer)[2])"


@pytest.fixture(params=["directory", "archive"])
def own_module(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> object:
    if request.param == "directory":
        (tmp_path / "own_helper.py").write_text(HELPER)
        (tmp_path / "own_dataset.py").write_text(MAIN)
        monkeypatch.syspath_prepend(tmp_path)
    else:
        with zipfile.ZipFile(tmp_path / "own.zip", "w") as file:
            file.writestr("own_helper.py", HELPER)
            file.writestr("own_dataset.py", MAIN)
        monkeypatch.syspath_prepend(tmp_path / "own.zip")
    yield importlib.import_module("own_dataset")
    for name in ("own_dataset", "own_helper"):
        del sys.modules[name]


def read_elsewhere(data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", READ], input=data, capture_output=True, check=False
    )


def test_modules_beside_the_script_travel_by_value(own_module: object) -> None:
    dataset = own_module.Dataset()  # type: ignore[attr-defined]
    assert b"No module named 'own_dataset'" in read_elsewhere(dump_in_band(dataset, "x")).stderr
    with by_value():
        data = dump_in_band(dataset, "dataset")
    done = read_elsewhere(data)
    assert done.stdout.strip() == b"9.0", done.stderr
    assert b"own_dataset" in pickle.dumps(type(dataset)), "by reference again afterwards"


def test_installed_modules_stay_references(own_module: object) -> None:
    with by_value():
        registered = cloudpickle.list_registry_pickle_by_value()
    assert {"own_dataset", "own_helper"} <= set(registered)
    assert not {"numpy", "torch", "pytest", "dpex", "json"} & {
        name.partition(".")[0] for name in registered
    }
    assert not cloudpickle.list_registry_pickle_by_value()


def test_a_distribution_in_a_directory_of_its_own_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after ``pip install --target``, and in the wheels of a PEX file."""
    (tmp_path / "target_helper.py").write_text(HELPER)
    (tmp_path / "target_dataset.py").write_text(MAIN.replace("own_helper", "target_helper"))
    record = tmp_path / "target_helper-1.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("target_helper.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("target_dataset")
    with by_value():
        registered = cloudpickle.list_registry_pickle_by_value()
    for name in ("target_dataset", "target_helper"):
        del sys.modules[name]
    assert "target_dataset" in registered
    assert "target_helper" not in registered


def test_an_error_shows_no_frames_of_picklers() -> None:
    with pytest.raises(SerializationError, match=r"^loader\[0\] \(of type builtins.gen") as info:
        dump([(row for row in ())], "loader")
    assert "cloudpickle" not in "".join(traceback.format_exception(info.value))


class Refuses:
    def __getstate__(self) -> Any:
        return self.connection()

    def connection(self) -> Any:
        raise TypeError("a session cannot be pickled")


def test_an_error_of_the_user_s_getstate_keeps_the_user_s_frames() -> None:
    with pytest.raises(SerializationError, match="a session cannot be pickled") as info:
        dump([Refuses()], "loader")
    cause = info.value.__cause__
    assert isinstance(cause, TypeError)
    frames = traceback.extract_tb(cause.__traceback__)
    assert [frame.name for frame in frames] == ["__getstate__", "connection"]


def test_a_pickled_batch_is_freed_with_its_last_reference() -> None:
    """Otherwise every worker process would hold many batches until a garbage collection."""
    batch = np.ones(1_000_000, dtype=np.uint8)
    alive = weakref.ref(batch)
    gc.disable()
    try:
        pickled = dump([batch], "batch")
        assert pickled.buffers
        del batch, pickled
        assert alive() is None
    finally:
        gc.enable()


def test_an_image_is_unpickled_where_nobody_has_loaded_pil() -> None:
    pickled = dump(PIL.Image.new("RGB", (50, 40)), "batch")
    program = (
        "import pickle, sys; from dpex.wire.pickling import Pickled, load;"
        "assert 'PIL.Image' not in sys.modules;"
        "head, buffer = pickle.load(sys.stdin.buffer);"
        "print(load(Pickled(head, [buffer], image_slots=frozenset({0}))).size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps((pickled.head, pickled.buffers[0])),
        capture_output=True,
        check=False,
    )
    assert done.stdout.strip() == b"(50, 40)", done.stderr


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16"])
def test_images_travel_as_one_buffer_and_are_their_own(
    mode: str, assert_same: Callable[[Any, Any], None]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 4), dtype=np.uint8)
    image = PIL.Image.fromarray(pixels).convert("RGBA" if mode == "LA" else "RGB")
    if mode == "I;16":
        image = PIL.Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    elif mode == "P":
        image = image.quantize(16)
    else:
        image = image.convert(mode)
    image.info["dpi"] = (72, 72)
    pickled = dump([image, image], "batch")
    assert len(pickled.buffers) == len(pickled.image_slots) == 1
    assert len(pickled.head) < 2_000
    memory = pickled.buffers[0].copy()
    there = Pickled(pickled.head, [memory], image_slots=pickled.image_slots)
    first, second = load(there)
    memory[:] = 0
    assert first is second
    assert_same(first, pickle.loads(pickle.dumps(image)))
    assert first.info == {**image.info}


class Outer:
    class Inner:
        pass


def test_a_class_that_travels_by_value_keeps_its_qualified_name() -> None:
    class Local:
        pass

    with by_value_of_this_module():
        for kind in (Outer, Outer.Inner, Local):
            assert load(dump(kind(), "dataset")).__class__.__qualname__ == kind.__qualname__


def test_a_module_s_sentinel_is_the_same_object_in_a_dataset_s_copy() -> None:
    module: Any = types.ModuleType("of_sentinels")
    module.MISSING, unknown = object(), object()
    dataset = {"default": [module.MISSING] * 2, "other": unknown}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "of_sentinels", module)
        pickled = dump(dataset, "dataset", Readers(same_host=True))
        read = load(pickled)
        assert read["default"] == [module.MISSING] * 2
        assert read["other"] is not unknown
        del module.MISSING
        first, second = load(pickled)["default"]
        assert first is second


@contextlib.contextmanager
def by_value_of_this_module() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_an_open_text_file_is_refused(tmp_path: Path) -> None:
    says = r"dataset\.file .*open file .*lines\.txt"
    with (
        (tmp_path / "lines.txt").open("w+") as file,
        pytest.raises(SerializationError, match=says),
    ):
        dump(types.SimpleNamespace(file=file), "dataset")


def test_the_standard_streams_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert load(dump([sys.stdout], "dataset")) == [sys.__stdout__]


@pytest.mark.parametrize(
    "view",
    [
        memoryview(array.array("i", range(1000, 1012))),
        memoryview(np.arange(6.0).reshape(2, 3)),
        memoryview(np.arange(12)[::2]),
        memoryview(np.zeros(2, "c16")),
        memoryview(np.arange(3, dtype=">i4")),
        memoryview(np.zeros(2, [("a", "i4"), ("b", "f8")])),
        memoryview(bytearray(b"writable")),
        memoryview(b"readonly"),
        memoryview(b""),
    ],
    ids=lambda view: f"{view.format}{list(view.shape)}",
)
def test_a_memory_view_keeps_its_format_and_shape(view: memoryview) -> None:
    found = load(dump([view], "dataset"))[0]
    assert found.tobytes() == view.tobytes()
    assert (found.format, found.shape, found.readonly) == (view.format, view.shape, view.readonly)


def test_code_may_name_any_module_of_torch() -> None:
    """Some modules of torch have classes of their own, and cloudpickle finds them in code."""
    names = {"torch": torch, "__name__": "__main__"}
    exec(
        "def settings():\n"
        "    torch.backends.cuda.matmul\n"
        "    torch.ops.aten\n"
        "    return torch.backends.cudnn, torch.backends.mkldnn, torch.ops\n",
        names,
    )
    settings = names["settings"]
    assert load(dump(settings, "worker_init_fn"))() == settings()
    assert load(dump([torch.backends.cudnn], "dataset")) == [torch.backends.cudnn]


HERE = Readers(same_host=True)


class Noted(torch.Tensor):
    pass


def slot_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares memory with an attribute of it."""
    tensor.part = tensor[1:]  # type: ignore[attr-defined]
    return tensor


TENSORS: dict[str, Callable[[], Any]] = {
    "small": lambda: torch.arange(4.0),
    "large": lambda: torch.zeros(1 << 16),
    "empty": lambda: torch.zeros(0),
    "requires grad": lambda: torch.zeros(4, requires_grad=True),
    "bfloat16": lambda: torch.zeros(4, dtype=torch.bfloat16),
    "transposed": lambda: torch.zeros(4, 3).t(),
    "conjugated": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(4)),
    "buffer": lambda: torch.nn.Buffer(torch.zeros(4)),
    "subclass": lambda: torch.zeros(4).as_subclass(Noted),
    "with a view": lambda: slot_of(torch.arange(4.0)),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("readers", [None, HERE], ids=["batch", "dataset"])
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_keeps_its_class_its_attributes_and_its_content(
    kind: str, readers: Readers | None
) -> None:
    tensor: Any = TENSORS[kind]()
    tensor.tag, tensor.weights = "yes", {"a": torch.ones(2)}
    read = load(dump([tensor, tensor], "x", readers))
    assert read[0] is read[1]
    assert type(read[0]) is type(tensor)
    assert vars(read[0]).keys() == vars(tensor).keys()
    assert read[0].tag == "yes"
    assert torch.equal(read[0].weights["a"], torch.ones(2))
    assert read[0].requires_grad == tensor.requires_grad
    if kind != "sparse":
        assert torch.equal(read[0], tensor)


def test_a_tensor_may_be_an_attribute_of_itself() -> None:
    tensor: Any = torch.zeros(4)
    tensor.own = tensor
    for readers in (None, HERE):
        read = load(dump(tensor, "x", readers))
        assert read.own is read


@pytest.mark.parametrize("readers", [None, HERE], ids=["batch", "dataset"])
@pytest.mark.parametrize("size", [0, 3, 1 << 20])
def test_a_storage_keeps_its_type_and_its_bytes(size: int, readers: Readers | None) -> None:
    storage = torch.arange(size, dtype=torch.uint8).untyped_storage()
    pickled = dump([storage, storage], "x", readers)
    assert len(pickled.head) < 10_000, "large bytes are out of band"
    first, second = load(pickled)
    assert first is second
    assert type(first) is torch.UntypedStorage
    assert first.tolist() == storage.tolist()
    before = storage.tolist()
    first.fill_(7)
    assert storage.tolist() == before


@pytest.mark.parametrize("readers", [None, HERE], ids=["batch", "dataset"])
def test_a_typed_storage_keeps_its_dtype(readers: Readers | None) -> None:
    storage = torch.FloatStorage([1, 2])
    read = load(dump(storage, "x", readers))
    assert type(read) is type(storage)
    assert read.dtype is torch.float32
    assert read.tolist() == [1, 2]
