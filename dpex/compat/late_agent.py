"""What an embedded Ray starts in place of an agent of its node: waits until the agent is wanted.

A program of its own, which imports nothing it can do without: it takes the place of one that takes
half a second of processor time to start, while everybody waits for the first batch.
"""

import os
import sys
import time

_WAIT_S = 0.05
_IDLE_S = 1.0


def main(wanted: str, *command: str) -> None:
    """Be replaced by the agent once it is wanted; end with the node, as the agent would.

    Args:
        wanted: A file that is there from that moment on.
        *command: The agent's program and its arguments; none if it is never wanted.
    """
    node = os.getppid()
    while os.getppid() == node:
        if command and os.path.exists(wanted):  # noqa: PTH110 - pathlib would take longer to load
            os.execvp(command[0], command)
        time.sleep(_WAIT_S if command else _IDLE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
