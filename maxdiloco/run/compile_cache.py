"""JAX's compile cache for the programs of a run, where it is sound."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from maxdiloco import ownership
from maxdiloco.cluster import agree
from maxdiloco.errors import ConfigError
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.storage import run_folder, shared_folder
from maxdiloco.storage.os_errors import refusing

LOSES_ORDER = (
    "a CPU loses the order of collectives in a saved program, and devices that share a replica "
    "would wait for each other forever"
)
# Only the first process writes to the cache. XLA:GPU divides the search for fast kernels among the
# processes that compile a program, and a process waits for the others' parts (github.com/openxla/
# xla/pull/14968), up to a day.
NOT_SHARED = (
    "not every process sees what the first one writes there, and a GPU that compiles would wait "
    "for one that loads; use a folder that all machines share, or a bucket"
)
# In place of JAX's 1 s, which leaves out most programs of a small model, and so seconds of every
# start. Our choice.
KEPT_FROM_S = 0.1
_LEAST = "jax_persistent_cache_min_compile_time_secs"


def keeps_order(mesh: Mesh, *, has_replicas: bool) -> bool:
    """Tell whether the devices of a mesh can run a saved program of the step.

    XLA:CPU orders the collectives of a program by one resource. When it loads a program, the body
    of each loop gets a resource of its own (jaxlib 0.10.2), and collectives in and out of a loop
    start in any order. Sound are programs without one in a loop: of replicas with a device each.
    """
    sharing = mesh.size // (mesh.shape["diloco"] if has_replicas else 1)
    return mesh.devices.flat[0].platform != "cpu" or sharing == 1


@contextmanager
def compile_cache(jax_cache_dir: str, mesh: Mesh, *, has_replicas: bool) -> Iterator[list[str]]:
    """Take programs compiled inside from JAX's compile cache, where that is sound, and keep them.

    Args:
      jax_cache_dir: its folder; empty: that of JAX's own setting.
      mesh: of the programs.
      has_replicas: whether `diloco` of the mesh has replicas.

    Yields:
      Lines for the user.

    Raises:
      ConfigError: others can have put code into the folder.
    """
    folder = jax_cache_dir or jax.config.values["jax_compilation_cache_dir"]
    source = "jax_cache_dir" if jax_cache_dir else "JAX_COMPILATION_CACHE_DIR"
    on_gpus = mesh_lib.on_gpus(mesh)
    # The variable of the environment may be one host's alone.
    if not (agree.in_any_process(bool(folder)) if on_gpus else folder):
        yield []
        return
    path = run_folder.absolute(folder, key=source) if folder else None
    if on_gpus:
        obstacle = "" if shared_folder.is_shared(path) else NOT_SHARED
    else:
        obstacle = "" if keeps_order(mesh, has_replicas=has_replicas) else LOSES_ORDER
    used = None if obstacle or path is None else own_cache(folder, source)
    given = jax.config.values[_LEAST]
    least = KEPT_FROM_S if given == 1 else given
    with jax_setting(_LEAST, least), jax_setting("jax_compilation_cache_dir", used):
        note = f"note: {source}={folder or ''} is not used: {obstacle}."
        yield [note] if obstacle else []


def own_cache(folder: str, key: str) -> str:
    """Make the folder of a compile cache, from which JAX loads machine code.

    Args:
      folder: its path; in a bucket, where nothing is made, the rights are the bucket's.
      key: what gave it.

    Returns:
      The absolute path.

    Raises:
      ConfigError: the folder belongs to another user, or others may write to it.
    """
    path = run_folder.absolute(folder, key=key)
    if not run_folder.is_local(path):
        return str(path)
    other = "Use a folder of your own"
    with refusing(ConfigError, f"{key}={folder} cannot be used", f"{other}."):
        # Else JAX makes it, which the group may write where the umask lets it.
        os.makedirs(path, mode=0o755, exist_ok=True)
        status = os.stat(path)
    if breach := ownership.breach(status, path, again=other):
        raise ConfigError(f"{key}={folder} {breach}, or leave it out.")
    return str(path)


@contextmanager
def jax_setting(name: str, value: Any) -> Iterator[None]:
    """A setting of JAX for a `with`; JAX asks only once for those of its compile cache."""
    before = jax.config.values[name]
    try:
        jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()
