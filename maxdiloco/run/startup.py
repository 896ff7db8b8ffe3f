"""Devices and processes of a program, joined before JAX's backends start, and its compile cache."""

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from maxdiloco import ownership
from maxdiloco.cluster import agree, coordination, start
from maxdiloco.config import checks, resume
from maxdiloco.config.keys import Config
from maxdiloco.errors import ConfigError
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.storage import run_folder, shared_folder
from maxdiloco.version import __version__

if TYPE_CHECKING:
    from maxdiloco.cluster.peers import Cluster

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


@contextmanager
def joined(cfg: Config) -> Iterator["Cluster | None"]:
    """This process with its devices, beside the others of the job, for a `with`.

    Raises ConfigError for keys or versions that differ between the processes and for devices that
    are not there, LostPeerError.
    """
    mesh_lib.choose_platform(cfg)
    mesh_lib.set_up_cpu(cfg)
    with start.joined(
        os.environ,
        timeout_s=cfg.jax_distributed_initialization_timeout,
        peer_timeout_s=cfg.peer_timeout_seconds,
        peer_port=0 if cfg.peer_port == "auto" else cfg.peer_port,
        interface=cfg.exchange_interface,
        secret_file=cfg.exchange_secret_file,
    ) as cluster:
        if cluster is not None:
            installed = {"maxdiloco": __version__, "jax": jax.__version__}
            installed["jaxlib"] = importlib.metadata.version("jaxlib")
            versions = {f"version of {name}": version for name, version in installed.items()}
            coordination.require_equal(
                cluster.job,
                resume.shared(cfg.as_dict()) | versions,
                difference=resume.describe_processes,
                timeout_s=cfg.peer_timeout_seconds,
            )
        mesh_lib.emulate_devices(cfg, num_processes=cluster.job.num_processes if cluster else 1)
        mesh_lib.visible_devices(cfg)  # those that are not there are refused before JAX is used
        yield cluster


def keep_their_order(cfg: Config, mesh: Mesh) -> bool:
    """Whether the devices of a mesh can run a saved program of the step.

    XLA:CPU orders the collectives of a program by one resource. When it loads a program, the body
    of each loop gets a resource of its own (jaxlib 0.10.2), and collectives in and out of a loop
    start in any order. Sound are programs without one in a loop: of replicas with a device each.
    """
    sharing = mesh.size // (mesh.shape["diloco"] if checks.has_replicas(cfg) else 1)
    return mesh.devices.flat[0].platform != "cpu" or sharing == 1


@contextmanager
def compile_cache(cfg: Config) -> Iterator[list[str]]:
    """Programs compiled inside come from JAX's compile cache, where that is sound, and are kept.

    Its folder is jax_cache_dir, or else that of JAX's own setting. Gives lines for the user. Raises
    ConfigError for a folder in which others can have put code.
    """
    folder = cfg.jax_cache_dir or jax.config.values["jax_compilation_cache_dir"]
    source = "jax_cache_dir" if cfg.jax_cache_dir else "JAX_COMPILATION_CACHE_DIR"
    mesh = mesh_lib.build(cfg)
    on_gpus = mesh_lib.on_gpus(mesh)
    # The variable of the environment may be one host's alone.
    if not (agree.in_any_process(bool(folder)) if on_gpus else folder):
        yield []
        return
    path = run_folder.absolute(folder, key=source) if folder else None
    if on_gpus:
        obstacle = "" if shared_folder.is_shared(path) else NOT_SHARED
    else:
        obstacle = "" if keep_their_order(cfg, mesh) else LOSES_ORDER
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
    with run_folder.refusing(ConfigError, f"{key}={folder} cannot be used", f"{other}."):
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
