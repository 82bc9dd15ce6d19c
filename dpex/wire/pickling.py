"""Pickles whose arrays travel beside them, not inside.

Pickle protocol 5 hands large buffers out of band. This pickler does so for torch tensors too,
which torch's own reducers would copy into the stream. Both directions use it: the dataset on its
way to the workers, and batches on their way back.
"""

from __future__ import annotations

import ctypes
import inspect
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
import xxhash

from dpex.errors import SerializationError
from dpex.wire.mapped_memory import Mappings, Readers, UnsharedMemoryError
from dpex.wire.reducers import reduce

__all__ = [
    "Pickled",
    "dump",
    "dump_in_band",
    "give_back_memory",
    "load",
    "own_copy",
]

# A smaller buffer stays in the stream: one more out-of-band buffer costs more than its copy.
_OUT_OF_BAND_BYTES = 2048
# Of a list of a million small objects, about.
_LARGE_STREAM_BYTES = 16 << 20
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
        tensor_slots: The positions in ``buffers`` that hold tensors; the others hold whatever
            else offers out-of-band buffers (numpy arrays, mostly).
        image_slots: The positions of PIL's images, which keep their pixels in another form, and
            so need no copy of the buffer.
        object_refs: The Ray object references in it, in the stream's order.
    """

    head: bytes
    buffers: list[np.ndarray[Any, Any]] = field(default_factory=list)
    tensor_slots: frozenset[int] = frozenset()
    image_slots: frozenset[int] = frozenset()
    object_refs: list[Any] = field(default_factory=list)

    @property
    def slots(self) -> tuple[frozenset[int], frozenset[int]]:
        """Both kinds of slots, in the order of the constructor's arguments."""
        return self.tensor_slots, self.image_slots

    @property
    def digest(self) -> str:
        """128 bits (XXH3) that stand for the contents: equal where those are."""
        digest = xxhash.xxh3_128(self.head)
        for buffer in self.buffers:
            digest.update(buffer.data)
        return str(digest.hexdigest())

    @property
    def size_bytes(self) -> int:
        """Size of stream and buffers together, in bytes."""
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


def _rebuild_tensor(
    buffer: torch.Tensor | bytearray,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Give a flat uint8 tensor its dtype, shape and strides back."""
    if isinstance(buffer, torch.Tensor):
        tensor = buffer.view(dtype).as_strided(size, stride)
    elif len(buffer):
        tensor = torch.frombuffer(buffer, dtype=dtype).as_strided(size, stride)
    else:
        tensor = torch.empty_strided(size, stride, dtype=dtype)
    return tensor.requires_grad_() if requires_grad else tensor


def _rebuild_memmap(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Give what was mapped from a file its type back; its memory is that of other arrays."""
    return array.view(np.memmap)


def _rebuild_image(pixels: Any, *state: Any) -> Any:
    """Make an image of PIL's from its state and its pixels, as it pickles them."""
    from PIL import Image  # who reads it may not have loaded it yet

    image = Image.Image.__new__(Image.Image)
    image.__setstate__([*state, pixels])
    return image


class _Unpickling(threading.local):
    """What a thread is unpickling.

    Attributes:
        object_refs: The Ray object references in it.
    """

    object_refs: Sequence[Any] = ()


_unpickling = _Unpickling()


def _is_rays(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "ray"


def _object_ref(place: int, _: str) -> Any:
    """Return the Ray object reference at a place in the pickle that this thread reads."""
    return _unpickling.object_refs[place]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with its elements side by side in memory, keeping channels-last order."""
    if tensor.is_contiguous():
        return tensor
    if tensor.dim() in (4, 5) and tensor.is_contiguous(
        memory_format=_TENSOR_FORMATS[tensor.dim() - 4]
    ):
        return tensor
    return tensor.contiguous()


class _Buffers:
    """The large buffers of one pickle.

    Apart from the pickler, which would refer to itself through its callback and so keep a batch's
    memory until the next garbage collection.
    """

    def __init__(self, out_of_band_bytes: float) -> None:
        self._out_of_band_bytes = out_of_band_bytes
        self.kept: list[np.ndarray[Any, Any]] = []
        self.slots: dict[str, set[int]] = {"tensor": set(), "image": set()}
        self.object_refs: list[Any] = []
        # The buffer that comes next, if it is of a kind.
        self.expected: tuple[str, pickle.PickleBuffer] | None = None

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large buffer; send a small one with the stream (says so by True)."""
        raw = buffer.raw()
        if raw.nbytes < self._out_of_band_bytes:
            return True
        if self.expected is not None and buffer is self.expected[1]:
            self.slots[self.expected[0]].add(len(self.kept))
            self.expected = None
        self.kept.append(np.frombuffer(raw, dtype=np.uint8))
        return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the bytes of plain CPU tensors and of PIL's images out of band."""

    def __init__(
        self, file: io.BytesIO, buffers: _Buffers, mappings: Mappings | None = None
    ) -> None:
        self._buffers = buffers
        self._mappings = mappings
        super().__init__(file, protocol=5, buffer_callback=buffers.take)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce exact, strided CPU tensors, mapped arrays, images and code; leave the rest."""
        if self._mappings is not None:
            reduced = self._mappings.reduce(obj) or reduce(obj)
            if reduced is not None:
                return reduced
        kind = type(obj)
        if kind is CodeType:
            return self._reduce_code(obj)
        if kind is torch.Tensor and obj.layout is torch.strided and obj.device.type == "cpu":
            return self._reduce_tensor(obj)
        if kind is np.memmap:
            return _rebuild_memmap, (obj.view(np.ndarray),)
        if self._mappings is None and kind is np.ndarray and not obj.flags.writeable:
            # A batch may be written to, but pickle keeps what it finds read-only so.
            return obj.copy(order="K").__reduce_ex__(5)
        if self._mappings is not None and kind.__name__ == "ObjectRef" and _is_rays(kind):
            # Ray counts who refers to an object only if Ray itself pickles the reference.
            self._buffers.object_refs.append(obj)
            return _object_ref, (len(self._buffers.object_refs) - 1, obj.hex())
        if kind.__module__ == "PIL.Image" and kind.__qualname__ == "Image":
            return self._reduce_image(obj)
        return super().reducer_override(obj)

    def _reduce_code(self, code: CodeType) -> Any:
        build, parts = self.dispatch_table[CodeType](code)
        # From 3.1.3 on cloudpickle leaves it out, and so the source lines of tracebacks. It is
        # copied, as other names are: interned or not, the pickle is the same.
        return _rebuild_code, (build, parts, "".join(code.co_filename))

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "a non-leaf tensor that requires grad cannot leave its process: autograd does "
                "not cross processes. Call detach() on it first"
            )
        data = tensor.detach()
        # Of what expand() repeats, one is enough.
        repeats = [step == 0 for step in data.stride()]
        once = _dense(data[tuple(slice(1) if again else slice(None) for again in repeats)])
        stride = tuple(
            0 if again else step for again, step in zip(repeats, once.stride(), strict=True)
        )
        # as_strided and not reshape: the bytes in the order in which they lie in memory.
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
        if len(state) != 4 or not isinstance(pixels, bytes):  # another PIL than we know
            return NotImplemented
        view = pickle.PickleBuffer(pixels)
        self._buffers.expected = ("image", view)
        return _rebuild_image, (view, *state)


def _rebuild_code(build: Callable[..., CodeType], parts: Sequence[Any], filename: str) -> CodeType:
    return build(*parts).replace(co_filename=filename)


def dump(obj: Any, what: str, readers: Readers | None = None) -> Pickled:
    """Pickle ``obj``, its arrays out of band.

    Args:
        obj: Anything cloudpickle takes; classes and functions of ``__main__`` go by value.
        what: What ``obj`` is to the user (``"dataset"``); the root of the path in an error.
        readers: The processes that will unpickle it. Given them, the pickle refers to mapped files
            and shared memory; by default it holds all content.

    Raises:
        SerializationError: Something in ``obj`` cannot be pickled; names its path.

    Source:
        PEP 574 (pickle protocol 5, out-of-band data).
    """
    return _dump_or_explain(obj, what, _OUT_OF_BAND_BYTES, readers)


def dump_in_band(obj: Any, what: str) -> bytes:
    """Pickle ``obj`` in one piece, as ``dump`` does otherwise; ``pickle.loads`` reads it."""
    return _dump_or_explain(obj, what, float("inf"), None).head


def _dump_or_explain(
    obj: Any, what: str, out_of_band_bytes: float, readers: Readers | None
) -> Pickled:
    mappings = Mappings(readers) if readers is not None else None
    try:
        pickled = _dump(obj, out_of_band_bytes, mappings)
        if mappings is not None and not mappings.hold:
            # Another thread has unmapped a file, and its addresses may have been reused.
            mappings = Mappings(cast(Readers, readers))
            pickled = _dump(obj, out_of_band_bytes, mappings)
    except Exception as error:
        path, cause = _unpicklable(obj, what, mappings, error)
        if isinstance(cause, UnsharedMemoryError):
            raise SerializationError(f"{path} cannot be shared with workers: {cause}") from error
        raise SerializationError(
            f"{path} cannot be sent between processes: {type(error).__name__}: {error}. "
            f"{_ADVICE.get(what, _ADVICE_ELSE)}"
        ) from error
    for copied in mappings.copied if mappings is not None else ():
        path = _path_to(copied, obj, what) or f"{what} (a {type(copied).__qualname__} in it)"
        warnings.warn(
            f"{path} is in memory that this process shares with others, but workers read a copy, "
            "which iter() makes",
            stacklevel=2,
        )
    return pickled


def _dump(
    obj: Any,
    out_of_band_bytes: float = _OUT_OF_BAND_BYTES,
    mappings: Mappings | None = None,
) -> Pickled:
    script = sys.modules.get("__mp_main__")
    if script is not None and script.__name__ == "__mp_main__":
        # So multiprocessing calls the script in a process that it has spawned. Others have not.
        cloudpickle.register_pickle_by_value(script)
    file = io.BytesIO()
    buffers = _Buffers(out_of_band_bytes)
    _Pickler(file, buffers, mappings).dump(obj)
    if file.tell() >= _LARGE_STREAM_BYTES:
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
"""Memory, as a flat uint8 array."""


def load(pickled: Pickled, take: Callable[[Bytes], Bytes | torch.Tensor] | None = None) -> Any:
    """Unpickle an object into memory of its own.

    Args:
        pickled: What ``dump`` returned; its buffers may be read-only views.
        take: Returns one buffer's bytes in memory for the object to keep; by default a copy.
            Pinned memory is made here, so that pinning costs no copy of its own.

    Returns:
        The object; by default its arrays and tensors are writable and share memory with nothing.
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
    if len(pickled.head) >= _LARGE_STREAM_BYTES:
        give_back_memory()
    return value


def give_back_memory() -> None:
    """Return the memory that the C library has free to the kernel.

    Pickling and unpickling millions of objects take a table of them all, which is larger than
    anything that comes after it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def own_copy(buffer: Bytes) -> Bytes:
    """Copy memory.

    numpy asks the kernel for huge pages where torch does not: with small ones, a fresh batch of
    38 MB costs four times its copy in page faults.
    """
    own = np.empty(buffer.nbytes, dtype=np.uint8)
    np.copyto(own, buffer)
    return own


def _unpicklable(
    obj: Any, path: str, mappings: Mappings | None, error: Exception, depth: int = 0
) -> tuple[str, Exception]:
    """Follow attributes and items down to the smallest part that cannot be pickled.

    Returns:
        Its path and type, and its error.
    """
    if depth < 8:
        for step, part in _parts(obj):
            try:
                _dump(part, mappings=mappings)
            except Exception as cause:
                return _unpicklable(part, path + step, mappings, cause, depth + 1)
    return f"{path} (of type {type(obj).__module__}.{type(obj).__qualname__})", error


def _path_to(wanted: Any, obj: Any, path: str, depth: int = 0) -> str | None:
    """Return the path of an object inside of another one, if it is found."""
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
        return  # its parts are not the user's
    elif hasattr(obj, "__dict__") and not isinstance(obj, (type, ModuleType)):
        # An object that says itself what travels is taken at its word.
        try:
            state = obj.__getstate__() if hasattr(type(obj), "__getstate__") else obj.__dict__
        except Exception:  # which is the error that is looked for
            return
        if isinstance(state, dict):
            for name, value in state.items():
                yield f".{name}", value
        yield "", type(obj)
    elif isinstance(obj, type) and obj.__module__ not in sys.stdlib_module_names:
        for name, value in vars(obj).items():
            if inspect.isfunction(value):
                yield f".{name}", value
