"""Training processes that a test stops at a batch, to disturb their cluster."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_programs import environment, spawn

PROGRAM = Path(__file__).parents[1] / "epoch_program.py"
LENGTH = 600
# Options for batches of 38 MB.
SMALL_STORE = {"batch_size": 10, "length": 200, "floats": 950_000, "seconds": 0.001}


class TrainingProcess:
    """A training process of ``epoch_program.py``, which waits for a command after each batch.

    Args:
        place: Directory of the test's processes.
        address: Address of the cluster's head.
        variables: Environment variables. With a rank's variables, it reads this rank's shard.
        nodes: Nodes of which each reads a sample before any other sample is read. Without them, one
            node may read all samples before another has started its worker processes.
        **options: Further options of the program.

    Attributes:
        options: The further options.
        suspended: From when until when it was suspended, by ``time.monotonic``.
    """

    def __init__(
        self,
        place: Path,
        address: str,
        variables: Mapping[str, str] | None = None,
        *,
        nodes: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.options = options
        self.suspended = (0.0, 0.0)
        self._out = place / f"epoch-{uuid.uuid4().hex}.json"
        gathering = self._out.with_suffix(".nodes")
        gathering.mkdir()
        given = {
            "address": address,
            "out": str(self._out),
            "length": LENGTH,
            "gathered": (str(gathering), nodes),
        }
        self.process = spawn(
            [sys.executable, str(PROGRAM), json.dumps({**given, **options})],
            place,
            env=environment(place, **{"RAY_AUTH_MODE": "disabled", **(variables or {})}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._stopped = False

    def until(self, batch: int) -> None:
        """Continue until this batch has been read."""
        while self._next()[0] < batch:
            pass

    def until_from(self, node: str) -> None:
        """Continue until a batch has been read that this node made, wholly or in part."""
        while node not in self._next()[1]:
            pass

    def _next(self, seconds: float = 150) -> tuple[int, list[str]]:
        """Read one more batch; return its number and the nodes that made it."""
        assert self.process.stdout is not None
        if self._stopped:
            self._say("next")
        # Invariant: Python's buffer contains no second line, because the process writes one line
        # and waits.
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(seconds), f"no batch within {seconds} s"
        line = self.process.stdout.readline()
        assert line, f"the training process ended with {self.process.wait()}"
        self._stopped = True
        number, *nodes = line.split()
        return int(number), nodes

    def suspend(self, seconds: float) -> None:
        """Suspend the process for some seconds."""
        since = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)
        self.suspended = (since, time.monotonic())

    def go(self) -> None:
        """Continue to the end of the epoch."""
        self._say("go")

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def finish(self, seconds: float = 250) -> dict[str, Any]:
        """Continue to the end of the epoch; wait for it, and return the report."""
        self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0
        return self.said()

    def said(self) -> dict[str, Any]:
        """Return the report that the process wrote."""
        result: dict[str, Any] = json.loads(self._out.read_text())
        return result


Drawn = tuple[int, int, str]
"""A sample: its batch, its index, and a digest of the numbers that it drew."""


def drawn(result: dict[str, Any]) -> list[Drawn]:
    """Return the parts of every sample, in order, that must not depend on its node."""
    return [(batch, index, draw) for batch, index, draw, _ in result["samples"]]


def longest_wait(result: dict[str, Any], suspended: tuple[float, float] = (0.0, 0.0)) -> float:
    """Return the longest wait for a batch, in seconds, without the time of a suspension.

    The wait for the first batch does not count: it includes the start of all processes.
    """
    since, until = suspended
    return max(
        got - asked - max(0.0, min(got, until) - max(asked, since))
        for asked, got in result["waits"][1:]
    )


def nodes_in(result: dict[str, Any]) -> set[str]:
    """Return the nodes that made an epoch's samples."""
    return {node for *_, node in result["samples"]}
