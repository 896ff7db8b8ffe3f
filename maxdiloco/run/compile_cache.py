"""Use JAX's compile cache for the programs of a run, if cached programs run correctly."""

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
from maxdiloco.storage.os_errors import replace_os_error

LOSES_ORDER = (
    "a CPU loses the order of collectives in a saved program, and devices that share a replica "
    "would wait for each other forever"
)
# Only the first process writes to the cache. XLA:GPU divides the search for fast kernels among the
# processes that compile a program. Each waits for the parts of the others, up to a day
# (github.com/openxla/xla/pull/14968).
NOT_SHARED = (
    "not every process can read the files of process 0; a GPU that compiles would wait for one "
    "that loads. Use a shared folder or a bucket"
)
# JAX's default of 1 s would leave out most programs of a small model, and cost seconds at every
# start.
KEPT_FROM_S = 0.1
_LEAST = "jax_persistent_cache_min_compile_time_secs"


def keeps_order(mesh: Mesh, *, has_replicas: bool) -> bool:
    """Tell whether the devices of a mesh can run a saved program of the step.

    XLA:CPU orders the collectives of a program by one resource. When it loads a program, the body
    of each loop gets its own resource (jaxlib 0.10.2). Then collectives inside and outside of a
    loop start in any order. Programs without a collective in a loop are safe. Replicas with one
    device each have such programs.
    """
    sharing = mesh.size // (mesh.shape["diloco"] if has_replicas else 1)
    return mesh.devices.flat[0].platform != "cpu" or sharing == 1


@contextmanager
def compile_cache(jax_cache_dir: str, mesh: Mesh, *, has_replicas: bool) -> Iterator[list[str]]:
    """Load programs from JAX's compile cache inside the context, and save new ones, if it is safe.

    Args:
      jax_cache_dir: folder of the cache; empty: the folder of JAX's own setting.
      mesh: the devices that run the programs.
      has_replicas: whether the mesh axis `diloco` has replicas.

    Yields:
      Lines for the user.

    Raises:
      ConfigError: other users can write to the folder.
    """
    folder = jax_cache_dir or jax.config.values["jax_compilation_cache_dir"]
    source = "jax_cache_dir" if jax_cache_dir else "JAX_COMPILATION_CACHE_DIR"
    on_gpus = mesh_lib.on_gpus(mesh)
    # The environment variable may be set on some hosts only.
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
    """Create the folder of a compile cache, from which JAX loads machine code.

    Args:
      folder: its path. In a bucket nothing is created, and the bucket's rights apply.
      key: name of the option that has the path.

    Returns:
      The absolute path.

    Raises:
      ConfigError: the folder belongs to another user, or others may write to it.
    """
    path = run_folder.absolute(folder, key=key)
    if not run_folder.is_local(path):
        return str(path)
    other = "Use a folder of your own"
    with replace_os_error(ConfigError, f"{key}={folder} cannot be used", f"{other}."):
        # Otherwise JAX creates it, and the group can write to it if the umask allows that.
        os.makedirs(path, mode=0o755, exist_ok=True)
        status = os.stat(path)
    if problem := ownership.problem(status, path, remedy=other):
        raise ConfigError(f"{key}={folder} {problem}, or leave it out.")
    return str(path)


@contextmanager
def jax_setting(name: str, value: Any) -> Iterator[None]:
    """Set an option of JAX inside the context. JAX reads options of its cache only once."""
    before = jax.config.values[name]
    try:
        jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()
