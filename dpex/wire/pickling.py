"""Pickles with large buffers out of band.

Pickle protocol 5 can pass large buffers outside the stream. The pickler of this module also does
this for torch tensors, which torch's own reducers copy into the stream. dpex uses it to send the
dataset to worker processes, and to send batches back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
import xxhash

from dpex import tuning, user_code
from dpex.errors import SerializationError
from dpex.log import warn
from dpex.wire.classes_by_value import reduce_class
from dpex.wire.local_modules import SCRIPTS
from dpex.wire.mapped_files import set_attributes
from dpex.wire.mapped_memory import Mappings, Readers, UnsharedMemoryError
from dpex.wire.reducers import reduce
from dpex.wire.shared_views import SharedViews

__all__ = [
    "Bytes",
    "Pickled",
    "dump",
    "dump_in_band",
    "give_back_memory",
    "load",
    "own_copy",
    "share_script",
]

_ADVICE = {
    "batch": "Have the dataset, or collate_fn, return something that can be pickled",
    "state": "Have state_dict() return something that can be pickled",
}
_ADVICE_ELSE = (
    "Create it where it is used (a dataset: at the first __getitem__), or leave it out of "
    "__getstate__"
)
_TENSOR_FORMATS = (torch.channels_last, torch.channels_last_3d)


@dataclass(frozen=True)
class Pickled:
    """One pickled object.

    Attributes:
        head: The pickle stream.
        buffers: Its out-of-band buffers, as flat uint8 arrays, in the stream's order. They are
            views of the pickled object's memory until they are copied.
        tensor_slots: The positions of tensors in ``buffers``. Other positions hold other objects
            with out-of-band buffers, mostly numpy arrays.
        image_slots: The positions of PIL images in ``buffers``. PIL keeps pixels in another form,
            so these buffers need no copy.
        object_refs: The Ray object references in the object, in the stream's order.
    """

    head: bytes
    buffers: list[np.ndarray[Any, Any]] = field(default_factory=list)
    tensor_slots: frozenset[int] = frozenset()
    image_slots: frozenset[int] = frozenset()
    object_refs: list[Any] = field(default_factory=list)

    @property
    def slots(self) -> tuple[frozenset[int], frozenset[int]]:
        """``tensor_slots`` and ``image_slots``, in the order of the constructor's arguments."""
        return self.tensor_slots, self.image_slots

    @property
    def digest(self) -> str:
        """The 128-bit XXH3 hash of stream and buffers, in hexadecimal."""
        digest = xxhash.xxh3_128(self.head)
        for buffer in self.buffers:
            digest.update(buffer.data)
        return str(digest.hexdigest())

    @property
    def size_bytes(self) -> int:
        """Total size of stream and buffers in bytes."""
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


def _rebuild_tensor(
    buffer: torch.Tensor | bytearray,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Return a tensor with a dtype, shape and strides in the memory of a flat buffer."""
    if isinstance(buffer, torch.Tensor):
        tensor = buffer.view(dtype).as_strided(size, stride)
    elif len(buffer):
        tensor = torch.frombuffer(buffer, dtype=dtype).as_strided(size, stride)
    else:
        tensor = torch.empty_strided(size, stride, dtype=dtype)
    return tensor.requires_grad_() if requires_grad else tensor


def _rebuild_storage(content: torch.Tensor) -> torch.UntypedStorage:
    """Return a storage of exactly a tensor's bytes, in the tensor's memory."""
    return torch.from_numpy(content.numpy()).untyped_storage()


def _rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _rebuild_memmap(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array as a ``numpy.memmap``, although its memory is not mapped from a file."""
    return array.view(np.memmap)


def _reduce_memory_view(view: memoryview) -> Any:
    """Reduce a memory view to one of a copy; cloudpickle would return its bytes."""
    data = view.tobytes() if view.readonly else bytearray(view.tobytes())
    layout: str | np.dtype[Any] = view.format
    try:
        _rebuild_view(data, layout, view.shape)
    except ValueError:  # the format is not that of one native character
        layout = np.asarray(view).dtype
    return _rebuild_view, (data, layout, view.shape)


def _rebuild_view(
    data: bytes | bytearray, layout: str | np.dtype[Any], shape: tuple[int, ...] | None
) -> memoryview:
    """Return a memory view of flat bytes, with a format and a shape."""
    if isinstance(layout, np.dtype):
        return memoryview(cast(Any, np.frombuffer(data, layout).reshape(cast(Any, shape))))
    view = memoryview(data)
    return view.cast(cast(Any, layout), cast(Any, shape)) if data else view


def _rebuild_image(pixels: Any, *state: Any) -> Any:
    """Return a PIL image from the pixels and the state that PIL pickles."""
    from PIL import Image  # this process may not have imported PIL yet

    image = Image.Image.__new__(Image.Image)
    image.__setstate__([*state, pixels])
    return image


class _Unpickling(threading.local):
    """The state of a thread that unpickles.

    Attributes:
        object_refs: The Ray object references of the ``Pickled`` that the thread unpickles.
    """

    object_refs: Sequence[Any] = ()


_unpickling = _Unpickling()


def _is_rays(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "ray"


def _object_ref(place: int, _: str) -> Any:
    """Return an object reference of the pickle that this thread reads, by its position."""
    return _unpickling.object_refs[place]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` contiguous in memory; a channels-last tensor keeps its order."""
    if tensor.is_contiguous():
        return tensor
    if tensor.dim() in (4, 5) and tensor.is_contiguous(
        memory_format=_TENSOR_FORMATS[tensor.dim() - 4]
    ):
        return tensor
    return tensor.contiguous()


class _Buffers:
    """The large buffers of one pickle.

    They are separate from the pickler. If the callback were a method of the pickler, a reference
    cycle would keep a batch's memory until the next garbage collection.
    """

    def __init__(self, out_of_band_bytes: float) -> None:
        self._out_of_band_bytes = out_of_band_bytes
        self.kept: list[np.ndarray[Any, Any]] = []
        self.slots: dict[str, set[int]] = {"tensor": set(), "image": set()}
        self.object_refs: list[Any] = []
        # Kind and buffer of the last tensor or image, until the pickler passes the buffer on.
        self.expected: tuple[str, pickle.PickleBuffer] | None = None
        self.views = SharedViews()

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large buffer out of band, or return True to leave a small one in the stream."""
        raw = buffer.raw()
        if raw.nbytes < self._out_of_band_bytes:
            return True
        if self.expected is not None and buffer is self.expected[1]:
            self.slots[self.expected[0]].add(len(self.kept))
            self.expected = None
        self.kept.append(np.frombuffer(raw, dtype=np.uint8))
        return False


_script_is_shared = False


def share_script() -> None:
    """Pickle classes and functions of batches by their names in the script, as torch's workers do.

    Call it in a process that multiprocessing has started from the one that unpickles.
    """
    global _script_is_shared
    _script_is_shared = True


def _name_in_script(obj: Any) -> str | None:
    """Return the name of a class or function in the script, or None if it has none there."""
    if obj.__module__ not in SCRIPTS:
        return None
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return str(obj.__qualname__) if found is obj else None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with the bytes of plain CPU tensors and PIL images out of band."""

    def __init__(
        self,
        file: io.BytesIO,
        buffers: _Buffers,
        mappings: Mappings | None = None,
        views: SharedViews | None = None,
    ) -> None:
        self._buffers = buffers
        self._mappings = mappings
        self._views = views
        super().__init__(file, protocol=5, buffer_callback=buffers.take)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce the objects that dpex pickles in a special way; leave all others to cloudpickle.

        These objects are strided CPU tensors (not subclasses), storages, arrays in shared memory,
        mapped memory, caches and locks, and read-only arrays of batches. Further ones are object
        references, PIL images, memory views, open text files, modules of torch, and code.
        """
        if self._mappings is not None:
            reduced = self._mappings.reduce(obj) or reduce(obj)
            if reduced is not None:
                return _with_attributes(obj, reduced) if type(obj) is torch.Tensor else reduced
        kind = type(obj)
        if kind is CodeType:
            return self._reduce_code(obj)
        if kind is torch.Tensor and obj.layout is torch.strided and obj.device.type == "cpu":
            return _with_attributes(obj, self._reduce_tensor(obj))
        if kind is torch.UntypedStorage and obj.device.type == "cpu":
            # Its own reduction copies all bytes into the stream, in a form that torch cannot load.
            return _rebuild_storage, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj),)
        if kind is torch.TypedStorage:
            return _rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
        if kind is np.ndarray and self._mappings is not None and not obj.dtype.hasobject:
            return self._reduce_view(obj)
        if kind is np.memmap:
            return _rebuild_memmap, (obj.view(np.ndarray),)
        if self._mappings is None and kind is np.ndarray and not obj.flags.writeable:
            # The arrays of a batch must be writable, but pickle restores a read-only array as such.
            return obj.copy(order="K").__reduce_ex__(5)
        if self._mappings is not None and kind.__name__ == "ObjectRef" and _is_rays(kind):
            # Ray counts a reference to an object only if Ray itself pickles the reference.
            self._buffers.object_refs.append(obj)
            return _object_ref, (len(self._buffers.object_refs) - 1, obj.hex())
        if kind.__module__ == "PIL.Image" and kind.__qualname__ == "Image":
            return self._reduce_image(obj)
        if kind is memoryview:  # cloudpickle would return its bytes
            return _reduce_memory_view(obj)
        if kind is io.TextIOWrapper and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would return the file's text as of now, all of it in memory.
            raise TypeError(f"cannot pickle the open file {getattr(obj, 'name', obj)!r}")
        if kind is not ModuleType and isinstance(obj, ModuleType):
            # Such as torch.backends.cudnn, which code refers to as soon as it names it.
            name = next((n for n, module in list(sys.modules.items()) if module is obj), None)
            if name not in (None, "__main__", "__mp_main__"):
                return importlib.import_module, (name,)
        if kind is object and self._mappings is not None and id(obj) in self._sentinels:
            return _sentinel, self._sentinels[id(obj)][1:]
        if _script_is_shared and isinstance(obj, type | FunctionType) and self._mappings is None:
            name = _name_in_script(obj)
            if name is not None:
                return name  # pickle then refers to it
        reduced = super().reducer_override(obj)
        if isinstance(obj, type):
            # What a batch brings does not change a class of the process that reads it.
            return reduce_class(obj, reduced, overwrite=self._mappings is not None)
        return reduced

    @functools.cached_property
    def _sentinels(self) -> dict[int, tuple[object, str, str]]:
        """Sentinels such as ``MISSING = object()`` by id, with their modules and names.

        A fork has the same object, and ``is`` compares with it.
        """
        return {
            id(value): (value, module, name)
            for module, content in list(sys.modules.items())
            if module not in ("__main__", "__mp_main__")  # whose code brings its own globals
            for name, value in list(getattr(content, "__dict__", {}).items())
            if type(value) is object
        }

    def _reduce_code(self, code: CodeType) -> Any:
        build, parts = self.dispatch_table[CodeType](code)
        # Since 3.1.3 cloudpickle omits the file name, without which tracebacks show no source
        # lines. Like cloudpickle, copy the string: string interning must not change the pickle.
        return _rebuild_code, (build, parts, "".join(code.co_filename))

    def _reduce_view(self, obj: np.ndarray[Any, Any] | torch.Tensor) -> Any:
        """Reduce an array or a tensor in memory that others share; leave others to pickle."""
        if self._views is not None:
            return self._views.reduce(obj) or NotImplemented
        self._buffers.views.note(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "a non-leaf tensor that requires grad cannot leave its process: autograd does "
                "not cross processes. Call detach() on it first"
            )
        if self._mappings is not None:
            view = self._reduce_view(tensor)
            if view is not NotImplemented:
                return view
        data = tensor.detach()
        # Pickle the elements that expand() repeats only once.
        repeats = [step == 0 for step in data.stride()]
        once = _dense(data[tuple(slice(1) if again else slice(None) for again in repeats)])
        stride = tuple(
            0 if again else step for again, step in zip(repeats, once.stride(), strict=True)
        )
        # as_strided, not reshape: it keeps the bytes in the order of memory.
        flat = once.as_strided((once.numel(),), (1,)) if once.numel() else once.reshape(-1)
        view = pickle.PickleBuffer(cast(Any, flat.view(torch.uint8).numpy()))
        arguments = (
            view,
            data.dtype,
            tuple(data.shape),
            stride,
            tensor.requires_grad,
        )
        self._buffers.expected = ("tensor", view)
        return _rebuild_tensor, arguments

    def _reduce_image(self, image: Any) -> Any:
        *state, pixels = image.__getstate__()
        if len(state) != 4 or not isinstance(pixels, bytes):  # an unknown version of PIL
            return NotImplemented
        view = pickle.PickleBuffer(pixels)
        self._buffers.expected = ("image", view)
        return _rebuild_image, (view, *state)


def _with_attributes(obj: Any, reduced: Any) -> Any:
    """Add an object's attributes, which the user has set, to a reduction without a state."""
    attributes = vars(obj)
    if reduced is NotImplemented or not attributes:
        return reduced
    return (*reduced, dict(attributes), None, None, set_attributes)


def _sentinel(module: str, name: str) -> object:
    with contextlib.suppress(Exception):  # this process has another version of the module
        found: object = getattr(importlib.import_module(module), name)
        if type(found) is object:
            return found
    return object()


def _rebuild_code(build: Callable[..., CodeType], parts: Sequence[Any], filename: str) -> CodeType:
    return build(*parts).replace(co_filename=filename)


def dump(obj: Any, what: str, readers: Readers | None = None) -> Pickled:
    """Pickle ``obj``, with its large buffers out of band.

    Args:
        obj: Any object that cloudpickle can pickle. It pickles classes and functions of
            ``__main__`` by value.
        what: The role of ``obj``, such as ``"dataset"``; the root of the path in an error.
        readers: The processes that will unpickle it. With them, the pickle refers to mapped files
            and shared memory. By default it holds all content.

    Raises:
        SerializationError: A part of ``obj`` cannot be pickled, or its memory cannot be shared with
            the readers. The message names the part's path.

    Source:
        PEP 574 (pickle protocol 5, out-of-band data).
    """
    return _dump_or_explain(obj, what, tuning.OUT_OF_BAND_BYTES, readers)


def dump_in_band(obj: Any, what: str) -> bytes:
    """Pickle ``obj`` as ``dump`` does, but with all buffers in the stream, for ``pickle.loads``."""
    return _dump_or_explain(obj, what, float("inf"), None).head


def _dump_or_explain(
    obj: Any, what: str, out_of_band_bytes: float, readers: Readers | None
) -> Pickled:
    mappings = Mappings(readers) if readers is not None else None
    try:
        pickled = _dump(obj, out_of_band_bytes, mappings)
        if mappings is not None and not mappings.hold:
            # Another thread has unmapped a file. Other memory may have its addresses now.
            mappings = Mappings(cast(Readers, readers))
            pickled = _dump(obj, out_of_band_bytes, mappings)
    except Exception as error:
        path, cause = _unpicklable(obj, what, mappings, error)
        if isinstance(cause, UnsharedMemoryError):
            raise SerializationError(f"{path} cannot be shared with workers: {cause}") from None
        trace = user_code.traceback_from(error.__traceback__)
        raise SerializationError(
            f"{path} cannot be sent between processes: {type(error).__name__}: {error}. "
            f"{_ADVICE.get(what, _ADVICE_ELSE)}"
        ) from (error.with_traceback(trace) if trace is not None else None)
    for copied in mappings.copied if mappings is not None else ():
        path = _path_to(copied, obj, what) or f"{what} (a {type(copied).__qualname__} in it)"
        warn(
            f"{path} is in memory that this process shares with others, but workers read a copy, "
            "which iter() makes",
        )
    return pickled


def _dump(
    obj: Any,
    out_of_band_bytes: float = tuning.OUT_OF_BAND_BYTES,
    mappings: Mappings | None = None,
) -> Pickled:
    script = sys.modules.get("__mp_main__")
    if script is not None and script.__name__ == "__mp_main__":
        # multiprocessing gives the script this name in a process that it spawns. Other processes
        # have no module of this name.
        cloudpickle.register_pickle_by_value(script)
    file, buffers = io.BytesIO(), _Buffers(out_of_band_bytes)
    _Pickler(file, buffers, mappings).dump(obj)
    if mappings is not None and buffers.views.find():
        views, file, buffers = buffers.views, io.BytesIO(), _Buffers(out_of_band_bytes)
        mappings.copied.clear()
        _Pickler(file, buffers, mappings, views).dump(obj)
    if file.tell() >= tuning.LARGE_PICKLE_BYTES:
        give_back_memory()
    slots = buffers.slots
    return Pickled(
        file.getvalue(),
        buffers.kept,
        frozenset(slots["tensor"]),
        frozenset(slots["image"]),
        buffers.object_refs,
    )


Bytes = np.ndarray[Any, Any]
"""Memory as a flat uint8 array."""


def load(pickled: Pickled, take: Callable[[Bytes], Bytes | torch.Tensor] | None = None) -> Any:
    """Unpickle an object, by default into new memory.

    Args:
        pickled: The result of ``dump``. Its buffers may be read-only views.
        take: Function that returns memory with a buffer's bytes, which the object keeps. The
            default copies the buffer. A copy to pinned memory makes a second copy unnecessary.

    Returns:
        The object. By default its arrays and tensors are writable, and no other object shares
        their memory.
    """
    buffers: list[Any] = []
    for slot, buffer in enumerate(pickled.buffers):
        own = buffer if slot in pickled.image_slots else (take or own_copy)(buffer)
        in_tensor = slot in pickled.tensor_slots
        buffers.append(torch.as_tensor(own) if in_tensor else np.asarray(own))
    outer, _unpickling.object_refs = _unpickling.object_refs, pickled.object_refs
    try:
        value = pickle.loads(pickled.head, buffers=buffers)
    except RecursionError as error:
        raise RecursionError(
            f"{error}, while unpickling: an object's __reduce__ or __setstate__ calls itself, or "
            "objects are nested too deeply"
        ) from error
    finally:
        _unpickling.object_refs = outer
    if len(pickled.head) >= tuning.LARGE_PICKLE_BYTES:
        give_back_memory()
    return value


def give_back_memory() -> None:
    """Return the free memory of the C library to the kernel.

    To pickle or unpickle millions of objects, pickle builds a table of all of them. This table is
    larger than any later allocation.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def own_copy(buffer: Bytes) -> Bytes:
    """Return a copy of a buffer, in memory that numpy allocates.

    numpy asks the kernel for huge pages, and torch does not. With small pages, the page faults of a
    new 38 MB batch take four times as long as the copy.
    """
    own = np.empty(buffer.nbytes, dtype=np.uint8)
    np.copyto(own, buffer)
    return own


def _unpicklable(
    obj: Any, path: str, mappings: Mappings | None, error: Exception, depth: int = 0
) -> tuple[str, Exception]:
    """Find the smallest part of ``obj`` that cannot be pickled, in its attributes and items.

    Returns:
        The path and type of the part, and the error from pickling it.
    """
    if depth < 8:
        for step, part in _parts(obj):
            try:
                _dump(part, mappings=mappings)
            except Exception as cause:
                return _unpicklable(part, path + step, mappings, cause, depth + 1)
    return f"{path} (of type {type(obj).__module__}.{type(obj).__qualname__})", error


def _path_to(wanted: Any, obj: Any, path: str, depth: int = 0) -> str | None:
    """Return the path of ``wanted`` in ``obj``, or None if the search does not find it."""
    if obj is wanted:
        return path
    if depth >= 8:
        return None
    paths = (_path_to(wanted, part, path + step, depth + 1) for step, part in _parts(obj))
    return next(filter(None, paths), None)


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(obj):
        names = inspect.getclosurevars(obj)
        for name, value in {**names.globals, **names.nonlocals}.items():
            yield f".<{name}>", value
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{key!r}]", value
    elif isinstance(obj, (list, tuple, set, frozenset)):
        for position, value in enumerate(obj):
            yield f"[{position}]", value
    elif type(obj).__module__.startswith(("ctypes", "multiprocessing.")):
        return  # the user did not define its parts
    elif hasattr(obj, "__dict__") and not isinstance(obj, (type, ModuleType)):
        # If an object defines __getstate__, its pickle holds only that state.
        try:
            state = obj.__getstate__() if hasattr(type(obj), "__getstate__") else obj.__dict__
        except Exception:  # __getstate__ of ``obj`` itself is what fails
            return
        if isinstance(state, dict):
            for name, value in state.items():
                yield f".{name}", value
        yield "", type(obj)
    elif isinstance(obj, type) and obj.__module__ not in sys.stdlib_module_names:
        for name, value in vars(obj).items():
            if inspect.isfunction(value):
                yield f".{name}", value
