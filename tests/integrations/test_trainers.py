"""Tests that Lightning, Accelerate, transformers and Ray Train take the steps of torch's loader."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import trainer_runs
from cluster_programs import (
    PROGRAM_SECONDS,
    PROGRAMS,
    processes_in,
    run_program,
    torchrun,
    wait_until,
    workplace,
)
from cluster_programs.clusters import Cluster
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_runs import OURS, Points

from dpex import DpexDataLoader
from dpex.integrations.accelerate import distribute, prepare, skip_first_batches
from dpex.integrations.ray_train import add_distributed_sampler
from dpex.remaking import own_options, remake

CARRIERS = ("local", "processes")
GONE_SECONDS = 60
RANKS = 2
# The workers of both ranks import the framework, on a machine that other tests keep busy: for each
# loader of the ranks, this took up to 90 s.
RANKS_SECONDS = 3 * PROGRAM_SECONDS


def assert_the_same_steps(runs: dict[str, Any], **options: Any) -> None:
    """Compare the runs of both loaders.

    Args:
        runs: The reports, by run and loader.
        **options: Options of dpex's loaders, unless they are those of ``OURS``.
    """
    for name, run in runs.items():
        assert run["dpex"]["steps"] == run["torch"]["steps"], name
        assert run["dpex"]["by_torch"] == [False], f"{name}: torch's workers made batches"
        # The framework reads from loaders of dpex, with all of dpex's options.
        assert run["torch"]["options"] == [], name
        assert run["dpex"]["options"], name
        assert all(found == {**OURS, **options} for found in run["dpex"]["options"]), name


@pytest.mark.extended
@pytest.mark.parametrize("framework", trainer_runs.RUNS)
@pytest.mark.usefixtures("shared_ray")
def test_one_process_takes_the_same_steps(framework: str, tmp_path: Path) -> None:
    runs = trainer_runs.both(framework, 1, tmp_path)
    assert_the_same_steps(runs)
    assert all(run["torch"]["by_torch"] == [True] for run in runs.values())


@pytest.mark.extended
@pytest.mark.usefixtures("shared_ray")
def test_lightning_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = trainer_runs.lightning_checkpoints(trainer_runs.make_torchs, tmp_path, None)
    ours = trainer_runs.lightning_checkpoints(trainer_runs.make_ours, tmp_path / "ours", None)
    assert ours == whole
    for step in (3, 8):
        rest = trainer_runs.lightning_checkpoints(trainer_runs.make_ours, tmp_path / "ours", step)
        assert rest == whole[step:], step


@pytest.mark.extended
@pytest.mark.usefixtures("shared_ray")
def test_lightning_forgets_a_loader_s_state_where_a_scheduler_asks_for_the_steps(
    tmp_path: Path,
) -> None:
    """Lightning then makes the iterator before it has the checkpoint: see docs/trainers.md."""

    def stateful(dataset: Any, **arguments: Any) -> Any:
        return StatefulDataLoader(dataset, num_workers=0, **arguments)

    for make in (stateful, trainer_runs.make_ours):
        directory = tmp_path / make.__name__
        whole = trainer_runs.lightning_checkpoints(make, directory, None, estimates=True)
        rest = trainer_runs.lightning_checkpoints(make, directory, 3, estimates=True)
        indices = [[step[1] for step in steps] for steps in (whole, rest)]
        assert indices[1][:3] == indices[0][:3], "the epoch begins again"


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


def assert_every_rank_took_the_same_steps(
    place: Path, run: subprocess.CompletedProcess[str], **options: Any
) -> None:
    assert run.returncode == 0, run.stdout + run.stderr
    reports = [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    for report in reports:
        assert_the_same_steps(report, **options)
    one, other = ([run["dpex"]["steps"] for run in report.values()] for report in reports)
    assert one != other, "the ranks read the same"


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.timeout(RANKS_SECONDS + 100)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("framework", trainer_runs.RUNS)
def test_ranks_take_the_same_steps(framework: str, place: Path, carrier: str) -> None:
    address, variables = carrier, {}
    if carrier == "local":  # ranks of a machine share the Ray of `ray start --head`
        # Ray ends idle processes beyond one a CPU. With fewer CPUs, it would start new ones, which
        # import the framework again, for nearly every iteration.
        variables = Cluster(place, head_options=("--num-cpus=8",)).variables
        address = "auto"
    run = torchrun(
        *(PROGRAMS / "trainers_program.py", framework, str(place), address),
        ranks=RANKS,
        place=place,
        seconds=RANKS_SECONDS,
        **variables,
    )
    assert_every_rank_took_the_same_steps(place, run, head_address=address)


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_of_ray_train_take_the_same_steps(place: Path, carrier: str) -> None:
    address = "auto" if carrier == "local" else carrier
    program = PROGRAMS / "ray_train_program.py"
    run = run_program(program, str(place), address, place=place, seconds=PROGRAM_SECONDS)
    assert_every_rank_took_the_same_steps(place, run, head_address=address)
    wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the program's Ray")


# --- Accelerate, in one process -------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[accelerate.Accelerator]:
    monkeypatch.setattr("dpex.log._warned", set())
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


def make_loader(**options: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(Points(), **{"batch_size": 4, "num_workers": 2, **OURS, **options})


def test_what_accelerate_makes_a_plain_loader_of_is_warned_of_once(
    accelerator: accelerate.Accelerator,
) -> None:
    with pytest.warns(UserWarning, match=r"dpex\.integrations\.accelerate\.prepare\(") as caught:
        prepared = accelerator.prepare(make_loader())
    assert len(caught) == 1
    assert type(prepared.base_dataloader) is DataLoader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(make_loader())


@pytest.mark.usefixtures("accelerator")
def test_a_reader_of_all_attributes_is_not_warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ("_is_accelerate_prepared", False) in inspect.getmembers(make_loader())


def test_a_loader_whose_indices_are_divided_already_is_warned_of(
    accelerator: accelerate.Accelerator,
) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Points(), num_replicas=2, rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(accelerator, make_loader(sampler=sampler))  # one process needs no split
    accelerator.state._shared_state["num_processes"] = 2
    with pytest.warns(
        UserWarning, match=r"DistributedSampler, and Accelerate divides .* 1/2 of"
    ) as caught:
        prepare(accelerator, make_loader(sampler=sampler))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(accelerator, make_loader())


@pytest.mark.parametrize("options", [{"distribute_mode": False}, {"num_workers": 0}])
def test_what_is_not_distributed_is_accelerate_s_to_make(
    accelerator: accelerate.Accelerator, options: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dpex: distribute_mode=False ignores")
        loader = make_loader(on_error="raise", **options)
        warnings.simplefilter("error")
        accelerator.prepare(loader)


def test_our_prepare_is_silent_and_the_loader_given_is_as_before(
    accelerator: accelerate.Accelerator,
) -> None:
    loader = make_loader()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = prepare(accelerator, loader)
        assert prepare(accelerator, prepared) is prepared
    assert accelerator._dataloaders == [prepared]
    with pytest.warns(UserWarning, match="Accelerate makes a plain torch DataLoader"):
        accelerator.prepare(loader)


def test_who_says_that_a_loader_is_prepared_keeps_it(accelerator: accelerate.Accelerator) -> None:
    loader = make_loader()
    loader._is_accelerate_prepared = True
    assert accelerator.prepare(loader) is loader


def test_a_subclass_stays_what_it_is(accelerator: accelerate.Accelerator) -> None:
    class Mine(DpexDataLoader[Any]):
        pass

    prepared = prepare(accelerator, Mine(Points(), num_workers=2, **OURS))
    assert type(prepared.base_dataloader) is Mine
    assert type(skip_first_batches(prepared, 1).base_dataloader) is Mine


def test_torch_s_arguments_are_all_taken_over() -> None:
    given = {
        "num_workers": 2,
        "collate_fn": list,
        "pin_memory": True,
        "timeout": 9.0,
        "worker_init_fn": print,
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "in_order": False,
    }
    own = own_options(make_loader())
    assert own == OURS
    batch_sampler = BatchSampler(SequentialSampler(range(9)), 3, True)
    for sampling in ({"batch_sampler": batch_sampler}, {"batch_size": None, "sampler": [5, 3]}):
        remade = remake(DataLoader(Points(), **sampling, **given), own)
        assert {name: getattr(remade, name) for name in given} == given
        assert {name: getattr(remade, name) for name in sampling} == sampling
        assert own_options(remade) == own


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("stateful", [False, True])
def test_a_prepared_loader_resumes_where_it_was(
    accelerator: accelerate.Accelerator, stateful: bool
) -> None:
    accelerator.dataloader_config.use_stateful_dataloader = stateful

    def prepared() -> Any:
        return prepare(accelerator, make_loader(shuffle=True, generator=torch.Generator()))

    whole = list(map(str, prepared()))
    for batches in (1, len(whole) - 1, len(whole)):
        loader = prepared()
        iterator = iter(loader)
        read = [str(next(iterator)) for _ in range(batches)]
        state = copy.deepcopy(loader.state_dict())
        after = prepared()
        after.load_state_dict(state)
        if batches < len(whole):
            read += list(map(str, after))
        assert read == whole, batches


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.usefixtures("shared_ray")
def test_a_stream_keeps_its_batches(accelerator: accelerate.Accelerator) -> None:
    # on_error="skip" leaves out indices, which a stream does not have.
    options = {**OURS, "on_error": "raise"}
    loader = DpexDataLoader(Stream(), batch_size=2, num_workers=1, **options)
    prepared = prepare(accelerator, loader)
    assert type(prepared.base_dataloader) is DpexDataLoader
    assert [batch.tolist() for batch in prepared] == [[0, 1], [2]]


def test_what_cannot_be_distributed_is_refused(accelerator: accelerate.Accelerator) -> None:
    with pytest.raises(TypeError, match="prepared, got DpexDataLoader"):
        distribute(make_loader(), distribute_mode=True)
    prepared = accelerator.prepare(DataLoader(Points(), num_workers=2))
    with pytest.raises(TypeError, match="distribute_mod"):
        distribute(prepared, distribute_mod=True)


def test_options_replace_those_of_a_prepared_loader(accelerator: accelerate.Accelerator) -> None:
    prepared = prepare(accelerator, make_loader(shuffle=True))
    inner = prepared.base_dataloader
    assert distribute(prepared) is prepared
    assert prepared.base_dataloader is inner
    assert distribute(prepared, prefetch_bytes=7, num_workers=3) is prepared
    remade = prepared.base_dataloader
    assert own_options(remade) == {**own_options(inner), "prefetch_bytes": 7}
    assert (remade.num_workers, remade.batch_sampler) == (3, inner.batch_sampler)
    with pytest.raises(TypeError, match="distribute_mod"):
        distribute(prepared, distribute_mod=True)


class Late(Points):
    """Points whose first samples must not be read."""

    def __getitem__(self, index: int) -> Any:
        assert index >= 12, "what is skipped was read"
        return index


@pytest.mark.usefixtures("shared_ray")
def test_what_is_skipped_is_not_read(accelerator: accelerate.Accelerator) -> None:
    loader = DpexDataLoader(Late(), batch_size=4, num_workers=2, **OURS)
    for given in (loader, prepare(accelerator, loader)):
        skipped = skip_first_batches(given, 3)
        assert len(skipped) == len(loader) - 3
        assert [batch.tolist() for batch in skipped] == [[*range(12, 16)], [*range(16, 20)], [20]]
    assert type(skip_first_batches(loader, 3)) is DpexDataLoader
    assert type(skip_first_batches(DataLoader(Points()), 3)) is DataLoader


# --- Ray Train, without ranks ---------------------------------------------------------------------


def test_one_rank_needs_no_distributed_sampler() -> None:
    loader = make_loader()
    assert add_distributed_sampler(loader) is loader
    sampler: DistributedSampler[Any] = DistributedSampler(Points(), num_replicas=2, rank=0)
    loader = make_loader(sampler=sampler)
    assert add_distributed_sampler(loader) is loader


# --- transformers, in one process -----------------------------------------------------------------


@pytest.mark.parametrize("options", ["{num_cpus: 2}", "[1]", "2", ["num_cpus"]])
def test_worker_options_of_another_type_are_told_at_once(options: Any, tmp_path: Path) -> None:
    from dpex.integrations.transformers import DpexTrainingArguments

    given = {"output_dir": str(tmp_path), "use_cpu": True}
    arguments = DpexTrainingArguments(**given, dataloader_worker_options='{"num_cpus": 2}')
    assert arguments.dataloader_worker_options == {"num_cpus": 2}
    with pytest.raises(ValueError, match="must be a dict or a JSON object, got") as caught:
        DpexTrainingArguments(**given, dataloader_worker_options=options)
    assert repr(options) in str(caught.value)
