"""Connect the processes and devices of a program, and use its compile cache."""

import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from maxdiloco.cluster import coordination, start
from maxdiloco.config.keys import Config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import resume, settings
from maxdiloco.run.compile_cache import compile_cache
from maxdiloco.version import __version__

if TYPE_CHECKING:
    from maxdiloco.cluster.peers import Cluster

# Longest wait until all processes have compiled. Large programs take many minutes, cached ones
# seconds.
READY_S = 2 * 3600.0
_SAY_AFTER_S = 10.0  # of waiting, after which a line is logged


@contextmanager
def set_up(cfg: Config) -> Iterator[tuple["Cluster | None", Mesh, list[str]]]:
    """Join the other processes, build the mesh and use the compile cache, inside the context.

    Yields:
      The cluster, as `join_processes`; the mesh; log lines.

    Raises:
      ConfigError: as `join_processes`, or the devices do not fill the mesh.
      LostPeerError: another process is lost.
    """
    with join_processes(cfg) as cluster:
        mesh = mesh_lib.build(settings.read_mesh(cfg))
        with compile_cache(cfg.jax_cache_dir, mesh, has_replicas=cfg.enable_diloco) as lines:
            yield cluster, mesh, lines


@contextmanager
def join_processes(cfg: Config) -> Iterator["Cluster | None"]:
    """Connect this process and its devices to the other processes of the job, inside the context.

    It comes before anything that starts JAX's backends.

    Yields:
      The cluster; None for a single process.

    Raises:
      ConfigError: keys or versions differ between the processes, or devices are absent.
      LostPeerError: another process is lost.
    """
    mesh, network = settings.read_mesh(cfg), settings.read_network(cfg)
    mesh_lib.choose_platform(mesh)
    mesh_lib.set_up_cpu(mesh)
    with start.join_processes(
        os.environ,
        timeout_s=network.jax_distributed_initialization_timeout,
        peer_timeout_s=network.peer_timeout_seconds,
        peer_port=0 if network.peer_port == "auto" else network.peer_port,
        interface=network.exchange_interface,
        secret_file=network.exchange_secret_file,
    ) as cluster:
        if cluster is not None:
            installed = {"maxdiloco": __version__, "jax": jax.__version__}
            installed["jaxlib"] = importlib.metadata.version("jaxlib")
            versions = {f"version of {name}": version for name, version in installed.items()}
            coordination.require_equal(
                cluster.job,
                resume.shared(cfg.as_dict()) | versions,
                difference=resume.describe_processes,
                timeout_s=network.peer_timeout_seconds,
            )
        mesh_lib.emulate_devices(mesh, num_processes=cluster.job.num_processes if cluster else 1)
        mesh_lib.visible_devices(mesh)  # refuse absent devices before JAX is used
        yield cluster


def wait_for_all(say: Callable[[str], None]) -> None:
    """Wait until all processes have compiled their programs and have their state.

    From then on, a process without heartbeats is considered lost.

    Raises:
      LostPeerError: a process has not arrived.
    """
    if jax.process_count() == 1:
        return
    line = "waiting for the other processes, which compile or read their state"
    note = threading.Timer(_SAY_AFTER_S, say, (line,))
    note.daemon = True
    note.start()
    what = "compiled its programs and made its state"
    try:
        coordination.barrier("maxdiloco/ready", what, timeout_s=READY_S)
    finally:
        note.cancel()
