"""An S3 server on this machine with delayed answers: rclone behind a relay.

``python -m benchmarks.object_store SOCKET DELAY_S`` runs the relay. It delays the server's answers
on all connections at the same time, and counts the requests of the clients.
"""

import asyncio
import functools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

START_TIMEOUT_S = 30
END_OF_REQUEST = b"\r\n\r\n"


@dataclass(frozen=True)
class ObjectStore:
    """A running server, and the relay in front of it.

    Attributes:
        environment: Environment variables for a client.
        server: The process of rclone.
        relay: The process that delays answers.
    """

    environment: dict[str, str] = field(repr=False)
    server: subprocess.Popen[str]
    relay: subprocess.Popen[str]

    def requests(self) -> dict[str, int]:
        """Return the number of requests so far, by method."""
        assert self.relay.stdin is not None
        assert self.relay.stdout is not None
        self.relay.stdin.write("\n")
        self.relay.stdin.flush()
        counts: dict[str, int] = json.loads(self.relay.stdout.readline())
        return counts

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the server and the relay."""
        return [psutil.Process(process.pid) for process in (self.server, self.relay)]


@contextmanager
def object_store(folder: Path, delay_s: float) -> Iterator[ObjectStore]:
    """Serve a folder whose subfolders are buckets.

    Args:
        folder: The folder, which is only read.
        delay_s: Delay of each answer, in seconds.

    Yields:
        The server, which ends with the context.

    Raises:
        RuntimeError: The server does not start.
    """
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    rclone = str(Path(sys.executable).with_name("rclone"))
    serve = [rclone, "serve", "s3", "--read-only", "--quiet"]
    started: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as place:
        # Another process could take a free port before rclone does, so rclone gets a socket file.
        behind = Path(place) / "s3"
        try:
            server = subprocess.Popen(
                [*serve, f"--addr=unix://{behind}", str(folder)],
                env={**os.environ, "RCLONE_AUTH_KEY": f'"{key},{secret}"'},
                text=True,
            )
            started.append(server)
            deadline = time.monotonic() + START_TIMEOUT_S
            while not behind.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{rclone} serves nothing after {START_TIMEOUT_S} s")
                time.sleep(0.05)
            relay = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.object_store", str(behind), str(delay_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(relay)
            assert relay.stdout is not None
            environment = {
                "AWS_ACCESS_KEY_ID": key,
                "AWS_SECRET_ACCESS_KEY": secret,
                "AWS_SESSION_TOKEN": "",
                "AWS_REGION": "here",
                "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{int(relay.stdout.readline())}",
            }
            yield ObjectStore(environment, server, relay)
        finally:
            for process in started:
                process.terminate()
                process.wait()


class Answers(asyncio.Protocol):
    """The server's side of a connection: it sends the server's data to the client after a delay.

    Args:
        delay_s: The delay in seconds.

    Attributes:
        client: Transport to the client, which is set before the server sends data.
    """

    client: asyncio.WriteTransport

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.held: deque[bytes] = deque()

    def data_received(self, data: bytes) -> None:
        self.held.append(data)
        asyncio.get_running_loop().call_later(self.delay_s, self.pass_on)

    def connection_lost(self, error: Exception | None) -> None:
        self.data_received(b"")

    def pass_on(self) -> None:
        # Send the oldest data first, even if two timers end at the same time.
        data = self.held.popleft()
        if data:
            self.client.write(data)
        else:
            self.client.close()


class Requests(asyncio.Protocol):
    """The client's side of a connection: it sends requests to the server at once, and counts them.

    Args:
        answers: The server's side.
        server: Transport to the server.
        counts: Counts of all clients, by method. Requests with content would be miscounted.
    """

    def __init__(
        self, answers: Answers, server: asyncio.WriteTransport, counts: Counter[str]
    ) -> None:
        self.answers = answers
        self.server = server
        self.counts = counts
        self.begun = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.answers.client = transport

    def data_received(self, data: bytes) -> None:
        *whole, self.begun = (self.begun + data).split(END_OF_REQUEST)
        self.counts.update(request.partition(b" ")[0].decode() for request in whole)
        self.server.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.server.close()


async def relay(behind: str, delay_s: float) -> None:
    """Pass requests on at once, and answers after a delay.

    The relay prints its port, and then the counts for each line of its input.

    Args:
        behind: Path of the server's socket.
        delay_s: Delay of an answer, in seconds.
    """
    loop = asyncio.get_running_loop()
    counts: Counter[str] = Counter()

    def tell() -> None:
        if not sys.stdin.readline():
            sys.exit()
        print(json.dumps(counts), flush=True)

    loop.add_reader(sys.stdin, tell)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = await loop.sock_accept(listener)
            server, answers = await loop.create_unix_connection(
                functools.partial(Answers, delay_s), behind
            )
            await loop.connect_accepted_socket(
                functools.partial(Requests, answers, server, counts), client
            )


if __name__ == "__main__":
    asyncio.run(relay(sys.argv[1], float(sys.argv[2])))
