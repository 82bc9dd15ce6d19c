"""The loaders that dpex is compared with, behind one protocol: time an epoch, close.

All of them read the same dataset in the same order with the same number of workers, keep their
workers from epoch to epoch, and have two batches per worker in flight where they let one choose.
Ray Data has no sampler and no order to keep: it reads the samples as they lie.

===============  ===============================================================================
``torch``        torch's DataLoader, workers forked
``spawn``        the same, workers spawned
``stateful``     torchdata's StatefulDataLoader, workers forked
``spdl``         an SPDL pipeline over a pool of forked processes
``rpc``          RPCDataloader, its workers behind sockets of this host
``raydata``      Ray Data as its documentation teaches: raw rows, ``map``, ``iter_torch_batches``
``raydata-index``  Ray Data over the indices of the dataset, which it reads in ``map``
``dpex``         DpexDataLoader on a Ray of its own
``inline``       one process, nothing beside it: its rate times the cores is the limit
===============  ===============================================================================
"""

import logging
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, Dataset, Sampler, SequentialSampler, default_collate

from benchmarks.harness import Case, Epoch, close, make_loader, time_epoch

# Forked workers come first, before anything has started threads in this process.
START_ORDER = (
    "torch",
    "stateful",
    "spdl",
    "spawn",
    "rpc",
    "dpex",
    "inline",
    "raydata",
    "raydata-index",
)
RAY_DATA = ("raydata", "raydata-index")
# torch and dpex are neighbours.
TURN_ORDER = ("torch", "dpex", "rpc", "spawn", "stateful", "spdl", *RAY_DATA)
# Those that make sense for every map-style dataset and every collate_fn.
TORCH_PEERS = ("torch", "dpex", "spawn", "stateful")
PREFETCH_FACTOR = 2  # torch's default


class Peer(Protocol):
    """Something that gives the batches of a dataset, epoch after epoch."""

    def epoch(self) -> Epoch:
        """Take every batch of the next epoch and measure."""
        ...

    def close(self) -> None:
        """Stop what was started."""
        ...


def start(name: str, case: Case, num_workers: int) -> Peer:
    """Make one peer.

    Args:
        name: One of ``START_ORDER``.
        case: What it reads.
        num_workers: How many processes read at once.

    Returns:
        The peer; some start their workers now, some in the first epoch.
    """
    if name == "spdl":
        return Spdl(case, num_workers)
    if name == "rpc":
        return Rpc(case, num_workers)
    if name in RAY_DATA:
        return RayData(case, num_workers, by_index=name == "raydata-index")
    return Loader(name, case, num_workers)


class Permutations(Sampler[int]):
    """A new permutation for every epoch, the same ones for every peer.

    ``RandomSampler`` would give them the same only as long as all draw equally much from their
    generators, and the single process leaves its epochs early.

    Args:
        length: Of the dataset.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.draws = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.draws += 1
        generator = torch.Generator().manual_seed(self.draws)
        yield from torch.randperm(self.length, generator=generator).tolist()


def sampler(case: Case) -> Sampler[int]:
    """Give the order that a case asks for."""
    length = len(case.dataset)  # type: ignore[arg-type]
    return Permutations(length) if case.shuffle else SequentialSampler(range(length))


class Loader:
    """Whatever takes the arguments of torch's DataLoader."""

    def __init__(self, name: str, case: Case, num_workers: int) -> None:
        self.max_batches = case.inline_batches if name == "inline" else None
        self.loader = make_loader(
            name,
            case.dataset,
            batch_size=case.batch_size,
            num_workers=num_workers,
            sampler=sampler(case),
            collate_fn=case.collate_fn,
            worker_init_fn=case.worker_init_fn,
        )

    def epoch(self) -> Epoch:
        return time_epoch(self.loader, self.max_batches)

    def close(self) -> None:
        close(self.loader)


# What a forked process of SPDL's pool reads; set as the pool starts it.
pool_dataset: Dataset[Any]
pool_collate_fn: Callable[[list[Any]], Any]


def enter_pool(dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
    """Make a process of SPDL's pool ready."""
    global pool_dataset, pool_collate_fn
    pool_dataset, pool_collate_fn = dataset, collate_fn
    torch.set_num_threads(1)


def fetch(indices: list[int]) -> Any:
    """Make one batch, in a process of SPDL's pool."""
    if hasattr(pool_dataset, "__getitems__"):
        return pool_collate_fn(pool_dataset.__getitems__(indices))
    return pool_collate_fn([pool_dataset[index] for index in indices])


class Spdl:
    """An SPDL pipeline of one stage, whose executor is a pool of processes that stays.

    SPDL's own loader for torch datasets starts a new pool for every epoch; this one would win.
    """

    def __init__(self, case: Case, num_workers: int) -> None:
        from spdl.pipeline import PipelineBuilder

        self.pool = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("fork"),
            initializer=enter_pool,
            initargs=(case.dataset, case.collate_fn or default_collate),
        )
        self.pool.submit(fetch, [0]).result()  # forks them, before the pipeline has its thread
        self.builder = (
            PipelineBuilder[list[int], Any]()
            .add_source(BatchSampler(sampler(case), case.batch_size, drop_last=False))
            .pipe(
                fetch,
                executor=self.pool,
                concurrency=PREFETCH_FACTOR * num_workers,
                output_order="input",
            )
            .add_sink(PREFETCH_FACTOR * num_workers)
        )

    def batches(self) -> Iterator[Any]:
        pipeline = self.builder.build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    def epoch(self) -> Epoch:
        return time_epoch(self.batches())

    def close(self) -> None:
        self.pool.shutdown()


def same(dataset: Dataset[Any]) -> Dataset[Any]:
    """Give the dataset back: a worker of RPCDataloader wants a function that makes it."""
    return dataset


class Rpc:
    """RPCDataloader, each worker a process of its own that listens on this host."""

    def __init__(self, case: Case, num_workers: int) -> None:
        from rpcdataloader import RPCDataloader, RPCDataset, run_worker

        ports = free_ports(num_workers)
        self.workers = [
            multiprocessing.get_context("spawn").Process(
                target=run_worker, args=("127.0.0.1", port), daemon=True
            )
            for port in ports
        ]
        self.loader: Any = None
        for worker in self.workers:
            worker.start()
        try:
            self.loader = RPCDataloader(
                RPCDataset([f"127.0.0.1:{port}" for port in ports], same, case.dataset),
                batch_size=case.batch_size,
                sampler=sampler(case),
                collate_fn=case.collate_fn,
                prefetch_factor=PREFETCH_FACTOR,
            )
        except BaseException:
            self.close()
            raise

    def epoch(self) -> Epoch:
        return time_epoch(self.loader)

    def close(self) -> None:
        # As its dataset goes it tells the workers, from threads of its own; if the workers are gone
        # by then it tries for two minutes, and the process does not end before.
        self.loader = None
        for thread in threading.enumerate():
            if "_rpc_send_command" in thread.name:
                thread.join()
        for worker in self.workers:
            worker.terminate()
            worker.join()


def free_ports(count: int) -> list[int]:
    """Find ports of this host that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


class RayData:
    """Ray Data in a process of its own, on a Ray with as many CPUs as there are workers.

    It shares neither dpex's Ray nor the 64 logical CPUs of that one. The epoch is timed there.
    """

    def __init__(self, case: Case, num_workers: int, *, by_index: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.control, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=run_ray_data,
            args=(case.dataset, case.batch_size, num_workers, by_index, theirs),
        )
        self.process.start()
        theirs.close()

    def epoch(self) -> Epoch:
        self.control.send(True)
        answer: Epoch | Exception = self.control.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.control.close()
        self.process.join()


def run_ray_data(
    dataset: Any, batch_size: int, num_cpus: int, by_index: bool, control: Connection
) -> None:
    """Run one epoch for every message, until the other end of the pipe is closed.

    Args:
        dataset: Has the rows, or is read by index.
        batch_size: In samples.
        num_cpus: Of the Ray that is started.
        by_index: Whether Ray Data gets the indices instead of the rows.
        control: Gets one :class:`Epoch` for every message, or what went wrong.
    """
    import ray

    torch.set_num_threads(1)
    # The dashboard would only take processor time from the peers whose turn it is.
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)

    def read(row: dict[str, Any]) -> dict[str, Any]:
        return {str(place): value for place, value in enumerate(dataset[row["id"]])}

    rows = (
        ray.data.range(len(dataset)).map(read)
        if by_index
        else ray.data.from_items(dataset.rows()).map(dataset.transform_row)
    )
    try:
        while control.recv():
            control.send(time_epoch(rows.iter_torch_batches(batch_size=batch_size)))
    except EOFError:
        pass
    except Exception as error:
        control.send(error)
    finally:
        ray.shutdown()
