"""A program of another user that tries to reach the files, ports and processes of a local Ray.

Its standard input is a JSON object with lists of paths, ports and pids, and a token for the ports.
It prints a JSON list of the attempts that succeeded, and the command lines that it could read.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster_programs.ports import answers

OTHER_USER = 65534


def attempts_on(path: Path) -> Iterator[Callable[[], object]]:
    def read() -> object:
        return list(path.iterdir()) if path.is_dir() else path.read_bytes()

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))

    def pre_create() -> None:
        new = (path if path.is_dir() else path.parent) / "new"
        new.touch()
        new.unlink()

    def replace_with_link() -> None:
        path.rename(path.with_name("away"))
        path.symlink_to("/etc/passwd")

    def replace_with_file() -> None:
        aside = Path("/tmp", f"aside-{os.getpid()}")
        aside.touch()
        try:
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)

    yield from [read, connect, pre_create, replace_with_file, replace_with_link]
    yield lambda: os.open(path, os.O_WRONLY)
    yield lambda: path.chmod(0o777)
    yield lambda: path.unlink()
    yield lambda: path.rmdir()


def attempts_on_process(pid: int) -> Iterator[Callable[[], object]]:
    yield lambda: os.kill(pid, 0)
    yield lambda: list(Path(f"/proc/{pid}/fd").iterdir())
    yield lambda: Path(f"/proc/{pid}/environ").read_bytes()
    yield lambda: Path(f"/proc/{pid}/maps").read_bytes()


def main() -> None:
    given = json.load(sys.stdin)
    with contextlib.suppress(OSError):  # load all modules: the other user may not be able to
        answers(1, None)
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    done = []
    for kind, attempts in (("paths", attempts_on), ("pids", attempts_on_process)):
        for target in given[kind]:
            for number, attempt in enumerate(attempts(Path(target) if kind == "paths" else target)):
                try:
                    attempt()
                except OSError:
                    continue
                done.append(f"attempt {number} on {target}")
    refused = ({"UNAUTHENTICATED"}, {"401"}, {"403"})
    for port in given["ports"]:
        codes = [answers(port, token) for token in (None, "0" * 64)]
        if any(answer not in refused for answer in codes):
            done.append(f"port {port} answered {codes}")
    commands = [Path("/proc", str(pid), "cmdline").read_bytes().decode() for pid in given["pids"]]
    print(json.dumps({"succeeded": done, "commands": commands}))


if __name__ == "__main__":
    main()
