"""A placeholder that a local Ray starts for an agent of its node, until the agent is wanted.

The agent takes half a second of processor time to start, which would delay the first batch. The
placeholder starts faster, because it imports only the modules that it needs. Then it is the agent's
parent. The raylet ends when the process that it has started for an agent ends, and so the training
ends too. The placeholder starts the agent again if a signal has killed it, for lack of memory.
"""

import os
import sys
import time

SHARE = "--share-port"
_PORT_OPTION = "--runtime-env-agent-port="
_WAIT_S = 0.05
_IDLE_S = 1.0
_PR_SET_PDEATHSIG = 1


def main(wanted: str, *command: str) -> None:
    """Wait until the file ``wanted`` exists, then run the agent until it ends by itself.

    If the parent process, the node's raylet, ends, return: the agent ends then too.

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
            run([*command[:program], __file__, SHARE, *command[program:]], node)
        time.sleep(_WAIT_S if command else _IDLE_S)


def run(command: "list[str]", node: int) -> None:
    """Run the agent; return if a signal has killed it, and exit as it does otherwise.

    The agent ends with this process. It sees the end of the raylet by the pipe that is its standard
    input, or if its parent is not the process in ``RAY_RAYLET_PID``.

    Args:
        command: The command.
        node: Process id of the raylet.
    """
    import ctypes
    import signal

    parent = os.getpid()
    environment = {**os.environ, "RAY_RAYLET_PID": str(parent)}
    agent = os.fork()
    if agent == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.execvpe(command[0], command, environment)
        os._exit(1)
    while os.getppid() == node:
        ended, status = os.waitpid(agent, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            return
        if ended:
            sys.exit(os.waitstatus_to_exitcode(status))
        time.sleep(_IDLE_S)


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
