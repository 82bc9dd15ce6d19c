"""A program for ``test_first_workers.py``: a training process whose loader begins before Ray.

Each scenario prints what the loader of dpex gives, beside what torch's gives.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cluster_programs import wait_until
from cluster_programs.output import take_stdout
from stateful import Alone, read_alone
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from dpex import BatchLostError, DpexDataLoader
from dpex.cluster.exclusive_init import _is_in_init

MARK = Path("mark")
TIMEOUT_SECONDS = 20


class Draws:
    """Sample i is i and numbers from all generators."""

    def __init__(self, length: int = 64) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        numbers = [random.random(), np.random.random(), float(torch.rand(()))]
        return index, *numbers, get_worker_info().id


class Tells(Draws):
    """Sample i is i, and whether its process has Ray."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return index, "ray" in sys.modules


class Waits(Draws):
    """Sample i is i, its process, and whether that has Ray."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return index, os.getpid(), "ray" in sys.modules


class AsksRay(Draws):
    """Samples that ask Ray for their node."""

    def __getitem__(self, index: int) -> Any:
        import ray

        return index, ray.get_runtime_context().get_node_id()


class Counts(Draws):
    """Samples that count, as a cache or a generator in a dataset does."""

    def __init__(self, length: int = 64) -> None:
        super().__init__(length)
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return index, self.read


class Large(Draws):
    """Samples of 1 MB."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 18,), float(index))


class Array(Draws):
    """Samples that read an array of the dataset."""

    def __init__(self, length: int = 64) -> None:
        super().__init__(length)
        self.array = np.arange(length)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return index, int(self.array[index])


class Fails(Draws):
    def __getitem__(self, index: int) -> Any:
        return 1 / (index - 5)


class Dies(Draws):
    """Sample 5 kills its process, always or until a file exists."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always

    def __getitem__(self, index: int) -> Any:
        if index == 5 and (self.always or not MARK.exists()):
            MARK.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Hangs(Draws):
    """The first sample never ends, once."""

    def __getitem__(self, index: int) -> Any:
        if index == 0 and not MARK.exists():
            MARK.write_text(str(os.getpid()))
            time.sleep(1000)
        return index


def loader_of(dataset: Any, **arguments: Any) -> DpexDataLoader[Any]:
    arguments = {"batch_size": 4, "num_workers": 2, "head_address": "local", **arguments}
    return DpexDataLoader(dataset, distribute_mode=True, **arguments)


def rows(batches: Any) -> list[Any]:
    """Return the batches as lists."""
    return [
        [column.tolist() for column in batch] if isinstance(batch, list) else batch.tolist()
        for batch in batches
    ]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def alone() -> Any:
    """Read epochs that first workers, Ray's worker processes and both make."""
    arguments = {"batch_size": 2, "num_workers": 3}
    loader = loader_of(Alone(300), **arguments)
    # The first epoch is handed over to Ray.
    got = [read_alone(loader), read_alone(loader)]
    torchs = DataLoader(Alone(300), **arguments)  # type: ignore[arg-type]
    return [got == [read_alone(torchs), read_alone(torchs)], "ray" in sys.modules]


def wait_for_ray(loader: DpexDataLoader[Any]) -> None:
    """Wait until the loader's batches come from Ray."""
    loader.warm_up(wait=True)


def epochs(loader: Any, seed: int) -> Iterator[list[Any]]:
    torch.manual_seed(seed)
    while True:
        yield rows(loader)


def same(persistent: bool) -> Any:
    """Compare two epochs of first workers and two of Ray with torch's."""
    arguments = {"shuffle": True, "persistent_workers": persistent}
    ours = loader_of(Draws(), **arguments)
    first = epochs(ours, 3)
    got = [next(first), next(first)]
    without_ray = "ray" not in sys.modules
    wait_for_ray(ours)
    got += [next(first), next(first)]
    torchs = epochs(DataLoader(Draws(), batch_size=4, num_workers=2, **arguments), 3)  # type: ignore[arg-type]
    indices = [[batch[0] for batch in epoch] for epoch in got]
    expected = [next(torchs) for _ in got]
    workers = [[batch[-1] for batch in epoch] for epoch in got]
    return [
        without_ray,
        indices == [[batch[0] for batch in epoch] for epoch in expected],
        workers == [[batch[-1] for batch in epoch] for epoch in expected],
    ]


def new_workers() -> Any:
    return same(persistent=False)


def persistent_workers() -> Any:
    return same(persistent=True)


def drawn_alike() -> Any:
    """Compare the numbers of first workers with those of Ray's worker processes."""
    loader = loader_of(Draws(), generator=torch.Generator().manual_seed(7))
    first = rows(loader)
    wait_for_ray(loader)
    assert loader.generator is not None
    loader.generator.manual_seed(7)
    return first == rows(loader)


def handed_over(loader: DpexDataLoader[Any] | None = None) -> Any:
    """Read one epoch that begins on first workers and ends on Ray."""
    loader = loader or loader_of(Tells(4000))
    by_ray = []
    got = []
    for index, has_ray in loader:
        got += index.tolist()
        by_ray += has_ray.tolist()
        if not any(by_ray):
            time.sleep(0.005)
    return [got == list(range(4000)), by_ray[0], by_ray[-1]]


def spread_out() -> Any:
    """Count processes: without Ray, and of Ray's first batch for each logical worker."""
    workers, length = 4 * len(os.sched_getaffinity(0)), 40_000
    before_ray: set[int] = set()
    by_ray: dict[int, int] = {}
    loader = loader_of(Waits(length), num_workers=workers)
    for number, (index, pids, has_ray) in enumerate(loader):
        assert index[0] == 4 * number
        if has_ray[0]:
            by_ray.setdefault(number % workers, int(pids[0]))
        else:
            before_ray.add(int(pids[0]))
        if len(by_ray) == workers:
            break
    return [len(before_ray) == workers, len(set(by_ray.values())) == workers]


def asks_ray() -> Any:
    """Compare the nodes that samples name with that of the loader's Ray."""
    loader = loader_of(AsksRay())
    batches = list(loader)
    import ray

    nodes = {node for _, names in batches for node in names}
    indices = joined(batch.tolist() for batch, _ in batches)
    return [indices == list(range(64)), nodes == {ray.get_runtime_context().get_node_id()}]


def counted(*, persistent: bool = False) -> Any:
    """Compare samples that change their dataset with torch's, from an epoch without Ray on."""
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
    arguments["persistent_workers"] = persistent
    ours = loader_of(Counts(), **arguments)
    torchs: Any = DataLoader(Counts(), **arguments)  # type: ignore[arg-type]
    got = [rows(ours) for _ in range(3)]
    return got == [rows(torchs) for _ in range(3)]


def counted_by_persistent_workers() -> Any:
    return counted(persistent=True)


def large() -> Any:
    """Keep batches that are in memory of first workers, beyond the end of their processes."""
    loader = loader_of(Large(24))
    kept = list(loader)
    wait_for_ray(loader)
    kept += list(loader)
    whole = all(torch.equal(batch, batch[:, :1].expand_as(batch)) for batch in kept)
    return [whole, joined(batch[:, 0].tolist() for batch in kept) == [*range(24)] * 2]


def changed_meanwhile() -> Any:
    """Change the dataset after ``iter()``, before and after Ray has started."""
    dataset = Array(400)
    loader = loader_of(dataset)
    batches = iter(loader)
    first = next(batches)
    dataset.array[:] = -1
    wait_for_ray(loader)
    rest = rows(batches)
    indices = first[1].tolist() + joined(batch[1] for batch in rest)
    values = {value for _, batch in rows(loader) for value in batch}
    return [indices == list(range(400)), sorted(values)]


def changed_between() -> Any:
    """Change the dataset between two epochs, while Ray starts."""
    dataset = Array(40)
    loader = loader_of(dataset)
    before = [value for _, values in rows(loader) for value in values]
    dataset.array[:] += 100
    after = [value for _, values in rows(loader) for value in values]
    return [before == list(range(40)), after == list(range(100, 140))]


def fails() -> Any:
    loader = loader_of(Fails(), batch_size=2)
    try:
        list(loader)
    except ZeroDivisionError as error:
        return str(error)
    return None


def dies_once() -> Any:
    return joined(rows(loader_of(Dies(always=False)))) == list(range(64))


def dies_always() -> Any:
    try:
        list(loader_of(Dies(always=True)))
    except BatchLostError as error:
        return str(error)
    return None


def hangs() -> Any:
    """End an epoch whose first sample never ends, and read on."""
    loader = loader_of(Hangs())
    batches = iter(loader)
    while not MARK.exists():
        time.sleep(0.01)
    del batches
    read = joined(rows(loader)) == list(range(64))
    hung = int(MARK.read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{hung}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return [read, Path(f"/proc/{hung}").exists()]


def broken_off() -> Any:
    """End many epochs early while Ray starts, and then read one."""
    loader = loader_of(Tells(400))
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        for _ in zip(loader, range(3), strict=False):
            pass
    return [index for batch in loader for index in batch[0].tolist()] == list(range(400))


def out_of_order() -> Any:
    loader = loader_of(Tells(800), in_order=False)
    return sorted(index for batch in loader for index in batch[0].tolist()) == list(range(800))


def beside_torchs() -> Any:
    """Fork workers of torch's loader in every step while Ray starts."""
    loader = loader_of(Tells(400))
    got: list[int] = []
    for batch in loader:
        got += batch[0].tolist()
        if len(got) % 40 == 0:
            beside = rows(DataLoader(Draws(8), batch_size=4, num_workers=2))  # type: ignore[arg-type]
            assert len(beside) == 2
    return [got == list(range(400)), "ray" in sys.modules]


def no_ray() -> Any:
    """Ask for batches although the start of Ray fails."""
    from dpex.cluster.local import launch

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no memory")

    launch.init_ray = fail
    loader = loader_of(Tells(100_000))
    errors = []
    batches = iter(loader)
    for attempt in (lambda: list(batches), lambda: next(batches), lambda: iter(loader)):
        try:
            attempt()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def one_batch() -> Any:
    """End the process right after its first batch."""
    return next(iter(loader_of(Tells())))[0].tolist()


def closed() -> Any:
    """Close the loader right after its first batch."""
    loader = loader_of(Tells())
    batches = iter(loader)
    first = next(batches)[0].tolist()
    loader.close()
    try:
        while True:  # batches that had arrived before are delivered
            next(batches)
    except BatchLostError as error:
        text = str(error)
    return [first, text, rows(loader)[-1][0]]


def two_at_once() -> Any:
    """Read two iterators of one loader in turns while Ray starts."""
    loader = loader_of(Tells(2000))
    got: list[list[Any]] = [[], []]
    for batches in zip(loader, loader, strict=True):
        for indices, batch in zip(got, batches, strict=True):
            indices += batch[0].tolist()
        time.sleep(0.005)
    return [got == [list(range(2000))] * 2, "ray" in sys.modules]


def dropped() -> Any:
    """Drop a loader and its iterator while Ray starts, and read another loader."""
    batches = iter(loader_of(Tells()))
    next(batches)
    del batches
    gc.collect()
    return rows(loader_of(Array()))[-1][0]


def do_nothing(_: int) -> None:
    pass


def warmed_up() -> Any:
    """Read loaders whose start was asked for before."""
    results = []
    for arguments in ({"worker_init_fn": do_nothing}, {}):
        loader = loader_of(Tells(), **arguments)
        loader.warm_up()
        loader.warm_up(wait=True)
        columns = list(zip(*loader, strict=True))
        indices, by_ray = (torch.cat(column).tolist() for column in columns)
        results.append([indices == list(range(64)), all(by_ray)])
    return results


def warmed_up_by_first_workers() -> Any:
    """Read a loader while the start that was asked for continues."""
    loader = loader_of(Tells())
    loader.warm_up()
    indices, by_ray = (torch.cat(column).tolist() for column in zip(*loader, strict=True))
    return [indices == list(range(64)), any(by_ray)]


def forked() -> Any:
    """Use loaders and their iterators in a fork, and then in this process."""
    loaders = [loader_of(Tells(400), persistent_workers=persistent) for persistent in (False, True)]
    iterators = [iter(loader) for loader in loaders]
    for batches in iterators:
        next(batches)
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        errors = []
        for loader, batches in zip(loaders, iterators, strict=True):
            for use in (lambda it=batches: next(it), lambda of=loader: iter(of)):
                try:
                    use()
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")
            loader.close()
        os.write(write_end, json.dumps(errors).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as errors_of_fork:
        errors = json.load(errors_of_fork)
    left = [joined(index.tolist() for index, _ in batches) for batches in iterators]
    return [errors, left == [list(range(4, 400))] * 2]


def delayed(call: Any, starting: threading.Event, go_on: threading.Event) -> Any:
    """Return a function that sets one event, waits for the other, and then calls ``call``."""

    def call_later(*arguments: Any, **options: Any) -> Any:
        starting.set()
        assert go_on.wait(TIMEOUT_SECONDS)
        return call(*arguments, **options)

    return call_later


def forked_by_a_thread() -> Any:
    """Use a loader in a process that a thread forks while Ray is starting."""
    from dpex.cluster.local import launch

    starting, go_on = threading.Event(), threading.Event()
    launch.init_ray = delayed(launch.init_ray, starting, go_on)
    loader = loader_of(Tells(400))
    batches = iter(loader)
    next(batches)
    assert starting.wait(TIMEOUT_SECONDS)
    errors: Any = multiprocessing.get_context("fork").SimpleQueue()

    def use() -> None:
        try:
            next(iter(loader_of(Tells())))
        except Exception as error:
            errors.put(f"{type(error).__name__}: {error}")

    def fork() -> None:
        process = multiprocessing.get_context("fork").Process(target=use)
        process.start()
        process.join()

    forks = threading.Thread(target=fork)
    forks.start()
    forks.join()
    go_on.set()
    left = joined(index.tolist() for index, _ in batches)
    return [errors.get(), left == list(range(4, 400))]


def calls_ray_meanwhile() -> Any:
    """Import Ray, and let two threads call it, while dpex starts it."""
    from dpex.cluster.local import launch

    starting, go_on = threading.Event(), threading.Event()
    launch.init_ray = delayed(launch.init_ray, starting, go_on)
    batches = iter(loader_of(Tells(400)))
    next(batches)
    assert starting.wait(TIMEOUT_SECONDS)
    import ray

    with ThreadPoolExecutor() as threads:
        ours = threads.submit(ray.init, num_cpus=7)
        theirs = threads.submit(lambda: ray.get(ray.put(3)))
        go_on.set()
        answers = ["node_id" in ours.result().address_info, theirs.result()]
    try:
        ray.init(num_cpus=1)
    except RuntimeError as error:
        answers.append("ray.init twice" in str(error))
    left = joined(index.tolist() for index, _ in batches)
    return [*answers, left == list(range(4, 400))]


def start_ray(meanwhile: Callable[[], None]) -> None:
    """Start Ray here, and call a function once this thread is in ``ray.init``."""
    main = threading.main_thread()

    def call() -> None:
        wait_until(lambda: _is_in_init(main), TIMEOUT_SECONDS, "call of ray.init")
        meanwhile()

    calls = threading.Thread(target=call)
    calls.start()
    import ray

    ray.init(num_cpus=3, include_dashboard=False)
    calls.join()


def starts_ray_first() -> Any:
    """Begin to start Ray before dpex does it."""
    import dpex.tuning

    dpex.tuning.HEAD_START_S = 1000.0
    loader = loader_of(Tells(400), head_address="auto")
    batches = iter(loader)
    next(batches)
    assert loader._cluster is not None
    session: Any = loader._cluster.session
    start_ray(session._workers.start_now.set)
    left = joined(index.tolist() for index, _ in batches)
    return left == list(range(4, 400))


def starts_ray_meanwhile() -> Any:
    """Begin to start Ray after dpex has prepared its start, but before dpex has imported Ray."""
    from dpex.cluster.local import launch

    starting, go_on = threading.Event(), threading.Event()
    launch.load_ray = delayed(launch.load_ray, starting, go_on)
    batches = iter(loader_of(Tells(400), head_address="auto"))
    next(batches)
    assert starting.wait(TIMEOUT_SECONDS)
    start_ray(go_on.set)
    left = joined(index.tolist() for index, _ in batches)
    return left == list(range(4, 400))


def undisturbed() -> Any:
    """Compare this process's generators and ``print`` after epochs with those before."""
    random.seed(7)
    np.random.seed(7)
    drawn, drawn_by_numpy = random.Random(7).random(), np.random.RandomState(7).rand()
    loader = loader_of(Draws())
    rows(loader)
    wait_for_ray(loader)
    rows(loader)
    from ray.experimental import tqdm_ray

    tqdm_ray.instance()  # as at the first line that a worker process prints
    return [random.random() == drawn, np.random.rand() == drawn_by_numpy, print.__module__]


def warmed_up_long_before() -> Any:
    """Read one batch, and then an epoch, of a loader whose Ray has started before."""
    loader = loader_of(Tells(4000))
    loader.warm_up()
    session = loader._warmed
    assert session is not None
    wait_until(lambda: session.over, TIMEOUT_SECONDS, "the start of Ray")
    index, by_ray = next(iter(loader))
    gc.collect()
    wait_until(lambda: session.over, TIMEOUT_SECONDS, "the pipeline of the dropped iteration")
    return [[*index.tolist()] == [0, 1, 2, 3], any(by_ray), *handed_over(loader)]


def warmed_up_in_vain() -> Any:
    """Read a loader although the start that was asked for has failed."""
    from dpex.cluster.local import launch

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no memory")

    launch.init_ray = fail
    loader = loader_of(Tells())
    loader.warm_up()
    assert loader._warmed is not None
    loader._warmed.wait()
    try:
        iter(loader)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def timed() -> Any:
    """Read samples that change their dataset, with a timeout below the time of Ray's start."""
    from dpex.cluster.local import launch

    init_ray = launch.init_ray

    def init_late(*arguments: Any, **options: Any) -> Any:
        time.sleep(TIMEOUT_SECONDS + 5)
        return init_ray(*arguments, **options)

    launch.init_ray = init_late
    return len(rows(loader_of(Counts(), timeout=TIMEOUT_SECONDS)))


def interrupted_fork() -> Any:
    """Return whether an interrupted fork waits for Ray's start, and then raises the interrupt."""
    loader = loader_of(Tells())
    next(iter(loader))
    assert loader._cluster is not None
    session: Any = loader._cluster.session
    over = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        if os.fork() == 0:
            os._exit(0)
        over.append(session.over)
        os.wait()
        time.sleep(10)
    except KeyboardInterrupt:
        over.append("interrupted")
    return over


def closed_before_the_start() -> Any:
    """Close a loader before Ray is started, and let its iterator begin again."""
    sampler: Any = DistributedSampler(range(64), 1, 0)
    loader = loader_of(Tells(), sampler=sampler)
    batches = iter(loader)
    loader.close()
    sampler.set_epoch(1)
    try:
        next(batches)
    except Exception as error:
        return type(error).__name__
    return None


def killed() -> Any:
    loader = loader_of(Tells())
    print(json.dumps(next(iter(loader))[0].tolist()), file=replies, flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")  # not the default since Python 3.14
    replies = take_stdout()
    print(json.dumps(globals()[sys.argv[1]]()), file=replies)
