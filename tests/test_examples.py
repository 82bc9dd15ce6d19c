"""Tests of the programs in ``examples/``: each runs and prints the expected results."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster_programs import (
    PROGRAM_SECONDS,
    ROOT,
    processes_in,
    run_program,
    spawn,
    torchrun,
    wait_until,
    workplace,
)
from cluster_programs.stores import ENVIRONMENT, object_store
from idx_files import TRAINING, digits, write_idx

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

EXAMPLES = ROOT / "examples"
GONE_SECONDS = 60
# Modules that the programs import.
NOT_HERE = {
    *("mnist", "ranks", "vectors", "digits"),
    *("demo_cluster", "demo_data", "demo_training"),
}


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory
        wait_until(lambda: not processes_in(directory), GONE_SECONDS, "end of the program's Ray")


def run(name: str, *arguments: str, place: Path) -> str:
    done = run_program(EXAMPLES / f"{name}.py", *arguments, place=place, seconds=PROGRAM_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_ranks(name: str, *arguments: str, place: Path, **variables: str) -> str:
    program = EXAMPLES / f"{name}.py"
    done = torchrun(program, *arguments, ranks=2, place=place, seconds=PROGRAM_SECONDS, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def accuracy_in(output: str) -> float:
    """Return the last accuracy that a program printed, in per cent."""
    return float(re.findall(r"accuracy ([\d.]+)%", output)[-1])


def test_every_program_is_tested_here() -> None:
    source = Path(__file__).read_text()
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - NOT_HERE
    assert programs == set(re.findall(r'run(?:_ranks)?\(\s*"(\w+)"', source))


def test_quickstart(place: Path) -> None:
    steps = run("quickstart", place=place).splitlines()
    assert [step.partition(":")[0] for step in steps] == [
        f"epoch {epoch}, step {step}" for epoch in range(3) for step in (0, 10)
    ]


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (0.7, "30% slower. The loop waited 40% instead of 20% of its time."),
        (1.001, "equally fast."),
        (1.38, "38% faster."),
        (3.4, "3.4 times as fast."),
    ],
)
def test_the_demo_s_verdict_is_honest_in_both_directions(
    speed: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from demo import verdict
    from demo_training import Epoch, Training

    def training(seconds: float, waiting_s: float) -> Training:
        result = Training("", None)
        # The first epoch counts as the others do.
        result.epochs = 2 * [Epoch(seconds, waiting_s, 0.0, 0.0, 100, [])]
        return result

    said = verdict(training(1.0, 0.2), training(1 / speed, 0.4 / speed))
    assert said.startswith(f"dpex fed the model {words}")


def test_the_demo_s_losses_are_equal_although_a_node_dies(place: Path) -> None:
    output = run("demo", "--quick", "--samples", "300", place=place)
    assert output.index("Killing a node") < output.index("epoch 1 cluster")
    assert "All 12 losses of the three trainings are equal" in " ".join(output.split())
    assert leftovers(place) == []


def test_the_demo_s_cluster_ends_at_an_interrupt(place: Path) -> None:
    with (place / "output").open("w+") as output:
        command = [sys.executable, "-u", str(EXAMPLES / "demo.py"), "--quick", "--samples", "100"]
        demo = spawn(command, place, stdout=output)
        wait_until(
            lambda: "epoch 0 cluster" in (place / "output").read_text(),
            PROGRAM_SECONDS,
            "first epoch on the cluster",
        )
    demo.send_signal(signal.SIGINT)
    assert demo.wait(GONE_SECONDS) != 0
    wait_until(lambda: not processes_in(place), GONE_SECONDS, "end of the demo's cluster")
    assert leftovers(place) == []


def leftovers(place: Path) -> list[str]:
    """Return what the demo has left in the folder for temporary files, and in Ray's folder."""
    return [path.name for path in place.iterdir() if path.name.startswith(("dpex", "ray", "tmp"))]


def test_single_device_trains_to_the_same_model_as_with_torchs_loader(place: Path) -> None:
    write_idx(place / "data", "FashionMNIST")
    arguments = ("--epochs", "2", "--num-workers", "2")
    ours = run("single_device", *arguments, place=place)
    torchs = run("single_device", *arguments, "--no-distribute-mode", place=place)
    figures = re.compile(r"loss ([\d.]+), accuracy ([\d.]+)%")
    assert len(figures.findall(ours)) == 2
    assert figures.findall(ours) == figures.findall(torchs)


def test_data_parallel(place: Path) -> None:
    output = run("data_parallel", place=place)
    assert "in the model: (30, 5) -> (30, 2)" in output or torch.cuda.device_count() > 1
    assert "outside: input (30, 5), output (30, 2)" in output


def test_ddp(place: Path) -> None:
    output = run_ranks("ddp", "--samples", "301", place=place)
    for rank in range(2):
        assert f"rank {rank} of 2, epoch 0: 151 steps" in output


def test_bad_samples(place: Path) -> None:
    output = run("bad_samples", place=place)
    assert "dataset index 5, batch 2" in output
    assert re.search(r"caught: Caught ZeroDivisionError in DataLoader worker process 0 ", output)
    # The batches before and after the failed one.
    for batch in ("[-0.2, -0.25]", "[-0.333, -0.5]", "[1.0, 0.5]", "[0.333, 0.25]"):
        assert batch in output
    assert re.findall(r" s: (\[.*\])", output) == [f"[{i}, {i + 1}]" for i in range(0, 16, 2)]


def test_two_loaders(place: Path) -> None:
    steps = run("two_loaders", place=place).splitlines()
    assert steps == [
        f"attempt {attempt}, step {step}: {list(range(10 * step, 10 * step + 10))} and "
        f"{list(range(10_000 + 10 * step, 10_010 + 10 * step))}"
        for attempt in range(3)
        for step in range(5)
    ]


def test_pinned_memory(place: Path) -> None:
    output = run("pinned_memory", "--pictures", "100", place=place)
    pinned = "yes" if torch.cuda.is_available() else "no"
    assert output.count(f"batches pinned: {pinned}") == 2


def test_mnist_data_parallel(place: Path) -> None:
    write_idx(place / "data", "MNIST")
    output = run("mnist_data_parallel", "--epochs", "4", place=place)
    assert f"epoch 3: {TRAINING} samples" in output
    assert accuracy_in(output) > 60


def test_two_devices(place: Path) -> None:
    write_idx(place / "data", "MNIST")
    output = run("two_devices", "--epochs", "4", place=place)
    assert f"epoch 3: {TRAINING} samples" in output
    assert accuracy_in(output) > 60


def test_mnist_ddp_under_torchrun(place: Path) -> None:
    write_idx(place / "data", "MNIST")
    assert_ranks_shared(run_ranks("mnist_ddp", "--epochs", "4", place=place))


def test_mnist_ddp_spawns_its_ranks(place: Path) -> None:
    write_idx(place / "data", "MNIST")
    assert_ranks_shared(run("mnist_ddp", "--epochs", "4", "--spawn", "2", place=place))


def test_lightning_trainer(place: Path) -> None:
    assert accuracy_in(run("lightning_trainer", place=place)) > 80


def test_accelerate_ddp(place: Path) -> None:
    output = run_ranks("accelerate_ddp", place=place)
    for rank in range(2):
        assert f"rank {rank}, epoch 4: 15 steps" in output
    assert output.count(" of 297") == 1
    assert accuracy_in(output) > 80


def test_hf_trainer(place: Path) -> None:
    assert accuracy_in(run("hf_trainer", place=place)) > 80


def test_ray_train(place: Path) -> None:
    assert "after 15 steps in each epoch" in run("ray_train", place=place)


def assert_ranks_shared(output: str) -> None:
    half = TRAINING // 2
    assert f"{TRAINING} samples in shares of [{half}, {half}]: 0 left out, 0 twice" in output
    for rank in range(2):
        assert f"rank {rank}, epoch 3: {half} samples" in output
    assert accuracy_in(output) > 60


def test_mnist_object_store(place: Path) -> None:
    with object_store(place) as (address, store):
        (store / "bucket" / "mnist").mkdir(parents=True)
        for name, part in (("training", "train"), ("test", "t10k")):
            torch.save(digits()[part], store / "bucket" / "mnist" / f"{name}.pt")
        endpoint = f"http://{address}"
        output = run_ranks(
            "mnist_object_store",
            "bucket/mnist",
            "--epochs=4",
            place=place,
            **ENVIRONMENT,
            AWS_ENDPOINT_URL=endpoint,
        )
    for rank in range(2):
        assert f"rank {rank}, epoch 3: {TRAINING // 2} samples" in output
    assert "epoch 3: 100%" in output  # the progress bar
    assert accuracy_in(output) > 60
    assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in output
