"""The loaders that dpex is compared with, behind one protocol: time an epoch, close.

All peers read the same dataset in the same order with the same number of workers. They keep their
workers from epoch to epoch. If the number of batches in flight can be chosen, it is two per worker.
Ray Data has no sampler, and need not keep an order: it reads the samples in the dataset's order.

- ``torch``: torch's DataLoader with forked workers
- ``spawn``: torch's DataLoader with spawned workers
- ``stateful``: torchdata's StatefulDataLoader with forked workers
- ``spdl``: an SPDL pipeline over a pool of forked processes
- ``rpc``: RPCDataloader, with workers behind sockets of this machine
- ``raydata``: Ray Data as its documentation teaches: raw rows, ``map``, ``iter_torch_batches``
- ``raydata-index``: Ray Data over the indices of the dataset, which ``map`` reads
- ``dpex``: DpexDataLoader as a user gets it by default, with processes of this machine
- ``local``: DpexDataLoader on a local Ray, with the whole Ray Data pipeline
- ``inline``: one process alone; its rate times the number of cores is the limit
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

# Peers with forked workers start first, before other peers start threads in this process.
START_ORDER = (
    "torch",
    "stateful",
    "spdl",
    "spawn",
    "rpc",
    "dpex",
    "inline",
    "local",
    "raydata",
    "raydata-index",
)
RAY_DATA = ("raydata", "raydata-index")
# Peers that start a Ray. They start after all other peers have finished.
WITH_RAY = ("local", *RAY_DATA)
# torch and dpex run one after the other.
TURN_ORDER = ("torch", "dpex", "rpc", "spawn", "stateful", "spdl", *WITH_RAY)
# Peers that can read every map-style dataset with every collate_fn.
TORCH_PEERS = ("torch", "dpex", "spawn", "stateful", "local")
PREFETCH_FACTOR = 2  # torch's default


class Peer(Protocol):
    """A loader that can run one epoch after another."""

    def epoch(self) -> Epoch:
        """Read every batch of the next epoch, and measure."""
        ...

    def close(self) -> None:
        """Stop all processes that the peer started."""
        ...


def start(name: str, case: Case, num_workers: int) -> Peer:
    """Make one peer.

    Args:
        name: One of ``START_ORDER``.
        case: The workload that it reads.
        num_workers: Number of processes that read at once.

    Returns:
        The peer. Some peers start their workers now, others in the first epoch.
    """
    if name == "spdl":
        return Spdl(case, num_workers)
    if name == "rpc":
        return Rpc(case, num_workers)
    if name in RAY_DATA:
        return RayData(case, num_workers, by_index=name == "raydata-index")
    return Loader(name, case, num_workers)


class Permutations(Sampler[int]):
    """A new permutation for every epoch, the same for every peer.

    ``RandomSampler`` would give the same permutations only if all peers drew equally often from
    their generators. The single process leaves its epochs early, so it draws less.

    Args:
        length: Length of the dataset.
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
    """Return a sampler with the order of a case."""
    length = len(case.dataset)  # type: ignore[arg-type]
    return Permutations(length) if case.shuffle else SequentialSampler(range(length))


class Loader:
    """A peer that takes the arguments of torch's DataLoader."""

    def __init__(self, name: str, case: Case, num_workers: int) -> None:
        self.max_batches = case.inline_batches if name == "inline" else None
        self.loader = make_loader(
            name,
            case.dataset,
            batch_size=case.batch_size,
            num_workers=num_workers,
            sampler=sampler(case),
            persistent_workers=case.persistent_workers,
            collate_fn=case.collate_fn,
            worker_init_fn=case.worker_init_fn,
        )

    def epoch(self) -> Epoch:
        return time_epoch(self.loader, self.max_batches)

    def close(self) -> None:
        close(self.loader)


# Dataset and collate_fn of a process of SPDL's pool, set when the pool starts the process.
pool_dataset: Dataset[Any]
pool_collate_fn: Callable[[list[Any]], Any]


def enter_pool(dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
    """Prepare a process of SPDL's pool."""
    global pool_dataset, pool_collate_fn
    pool_dataset, pool_collate_fn = dataset, collate_fn
    torch.set_num_threads(1)


def fetch(indices: list[int]) -> Any:
    """Make one batch in a process of SPDL's pool."""
    if hasattr(pool_dataset, "__getitems__"):
        return pool_collate_fn(pool_dataset.__getitems__(indices))
    return pool_collate_fn([pool_dataset[index] for index in indices])


class Spdl:
    """An SPDL pipeline with one stage, whose executor is a persistent pool of processes.

    SPDL's own loader for torch datasets starts a new pool for every epoch, and would be slower.
    """

    def __init__(self, case: Case, num_workers: int) -> None:
        from spdl.pipeline import PipelineBuilder

        self.pool = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("fork"),
            initializer=enter_pool,
            initargs=(case.dataset, case.collate_fn or default_collate),
        )
        self.pool.submit(fetch, [0]).result()  # forks, before the pipeline starts its thread
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
    """Return the dataset itself; a worker of RPCDataloader needs a function that makes it."""
    return dataset


class Rpc:
    """RPCDataloader, whose workers are processes that listen on ports of this machine."""

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
        # When RPCDataloader's dataset is deleted, threads of the dataset send a message to the
        # workers. If the workers have ended, these threads keep the process alive for two minutes.
        self.loader = None
        for thread in threading.enumerate():
            if "_rpc_send_command" in thread.name:
                thread.join()
        for worker in self.workers:
            worker.terminate()
            worker.join()


def free_ports(count: int) -> list[int]:
    """Return ports of this machine on which no process listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


class RayData:
    """Ray Data in a separate process, on a Ray with as many CPUs as there are workers.

    It does not share the Ray of ``local``, which has at least 64 logical CPUs. The other process
    times the epoch.
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
        dataset: Dataset that has rows, or is read by index.
        batch_size: Samples in a batch.
        num_cpus: Number of CPUs of the Ray that this function starts.
        by_index: Whether Ray Data gets the indices instead of the rows.
        control: Pipe that gets one :class:`Epoch` for every message, or an exception.
    """
    import ray

    torch.set_num_threads(1)
    # A dashboard would take processor time from the other peers.
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
