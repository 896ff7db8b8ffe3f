"""Buckets of objects on gs://, s3:// and az://, and files on https://; only this uses obstore.

A folder of this machine serves as a bucket without it.

An object appears whole or not at all. A read that follows a write sees it, in all three clouds. A
version identifies one content of an object. A conditional put names the version that it replaces,
so of two writers one fails. Every failure is an OSError whose strerror is one line.
"""

import configparser
import contextlib
import datetime
import errno
import http.client
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from maxdiloco import small_files

SCHEMES = ("gs", "s3", "az")
# A request is retried after 429, 5xx and a lost connection, with growing pauses.
RETRY_S = 30.0  # time limit of the retries: a run survives a brief outage and notices a longer one
MOST_PAUSE_S = 2.0  # longest pause between two retries
TIMEOUT_S = 60.0  # time limit without a byte of an answer
MOST_S = 6 * 3600.0  # time limit of a request: a slow link needs hours for a large object
LEAST_BYTES_S = 1e5  # the slowest link through which one request writes a whole object
_MOST_INI = 1 << 20  # size limit of ~/.aws/config: thousands of profiles
BLOCK_BYTES = 1 << 24  # size of a request; a larger object needs several, each of which is retried

# Answers with an errno of their own: no such object, no rights, and shorter than it was.
_NUMBERS = MappingProxyType(
    {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 416: errno.ESTALE}
)

Version = Mapping[str, str]  # as obstore names it: e_tag, and on gs:// the generation


def is_local(path: os.PathLike | str) -> bool:
    """Tell whether a path is on a mounted file system, not in a bucket."""
    return "://" not in os.fspath(path)


class Entry(NamedTuple):
    """An object in a listing.

    Attributes:
      name: key in the bucket.
      size: bytes.
      version: see Version.
    """

    name: str
    size: int
    version: Version


class Bucket:
    """The objects of one bucket. Names have no slash at either end; a prefix names a folder.

    Methods raise FileNotFoundError for an object that does not exist, and OSError for any other
    failure.
    """

    def __init__(self, client: Any, api: Any, patient: Callable[[float], Any] | None = None):
        """Wrap a store of obstore.

        Args:
          client: the store.
          api: obstore, or an object with its functions.
          patient: makes the same store with another limit on the seconds without an answer.
        """
        self._client, self._api, self._patient = client, api, patient

    def get(self, name: str) -> bytes:
        """Return the content of an object."""
        return self.get_version(name)[0]

    def get_version(self, name: str) -> tuple[bytes, Version]:
        """Return the content of an object and its version."""
        with _as_os_errors():
            found = self._api.get(self._client, name)
            size, version = found.meta["size"], _version(found.meta)
            data = bytes(found.bytes()) if size <= BLOCK_BYTES else b""
        if size <= BLOCK_BYTES:
            return _whole(data, name, 0, size), version
        starts = range(0, size, BLOCK_BYTES)
        parts = [self.get_range(name, n, min(n + BLOCK_BYTES, size)) for n in starts]
        return b"".join(parts), version

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of an object. Raises OSError if it is shorter."""
        return self.get_part(name, start, end)[0]

    def get_part(self, name: str, start: int, end: int) -> tuple[bytes, Entry]:
        """Return the bytes [start, end) of an object, and its entry, by one request."""
        with _as_os_errors():
            found = self._api.get(self._client, name, options={"range": (start, end)})
            entry, data = _entry(found.meta), bytes(found.bytes())
        return _whole(data, name, start, end), entry

    def get_first(self, name: str, most: int) -> tuple[bytes, Entry]:
        """Return up to `most` bytes from the start of an object, and its entry, by one request."""
        try:
            with _as_os_errors():
                found = self._api.get(self._client, name, options={"range": (0, most)})
                return bytes(found.bytes()), _entry(found.meta)
        except FileNotFoundError:
            raise
        except OSError:  # each store refuses a range of no bytes, with an error of its own
            entry = self.head(name)
            if entry is None or entry.size:
                raise
            return b"", entry

    def put(self, name: str, data: bytes | os.PathLike) -> None:
        """Write an object from bytes or a file, replacing one of that name."""
        with _as_os_errors():
            self._api.put(self._client, name, data, chunk_size=BLOCK_BYTES)

    def put_if(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Write an object if it has this version.

        Args:
          name: of the object.
          data: its content.
          version: to replace; None: there must be no object of that name.

        Returns:
          The new version; None if there is another version. After a lost answer, that may be the
          one just written.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        client = self._client
        if self._patient and len(data) > BLOCK_BYTES:  # one request, whose answer follows its body
            client = self._patient(TIMEOUT_S + len(data) / LEAST_BYTES_S)
        mode = "create" if version is None else dict(version)
        try:
            with _as_os_errors():
                return _version(self._api.put(client, name, data, mode=mode))
        except (AlreadyExistsError, PreconditionError):
            return None

    def head(self, name: str) -> Entry | None:
        """Return the entry of an object; None if there is none."""
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            return _entry(self._api.head(self._client, name))
        return None

    def list_all(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects below a folder, at any depth, up to 1000 a request."""
        with _as_os_errors():
            for page in self._api.list(self._client, prefix or None):
                yield from map(_entry, page)

    def list_folder(self, prefix: str) -> tuple[list[Entry], list[str]]:
        """Return the objects and the folders in a folder, up to 1000 a request."""
        with _as_os_errors():
            found = self._api.list_with_delimiter(self._client, prefix or None)
        return [_entry(meta) for meta in found["objects"]], list(found["common_prefixes"])

    def copy(self, name: str, target: str) -> None:
        """Copy an object inside the bucket, replacing one of the target's name."""
        with _as_os_errors():
            self._api.copy(self._client, name, target)

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; names without an object count as deleted."""
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._api.delete(self._client, list(names))
            return
        for name in names:  # one was gone, and others of its request may still exist
            with contextlib.suppress(FileNotFoundError), _as_os_errors():
                self._api.delete(self._client, name)


def connect(scheme: str, bucket: str, folder: str = "") -> Bucket:
    """Open a bucket with the credentials from the usual places of its cloud.

    Args:
      scheme: `gs`, `s3` or `az`; `https` for the files of a host, which can only be read.
      bucket: its name, or the host.
      folder: in the bucket, to which all names are relative.

    Raises:
      ModuleNotFoundError: obstore is not installed.
      OSError: the settings cannot be used.
    """
    import obstore
    from obstore import store

    seconds = datetime.timedelta(seconds=1)
    make = {"gs": store.GCSStore, "s3": store.S3Store, "az": store.AzureStore}.get(scheme)
    keys = aws_profile(os.environ) if scheme == "s3" else {}

    def client(silence_s: float) -> Any:
        options = {
            # Only the environment names an endpoint, which may be a server without TLS.
            "client_options": {
                "allow_http": scheme != "https", "timeout": MOST_S * seconds,
                "read_timeout": silence_s * seconds,
            },
            "retry_config": {
                "retry_timeout": RETRY_S * seconds, "max_retries": 1000,
                "backoff": {"max_backoff": MOST_PAUSE_S * seconds},
            },
        }  # fmt: skip
        if make is None:
            return store.HTTPStore.from_url(f"https://{bucket}", **options)
        return make(bucket, prefix=folder or None, config=keys, **options)

    with _as_os_errors():
        return Bucket(client(TIMEOUT_S), obstore, client)


class LocalFolder:
    """A folder of this machine with the methods of Bucket that islands use. An object is a file.

    An object appears whole: it is written under another name, in the same folder, and then renamed
    or linked. So the file system needs hard links, which Linux and NFS have.
    """

    def __init__(self, path: os.PathLike | str):
        """Make the folder if it does not exist."""
        self._root = pathlib.Path(path).absolute()
        self._root.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> bytes:
        """Return the content of an object."""
        with self._opened(name) as file:
            return file.read()

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of an object. Raises OSError if it is shorter."""
        with self._opened(name) as file:
            file.seek(start)
            return _whole(file.read(end - start), name, start, end)

    def get_first(self, name: str, most: int) -> tuple[bytes, Entry]:
        """Return up to `most` bytes from the start of an object, and its entry."""
        with self._opened(name) as file:
            return file.read(most), _file_entry(name, os.fstat(file.fileno()))

    def put(self, name: str, data: bytes) -> None:
        """Write an object, replacing one of that name."""
        with self._written(name, data) as part:
            os.replace(part, self._root / name)

    def put_if(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Write an object if the name is free.

        Returns:
          Its version; None if there is one already.

        Raises:
          OSError: `version` is not None (ENOTSUP), or the object cannot be written.
        """
        if version is not None:
            raise OSError(errno.ENOTSUP, "a file is not replaced by its version")
        with self._written(name, data) as part:
            try:
                os.link(part, self._root / name)
            except FileExistsError:
                return None
            return _file_entry(name, os.stat(part)).version

    def head(self, name: str) -> Entry | None:
        """Return the entry of an object; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self._root / name)
            return _file_entry(name, found) if stat.S_ISREG(found.st_mode) else None
        return None

    def list_all(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects below a folder, at any depth."""
        for folder, _, files in os.walk(self._root / prefix, onerror=_unless_gone):
            for name in files:
                path = pathlib.Path(folder, name).relative_to(self._root).as_posix()
                entry = None if _PART.fullmatch(name) else self.head(path)
                if entry is not None:
                    yield entry

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; names without an object count as deleted."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root / name)

    def _opened(self, name: str) -> BinaryIO:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        file = open(os.open(self._root / name, flags), "rb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "not a regular file", name)
        return file

    @contextlib.contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[pathlib.Path]:
        """Yield a file with these bytes, whose name is removed afterwards."""
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        try:
            part.write_bytes(data)
            yield part
        finally:
            part.unlink(missing_ok=True)


_PART = re.compile(r"\..*\.[0-9a-f]{16}\.part")


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _file_entry(name: str, found: os.stat_result) -> Entry:
    tag = f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
    return Entry(name, found.st_size, {"e_tag": tag})


def local_folder(path: os.PathLike | str) -> LocalFolder:
    """Return a folder of this machine as a bucket, and make it if it does not exist.

    Its put_if only creates objects: version must be None.
    """
    return LocalFolder(path)


def in_memory() -> Bucket:
    """Return a bucket in the memory of this process.

    Raises:
      ModuleNotFoundError: obstore is not installed.
    """
    import obstore
    from obstore import store

    return Bucket(store.MemoryStore(), obstore)


def aws_profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the region and keys that `aws configure` stored, except those that variables name.

    A section that occurs twice is read as one, whose last value counts, as in the AWS SDKs. A file
    that does not exist, or that this user must not read, counts as empty.

    Raises:
      OSError: a file, which the error names, does not have the format.
    """
    folder = pathlib.Path.home() / ".aws"
    profile = environ.get("AWS_PROFILE", "default")
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    for path in (
        environ.get("AWS_CONFIG_FILE", folder / "config"),
        environ.get("AWS_SHARED_CREDENTIALS_FILE", folder / "credentials"),
    ):
        _read_ini(parser, path)
    found: dict[str, str] = {}
    for section in (f"profile {profile}", profile):
        found |= dict(parser[section]) if parser.has_section(section) else {}
    wanted = ["region"] if {"AWS_REGION", "AWS_DEFAULT_REGION"}.isdisjoint(environ) else []
    others = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if all(name not in environ for name in others) and "aws_access_key_id" in found:
        wanted += ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"]
    return {name: found[name] for name in wanted if name in found}


def _read_ini(parser: configparser.ConfigParser, path: os.PathLike | str) -> None:
    """Add the content of a file. Raises OSError with the path if it does not have the format."""
    if os.fspath(path) == os.devnull:  # a user names it to have no file read
        return
    try:
        parser.read_string(small_files.read_bytes(path, _MOST_INI).decode("utf-8-sig"))
        return
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        why = f"line {number} is not UTF-8"
    except configparser.MissingSectionHeaderError as error:
        why = f"line {error.lineno} is before the first [section]"
    except configparser.ParsingError as error:
        why = f"line {error.errors[0][0]} is not `key = value`"
    except OSError as error:
        why = error.strerror
    raise OSError(errno.EINVAL, f"{path} cannot be read: {why}")


def _whole(data: bytes, name: str, start: int, end: int) -> bytes:
    if len(data) != end - start:
        why = f"{name} has {len(data)} bytes from {start} to {end}: it is truncated or was replaced"
        raise OSError(errno.EIO, why)
    return data


def _entry(meta: Mapping[str, Any]) -> Entry:
    return Entry(meta["path"], meta["size"], _version(meta))


def _version(meta: Mapping[str, Any]) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Replace obstore's errors by OSError, or by FileNotFoundError if there is no such object.

    The errors of a condition that does not hold stay obstore's.
    """
    from obstore import exceptions

    try:
        yield
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise
    except (FileNotFoundError, exceptions.BaseError) as error:
        why, status = reason(str(error))
        number = _NUMBERS.get(status, errno.EIO)
        if isinstance(error, FileNotFoundError):
            number = errno.ENOENT
        elif isinstance(error, exceptions.NotSupportedError):
            number = errno.ENOTSUP
        raise OSError(number, why) from error  # ENOENT makes it a FileNotFoundError


def reason(text: str) -> tuple[str, int | None]:
    """Return an error of obstore in one line, and the status of the store's answer or None."""
    text = text.partition("\n\nDebug source")[0]
    if answer := re.search(r"status code: (\d{3})[^:]*:?\s*(.*)", text, re.DOTALL):
        code = int(answer[1])
        phrase = http.client.responses.get(code, "the store answers")  # proxies have their own
        words = re.search(r"<Message>(.*?)</Message>", answer[2], re.DOTALL) or re.search(
            r'"message": *"([^"]*)"', answer[2]
        )
        said = f": {words[1].strip()}" if words else ""
        token = "no credentials: " if "token request" in text else ""
        return f"{token}{phrase} ({code}){said}".rstrip("."), code
    left_out = r"^Generic \w+ error: |, after \d+ retries.*?(?= - )| in [\d.]+(ns|µs|ms|s)\b"
    return re.sub(left_out, "", text.partition("\n")[0]).rstrip("."), None
