"""A trainer in a process of its own, which the test stops at a batch to do something to it."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster_programs import environment, spawn

PROGRAM = Path(__file__).parents[1] / "epoch_program.py"
LENGTH = 600


class Trainer:
    """A process of epoch_program.py.

    Args:
        place: Directory of the test's processes.
        address: The cluster's head.
        pauses: Numbers of the batches at which it waits for ``go``.
        **options: What else the program takes.
    """

    def __init__(
        self, place: Path, address: str, *, pauses: tuple[int, ...] = (), **options: Any
    ) -> None:
        self._out = place / f"epoch-{id(self)}.json"
        given = {"address": address, "out": str(self._out), "pauses": pauses, "length": LENGTH}
        self.process = spawn(
            [sys.executable, str(PROGRAM), json.dumps({**given, **options})],
            place,
            env=environment(place, RAY_AUTH_MODE="disabled"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def until(self, batch: int, seconds: float = 90) -> None:
        """Wait until it has got a batch."""
        assert self.process.stdout is not None
        line = ""
        while line != f"batch {batch}\n":
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                assert selector.select(seconds), f"no batch {batch} within {seconds} s"
            line = self.process.stdout.readline()
            assert line, f"the trainer ended with {self.process.wait()}"

    def go(self) -> None:
        """Let it go on from a pause."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self, seconds: float = 150) -> dict[str, Any]:
        """Wait for its end; returns what it wrote."""
        self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0
        result: dict[str, Any] = json.loads(self._out.read_text())
        return result


def drawn(result: dict[str, Any]) -> list[tuple[int, float]]:
    """What must not depend on where it was made: index and draw of every sample, in order."""
    return [(index, draw) for index, draw, _ in result["samples"]]


def nodes_in(result: dict[str, Any], until: int | None = None) -> set[str]:
    """The nodes that made an epoch's samples, or its first ones."""
    return {node for _, _, node in result["samples"][:until]}
