"""Calls to the ports of Ray's servers."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc

# A method of each of Ray's servers that has no effect with an empty request.
_METHODS = [
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetResourceLoad",
    "ObjectManagerService/Push",
    "CoreWorkerService/GetCoreWorkerStats",
]


def answers(port: int, token: str | None) -> set[str]:
    """Return the status codes, of gRPC or HTTP, with which a port answers known calls."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    codes: set[str] = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in _METHODS:
            call = channel.unary_unary(f"/ray.rpc.{method}")
            try:
                call(b"", timeout=20, metadata=tuple(headers.items()))
                codes.add("OK")
            except grpc.RpcError as error:
                codes.add(error.code().name)
    if codes == {"UNAVAILABLE"}:  # the server speaks HTTP 1
        try:
            request = Request(f"http://127.0.0.1:{port}/", headers=headers)
            return {str(urlopen(request, timeout=20).status)}
        except HTTPError as error:
            return {str(error.code)}
    return codes - {"UNIMPLEMENTED"}
