"""Tests of segments: memory that a worker process fills and the training process reads."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import resource
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from living import Plain
from torch.utils.data import DataLoader

from dpex import DpexDataLoader, tuning
from dpex.protocol.chunks import Entry
from dpex.transforms import MappedDataset, Stage
from dpex.wire import segments
from dpex.wire.block_format import BlockWriter, decode, places_in, read_block
from dpex.wire.machine import machine
from dpex.wire.mapped_memory import Readers
from dpex.wire.memory_map import SEGMENT_NAME, spans
from dpex.wire.pickling import dump
from dpex.wire.segments import (
    Place,
    SegmentLostError,
    SegmentPool,
    SegmentReader,
    SegmentsUnreadableError,
)
from dpex.wire.timings import Costs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no anonymous files")

SIZE = 2 << 20


def pool_of(pipeline: str = "pipeline", run: str = "run") -> SegmentPool:
    pool = SegmentPool()
    pool.serve(pipeline, run, machine())
    return pool


def batch_of(value: int, nbytes: int = SIZE) -> Any:
    return np.full(nbytes, value, np.uint8)


def placed(pool: SegmentPool, value: int, nbytes: int = SIZE) -> Place:
    place = pool.place(batch_of(value, nbytes))
    assert place is not None
    return place


_SEGMENT = re.compile(rf"memfd:({SEGMENT_NAME}\w+)")
_before: set[str] = set()


@pytest.fixture(autouse=True)
def only_its_own_segments() -> Iterator[None]:
    """Make a test count its own segments only: earlier tests may have left some."""
    _before.update(_SEGMENT.findall(_descriptors() + _mappings()))
    yield
    _before.clear()


def _descriptors() -> str:
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return "\n".join(str(file.readlink()) for file in files)


def _mappings() -> str:
    return Path("/proc/self/maps").read_text()


def open_segments() -> int:
    """Return the number of segments that this process has open."""
    return sum(name not in _before for name in _SEGMENT.findall(_descriptors()))


def mapped_segments() -> int:
    """Return the number of segments that this process has mapped, its own included."""
    return sum(name not in _before for name in _SEGMENT.findall(_mappings()))


def test_a_batch_is_the_memory_that_the_worker_filled() -> None:
    pool, reader = pool_of(), SegmentReader()
    memory = pool.empty(SIZE)
    assert memory is not None
    memory[:] = 5
    place = pool.place(memory[4096:])
    assert place is not None
    batch = reader.view(place)
    assert batch.nbytes == SIZE - 4096
    assert (batch == 5).all()
    memory[4096] = 7
    assert batch[0] == 7, "not a copy"
    batch[1] = 8
    assert memory[4097] == 8, "writable"


def test_a_segment_is_used_again_when_its_batch_and_all_views_are_gone() -> None:
    pool, reader = pool_of(), SegmentReader()
    first = placed(pool, 1)
    batch = reader.view(first)
    part = batch[10:20]
    del batch
    second = placed(pool, 2)
    assert second.name != first.name
    assert (part == 1).all()
    del part
    third = placed(pool, 3)
    assert (third.name, third.use) == (first.name, first.use + 1)
    assert (reader.view(third) == 3).all()


def test_a_batch_in_a_segment_that_is_being_read_is_never_filled() -> None:
    pool, reader = pool_of(), SegmentReader()
    kept = [reader.view(placed(pool, value)) for value in range(200)]
    assert all((batch == value).all() for value, batch in enumerate(kept))
    # Each segment of the pool is one open file; the reader has none.
    assert open_segments() <= tuning.MOST_SEGMENTS
    del kept
    assert (reader.view(placed(pool, 201)) == 201).all()


def test_blocks_that_nobody_reads_leave_no_more_segments_than_the_limit() -> None:
    pool = pool_of()
    places = [pool.place(batch_of(1)) for _ in range(tuning.MOST_SEGMENTS + 1)]
    assert places[-1] is None, "it travels through the object store"
    assert all(place is not None for place in places[:-1])
    pool.serve("pipeline", "next run", machine())
    assert placed(pool, 2).name not in {place.name for place in places if place is not None}
    assert open_segments() == 1, "the next run needs no others"


def test_unread_blocks_of_another_pipeline_are_kept() -> None:
    pool, reader = pool_of("one"), SegmentReader()
    unread = placed(pool, 1)
    pool.serve("other", "run of the other", machine())
    assert placed(pool, 2).name != unread.name
    assert (reader.view(unread) == 1).all()


def test_an_unread_batch_of_an_ended_run_is_lost_and_is_never_another_batch() -> None:
    pool, reader, late = pool_of(), SegmentReader(), SegmentReader()
    first = placed(pool, 1)
    pool.serve("pipeline", "next run", machine())
    second = placed(pool, 2)
    with pytest.raises(SegmentLostError):
        late.view(first)
    batch = reader.view(second)
    assert placed(pool, 3).name != second.name
    assert (batch == 2).all()


def test_a_late_view_of_a_dropped_segment_is_the_batch_if_the_segment_is_mapped() -> None:
    pool, reader = pool_of(), SegmentReader()
    reader.view(placed(pool, 0))  # the reader keeps the mapping
    first = placed(pool, 1)
    pool.serve("pipeline", "next run", machine())
    second = placed(pool, 2)
    late = reader.view(first)
    assert (late == 1).all()
    assert placed(pool, 3).name != second.name != first.name
    assert (late == 1).all()


def test_a_block_that_comes_twice_is_read_once() -> None:
    pool, reader = pool_of(), SegmentReader()
    place = placed(pool, 1)
    batch = reader.view(place)
    with pytest.raises(SegmentLostError, match="already"):
        reader.view(place)
    assert placed(pool, 2).name != place.name
    assert (batch == 1).all()


def test_memory_that_is_not_sent_is_free_again() -> None:
    pool = pool_of()
    memory = pool.empty(SIZE)
    assert memory is not None
    address = memory.ctypes.data
    held: Any = memory[:10]
    del memory
    other = pool.empty(SIZE)
    assert other is not None
    assert other.ctypes.data != address, "a part of it is still used"
    del held
    again = pool.empty(SIZE)
    assert again is not None
    assert again.ctypes.data == address


def test_a_buffer_that_is_sent_twice_has_two_segments() -> None:
    pool, reader = pool_of(), SegmentReader()
    memory = pool.empty(SIZE)
    assert memory is not None
    memory[:] = 4
    first, second = pool.place(memory), pool.place(memory)
    assert first is not None
    assert second is not None
    assert first.name != second.name
    assert (reader.view(first) == 4).all()
    assert (reader.view(second) == 4).all()


@pytest.mark.parametrize("share", [4, 64], ids=["the same size", "another size"])
def test_idle_segments_are_limited(share: int) -> None:
    pool, reader = pool_of(), SegmentReader()
    size = tuning.IDLE_BYTES // 4
    kept = [reader.view(placed(pool, value, size)) for value in range(8)]
    del kept
    placed(pool, 1, tuning.IDLE_BYTES // share)
    assert open_segments() <= 5
    pool.close("pipeline")
    gc.collect()
    assert open_segments() <= 1, "one whose batch may still be read"


def test_a_segment_that_is_filled_while_its_pipeline_closes_is_dropped_later() -> None:
    pool = pool_of()
    memory = pool.empty(SIZE)
    assert memory is not None
    pool.close("pipeline")
    assert pool.place(memory) is not None
    del memory
    pool.serve("other", "run", machine())
    placed(pool, 1)
    assert open_segments() == 1


def test_segments_of_processes_that_have_ended_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "IDLE_MAPPED_BYTES", 4 * SIZE)
    reader = SegmentReader()
    places: Any = multiprocessing.SimpleQueue()

    def work(read: Any) -> None:
        pool = pool_of()
        for value in range(3):
            places.put(placed(pool, value))
        read.wait(60)

    for _ in range(3):
        read = multiprocessing.Event()
        child = in_child(work, read)
        batches = [reader.view(places.get()) for _ in range(3)]
        assert [int(batch[0]) for batch in batches] == [0, 1, 2]
        read.set()
        child.join(60)
        assert child.exitcode == 0
        del batches
    assert mapped_segments() == 4


def test_without_descriptors_there_are_no_more_segments() -> None:
    def work() -> None:
        pool, reader = pool_of(), SegmentReader()
        place = placed(pool, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        spare = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        assert pool.place(batch_of(2)) is None
        os.close(spare.pop())
        assert pool.place(batch_of(2)) is None, "for a moment, a segment needs two"
        os.close(spare.pop())
        assert pool.place(batch_of(2)) is not None
        with warnings.catch_warnings(record=True):
            try:
                reader.view(place)
            except SegmentsUnreadableError:
                os._exit(0)

    # In this process, the segment's owner is another living process.
    child = in_child(work)
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("reader", ["", "elsewhere"])
def test_batches_for_other_machines_have_no_segments(reader: str) -> None:
    pool = SegmentPool()
    pool.serve("pipeline", "run", reader)
    assert pool.empty(SIZE) is None
    assert pool.place(batch_of(1)) is None


def test_a_small_batch_is_not_made_in_a_segment() -> None:
    assert pool_of().empty(tuning.SEGMENT_BYTES - 1) is None


@pytest.mark.parametrize(
    ("sizes", "in_segments"),
    [
        ([tuning.SMALL_BYTES], 1),
        ([10_000, 400_000, 10_000], 1),
        ([90_000], 0),  # the call can carry it
        ([400_000] * tuning.SEGMENTS_FOR_BLOCK, tuning.SEGMENTS_FOR_BLOCK),
        ([400_000] * (tuning.SEGMENTS_FOR_BLOCK + 1), 0),  # one transfer is better
        ([tuning.SEGMENT_BYTES, 400_000], 2),
        ([tuning.SEGMENT_BYTES, *[10_000] * 20], 1),
        ([10_000] * 12, 0),  # too small for a segment each
        ([20_000] * 8, 4),
    ],
)
def test_a_short_block_needs_no_object_store(sizes: list[int], in_segments: int) -> None:
    reader = SegmentReader()
    writer = BlockWriter("run", 0, segments=pool_of())
    batches = [
        torch.full((nbytes,), value, dtype=torch.uint8) for value, nbytes in enumerate(sizes)
    ]
    for number, batch in enumerate(batches):
        writer.add(Entry(number, dump(batch, "batch")), Costs())
    table = writer.table()
    block = read_block(table)
    assert len(places_in(block)) == in_segments
    if max(sizes) < tuning.SEGMENT_BYTES:
        assert (table.nbytes < tuning.SMALL_BYTES) == bool(in_segments or sizes == [90_000])
    read = [e.value for e in decode(block, reader, pin_memory=False)]
    assert all(map(torch.equal, read, batches))


def test_a_block_without_a_segment_for_its_tensor_is_not_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of()
    monkeypatch.setattr(pool, "place", lambda _: None)  # all segments are in use
    writer = BlockWriter("run", 0, segments=pool)
    writer.add(Entry(0, dump(torch.zeros(400_000, dtype=torch.uint8), "batch")), Costs())
    assert writer.message() is None
    assert read_block(writer.table()).entries[0].value.size_bytes >= 400_000


def test_a_short_block_copies_arrays_that_are_no_tensors() -> None:
    writer = BlockWriter("run", 0, segments=pool_of())
    writer.add(Entry(0, dump(np.ones(400_000, np.uint8), "batch")), Costs())
    assert places_in(read_block(writer.table())) == []


def in_child(function: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def test_what_a_forked_child_reads_is_never_filled_again() -> None:
    pool, reader = pool_of(), SegmentReader()
    place = placed(pool, 1)
    held = [reader.view(place)]
    go, done = multiprocessing.Event(), multiprocessing.SimpleQueue()

    def read() -> None:
        go.wait(60)
        done.put(bool((held[0] == 1).all()))

    child = in_child(read)
    held.clear()
    others = [placed(pool, value) for value in range(2, 6)]
    assert place.name not in {other.name for other in others}
    go.set()
    assert done.get()
    child.join(60)
    assert child.exitcode == 0
    assert (reader.view(others[0]) == 2).all(), "the child has released nothing of its parent"


def test_a_child_that_drops_its_batches_releases_nothing_of_its_parent() -> None:
    pool, reader = pool_of(), SegmentReader()
    place = placed(pool, 1)
    held = [reader.view(place)]
    child = in_child(held.clear)
    child.join(60)
    assert child.exitcode == 0
    assert placed(pool, 2).name != place.name
    assert (held[0] == 1).all()


def test_a_batch_outlives_its_worker_process_once_it_is_mapped() -> None:
    places, stop = multiprocessing.SimpleQueue(), multiprocessing.Event()

    def work() -> None:
        pool = pool_of()
        for value in (1, 2):
            places.put(placed(pool, value))
        stop.wait(60)
        os._exit(0)

    child = in_child(work)
    reader = SegmentReader()
    batch = reader.view(places.get())
    unread = places.get()
    stop.set()
    child.join(60)
    assert (batch == 1).all()
    with pytest.raises(SegmentLostError):
        reader.view(unread)


def test_another_file_of_the_process_is_not_taken_for_a_segment(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(SIZE)
        place = Place(os.getpid(), file.fileno(), "dpex-0", 1, 0, SIZE)
        with pytest.raises(SegmentLostError, match="dpex-0"):
            SegmentReader().view(place)


def test_where_segments_cannot_be_read_there_is_one_warning_and_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert segments.readable_segments() == machine() != ""
    pool, reader = pool_of(), SegmentReader()
    monkeypatch.setattr(segments, "_readable", True)

    def refuse(*_: Any) -> int:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "open", refuse)
    places = [placed(pool, value) for value in range(2)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for place in places:
            with pytest.raises(SegmentsUnreadableError):
                reader.view(place)
    assert ["not yours" in str(warning.message) for warning in told] == [True]
    assert segments.readable_segments() == ""


def test_a_program_that_keeps_too_many_batches_gets_no_more_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "_readable", True)
    monkeypatch.setattr(segments, "_mapped_now", weakref.WeakSet())
    monkeypatch.setattr(tuning, "MOST_MAPPED", 3)
    pool, reader = pool_of(), SegmentReader()
    for value in range(5):
        assert (reader.view(placed(pool, value)) == value).all(), "not kept, so used again"
    kept = [reader.view(placed(pool, value)) for value in range(3)]
    with (
        pytest.warns(UserWarning, match="it has mapped 3 batches that the program keeps"),
        pytest.raises(SegmentsUnreadableError),
    ):
        reader.view(placed(pool, 3))
    assert segments.readable_segments() == ""
    assert [int(batch[0]) for batch in kept] == [0, 1, 2]


def test_an_ended_run_keeps_no_mapping() -> None:
    pool, reader = pool_of(), SegmentReader()
    batch = reader.view(placed(pool, 1))
    watch = weakref.ref(batch)
    reader.close()
    assert (batch == 1).all()
    del batch
    assert watch() is None
    assert mapped_segments() == 1, "the pool's own"


def test_a_batch_in_a_dataset_is_sent_as_its_content() -> None:
    pool, reader = pool_of(), SegmentReader()
    batch = torch.from_numpy(reader.view(placed(pool, 6)))
    for obj in (batch, batch.numpy()):
        pickled = dump(obj, "dataset", Readers(same_host=True))
        assert sum(buffer.nbytes for buffer in pickled.buffers) == SIZE


# --- with a loader --------------------------------------------------------------------------------


class Pictures(Plain):
    """Sample i is a picture of i, and i. A batch of 8 has 3 MB."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 256, 128), float(index)), index


class DyingPictures(Pictures):
    """The same, but each worker process dies once, in its second batch or later."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place
        self.made = 0

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        mark = self.place / str(index // 100)
        if self.made > 12 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def loader_of(dataset: Any, **arguments: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(dataset, batch_size=8, num_workers=2, distribute_mode=True, **arguments)


def in_segments(*arrays: torch.Tensor) -> bool:
    """Return whether all arrays are in segments."""
    found = [span for span in spans() if f"/memfd:{SEGMENT_NAME}" in span.path]
    return all(any(span.start <= array.data_ptr() < span.end for span in found) for array in arrays)


def check(batches: list[Any]) -> None:
    """Check that batches are those of ``Pictures``, and that each has memory of its own."""
    oracle = DataLoader(Pictures(), batch_size=8)
    for (pictures, numbers), (others, other_numbers) in zip(batches, oracle, strict=True):
        assert torch.equal(pictures, others)
        assert torch.equal(numbers, other_numbers)
    assert len({pictures.data_ptr() for pictures, _ in batches}) == len(batches)


@pytest.mark.usefixtures("shared_ray")
def test_kept_batches_stay_while_other_loaders_and_epochs_go_on() -> None:
    first, second = loader_of(Pictures(), persistent_workers=True), loader_of(Pictures())
    kept = [list(first)]
    for _ in first:
        break
    both = list(zip(first, second, strict=True))
    kept += [[one for one, _ in both], [other for _, other in both], list(first)]
    for epoch in kept:
        check(epoch)
    pictures = [picture for epoch in kept for picture, _ in epoch]
    assert in_segments(*pictures)
    assert len({picture.data_ptr() for picture in pictures}) == len(pictures)


@pytest.mark.usefixtures("shared_ray")
def test_batches_of_later_stages_and_of_any_collate_fn_are_in_segments() -> None:
    def collated(samples: list[Any]) -> Any:
        pictures, numbers = zip(*samples, strict=True)
        return torch.stack(pictures), torch.tensor(numbers)

    # Ray Data runs both stages in one task. What passes between them is a tensor of 3 MB.
    staged = MappedDataset(Pictures(), Stage(lambda pictures: pictures + 1, batched=True))
    batches = list(loader_of(staged))
    check([(pictures - 1, numbers) for pictures, numbers in batches])
    assert in_segments(*(pictures for pictures, _ in batches))
    batches = list(loader_of(Pictures(), collate_fn=collated))
    check(batches)
    assert in_segments(*(pictures for pictures, _ in batches))


@pytest.mark.usefixtures("shared_ray")
def test_arrays_of_a_batch_are_private_as_torchs() -> None:
    def collated(samples: list[Any]) -> Any:
        return np.stack([picture.numpy() for picture, _ in samples])

    [*batches] = loader_of(Pictures(), collate_fn=collated)
    assert not any(in_segments(torch.from_numpy(batch)) for batch in batches)
    assert [batch[0, 0, 0, 0] for batch in batches] == list(range(0, 200, 8))


@pytest.mark.usefixtures("shared_ray")
def test_batches_of_processes_that_die_are_made_again(tmp_path: Path) -> None:
    kept = list(loader_of(DyingPictures(tmp_path)))
    check(kept)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("shared_ray")
def test_an_epoch_comes_where_segments_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, *arguments: Any, **others: Any) -> int:
        if str(path).startswith("/proc/") and "/fd/" in str(path):
            raise PermissionError("not yours")
        return real(path, *arguments, **others)

    monkeypatch.setattr(segments, "_readable", True)
    monkeypatch.setattr(os, "open", refuse)
    loader = loader_of(Pictures())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first, second = list(loader), list(loader)
    assert ["not yours" in str(warning.message) for warning in told] == [True]
    for epoch in (first, second):
        check(epoch)
        assert not any(in_segments(picture) for picture, _ in epoch)
