"""What an embedded Ray starts in place of a worker: asks the fork server for one, and ends.

A program of its own, which imports nothing it can do without: it is started for every worker.
"""

import os
import pickle
import resource
import socket
import sys

SERVER = "DPEX_FORK_SERVER"
"""Environment variable with the server's address."""
RAYS_OWN = "DPEX_SETUP_WORKER"
"""Environment variable with the program that Ray itself would have started."""

_SERVER_SECONDS = 30.0


def ask(arguments: list[str]) -> bool:
    """Ask for a fork that runs Ray's worker program.

    Args:
        arguments: Of Ray's set-up program: the worker program's path and its arguments.

    Returns:
        Whether there is one.
    """
    context = "--serialized-runtime-env-context="
    if any(a.startswith(context) and a != context + "{}" for a in arguments) or any(
        a.startswith("--worker-type=") and a != "--worker-type=WORKER" for a in arguments
    ):
        return False  # something is to be different in there
    # Ray puts the interpreter's own flags (-s, -S) before the program; the fork has them.
    program = arguments[next(n for n, a in enumerate(arguments) if not a.startswith("-")) :]
    name, _, token = os.environ[SERVER].partition("/")
    request = {
        "instead": [os.environ[RAYS_OWN], *arguments],
        "arguments": [a for a in program if not a.startswith((context, "--language="))],
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109 - pathlib would take longer than all the rest
        "group": os.getpgid(0),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # It may still be loading modules. Should it be stuck, Ray starts the worker.
        connection.settimeout(_SERVER_SECONDS)
        connection.connect("\0" + name)
        message = token.encode() + b"\n" + pickle.dumps(request)
        sent = socket.send_fds(connection, [message], [0, 1, 2])
        connection.sendall(message[sent:])
        connection.shutdown(socket.SHUT_WR)
        return bool(connection.recv(16))


def main() -> None:
    """Be replaced by a fork, or else by Ray's own program."""
    try:
        forked = ask(sys.argv[1:])
    except Exception:  # no server, or Ray starts its workers in another way
        forked = False
    if not forked:
        os.execv(sys.executable, [sys.executable, os.environ[RAYS_OWN], *sys.argv[1:]])


if __name__ == "__main__":
    main()
