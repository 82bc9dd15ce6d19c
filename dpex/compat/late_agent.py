"""A placeholder that a local Ray starts for an agent of its node, until the agent is wanted.

The agent takes half a second of processor time to start, which would delay the first batch. The
placeholder starts faster, because it imports only the modules that it needs.
"""

import os
import sys
import time

SHARE = "--share-port"
_PORT_OPTION = "--runtime-env-agent-port="
_WAIT_S = 0.05
_IDLE_S = 1.0


def main(wanted: str, *command: str) -> None:
    """Wait until the file ``wanted`` exists, then replace this process by the agent.

    If the parent process, the node's raylet, ends first, return: the agent would end then too.

    Args:
        wanted: Path of the file.
        *command: The agent's interpreter, its program and their arguments. Without a command, the
            agent never starts.
    """
    node = os.getppid()
    if not is_raylet(node):
        return
    while os.getppid() == node:
        if command and os.path.exists(wanted):  # noqa: PTH110 - pathlib would take longer to load
            program = [word.endswith(".py") for word in command].index(True)
            os.execvp(command[0], [*command[:program], __file__, SHARE, *command[program:]])
        time.sleep(_WAIT_S if command else _IDLE_S)


def is_raylet(pid: int) -> bool:
    """Return whether a process is a raylet; True where the system does not show its command.

    The raylet may end before this process first looks: then its parent is another process.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return b"raylet" in file.read()
    except OSError:
        return not os.path.exists("/proc/self")  # noqa: PTH110


def share_port(program: str, *arguments: str) -> None:
    """Run an agent that shares its port with the socket that reserves the port for this user."""
    import runpy
    import socket

    ports = [int(a.removeprefix(_PORT_OPTION)) for a in arguments if a.startswith(_PORT_OPTION)]
    bind = socket.socket.bind

    def bind_shared(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and address[1] in ports:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bind(self, address)  # type: ignore[arg-type]

    socket.socket.bind = bind_shared  # type: ignore[assignment, method-assign]
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(program)  # noqa: PTH120
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == SHARE:
        share_port(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
