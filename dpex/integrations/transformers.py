"""transformers: a ``Trainer`` whose batches dpex makes."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from dpex.dataloader import DEFAULT_MAX_SKIPPED, DEFAULT_PREFETCH_BYTES
from dpex.integrations.accelerate import distribute, skip_first_batches
from dpex.remaking import OWN_OPTIONS

if TYPE_CHECKING:
    from transformers import TrainerState

__all__ = ["DpexTrainerMixin", "DpexTrainingArguments"]


@dataclass
class DpexTrainingArguments(TrainingArguments):
    """``TrainingArguments`` with dpex's options, prefixed with ``dataloader_`` like torch's.

    ``HfArgumentParser`` reads the options from a command line. To add them to a subclass of
    ``TrainingArguments``, inherit from both classes.

    Attributes:
        dataloader_distribute_mode: ``distribute_mode`` of ``DpexDataLoader``.
        dataloader_head_address: ``head_address``: which Ray to use.
        dataloader_worker_options: ``worker_options``: Ray's options of one worker, as a dict or as
            JSON.
        dataloader_prefetch_bytes: ``prefetch_bytes``.
        dataloader_on_error: ``on_error``: raise the error of a sample, or skip the sample.
        dataloader_max_skipped: ``max_skipped``: how many samples of an epoch may be left out.

    Raises:
        ValueError: ``dataloader_worker_options`` is neither a dict nor a JSON object.

    Source:
        ``dataloader_num_workers`` and similar fields of ``TrainingArguments``, transformers 5.23.
    """

    dataloader_distribute_mode: bool = field(
        default=True, metadata={"help": "Whether the loaders' workers are Ray tasks."}
    )
    dataloader_head_address: str = field(
        default="auto", metadata={"help": 'Which Ray: "auto", "local", or "host:port".'}
    )
    dataloader_worker_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Ray's options of one worker, as JSON."}
    )
    dataloader_prefetch_bytes: int = field(
        default=DEFAULT_PREFETCH_BYTES,
        metadata={"help": "Total bytes of the batches that may be in flight."},
    )
    dataloader_on_error: str = field(
        default="raise", metadata={"help": '"raise" an error of a sample, or "skip" the sample.'}
    )
    dataloader_max_skipped: int = field(
        default=DEFAULT_MAX_SKIPPED, metadata={"help": "Samples of an epoch that may be left out."}
    )

    def __post_init__(self) -> None:
        """Check the arguments, and parse options that are JSON."""
        options = self.dataloader_worker_options
        if isinstance(options, str):
            with contextlib.suppress(ValueError):  # the check below rejects the string
                options = json.loads(options)
        if options is not None and not isinstance(options, dict):
            raise ValueError(
                "dataloader_worker_options must be a dict or a JSON object, got "
                f"{self.dataloader_worker_options!r}. Example: '{{\"num_cpus\": 2}}'"
            )
        self.dataloader_worker_options = options
        super().__post_init__()  # type: ignore[no-untyped-call]


class DpexTrainerMixin:
    """Mixin for a ``Trainer`` that reads training, evaluation and test sets through dpex.

    Write ``class MyTrainer(DpexTrainerMixin, Trainer)``; nothing else changes. The Trainer still
    decides on batches, on the share of each rank and on shuffling. ``dataloader_num_workers`` is
    the number of workers; its default is 0. dpex's options come from ``DpexTrainingArguments``.
    With arguments of another class, dpex's options have their defaults.

    Source:
        ``Trainer.get_train_dataloader`` and similar methods, transformers 5.23.
    """

    # The first iterator of a train() call, and the iterator that is read in its place.
    _begun_with: tuple[Any, Any] | None = None

    # mypy does not know that the mixin has the Trainer's attributes.
    if TYPE_CHECKING:
        args: TrainingArguments
        state: TrainerState
        callback_handler: Any

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's training loader, with batches made by dpex."""
        return self._distributed(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's evaluation loader, with batches made by dpex."""
        return self._distributed(super().get_eval_dataloader(eval_dataset))  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the Trainer's test loader, with batches made by dpex."""
        return self._distributed(super().get_test_dataloader(test_dataset))  # type: ignore[misc]

    def _distributed(self, loader: Any) -> Any:
        options = {name: getattr(self.args, f"dataloader_{name}", None) for name in OWN_OPTIONS}
        given = {name: value for name, value in options.items() if value is not None}
        return distribute(loader, **{"distribute_mode": True, **given})

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train as the Trainer does."""
        self._begun_with = None
        try:
            return super().train(*arguments, **named)  # type: ignore[misc]
        finally:
            self._begun_with = None

    def get_batch_samples(self, epoch_iterator: Any, *others: Any, **named: Any) -> Any:
        """Return the next batches, made by dpex even if the Trainer skips some.

        To resume in the middle of an epoch, the Trainer makes a torch ``DataLoader`` that skips
        batches. The first ``epoch_iterator`` is then the iterator of that loader. Nothing has been
        read from it, so this method replaces it.
        """
        if self._begun_with is None:
            self._begun_with = (epoch_iterator, self._rest_of_epoch() or epoch_iterator)
        theirs, ours = self._begun_with
        read = ours if epoch_iterator is theirs else epoch_iterator
        return super().get_batch_samples(read, *others, **named)  # type: ignore[misc]

    def _rest_of_epoch(self) -> Any:
        """Return an iterator over the rest of the checkpoint's epoch, or None for a whole epoch."""
        loader: Any = self.callback_handler.train_dataloader
        batches = len(loader) if has_length(loader) else 0
        per_update = self.args.gradient_accumulation_steps
        epoch, updates = divmod(self.state.global_step, max(1, math.ceil(batches / per_update)))
        if updates == 0 or self.args.ignore_data_skip:
            return None
        rest = skip_first_batches(loader, updates * per_update)
        if hasattr(rest, "set_epoch"):  # a loader that Accelerate has not prepared lacks it
            rest.set_epoch(epoch)
        return iter(rest)
