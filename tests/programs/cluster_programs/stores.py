"""An S3 server on this machine, and a proxy that injects faults into its answers."""

from __future__ import annotations

import contextlib
import http.client
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster_programs import spawn, wait_until

KEY, SECRET = "someone", "a-secret-of-theirs"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "here"}
MEET_SECONDS = 20


@contextlib.contextmanager
def object_store(place: Path) -> Iterator[tuple[str, Path]]:
    """Run an S3 server; yield its address, and the folder whose subfolders are buckets."""
    folder, log = place / "buckets", place / "store.log"
    folder.mkdir()
    server = spawn(
        [
            *(str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--addr=127.0.0.1:0"),
            *(f"--auth-key={KEY},{SECRET}", "-vv", f"--log-file={log}", str(folder)),
        ],
        place,
    )
    try:
        listening = r"Starting s3 server on \[http://([\d.:]+)"
        [address] = wait_until(
            lambda: log.exists() and re.findall(listening, log.read_text()), 30, "object store"
        )
        yield address, folder
    finally:
        server.kill()
        server.wait()


# Answers of the proxy that refuse a request: HTTP status and S3's error code.
REFUSALS = {
    "busy": (503, "SlowDown"),
    "denied": (403, "AccessDenied"),
    "elsewhere": (301, "PermanentRedirect"),
}


class Proxy:
    """A proxy that forwards requests to a server, and injects faults.

    Args:
        behind: Address of the server.

    Attributes:
        address: Address of the proxy.
        faults: Faults of the next answers to requests for objects: ``"busy"`` (503),
            ``"short"`` (less content than announced), ``"denied"`` (403),
            ``"elsewhere"`` (301), ``"reset"``.
        delay_s: Delay of each answer, in seconds.
        first_two: Barrier at which the first two requests for objects wait, or None.
        requests: Method and path of every request for an object.
        times: Time of each of these requests, in seconds.
        listings: Query of every request for a listing.
    """

    def __init__(self, behind: str) -> None:
        self.faults: list[str] = []
        self.delay_s = 0.0
        self.first_two: threading.Barrier | None = None
        self.requests: list[tuple[str, str]] = []
        self.times: list[float] = []
        self.listings: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                time.sleep(proxy.delay_s)
                path, _, query = self.path.partition("?")
                fault = ""
                if "list-type" in query:
                    proxy.listings.append(query)
                elif path.count("/") > 1:
                    proxy.times.append(time.monotonic())
                    proxy.requests.append((self.command, path))
                    if proxy.first_two is not None and len(proxy.requests) <= 2:
                        proxy.first_two.wait(MEET_SECONDS)
                    fault = proxy.faults.pop(0) if proxy.faults else ""
                if fault in REFUSALS:
                    status, code = REFUSALS[fault]
                    body = f"<Error><Code>{code}</Code></Error>".encode()
                    return self.answer(status, {}, body)
                connection = http.client.HTTPConnection(behind, timeout=30)
                connection.request(self.command, self.path, headers=dict(self.headers))
                answer = connection.getresponse()
                body = answer.read()
                own = {"connection", "transfer-encoding"}
                headers = {k: v for k, v in answer.getheaders() if k.lower() not in own}
                if fault == "reset" or (fault == "short" and self.command != "GET"):
                    self.close_connection = True
                    return self.connection.close()
                self.answer(answer.status, headers, body[: len(body) // 2] if fault else body)
                return None

            def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                announced = {"Content-Length": str(len(body)), **headers}
                for name, value in announced.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                if int(announced["Content-Length"]) != len(body):
                    self.close_connection = True

            do_GET = do_HEAD = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
