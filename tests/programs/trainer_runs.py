"""Training runs of frameworks for ``test_trainers.py``, with torch's loader or with dpex's.

Each run gets a function that makes loaders, and returns the batches and losses of this rank.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from dpex import DpexDataLoader

# Divisible neither by the number of ranks nor by the batch size.
LENGTH = 21
BATCH_SIZE = 4
EPOCHS = 2
# Two ranks then start two worker processes, not four.
NUM_WORKERS = 1
TORCHS_LOOP = "torch.utils.data._utils.worker"
# Almost no value is the default, so that a test notices a lost option.
OURS = {
    "distribute_mode": True,
    "head_address": "auto",
    "worker_options": {"num_cpus": 0.5},
    "prefetch_bytes": 1 << 20,
    "on_error": "skip",
    "max_skipped": 7,
}

Report = dict[str, Any]
MakeLoader = Callable[..., DataLoader[Any]]


def torchs_workers() -> int:
    """Return torch's ``num_workers``: 0 in a rank, where gloo's threads can make forks hang."""
    return NUM_WORKERS if os.environ.get("WORLD_SIZE", "1") == "1" else 0


def make_torchs(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **arguments, num_workers=torchs_workers())


def make_ours(dataset: Any, **arguments: Any) -> DpexDataLoader[Any]:
    return DpexDataLoader(dataset, **arguments, num_workers=NUM_WORKERS, **OURS)


class Points(Dataset[dict[str, Any]]):
    """Points of a line; each sample says whether a worker process of torch made it."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.tensor([index / LENGTH, 1.0])
        return {"x": x, "labels": 3 * x[:1] - 1, "index": index, "by_torch": made_by_torch()}


def made_by_torch() -> bool:
    """Return whether the worker loop of torch calls this function."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != TORCHS_LOOP:
        frame = frame.f_back
    return frame is not None


class Line(nn.Module):
    """A linear model that always starts with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Seen:
    """The batches and losses of a run, step by step."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.by_torch: set[bool] = set()
        self.options: list[Any] = []

    def note(self, what: str, batch: Any, loss: Any = None) -> None:
        self.steps.append([what, batch["index"].tolist(), None if loss is None else loss.item()])
        self.by_torch |= set(batch["by_torch"].tolist())

    def close(self, *loaders: Any) -> None:
        """Record the options of dpex's loaders, and close these loaders."""
        for loader in loaders:
            if type(loader) is DpexDataLoader:
                self.options.append({name: getattr(loader, name) for name in OURS})
                loader.close()

    @property
    def report(self) -> Report:
        by_torch = sorted(self.by_torch)
        return {"steps": self.steps, "by_torch": by_torch, "options": self.options}


def train(model: nn.Module, optimizer: Any, batch: Any, backward: Any, seen: Seen) -> None:
    loss = model(batch["x"], batch["labels"])["loss"]
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    seen.note("train", batch, loss)


# --- Lightning ------------------------------------------------------------------------------------


def lightning_module(make: MakeLoader, *, estimates: bool = False) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Line()
            self.seen = Seen()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(batch["x"], batch["labels"])["loss"]
            self.seen.note("train", batch, loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.seen.note("validate", batch, self.model(batch["x"], batch["labels"])["loss"])

        def val_dataloader(self) -> Any:
            return make(Points(), batch_size=BATCH_SIZE)

        def configure_optimizers(self) -> Any:
            if estimates:
                assert self.trainer.estimated_stepping_batches == EPOCHS * -(-LENGTH // BATCH_SIZE)
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


LIGHTNING: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": EPOCHS,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def lightning_trainer(make: MakeLoader, ranks: int, _: Path, **options: Any) -> Report:
    import lightning

    torch.manual_seed(1)
    module = lightning_module(make)
    trainer = lightning.Trainer(
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        enable_checkpointing=False,
        **LIGHTNING,
        **options,
    )
    trainer.fit(module, make(Points(), batch_size=BATCH_SIZE, shuffle=True))
    module.seen.close(trainer.train_dataloader, trainer.val_dataloaders)
    return module.seen.report


def lightning_overfit(make: MakeLoader, ranks: int, directory: Path) -> Report:
    """Overfit on some batches: on one device, only this makes the Trainer replace its loaders."""
    return lightning_trainer(make, ranks, directory, overfit_batches=2)


def lightning_checkpoints(
    make: MakeLoader, directory: Path, step: int | None, *, estimates: bool = False
) -> list[Any]:
    """Return the training steps of a run that writes checkpoints, and may resume from one.

    Args:
        make: Makes a loader.
        directory: Directory of the checkpoints.
        step: Step whose checkpoint the run resumes from; None to start from the beginning.
        estimates: Whether the module asks for the number of steps, as schedulers do.
    """
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    torch.manual_seed(1)
    module = lightning_module(make, estimates=estimates)
    checkpoints = ModelCheckpoint(directory, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = lightning.Trainer(devices=1, callbacks=[checkpoints], **LIGHTNING)
    loader = make(Points(), batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator())
    begin = None if step is None else str(directory / f"step={step}.ckpt")
    trainer.fit(module, loader, ckpt_path=begin)
    module.seen.close(trainer.train_dataloader, trainer.val_dataloaders)
    return [seen for seen in module.seen.steps if seen[0] == "train"]


def lightning_fabric(make: MakeLoader, ranks: int, _: Path) -> Report:
    import lightning

    torch.manual_seed(1)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto"
    )
    fabric.launch()
    model = Line()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader: Any = fabric.setup_dataloaders(make(Points(), batch_size=BATCH_SIZE, shuffle=True))
    seen = Seen()
    for _ in range(EPOCHS):
        for batch in loader:
            train(model, optimizer, batch, fabric.backward, seen)
    seen.close(loader._dataloader)
    return seen.report


# --- Accelerate -----------------------------------------------------------------------------------

# Configurations for one process or several, and for several only.
PREPARATIONS: list[dict[str, Any]] = [{}, {"use_seedable_sampler": True}]
DIVISIONS = [{"dispatch_batches": True}, {"split_batches": True}, {"even_batches": False}]


def samplings() -> dict[str, dict[str, Any]]:
    return {
        "shuffled": {"batch_size": BATCH_SIZE, "shuffle": True},
        "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(Points()), 4, True)},
        "batches as samples": {
            "batch_size": None,
            "sampler": BatchSampler(SequentialSampler(range(LENGTH)), 4, False),
            "collate_fn": default_collate,
        },
    }


class Batches(Points):
    """Samples that are whole batches, for a sampler that yields lists of indices."""

    def __getitem__(self, index: Any) -> Any:
        return [super(Batches, self).__getitem__(each) for each in index]


def accelerate_train(make: MakeLoader, ranks: int, _: Path) -> Report:
    import accelerate

    from dpex.integrations.accelerate import prepare, skip_first_batches

    ours = make is make_ours
    skip = skip_first_batches if ours else accelerate.skip_first_batches
    seen = Seen()
    for config in PREPARATIONS if ranks == 1 else PREPARATIONS + DIVISIONS:
        accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**config)
        )
        assert accelerator.num_processes == ranks
        for kind, arguments in samplings().items():
            if config and kind != "shuffled":
                continue
            if kind == "batches as samples" and ranks == 1:
                continue  # Accelerate 1.15 raises TypeError
            torch.manual_seed(1)
            model = Line()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            dataset = Batches() if kind == "batches as samples" else Points()
            loader = make(dataset, **arguments)
            model, loader, optimizer = (
                prepare(accelerator, model, loader, optimizer)
                if ours
                else accelerator.prepare(model, loader, optimizer)
            )
            seen.steps.append([config, kind, len(loader)])
            for _ in range(EPOCHS):
                for batch in loader:
                    if not config.get("even_batches", True):
                        seen.note("read", batch)  # DDP needs equally many batches in all ranks
                        continue
                    train(model, optimizer, batch, accelerator.backward, seen)
                    seen.steps.append(accelerator.gather_for_metrics(batch["index"]).tolist())
            if kind != "batch sampler" and config in ({}, {"dispatch_batches": True}):
                skipped = skip(loader, 1)
                for batch in skipped:
                    seen.note("read", batch)
                seen.close(skipped.base_dataloader)
            seen.close(loader.base_dataloader)
        accelerator.free_memory()
        accelerate.state.AcceleratorState._reset_state()
        accelerate.state.GradientState._reset_state()
    return seen.report


# --- transformers ---------------------------------------------------------------------------------


class Texts(Points):
    """Points with texts of different lengths, by which a sampler forms batches."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= LENGTH:
            raise IndexError(index)  # the sampler iterates over the dataset
        return {**super().__getitem__(index), "input_ids": list(range(1 + index * 7 % 11))}


def without_texts(samples: list[dict[str, Any]]) -> Any:
    return default_collate([{k: v for k, v in s.items() if k != "input_ids"} for s in samples])


def hf_rebalanced(make: MakeLoader, ranks: int, directory: Path) -> Report:
    """Run ``hf_trainer`` with a sampler that sizes batches by length and divides them itself."""
    return hf_trainer(make, ranks, directory / "rebalanced", "batch_rebalance")


def hf_trainer(make: MakeLoader, ranks: int, directory: Path, strategy: str = "random") -> Report:
    """Train, then resume from a checkpoint in the middle of an epoch."""
    import transformers

    from dpex.integrations.transformers import DpexTrainerMixin, DpexTrainingArguments

    seen = Seen()
    loaders: list[Any] = []

    class Watching(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
            loss = super().training_step(model, inputs, *others)
            seen.note("train", inputs, loss)
            loaders.append(self.callback_handler.train_dataloader.base_dataloader)
            return loss

        def prediction_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
            seen.note("predict", inputs)
            return super().prediction_step(model, inputs, *others, **named)

    class Ours(DpexTrainerMixin, Watching):
        pass

    ours = make is make_ours
    options = {f"dataloader_{name}": value for name, value in OURS.items()} if ours else {}
    kind = "dpex" if ours else "torch"
    arguments = (DpexTrainingArguments if ours else transformers.TrainingArguments)(
        output_dir=str(directory / kind),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        dataloader_num_workers=NUM_WORKERS if ours else torchs_workers(),
        dataloader_persistent_workers=ours or torchs_workers() > 0,
        save_strategy="steps",
        save_steps=1,
        logging_steps=1,
        use_cpu=True,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy=strategy,
        **options,
    )
    rebalances = strategy == "batch_rebalance"
    dataset = Texts() if rebalances else Points()

    def make_trainer() -> Any:
        return (Ours if ours else Watching)(
            Line(),
            arguments,
            train_dataset=dataset,
            eval_dataset=dataset,
            data_collator=without_texts if rebalances else None,
        )

    trainer = make_trainer()
    trainer.train()
    seen.steps.append([round(entry.get("loss", 0), 6) for entry in trainer.state.log_history])
    # Each loader of each rank starts worker processes, which import the framework for many seconds.
    # So ranks evaluate and resume with one sampler only.
    if ranks == 1 or not rebalances:
        for _ in range(2):
            trainer.evaluate()
        # The last checkpoint but one is in the middle of the last epoch.
        checkpoint = directory / kind / f"checkpoint-{trainer.state.global_step - 1}"
        make_trainer().train(resume_from_checkpoint=str(checkpoint))
    if ranks == 1:
        trainer.predict(dataset)

        class Stopping(transformers.TrainerCallback):
            def on_step_end(self, _: Any, state: Any, control: Any, **named: Any) -> None:
                control.should_epoch_stop = state.global_step % 2 == 0

        trainer = make_trainer()
        trainer.add_callback(Stopping())
        trainer.train()
    seen.close(*loaders)
    return seen.report


RUNS: dict[str, list[Callable[..., Report]]] = {
    "lightning": [lightning_trainer, lightning_overfit, lightning_fabric],
    "accelerate": [accelerate_train],
    "transformers": [hf_trainer, hf_rebalanced],
}


def both(framework: str, ranks: int, directory: Path) -> dict[str, dict[str, Report]]:
    """Return the reports of a framework's runs, by name and by loader (``"torch"``, ``"dpex"``)."""
    makes: dict[str, MakeLoader] = {"torch": make_torchs, "dpex": make_ours}
    reports: dict[str, dict[str, Report]] = {}
    # Ranks leave out lightning_overfit, because each start of a loader takes seconds.
    runs = [run for run in RUNS[framework] if ranks == 1 or run is not lightning_overfit]
    for run, (name, make) in itertools.product(runs, makes.items()):
        reports.setdefault(run.__name__, {})[name] = run(make, ranks, directory)
    return reports
