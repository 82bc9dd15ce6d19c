"""States of random number generators, from which their draws can be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dpex.worker.seeding import generators_kept, global_states, set_global_states

__all__ = ["Draws"]


@dataclass(frozen=True, eq=False)
class Draws:
    """States of generators at one moment.

    Attributes:
        torchs: State of torch's global CPU generator.
        numpys: State of numpy's global generator, as ``np.random.get_state`` returns it.
        pythons: State of ``random``.
        own: States of the generators that a loader or its samplers were given, by owner.
    """

    torchs: torch.Tensor
    numpys: Any
    pythons: Any
    own: dict[str, torch.Tensor]

    @classmethod
    def now(cls, own: Mapping[str, torch.Generator]) -> Draws:
        """Return the current states.

        Args:
            own: Generators besides the global ones, by owner.
        """
        own_states = {name: generator.get_state() for name, generator in own.items()}
        torchs, numpys, pythons = global_states()
        return cls(torchs, numpys, pythons, own_states)

    def give(self, own: Mapping[str, torch.Generator]) -> None:
        """Restore the states of the generators that are not global."""
        for name, generator in own.items():
            if name in self.own:
                generator.set_state(self.own[name])

    def give_global(self) -> None:
        """Restore the states of the global generators."""
        set_global_states((self.torchs, self.numpys, self.pythons))

    @contextlib.contextmanager
    def repeated(self, own: Mapping[str, torch.Generator]) -> Iterator[None]:
        """Restore all states for the block, then return the global generators to theirs."""
        with generators_kept():
            self.give_global()
            self.give(own)
            yield
