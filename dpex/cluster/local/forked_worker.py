"""Program that a local Ray starts in place of a worker process.

It asks the fork server for a fork, and ends. Ray starts it for every worker process, so it imports
only what it needs.
"""

import os
import pickle
import resource
import socket
import struct
import sys

SERVER = "DPEX_FORK_SERVER"
"""Environment variable with the server's address, or with a directory that has one file per job.

The address is the path of a Unix socket.

Ranks that share a Ray have a job and a server each. A job's file begins with the server's address,
which may be empty. Then come the variables in which the rank differs from the Ray: ``NAME=value``,
or ``NAME`` for one that the rank lacks. A NUL ends each part."""
RAYS_OWN = "DPEX_SETUP_WORKER"
"""Environment variable with the path of the program that Ray itself would have started."""

_SERVER_SECONDS = 30.0


def ask(arguments: list[str]) -> bool:
    """Ask for a fork that runs Ray's worker program.

    Args:
        arguments: Arguments of Ray's set-up program: the worker program's path and its arguments.

    Returns:
        Whether the server has forked a worker process.
    """
    address = _address()
    context = "--serialized-runtime-env-context="
    if any(a.startswith(context) and a != context + "{}" for a in arguments) or any(
        a.startswith("--worker-type=") and a != "--worker-type=WORKER" for a in arguments
    ):
        return False  # another environment, or no ordinary worker process
    if not address:
        return False
    # Ray puts the interpreter's flags (-s, -S) before the program; the fork has them already.
    program = arguments[next(n for n, a in enumerate(arguments) if not a.startswith("-")) :]
    request = {
        "instead": [os.environ[RAYS_OWN], *arguments],
        "arguments": [a for a in program if not a.startswith((context, "--language="))],
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109 - pathlib would take longer than all the rest
        "group": os.getpgid(0),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # The server may still be loading modules. After the timeout, Ray's own program runs.
        connection.settimeout(_SERVER_SECONDS)
        connection.connect(address)
        if not is_own(connection):
            return False
        message = pickle.dumps(request)
        sent = socket.send_fds(connection, [message], [0, 1, 2])
        connection.sendall(message[sent:])
        connection.shutdown(socket.SHUT_WR)
        return bool(connection.recv(16))


def is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this user.

    That is the process that connected, or the one that began to listen. Systems other than Linux do
    not say which user that is. There, only the directory of the socket keeps others away.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _pid, user, _group = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, option, 12))
    return bool(user == os.geteuid())


def _address() -> str:
    """Return the address of this job's server, and take over the variables of the job's rank."""
    address = os.environ[SERVER]
    if not os.path.isdir(address):  # noqa: PTH112 - pathlib would take longer than all the rest
        return address
    with open(f"{address}/{os.environ['RAY_JOB_ID']}", "rb") as file:  # noqa: PTH123 - as above
        address, *variables = os.fsdecode(file.read()).split("\0")[:-1]
    for variable in variables:
        name, has_value, value = variable.partition("=")
        if has_value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    return address


def main() -> None:
    """Ask for a fork; if that fails, replace this process with Ray's own program."""
    try:
        forked = ask(sys.argv[1:])
    except Exception:  # no server, or this Ray starts its worker processes differently
        forked = False
    if not forked:
        os.execv(sys.executable, [sys.executable, os.environ[RAYS_OWN], *sys.argv[1:]])


if __name__ == "__main__":
    main()
