"""Files by URI: on a disk, in an object store, or in any filesystem of fsspec."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

if TYPE_CHECKING:
    import pyarrow.fs as pafs

__all__ = ["Store"]

# Requests that Arrow sends for one answer of an S3 store, at growing random intervals.
_ATTEMPTS = 6
# Files that one process reads concurrently; the other worker processes read as many.
_READ_AT_ONCE = 8
# Files that may be read before their sample is made: a batch of large files must not fill memory.
_READ_AHEAD = 16
# Arrow's default timeouts are 1 s for the connection and 3 s for the answer.
_CONNECT_S = 10.0
_ANSWER_S = 60.0
# By default, Arrow retries Google's store for 15 minutes, even without credentials.
_GOOGLE_RETRIES = "retry_limit_seconds=10"
# Schemes whose name before "@" is not a secret: a container, or a user who logs in with a key.
_NAMED = {"abfs", "abfss", "ftp", "hdfs", "sftp", "smb", "ssh", "wasb", "wasbs"}
# Options of an S3 store in Arrow's URIs, and how to parse them.
_S3_OPTIONS: dict[str, Callable[[str], Any]] = {
    "endpoint_override": str,
    "force_virtual_addressing": lambda text: text.lower() == "true",
    "region": str,
    "scheme": str,
}


class Store:
    """A folder of files, or a single file.

    Each process creates its client when it first reads. Credentials come from the environment, from
    the client library's configuration files, or from ``filesystem``.

    Args:
        uri: A folder or a file: a path, ``file://``, ``s3://bucket/path``, ``s3a://``, ``gs://``,
            ``oss://``, or any URI that fsspec supports. ``oss://`` uses the S3 protocol, with the
            endpoint and credentials in ``OSS_ENDPOINT``, ``OSS_ACCESS_KEY_ID``,
            ``OSS_ACCESS_KEY_SECRET`` and ``OSS_SESSION_TOKEN``.
        filesystem: A ``pyarrow.fs.FileSystem`` or an fsspec filesystem, used as it is. ``uri`` is
            then a path in this filesystem.

    Raises:
        ValueError: The URI contains credentials.
    """

    def __init__(self, uri: str | Path, filesystem: Any = None) -> None:
        text = str(uri)
        if filesystem is not None:
            # fsspec filesystems normalize paths, and list files by their normalized paths.
            strip = getattr(filesystem, "_strip_protocol", str)
            self._whole = strip(text).rstrip("/")
            self.uri = _without_query(self._whole).rstrip("/")
        elif isinstance(uri, str) and _is_uri(uri):
            self._whole = text
            self.uri = _without_query(text).rstrip("/")
        else:
            # Unlike Path's, this function leaves a name such as ~unknown as it is.
            whole = os.path.expanduser(uri)  # noqa: PTH111
            self._whole = str(Path(whole).absolute())
            self.uri = self._whole.rstrip("/")
        self._given = filesystem
        self._made_in = os.getpid()
        self._opened: tuple[int, pafs.FileSystem, str] | None = None
        if any(map(_has_credentials, text.split("::"))):
            raise ValueError(
                "the URI must not contain credentials, because messages show it. Set environment "
                "variables instead, or pass filesystem="
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the client, which another process must not use."""
        own = {"_opened", "_made_in"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opened=None, _made_in=os.getpid())

    def __repr__(self) -> str:
        """Return the store's URI, without its query."""
        return f"Store({self.uri!r})"

    def read(self, path: str) -> bytes:
        """Return a file's content.

        Args:
            path: Path of the file, relative to the store's.

        Raises:
            FileNotFoundError: The file does not exist.
            OSError: The store refuses access, or does not answer.
        """
        with self.reading(path), self.open(path) as file:
            content: bytes = file.read()
            return content

    def read_all(self, paths: Iterable[str]) -> Iterator[bytes]:
        """Yield the contents of files in order, reading several concurrently.

        Args:
            paths: Paths of the files, relative to the store's.

        Raises:
            FileNotFoundError: A file does not exist.
            OSError: The store refuses access, or does not answer.
        """
        with self.reading(""):
            self._client()  # create one client for all threads
        readers = _readers(os.getpid())
        reading: deque[Future[bytes]] = deque()
        for path in paths:
            reading.append(readers.submit(self.read, path))
            if len(reading) > _READ_AHEAD:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()

    @property
    def local_path(self) -> str | None:
        """Path of the store in this machine's filesystem, or None for any other store."""
        if self._given is not None:
            return None
        if not _is_uri(self._whole):
            return self._whole
        parts = urlsplit(self._whole, allow_fragments=False)
        if parts.scheme != "file":
            return None
        if parts.netloc not in {"", "localhost"}:
            raise ValueError(
                f"{self.uri} names the host {parts.netloc!r}, but file: reads from this machine. "
                "Write file:/// before the path"
            )
        return unquote(parts.path).rstrip("/")

    def root(self, given: str | Path) -> str | Path:
        """Return a torchvision dataset's ``root``: a local folder as given, or the store's URI.

        The URI has no query, which may contain a signature.

        Args:
            given: The constructor's ``uri``.
        """
        if self.local_path is None:
            return self.uri
        return self.local_path if _is_uri(str(given)) else given

    def listing(self) -> tuple[list[str], list[str]]:
        """Return the sorted relative paths of all files, and of all folders, in the store.

        Raises:
            FileNotFoundError: The store's folder does not exist.
            OSError: The store refuses access, or does not answer.
        """
        import pyarrow.fs as pafs

        with self.reading(""):
            filesystem, base = self._client()
            if _is_local(filesystem):
                return _below(base)
            found = filesystem.get_file_info(pafs.FileSelector(base, recursive=True))
        strange = next((f.path for f in found if not f.path.startswith(base)), None)
        if strange is not None:
            raise ValueError(
                f"a listing of {base!r} returned the path {strange!r}, which does not begin with "
                "it. Pass the folder as the listing spells it"
            )
        paths = [(f.path[len(base) :].removeprefix("/"), f.is_file) for f in found]
        for path, _ in paths:
            if not {"", ".", ".."}.isdisjoint(path.removesuffix("/").split("/")):
                raise ValueError(
                    f"{self.uri} contains {path!r}, which cannot be read as a path: a part of it "
                    "is empty, '.' or '..'. Copy the object to another key"
                )
        return sorted(p for p, is_file in paths if is_file), sorted(
            p for p, is_file in paths if not is_file
        )

    def is_file(self) -> bool:
        """Return whether the store's path is a file."""
        with self.reading(""):
            filesystem, base = self._client()
            return bool(filesystem.get_file_info(base).is_file)

    def open(self, path: str) -> Any:
        """Open a file for random access; errors are the client's own, see ``reading``."""
        filesystem, base = self._client()
        whole = f"{base}/{path}" if path else base
        if _is_local(filesystem):  # Arrow cannot open a name that is not UTF-8
            return Path(whole).open("rb")
        return filesystem.open_input_file(whole)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Name the file in the errors of the ``with`` block, and hide secrets in their texts.

        Args:
            path: Path of the file that the block reads, relative to the store's.

        Raises:
            FileNotFoundError: The file does not exist.
            OSError: The store refuses access, or does not answer.
        """
        where = f"{self.uri}/{path}" if path else self.uri
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(f"{where} does not exist") from None
        except OSError as error:
            kind = PermissionError if isinstance(error, PermissionError) else OSError
            text = self._without_secrets(str(error))
            raise kind(f"{where} cannot be read: {text}") from None
        except Exception as error:
            text = self._without_secrets(str(error))
            if text != str(error):
                raise OSError(f"{where}: {type(error).__name__}: {text}") from None
            error.add_note(f"{where} was being read")
            raise

    def _without_secrets(self, text: str) -> str:
        query = self._whole.removeprefix(_without_query(self._whole)).removeprefix("?")
        secrets = [query]  # may contain a signature
        for name, value in os.environ.items():
            if re.search("KEY|SECRET|TOKEN|PASSWORD", name) and len(value) >= 8:
                secrets.append(value)
        for secret in filter(None, secrets):
            text = text.replace(secret, "…")
        return text

    def _client(self) -> tuple[pafs.FileSystem, str]:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), *self._open())
        return self._opened[1:]

    def _open(self) -> tuple[pafs.FileSystem, str]:
        import pyarrow.fs as pafs

        given = self._given
        if given is not None:
            if self._made_in != os.getpid():
                # Forks inherit connections, and would read one another's answers from them.
                given = pickle.loads(pickle.dumps(given))
            if not isinstance(given, pafs.FileSystem):
                given = pafs.PyFileSystem(pafs.FSSpecHandler(given))
            return given, self._whole
        if (local_path := self.local_path) is not None:
            return pafs.LocalFileSystem(), local_path
        parts = urlsplit(self._whole, allow_fragments=False)
        if parts.scheme in {"s3", "s3a", "oss"}:
            client = _oss if parts.scheme == "oss" else _s3
            options = _s3_options(parts.query)
            return client(parts.netloc, options), f"{parts.netloc}{parts.path}".rstrip("/")
        if parts.scheme == "gs":
            query = parts.query or _GOOGLE_RETRIES
            found: tuple[pafs.FileSystem, str] = pafs.FileSystem.from_uri(
                parts._replace(query=query).geturl()
            )
            return found
        import fsspec

        client, path = fsspec.core.url_to_fs(self._whole)
        return pafs.PyFileSystem(pafs.FSSpecHandler(client)), path


@functools.lru_cache(maxsize=1)
def _readers(_: int) -> ThreadPoolExecutor:
    """Return the thread pool of a process; a fork does not inherit its parent's threads."""
    return ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="dpex-store")


def _s3_options(query: str) -> dict[str, Any]:
    given = dict(parse_qsl(query))
    unknown = sorted(given.keys() - _S3_OPTIONS.keys())
    if unknown:
        raise ValueError(
            f"the URI has unknown options {unknown}. Accepted: {', '.join(sorted(_S3_OPTIONS))}"
        )
    return {name: _S3_OPTIONS[name](text) for name, text in given.items()}


def _s3(bucket: str, options: dict[str, Any]) -> pafs.FileSystem:
    import pyarrow.fs as pafs

    environment = os.environ
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", "")
    options = _addressed(options, endpoint)
    told = options.keys() & {"endpoint_override", "region"}
    if not told and not environment.keys() & {"AWS_REGION", "AWS_DEFAULT_REGION"}:
        # In another region, S3 answers with a redirect, which Arrow's client does not follow.
        options["region"] = pafs.resolve_s3_region(bucket)
    return _client_of(options)


def _oss(_: str, options: dict[str, Any]) -> pafs.FileSystem:
    environment = os.environ
    for name in ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET"):
        if not environment.get(name):
            raise ValueError(
                f"oss:// needs the environment variable {name}, or the client would send the "
                "credentials for Amazon S3. For a public bucket, pass filesystem="
            )
    options = _addressed(options, environment.get("OSS_ENDPOINT", ""))
    if not options.get("endpoint_override"):
        raise ValueError(
            "oss:// needs the environment variable OSS_ENDPOINT, or the client would connect to "
            "Amazon S3"
        )
    own = {
        "access_key": environment["OSS_ACCESS_KEY_ID"],
        "secret_key": environment["OSS_ACCESS_KEY_SECRET"],
        "session_token": environment.get("OSS_SESSION_TOKEN"),
        "force_virtual_addressing": True,
    }
    return _client_of({**own, **options})


def _addressed(options: dict[str, Any], endpoint: str) -> dict[str, Any]:
    """Add the endpoint ``"host:port"`` or ``"http://host:port"`` to options that have none."""
    if not endpoint or options.get("endpoint_override"):
        return options
    scheme, separator, host = endpoint.rpartition("://")
    return options | {"endpoint_override": host} | ({"scheme": scheme} if separator else {})


def _client_of(options: dict[str, Any]) -> pafs.FileSystem:
    import pyarrow.fs as pafs

    return pafs.S3FileSystem(
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        connect_timeout=_CONNECT_S,
        request_timeout=_ANSWER_S,
        **options,
    )


def _is_uri(text: str) -> bool:
    return re.match("[A-Za-z][A-Za-z0-9+.-]*(://|::)", text) is not None


def _without_query(text: str) -> str:
    """Return a URI without its query, which may contain a signature; return a path unchanged."""
    return text.partition("?")[0] if _is_uri(text) else text


def _has_credentials(uri: str) -> bool:
    scheme, _, rest = uri.partition("://")
    name, at, _ = rest.partition("/")[0].rpartition("@")
    return bool(at) and (":" in name or scheme not in _NAMED)


def _is_local(filesystem: pafs.FileSystem) -> bool:
    return bool(filesystem.type_name == "local")


def _below(folder: str) -> tuple[list[str], list[str]]:
    """Return the sorted relative paths of all files, and of all folders, in a local folder.

    Arrow's listing is not used: it omits broken links, and fails at a name that is not UTF-8.
    """
    files: list[str] = []
    folders: list[str] = []

    def refuse(error: OSError) -> None:
        raise error

    for place, inner, names in os.walk(folder, onerror=refuse, followlinks=True):
        below = os.path.relpath(place, folder)
        prefix = "" if below == os.curdir else f"{below}/"
        folders += [prefix + name for name in inner]
        files += [prefix + name for name in names]
    return sorted(files), sorted(folders)
