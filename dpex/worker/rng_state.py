"""What random number generators are about to draw, as plain data, so that it is drawn again."""

from __future__ import annotations

import base64
import contextlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpex.worker.seeding import generators_kept, global_states, set_global_states

__all__ = ["Draws"]


@dataclass(frozen=True, eq=False)
class Draws:
    """The states of generators at one moment.

    Attributes:
        torchs: Of torch's global CPU generator.
        numpys: Of numpy's global one, as ``np.random.get_state`` gives it.
        pythons: Of ``random``.
        own: Of generators that a loader or its samplers were given, by what they belong to.
    """

    torchs: torch.Tensor
    numpys: Any
    pythons: Any
    own: dict[str, torch.Tensor]

    @classmethod
    def now(cls, own: Mapping[str, torch.Generator]) -> Draws:
        """Take the states as they are.

        Args:
            own: Generators besides the global ones.
        """
        own_states = {name: generator.get_state() for name, generator in own.items()}
        torchs, numpys, pythons = global_states()
        return cls(torchs, numpys, pythons, own_states)

    def give(self, own: Mapping[str, torch.Generator]) -> None:
        """Put the states of the generators that are not global back."""
        for name, generator in own.items():
            if name in self.own:
                generator.set_state(self.own[name])

    def give_global(self) -> None:
        """Put the states of the global generators back."""
        set_global_states((self.torchs, self.numpys, self.pythons))

    @contextlib.contextmanager
    def repeated(self, own: Mapping[str, torch.Generator]) -> Iterator[None]:
        """Draw as it was drawn then; the global generators are left as they are found."""
        with generators_kept():
            self.give_global()
            self.give(own)
            yield

    def plain(self) -> dict[str, Any]:
        """Return the states as strings and numbers."""
        _, keys, place, has_gauss, gauss = self.numpys
        version, words, next_gauss = self.pythons
        return {
            "torch": _text(self.torchs.numpy().tobytes()),
            "numpy": [_text(keys.tobytes()), int(place), int(has_gauss), float(gauss)],
            "python": [version, _text(array("I", words).tobytes()), next_gauss],
            "own": {name: _text(state.numpy().tobytes()) for name, state in self.own.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Draws:
        """Make it from what ``plain`` returned."""
        keys, place, has_gauss, gauss = plain["numpy"]
        version, words, next_gauss = plain["python"]
        return cls(
            _state(plain["torch"]),
            ("MT19937", np.frombuffer(_bytes(keys), np.uint32), place, has_gauss, gauss),
            (version, tuple(array("I", _bytes(words))), next_gauss),
            {name: _state(text) for name, text in plain["own"].items()},
        )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
