"""Compiled programs in a file: made by train_compile, started from by train.

A zip file. manifest.json has the versions and devices that the programs were compiled for, a
fingerprint of each program, and the flags of the compiler and the keys of the config, which only
serve to name what differs. The other members are executables.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import io
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from maxdiloco import json_text
from maxdiloco.engine.calls import STEP, Call
from maxdiloco.errors import ConfigError
from maxdiloco.flags.config import Config
from maxdiloco.parallel import chips, processor
from maxdiloco.storage import durable
from maxdiloco.storage.run_folder import absolute, is_local, refusing
from maxdiloco.trainer import job

FORMAT = 3
REMEDY = "Compile it again with maxdiloco.train_compile, or leave the file out."
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextlib.contextmanager
def compiled_here() -> Iterator[None]:
    """Programs compiled inside are new: not from JAX's compile cache, on disk or in memory.

    On CPU an executable that was loaded from the cache, and saved again, lacks part of its code.
    """
    with job.jax_setting("jax_enable_compilation_cache", False), without_folders():
        jax.clear_caches()  # it keeps what it loaded for a function that is jitted again
        yield


def without_folders() -> contextlib.AbstractContextManager[None]:
    """Programs lowered inside name source files, also in a Pallas kernel, without their folders."""
    return job.jax_setting("jax_hlo_source_file_canonicalization_regex", ".*/")


def save(path: str, cfg: Config, mesh: Mesh, calls: list[Call]) -> int:
    """Write the programs of `calls`, compiled in compiled_here(); returns the bytes written."""
    manifest = _made_for(mesh) | {"format": FORMAT, "keys": cfg.as_dict()}
    manifest |= {"programs": _identities(calls), "flags": chips.compiler_flags()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", json.dumps(manifest, indent=1))
        for n, call in enumerate(calls):
            archive.writestr(f"program_{n}", call.program.serialized(*call.args))
    write_whole("compiled_trainstep_file", path, packed.getvalue())
    return len(packed.getvalue())


def check_place(key: str, path: str) -> None:
    """Make the folder of a file that will be written, "" for none. Raises ConfigError."""
    if not path:
        return
    if _is_no_file(path):
        raise ConfigError(
            f"{key}={path} is no file, and writing would replace it. Give the path of a file."
        )
    with _no_os_error(key, path):
        place = _place(key, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        probe = durable.beside(place)
        probe.write_bytes(b"")
        probe.unlink()


def write_whole(key: str, path: str, content: bytes) -> None:
    """Write a file that appears whole or not at all. Raises ConfigError when it cannot be."""
    with _no_os_error(key, path), durable.replacing(_place(key, path)) as part:
        part.write_bytes(content)
        if is_local(part):  # a run refuses programs that others may write
            os.chmod(part, os.stat(part).st_mode & ~_OTHERS_WRITE)


def write_json(key: str, path: str, content: Any) -> None:
    """Write a file of JSON; "" for none. Raises as write_whole."""
    if path:
        write_whole(key, path, f"{json.dumps(content, indent=1)}\n".encode())


def _place(key: str, path: str) -> epath.Path:
    return epath.Path(path) if is_local(path) else absolute(path, key=key)


def _is_no_file(path: str) -> bool:
    """Whether the path is a folder, pipe or device. Reading a device may never end."""
    return is_local(path) and os.path.exists(path) and not os.path.isfile(path)


def _no_os_error(key: str, path: str) -> contextlib.AbstractContextManager[None]:
    remedy = "Give the path of a file in a folder that can be written and has free space."
    return refusing(ConfigError, f"{key}={path} cannot be written", remedy)


def check_order(path: str, cfg: Config, mesh: Mesh) -> None:
    """Raise ConfigError for devices that cannot run a saved program of the step."""
    if not job.keep_their_order(cfg, mesh):
        raise ConfigError(f"compiled_trainstep_file={path}: {job.LOSES_ORDER}. Leave the file out.")


def check(path: str, cfg: Config, mesh: Mesh) -> list[str]:
    """A line for each of the compiler's flags that were others: those of the file count.

    Raises ConfigError for a file that cannot be read or is of other versions or devices.
    """
    check_order(path, cfg, mesh)
    with _opened(path) as (stored, _):
        here = _made_for(mesh)
    for part, what in (("versions", "with"), ("machine", "for")):
        for name in here[part] | stored[part]:
            old, new = (made[part].get(name, "none") for made in (stored, here))
            if old != new:
                raise ConfigError(
                    f"compiled_trainstep_file={path} was compiled {what} {name}={_shown(old)}, "
                    f"but this run has {name}={_shown(new)}. {REMEDY}"
                )
    return [
        f"note: {path} was compiled under {name}={_shown(stored['flags'][name])}, here "
        f"{_shown(flags)}: its programs keep theirs."
        for name, flags in chips.compiler_flags().items()
        if stored["flags"][name] != flags
    ]


def stored_keys(path: str) -> dict[str, Any]:
    """The keys of the config that a file was compiled with. Raises ConfigError."""
    with _opened(path) as (stored, _):
        return stored["keys"]


def load(path: str, cfg: Config, mesh: Mesh, calls: list[Call]) -> int:
    """Put the programs of a checked file into those of `calls` of equal name and fingerprint.

    Returns how many. Raises ConfigError when one of the steps is missing; those beside the steps
    depend on keys such as eval_interval that a run may change.
    """
    with _opened(path) as (stored, archive):
        blobs = {
            tuple(identity): archive.read(f"program_{n}")
            for n, identity in enumerate(stored["programs"])
        }
    mine = list(zip(calls, map(blobs.get, _identities(calls)), strict=True))
    absent = [call.program.name for call, blob in mine if blob is None and call.when == STEP]
    if absent:
        raise ConfigError(
            f"compiled_trainstep_file={path} was compiled for another program "
            f"{', '.join(dict.fromkeys(absent))}. {_differences(stored['keys'], cfg)} {REMEDY}"
        )
    loaded = [(call, blob) for call, blob in mine if blob is not None]
    with without_folders():  # as above, so that nothing is lowered again
        for call, blob in loaded:
            call.program.load(blob, list(mesh.devices.flat), *call.args)
    return len(loaded)


def _identities(calls: list[Call]) -> list[tuple[str, str]]:
    """Name and fingerprint of each program."""
    with without_folders():
        return [(call.program.name, call.program.fingerprint(*call.args)) for call in calls]


def _differences(stored: dict[str, Any], cfg: Config) -> str:
    """What may be why a program differs, for the user."""
    changes = "; ".join(
        f"{name}={_shown(stored.get(name, 'none'))}, here {_shown(value)}"
        for name, value in cfg.as_dict().items()
        if stored.get(name, "none") != value
    )
    if not changes:
        return "No key differs, so the code or a setting of JAX does."
    return f"Its keys that differ: {changes}."


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[dict[str, Any], zipfile.ZipFile]]:
    """Manifest and members. Raises ConfigError, also for damage that is met inside the `with`."""
    try:
        if _is_no_file(path):
            raise OSError(errno.EINVAL, "not a file")
        archive = zipfile.ZipFile(io.BytesIO(_read_trusted(path)))
        stored: dict[str, Any] = {}
        with contextlib.suppress(KeyError, ValueError):
            stored = json_text.parse(archive.read("manifest.json"))
        if stored.get("format") != FORMAT:
            raise ConfigError(
                f"compiled_trainstep_file={path} has no programs, or those of another maxdiloco. "
                f"Make it again with maxdiloco.train_compile, or leave it out."
            )
        yield stored, archive
    except OSError as error:
        raise ConfigError(
            f"compiled_trainstep_file={path} cannot be read: {error.strerror or 'not found'}. Make "
            f"it with maxdiloco.train_compile, or leave it out."
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise ConfigError(
            f"compiled_trainstep_file={path} cannot be read: not a whole file of compiled "
            f"programs. Make it again, or leave it out."
        ) from None


def _read_trusted(path: str) -> bytes:
    """The bytes of a file that nobody but this user and root can have written: JAX unpickles them.

    In a bucket the rights are the bucket's. Raises ConfigError where others own or may write it.
    """
    if not is_local(path):
        return _place("compiled_trainstep_file", path).read_bytes()
    with open(path, "rb") as file:
        content, status = file.read(), os.fstat(file.fileno())
    if status.st_uid not in (os.geteuid(), 0):
        why, remedy = f"belongs to user {status.st_uid}", "Make it again as the user of the run"
    elif status.st_mode & _OTHERS_WRITE:
        why = f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
        remedy = f"If you trust it, run chmod go-w {path}"
    else:
        return content
    raise ConfigError(
        f"compiled_trainstep_file={path} {why}, and a program runs what is in it. {remedy}, or "
        f"leave it out."
    )


def _made_for(mesh: Mesh) -> dict[str, Any]:
    """The versions and devices that executables depend on."""
    devices = mesh.devices.flat
    platform = devices[0].platform
    names = ("jax", "jaxlib", "libtpu") if platform == "tpu" else ("jax", "jaxlib")
    machine = {
        "platform": platform,
        "device_kind": devices[0].device_kind,
        "devices": mesh.size,
        "processes": len({device.process_index for device in devices}),
        "mesh": dict(mesh.shape),
    }
    if platform == "cpu":  # XLA's code depends on its features
        lines = processor.host_cpuinfo().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        machine["processor"] = hashlib.sha256(features.encode()).hexdigest()[:16]
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"versions": versions, "machine": machine}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
