"""A program for ``test_nodes.py`` and the soak: an epoch on a cluster whose nodes may die.

Usage: epoch_program.py '{"address": ..., "out": ..., ...}'

After each batch, it prints the batch's number and the nodes that made it. Then it waits for a line.
After "go", or when its standard input ends, it no longer waits.

At the end, it writes to ``out`` every sample's batch, index, digest of the drawn numbers, and node.
It also writes when it asked for each batch, and when it had it (``waits``, by ``time.monotonic``).

If a batch exceeds the ``timeout``, it writes the error to ``out``, and fails. With a
``checkpoint``, it saves its state after each batch, and resumes from an existing checkpoint. With a
rank's environment variables, it reads this rank's shard.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from cluster_programs import ask_actor, wait_until
from cluster_programs.output import take_stdout
from torch.utils.data import default_collate
from torch.utils.data.distributed import DistributedSampler

from dpex import DpexDataLoader
from dpex.transforms import MappedDataset, Stage

HUNGRY_SECONDS = 60
GATHER_SECONDS = 120


class Located:
    """Samples that contain the node that made them, and random numbers.

    The random numbers must not depend on the node. A fault happens only if its file ``mark`` does
    not exist.

    Args:
        length: Number of samples.
        seconds: Time that each sample takes.
        floats: Number of floats that each sample draws.
        deadly: ``[index, signal, mark]``: the sample with this index sends its process the signal.
        hungry: ``[index, bytes, mark]``: the sample with this index allocates this much memory,
            and waits until its process is killed.
        endless: ``[index, mark]``: the sample with this index never returns.
        gathered: Directory and node ids: the samples wait until each of these nodes reads one.
    """

    def __init__(
        self,
        length: int,
        seconds: float,
        floats: int,
        deadly: tuple[int, int, str] | None,
        hungry: tuple[int, int, str] | None,
        endless: tuple[int, str] | None,
        gathered: tuple[str, list[str]],
    ) -> None:
        self.length = length
        self.seconds = seconds
        self.floats = floats
        self.deadly = deadly
        self.hungry = hungry
        self.endless = endless
        self.gathered = gathered

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, str]:
        import ray

        if self.deadly is not None and index == self.deadly[0]:
            kill_once(*self.deadly[1:])
        if self.hungry is not None and index == self.hungry[0]:
            starve_once(*self.hungry[1:])
        if self.endless is not None and index == self.endless[0] and first_time(self.endless[1]):
            threading.Event().wait()
        node = ray.get_runtime_context().get_node_id()
        wait_for_nodes(node, *self.gathered)
        time.sleep(self.seconds)
        return index, torch.rand(self.floats), node


class Collate:
    """torch's ``default_collate``, which may send its process a signal as ``Located`` does.

    The draws are an array, because large tensors of this machine's workers are in segments and not
    in the object store.
    """

    def __init__(self, deadly: tuple[int, int, str] | None) -> None:
        self.deadly = deadly

    def __call__(self, samples: list[Any]) -> Any:
        if self.deadly is not None and any(sample[0] == self.deadly[0] for sample in samples):
            kill_once(*self.deadly[1:])
        indices, draws, nodes = default_collate(samples)
        return indices, draws.numpy(), nodes


class Passing:
    """A transform that changes nothing, but may send its process a signal as ``Located`` does."""

    def __init__(self, deadly: tuple[int, int, str] | None) -> None:
        self.deadly = deadly

    def __call__(self, index: int) -> int:
        if self.deadly is not None and index == self.deadly[0]:
            kill_once(*self.deadly[1:])
        return index


def stamp(index: int, draws: torch.Tensor, _: str) -> tuple[int, torch.Tensor, str]:
    """Return a sample with this node in place of the node that read it."""
    import ray

    return index, draws, ray.get_runtime_context().get_node_id()


def first_time(mark: str) -> bool:
    """Return whether the file ``mark`` does not exist, and create it."""
    if Path(mark).exists():
        return False
    Path(mark).touch()
    return True


def kill_once(what: int, mark: str) -> None:
    if first_time(mark):
        os.kill(os.getpid(), signal.Signals(what))


def wait_for_nodes(here: str, directory: str, nodes: list[str]) -> None:
    """Record that the node ``here`` reads a sample, and wait until all ``nodes`` have read one."""
    Path(directory, here).touch()
    marks = [Path(directory, node) for node in nodes]
    wait_until(lambda: all(mark.exists() for mark in marks), GATHER_SECONDS, f"sample of {nodes}")


def starve_once(size: int, mark: str) -> None:
    if first_time(mark):
        held = b"x" * size
        time.sleep(HUNGRY_SECONDS)
        raise AssertionError(f"nobody has killed who has taken {len(held):,} bytes")


def told_of_timeouts(loader: DpexDataLoader[Any], out: Path) -> Iterator[Any]:
    """Yield a loader's batches; if one times out, write the error to ``out`` and raise it."""
    try:
        yield from loader
    except RuntimeError as error:
        if "timed out" in str(error):
            out.write_text(json.dumps({"timed_out": str(error)}))
        raise


def node_of_pipeline_actor(loader: Any) -> str:
    """Return the node of the loader's pipeline actor."""
    import ray

    def here(_: Any) -> str:
        return ray.get_runtime_context().get_node_id()

    return str(ask_actor(loader, here))


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    replies = take_stdout()
    dataset: Any = Located(
        given["length"],
        given.get("seconds", 0.01),
        # Large enough that a batch is in its node's object store, not in its owner's memory.
        given.get("floats", 5_000),
        given.get("deadly_read"),
        given.get("hungry"),
        given.get("endless"),
        given["gathered"],
    )
    if given.get("staged"):  # the stage runs in other tasks than the reads
        stage = Stage(Passing(given.get("deadly_transform")), num_cpus=0.5)
        dataset = MappedDataset(dataset, stage)
    if "stamped" in given:  # options of a stage that shows its own node
        dataset = MappedDataset(dataset, joint_transforms=Stage(stamp, **given["stamped"]))
    sampler = None
    if "RANK" in os.environ:
        ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        sampler = DistributedSampler(dataset, ranks, rank)
    loader: DpexDataLoader[Any] = DpexDataLoader(
        dataset,
        batch_size=given.get("batch_size", 10),
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=given.get("num_workers", 4),
        collate_fn=Collate(given.get("deadly_collate")),
        generator=torch.Generator().manual_seed(given.get("seed", 5)),
        distribute_mode=True,
        head_address=given["address"],
        timeout=given.get("timeout", 0),
        worker_options=given.get("worker_options"),
        prefetch_bytes=0,
    )
    samples, waits = [], []
    checkpoint = Path(given.get("checkpoint", os.devnull))
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        samples = saved["samples"]
        loader.load_state_dict(saved["loader"])
    stepping = True
    asked = time.monotonic()
    for number, (indices, draws, nodes) in enumerate(told_of_timeouts(loader, Path(given["out"]))):
        waits.append((asked, time.monotonic()))
        batch = samples[-1][0] + 1 if samples else 0
        digests = [xxhash.xxh3_128_hexdigest(row.data) for row in draws]
        rows = zip(indices.tolist(), digests, nodes, strict=True)
        samples += [(batch, *row) for row in rows]
        if "checkpoint" in given:
            aside = checkpoint.with_suffix(".new")
            torch.save({"samples": samples, "loader": loader.state_dict()}, aside)
            aside.replace(checkpoint)
        if stepping:
            print(number, *sorted(set(nodes)), file=replies)
            stepping = sys.stdin.readline() == "next\n"
        asked = time.monotonic()
    import ray

    assert node_of_pipeline_actor(loader) == ray.get_runtime_context().get_node_id()
    Path(given["out"]).write_text(json.dumps({"samples": samples, "waits": waits}))
    loader.close()


if __name__ == "__main__":
    main()
