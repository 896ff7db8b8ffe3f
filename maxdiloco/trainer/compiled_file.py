"""Compiled programs in a file: made by train_compile, started from by train.

A zip file: manifest.json says what the programs were compiled for, and each of the others is one
executable. An executable is code (JAX unpickles it): a local file that others may write is refused.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import stat
import zipfile
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from maxdiloco.engine.calls import STEP, Call
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml
from maxdiloco.flags.config import Config
from maxdiloco.storage.run_folder import is_local, reason
from maxdiloco.trainer import assemble
from maxdiloco.trainer.assemble import Parts

FORMAT = 1
# Groups of base.yml that no program depends on, and the keys in them that one does.
OUTSIDE_GROUPS = ("run", "checkpoint", "data", "tools", "compile")
INSIDE_KEYS = ("nan_policy",)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextlib.contextmanager
def compiled_here() -> Iterator[None]:
    """Programs compiled inside are new: not from JAX's compile cache, on disk or in memory.

    On CPU an executable that was loaded from the cache, and saved again, lacks part of its code.
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks only once whether there is a cache
    jax.clear_caches()  # it keeps what it loaded for a function that is jitted again
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def save(path: str, cfg: Config, parts: Parts, calls: list[Call], *, total_steps: int) -> int:
    """Write the compiled programs of `calls`; returns the bytes written.

    The file appears whole or not at all; `check_place` said that it can be written.
    """
    manifest = _manifest(cfg, parts, total_steps) | {"programs": _signatures(calls)}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", json.dumps(manifest, indent=1))
        for n, call in enumerate(calls):
            archive.writestr(f"program_{n}", call.program.serialized(*call.args))
    write_whole("compiled_trainstep_file", path, packed.getvalue())
    return len(packed.getvalue())


def check_place(key: str, path: str) -> None:
    """Make the folder of a file to come. Raises ConfigError where it cannot be written."""
    target = epath.Path(path)
    if _is_no_file(target):
        raise ConfigError(
            f"{key}={path} is no file: it would be replaced. Give the path of a file."
        )
    with _writing(key, path) as part:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"")
        part.unlink()


def write_whole(key: str, path: str, content: bytes) -> None:
    """Write a file that appears whole or not at all. Raises ConfigError when it cannot be."""
    with _writing(key, path) as part:
        part.write_bytes(content)
        if is_local(part):  # a run refuses programs that others may write
            os.chmod(part, os.stat(part).st_mode & ~_OTHERS_WRITE)
        part.replace(epath.Path(path))


def _is_no_file(path: epath.Path) -> bool:
    """Whether a folder, pipe or device is there. A device may have no end to read."""
    return is_local(path) and os.path.exists(path) and not os.path.isfile(path)


@contextlib.contextmanager
def _writing(key: str, path: str) -> Iterator[epath.Path]:
    """The file to write first, beside the one that is meant; removed after an error."""
    target = epath.Path(path)
    part = target.parent / f"{target.name}.part"
    try:
        yield part
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ConfigError(
            f"{key}={path} cannot be written: {reason(error)}. Give the path of a file in a "
            f"folder that can be written and has free space."
        ) from None


def check(path: str, cfg: Config, parts: Parts, *, total_steps: int) -> None:
    """Raise ConfigError, with the difference named, unless the programs are those of this run."""
    with _opened(path) as archive:
        stored = _stored(path, archive)
    here = _manifest(cfg, parts, total_steps)
    for part, what in (("versions", "with"), ("machine", "for"), ("keys", "with")):
        for name in here[part] | stored[part]:
            old, new = (found[part].get(name, "none") for found in (stored, here))
            if old != new:
                raise ConfigError(
                    f"compiled_trainstep_file={path} was compiled {what} {name}={_shown(old)}, "
                    f"but this run has {name}={_shown(new)}. Compile it again with "
                    f"maxdiloco.train_compile, or leave the file out."
                )


def load(path: str, parts: Parts, calls: list[Call]) -> int:
    """Put the programs of a checked file into the run's; returns how many.

    A program beside the steps may be missing: it depends on keys such as eval_interval that a run
    may change. Raises ConfigError when a program of the steps takes other arguments.
    """
    with _opened(path) as archive:
        stored = _stored(path, archive)["programs"]
        blobs = {tuple(one): archive.read(f"program_{n}") for n, one in enumerate(stored)}
    found = [(call, blobs.get(_signature(call))) for call in calls]
    if any(data is None and call.when == STEP for call, data in found):
        steps = [list(_signature(call)) for call in calls if call.when == STEP]
        raise ConfigError(
            f"compiled_trainstep_file={path} has programs {_names(stored)} for other arrays than "
            f"{_names(steps)} of this run. Compile it again with "
            f"maxdiloco.train_compile, or leave the file out."
        )
    held = [(call, data) for call, data in found if data is not None]
    for call, data in held:
        call.program.load(data, list(parts.mesh.devices.flat), *call.args)
    return len(held)


def _opened(path: str) -> zipfile.ZipFile:
    file = epath.Path(path)
    try:
        if _is_no_file(file):
            raise OSError(errno.EINVAL, "not a file")
        return zipfile.ZipFile(io.BytesIO(_read_own(path)))
    except OSError as error:
        why, remedy = error.strerror or "not found", "Make it with maxdiloco.train_compile"
    except zipfile.BadZipFile:
        why, remedy = "not a whole file of compiled programs", "Make it again"
    raise ConfigError(
        f"compiled_trainstep_file={path} cannot be read: {why}. {remedy}, or leave it out."
    )


def _read_own(path: str) -> bytes:
    """The bytes of a file that nobody but this user and root can have written.

    On gs:// the rights are the bucket's. Raises ConfigError where others own or may write it.
    """
    if not is_local(path):
        return epath.Path(path).read_bytes()
    with open(epath.Path(path), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0):
            why, remedy = f"belongs to user {status.st_uid}", "Make it again as the user of the run"
        elif status.st_mode & _OTHERS_WRITE:
            why = f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
            remedy = f"If you trust it, run chmod go-w {path}"
        else:
            return file.read()
    raise ConfigError(
        f"compiled_trainstep_file={path} {why}, and a program runs what is in it. {remedy}, or "
        f"leave it out."
    )


def _stored(path: str, archive: zipfile.ZipFile) -> dict[str, Any]:
    try:
        stored = json.loads(archive.read("manifest.json"))
    except (KeyError, ValueError):
        stored = {}
    if stored.get("format") != FORMAT:
        raise ConfigError(
            f"compiled_trainstep_file={path} is of another kind or an older maxdiloco. Make it "
            f"again with maxdiloco.train_compile, or leave it out."
        )
    return stored


def _manifest(cfg: Config, parts: Parts, total_steps: int) -> dict[str, Any]:
    devices = parts.mesh.devices.flat
    platform = devices[0].platform
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if platform == "tpu":
        versions["libtpu"] = importlib.metadata.version("libtpu")
    return {
        "format": FORMAT,
        "versions": versions | {"maxdiloco": _source()},
        "machine": {
            "platform": platform,
            "device_kind": devices[0].device_kind,
            "devices": parts.mesh.size,
            "processes": len({device.process_index for device in devices}),
            "mesh": dict(parts.mesh.shape),
            **({"processor": _processor()} if platform == "cpu" else {}),
        },
        "keys": _keys(cfg) | {"schedule_steps": assemble.schedule_steps(cfg, total_steps)},
    }


def _keys(cfg: Config) -> dict[str, Any]:
    """The keys that a program depends on."""
    folder = base_yml.config_folder()
    declared = base_yml.declared(folder / "base.yml")
    return {
        name: value
        for name, value in cfg.as_dict().items()
        if declared[name].group.partition(":")[0] not in OUTSIDE_GROUPS or name in INSIDE_KEYS
    }


def _source() -> str:
    """A fingerprint of the package's own code."""
    folder = base_yml.PACKAGE
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _processor() -> str:
    """What XLA's code for a CPU depends on: a fingerprint of the features of this one."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:16]


def _signatures(calls: list[Call]) -> list[list[str]]:
    """Name and a fingerprint of the arguments of each program, in order."""
    return [list(_signature(call)) for call in calls]


def _signature(call: Call) -> tuple[str, str]:
    return call.program.name, _fingerprint(call.args)


def _fingerprint(args: tuple) -> str:
    arrays = [
        [str(x.dtype), list(x.shape), _layout(x)]
        for x in jax.tree.leaves(args)
    ]
    return hashlib.sha256(json.dumps(arrays).encode()).hexdigest()[:16]


def _layout(x: Any) -> str:
    placed = isinstance(x, jax.ShapeDtypeStruct)
    return str((x.sharding.spec, x.sharding.memory_kind)) if placed else ""


def _names(signatures: list[list[str]]) -> str:
    return ", ".join(name for name, _ in signatures)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
