"""Tests of chains of several stages on Ray: their batches equal those of torch's loader."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
from cluster_programs import PROGRAM_SECONDS, PROGRAMS, run_program, workplace
from cluster_programs.clusters import Cluster
from living import Plain
from torch.utils.data import ConcatDataset, DataLoader, Subset, get_worker_info
from torchvision import tv_tensors

from dpex import BatchLostError, ClusterError, DpexDataLoader
from dpex.datasets import on_node
from dpex.transforms import MappedDataset, Stage
from dpex.worker import later_stage

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("shared_ray")]

GPU_PROGRAM = PROGRAMS / "gpu_stage_program.py"
CARRIERS = ("local", pytest.param("processes", marks=pytest.mark.extended))
OURS = {"distribute_mode": True, "head_address": "local"}

Same = Callable[[Any, Any], None]


class AtOnce(Plain):
    """A dataset that reads a batch's samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_what_leaves_a_gpu_stays_what_it_is() -> None:
    boxes = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(9, 9))
    assert type(later_stage._to_cpu(boxes)) is tv_tensors.BoundingBoxes


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def negate(batch: torch.Tensor) -> torch.Tensor:
    return -batch


def joined(samples: list[Any]) -> dict[str, Any]:
    return {"values": torch.stack([value for value, _ in samples]), "count": len(samples)}


def first_of(batch: Any) -> Any:
    return {**batch, "values": batch["values"][:1]}


# Ray fuses a stage into the first stage's tasks if both ask for the same resources.
CHAINS: dict[str, list[Any]] = {
    "no stage": [double],
    "reading, then a stage": [Stage(double)],
    "of the same kind": [double, Stage(double), torch.sqrt],
    "with other CPUs": [double, Stage(double, num_cpus=2), Stage(torch.sqrt, num_cpus=0.5)],
    "one worker": [Stage(double, num_cpus=0.5, max_workers=1), torch.sqrt],
    "of batches": [double, Stage(negate, batched=True)],
    "of batches, elsewhere": [
        double,
        Stage(torch.sqrt, num_cpus=2),
        Stage(negate, batched=True, num_cpus=0.5),
        double,
        Stage(negate, batched=True, num_cpus=3),
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 7},
    "shuffled": {"batch_size": 8, "shuffle": True, "drop_last": True},
    "one by one": {"batch_size": None},
    "persistent": {"batch_size": 9, "persistent_workers": True},
}


# Every pair of a chain, options and a source occurs.
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chain_name", CHAINS)
def test_batches_are_torchs(chain_name: str, options: str, assert_same: Same) -> None:
    at_once = ([*CHAINS].index(chain_name) + [*OPTIONS].index(options)) % 2
    check_batches(
        CHAINS[chain_name], OPTIONS[options], AtOnce(60) if at_once else Plain(60), assert_same
    )


def check_batches(
    chain: list[Any], options: dict[str, Any], source: Any, assert_same: Same
) -> None:
    dataset = MappedDataset(source, chain)
    torchs, ours = {"num_workers": 0}, {"num_workers": 3, **OURS}
    if options.get("persistent_workers"):
        torchs["num_workers"] = 1
    if dataset.batched:
        base = None if options["batch_size"] else torch.utils.data.default_convert
        torchs["collate_fn"] = dataset.collate(base)  # type: ignore[assignment]
    epochs = []
    for make, own in ((DataLoader, torchs), (DpexDataLoader, ours)):
        generator = torch.Generator().manual_seed(3)
        loader = make(copy.copy(dataset), generator=generator, **options, **own)
        epochs.append([list(loader) for _ in range(2)])
    assert_same(epochs[1], epochs[0])


def test_a_collate_fn_of_the_user_runs_between_samples_and_batches(assert_same: Same) -> None:
    for chain in ([Stage(double, num_cpus=2)], [Stage(double), Stage(first_of, batched=True)]):
        dataset = MappedDataset(Plain(30), chain)
        collate_fn = dataset.collate(joined) if dataset.batched else joined
        expected = list(DataLoader(dataset, 4, collate_fn=collate_fn))
        for given in (joined, collate_fn):
            loader: Any = DpexDataLoader(dataset, 4, num_workers=2, collate_fn=given, **OURS)
            assert_same(list(loader), expected)


def noisy(value: torch.Tensor) -> torch.Tensor:
    drawn = float(torch.rand(())), float(np.random.rand()), random.random()
    return value + torch.tensor(drawn)


def in_place(value: torch.Tensor) -> torch.Tensor:
    """Change the given value, and add random numbers only if it is then above 30."""
    value += 1
    return value + torch.rand(3) if value[0] > 30 else value


@pytest.mark.parametrize("source", [Plain(24), AtOnce(24)], ids=["one", "at once"])
def test_chains_in_one_another_draw_different_numbers(source: Any) -> None:
    def drawn(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value, torch.rand(1)])

    inner = MappedDataset(source, drawn)
    for between in (inner, Subset(inner, range(24)), on_node(lambda: inner, length=24)):
        loader: Any = DpexDataLoader(MappedDataset(between, drawn), 6, num_workers=2, **OURS)
        epoch = torch.cat([values[:, 3:] for values, _ in loader])
        assert len(epoch.unique()) == 48


@pytest.mark.parametrize("wrapped", [Subset, ConcatDataset], ids=lambda kind: kind.__name__)
def test_batched_stages_inside_of_another_dataset(wrapped: Any, assert_same: Same) -> None:
    inner = MappedDataset(Plain(20), [double, Stage(negate, batched=True)])
    dataset = Subset(inner, range(5, 20)) if wrapped is Subset else ConcatDataset([inner, inner])
    expected = list(DataLoader(dataset, 4, collate_fn=inner.collate()))
    ours: Any = DpexDataLoader(dataset, 4, collate_fn=inner.collate(), num_workers=2, **OURS)
    assert_same(list(ours), expected)
    forgetful: Any = DpexDataLoader(dataset, 4, num_workers=2, **OURS)
    with pytest.raises(TypeError, match=r"Pass collate_fn=dataset\.collate\(\)"):
        next(iter(forgetful))


class Alone:
    """A transform that logs the starts and ends of its work to a file."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        for word in ("begin", "end"):
            with self.log.open("a") as log:
                log.write(f"{word} {os.getpid()}\n")
            time.sleep(0.02)
        return value


@pytest.mark.only_ray
def test_no_more_workers_at_once_than_a_stage_allows(tmp_path: Path) -> None:
    stage = Stage(Alone(tmp_path / "log"), num_cpus=0.5, max_workers=1)
    loader: Any = DpexDataLoader(MappedDataset(Plain(40), [stage]), 2, num_workers=4, **OURS)
    assert len(list(loader)) == 20
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 80
    for begun, ended in zip(lines[::2], lines[1::2], strict=True):
        assert begun.replace("begin", "end") == ended, "another one began meanwhile"


class Pid:
    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value, torch.tensor([float(os.getpid())])])


@pytest.mark.only_ray
@pytest.mark.parametrize(("num_cpus", "together"), [(1, True), (2, False)])
def test_a_stage_that_asks_for_the_same_runs_in_the_same_task(
    num_cpus: int, together: bool
) -> None:
    class Where(Plain):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor([float(os.getpid())]), index

    dataset = MappedDataset(Where(60), [Stage(Pid(), num_cpus=num_cpus)])
    loader: Any = DpexDataLoader(dataset, 5, num_workers=1, **OURS)
    pairs = torch.cat([pids for pids, _ in loader])
    assert bool((pairs[:, 0] == pairs[:, 1]).all()) is together


def draws(chain: list[Any], source: Any = None, **options: Any) -> list[torch.Tensor]:
    """Return the samples of two epochs, in order."""
    dataset = MappedDataset(source or Plain(48), chain) if chain else source
    options = {"batch_size": 6, "num_workers": 2, **options}
    generator = torch.Generator().manual_seed(5)
    loader: Any = DpexDataLoader(dataset, generator=generator, **options, **OURS)
    return [torch.cat([values for values, _ in loader]) for _ in range(2)]


@pytest.mark.parametrize(
    "chain",
    [
        [noisy],
        [noisy, Stage(noisy)],
        [noisy, Stage(noisy, num_cpus=2), Stage(noisy, num_cpus=0.5)],
        [Stage(in_place, num_cpus=2)],
    ],
    ids=["no stage", "of the same kind", "with other CPUs", "seldom"],
)
@pytest.mark.parametrize("source", [Plain(48), AtOnce(48)], ids=["one", "at once"])
def test_what_a_sample_draws_depends_on_its_place_alone(chain: list[Any], source: Any) -> None:
    once = draws(chain, source)
    assert not torch.equal(*once), "every epoch draws new numbers"
    noise = once[0] - once[0].round()
    assert len(noise[31:].unique()) == noise[31:].numel(), "every sample draws for itself"
    for other in ({"num_workers": 1}, {"num_workers": 5}, {"batch_size": 4}, {"batch_size": 48}):
        for epoch, again in zip(once, draws(chain, source, **other), strict=True):
            assert torch.equal(epoch, again), other


@pytest.mark.parametrize("staged", [False, True])
def test_so_does_what_it_draws_from_a_generator_of_its_own(staged: bool) -> None:
    noise: Any = albumentations.Compose([albumentations.GaussNoise(p=1.0)])
    if staged:
        noise = Stage(noise, num_cpus=2)
    chain = [lambda _: np.full((4, 4, 3), 128, np.uint8), noise, torch.from_numpy]
    once = draws(chain)
    assert len(torch.cat(once).unique(dim=0)) == 96
    for epoch, again in zip(once, draws(chain, num_workers=5, batch_size=4), strict=True):
        assert torch.equal(epoch, again)


@pytest.mark.parametrize(
    "around",
    [lambda d: d, lambda d: MappedDataset(d, double), lambda d: on_node(lambda: d, length=48)],
    ids=["alone", "mapped", "on node"],
)
def test_a_subset_draws_as_what_it_is_of_does(around: Callable[[Any], Any]) -> None:
    inner = Subset(Subset(MappedDataset(Plain(60), noisy), range(10, 60)), range(2, 50))
    dataset = around(inner)
    once = draws([], dataset)
    noise = once[0] - once[0].round()
    assert len(noise.unique()) == noise.numel(), "every sample draws for itself"
    for other in ({"num_workers": 1}, {"batch_size": 4}, {"batch_size": 48}):
        for epoch, again in zip(once, draws([], dataset, **other), strict=True):
            assert torch.equal(epoch, again), other


def test_what_a_batched_stage_draws_depends_on_its_batch_alone() -> None:
    chain = [Stage(lambda batch: batch + torch.rand(batch.shape), batched=True, num_cpus=2)]
    once = draws(chain)
    assert not torch.equal(*once)
    for epoch, again in zip(once, draws(chain, num_workers=4), strict=True):
        assert torch.equal(epoch, again)


class Says:
    """A transform that returns its worker ID, the offset of its seed, and its number of threads."""

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.num_workers == 2
        return torch.tensor([info.id, torch.initial_seed() - info.seed, torch.get_num_threads()])


def test_later_stages_are_workers_too() -> None:
    dataset = MappedDataset(Plain(20), [Stage(Says(), num_cpus=2)])
    loader: Any = DpexDataLoader(dataset, 5, num_workers=2, **OURS)
    assert [values[0].tolist() for values, _ in loader] == [[0, 0, 1], [1, 0, 1]] * 2


def fails_at_114(value: torch.Tensor) -> torch.Tensor:
    return torch.tensor(1 // (int(value[0]) - 114))


@pytest.mark.parametrize("num_cpus", [1, 2], ids=["fused", "apart"])
def test_an_error_keeps_its_type_and_names_index_and_stage(num_cpus: int) -> None:
    dataset = MappedDataset(Plain(), [double, Stage(fails_at_114, num_cpus=num_cpus)])
    loader: Any = DpexDataLoader(dataset, 10, num_workers=2, **OURS)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    with pytest.raises(ZeroDivisionError, match=r"dataset index 57, batch 5, stage 1, node"):
        next(iterator)
    assert len(list(iterator)) == 14


def test_an_error_in_reading_passes_through_the_later_stages() -> None:
    class Fails(Plain):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(1 // (index - 57))

    dataset = MappedDataset(Fails(), [Stage(double, num_cpus=2)])
    loader: Any = DpexDataLoader(dataset, 10, num_workers=2, **OURS)
    batches, errors = 0, []
    iterator = iter(loader)
    while True:
        try:
            next(iterator)
            batches += 1
        except ZeroDivisionError as error:
            errors.append(str(error))
        except StopIteration:
            break
    assert batches == 19
    assert len(errors) == 1
    assert "dataset index 57, batch 5, node" in errors[0]


class KillsAt:
    """A transform that kills its process at one value; only once if ``mark`` is given."""

    def __init__(self, value: int, mark: Path | None) -> None:
        self.value = value
        self.mark = mark

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if int(value[0]) == self.value and not (self.mark and self.mark.exists()):
            if self.mark:
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value


def test_a_stage_whose_worker_dies_once_loses_nothing(tmp_path: Path, assert_same: Same) -> None:
    dataset = MappedDataset(Plain(100), [Stage(KillsAt(42, tmp_path / "mark"), num_cpus=2), noisy])
    loader: Any = DpexDataLoader(
        dataset, 10, num_workers=2, generator=torch.Generator().manual_seed(1), **OURS
    )
    epochs = []
    for _ in range(2):
        loader.generator.manual_seed(1)
        epochs.append(list(loader))
    assert (tmp_path / "mark").exists()
    assert_same(*epochs)


@pytest.mark.timeout(180)
def test_a_sample_that_kills_a_stage_every_time_is_an_error() -> None:
    dataset = MappedDataset(Plain(100), [Stage(KillsAt(42, None), num_cpus=2)])
    loader: Any = DpexDataLoader(dataset, 10, num_workers=2, **OURS)
    iterator = iter(loader)
    assert [int(next(iterator)[0][0, 0]) for _ in range(4)] == [0, 10, 20, 30]
    with pytest.raises(BatchLostError, match=r"batch 4 \(dataset indices \[40, 41"):
        next(iterator)
    assert [int(values[0, 0]) for values, _ in iterator] == [50, 60, 70, 80, 90]


def test_an_epoch_may_be_left_and_another_started() -> None:
    dataset = MappedDataset(Plain(300), [Stage(double, num_cpus=2)])
    loader: Any = DpexDataLoader(dataset, 3, num_workers=2, **OURS)
    for _ in range(5):
        for place, (values, _) in enumerate(loader):
            assert int(values[0, 0]) == 6 * place
            if place == 4:
                break
    assert [int(values[0, 0]) for values, _ in loader] == list(range(0, 600, 6))


@pytest.mark.parametrize(
    "inside", [lambda d: Subset(d, [1, 2]), lambda d: ConcatDataset([d, d]), MappedDataset]
)
def test_what_a_stage_inside_of_another_dataset_would_not_get_is_an_error(inside: Any) -> None:
    for asks in ({"num_gpus": 1}, {"resources": {"tape": 1}}, {"label_selector": {"a": "b"}}):
        dataset = inside(Subset(MappedDataset(Plain(), [Stage(double, **asks)]), range(9)))
        loader: Any = DpexDataLoader(dataset, 2, num_workers=2, **OURS)
        with pytest.raises(
            ValueError, match=r"Stage\(.*\) cannot run inside a \w+, .*MappedDataset\(Subset"
        ):
            iter(loader)


@pytest.mark.only_ray
@pytest.mark.parametrize(
    "asks",
    [{"num_gpus": 1}, {"resources": {"tape": 2}}, {"num_cpus": 100_000}],
    ids=["GPU", "resource", "CPU"],
)
def test_what_no_node_has_is_told_in_iter(asks: dict[str, Any]) -> None:
    if "num_gpus" in asks and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    dataset = MappedDataset(Plain(), [Stage(double, **asks)])
    loader: Any = DpexDataLoader(dataset, 10, num_workers=2, **OURS)
    with pytest.raises(
        ClusterError, match=r"stage 1 \(double\) .* but no node has all of it\. The most"
    ):
        iter(loader)


@pytest.mark.extended
@pytest.mark.multiprocess
def test_a_stage_with_a_gpu_runs_where_there_is_one_and_keeps_its_process() -> None:
    with workplace() as place:
        cluster = Cluster(place)
        cluster.add("--num-cpus=2")
        with_gpus = cluster.add("--num-gpus=2")
        out = place / "out.json"
        done = run_program(
            GPU_PROGRAM,
            cluster.address,
            str(out),
            place=place,
            seconds=PROGRAM_SECONDS,
            RAY_AUTH_MODE="disabled",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        epochs = json.loads(out.read_text())
    processes: dict[int, int] = {}
    for epoch in epochs:
        assert [number for number, *_ in epoch] == list(range(20)), "torch's order"
        for _, node, device, pid, calls in epoch:
            assert node == with_gpus
            assert device in {"0", "1"}
            processes[pid] = max(calls, processes.get(pid, 0))
    assert len(processes) <= 2
    assert sum(processes.values()) == 3 * 20, "the same processes in all epochs"
