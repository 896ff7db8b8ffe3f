"""Where a program that was compiled before may be loaded: from JAX's compile cache, or a file."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from maxdiloco.flags.config import Config
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import assemble

LOSES_ORDER = (
    "a CPU loses the order of collectives in a saved program, and devices that share a replica "
    "would wait for each other forever"
)


def keep_their_order(cfg: Config, mesh: Mesh) -> bool:
    """Whether the devices of a mesh can run a saved program of the step.

    XLA:CPU orders the collectives of a program by one resource. When it loads a program, the body
    of each loop gets a resource of its own (jaxlib 0.10.2): a collective of the layers' loop and
    one outside then start in any order, on each device in another. Programs without a collective
    in a loop are sound: those of replicas that have a device each.
    """
    sharing = mesh.size // (mesh.shape["diloco"] if assemble.has_replicas(cfg) else 1)
    return mesh.devices.flat[0].platform != "cpu" or sharing == 1


@contextmanager
def compile_cache(cfg: Config) -> Iterator[list[str]]:
    """Programs compiled inside come from JAX's compile cache, where that is sound, and are kept.

    Its folder is jax_cache_dir, or else that of JAX's own setting. Gives lines for the user.
    """
    before = jax.config.values["jax_compilation_cache_dir"]
    folder = cfg.jax_cache_dir or before
    if not folder:
        yield []
        return
    sound = keep_their_order(cfg, mesh_lib.build(cfg))
    jax.config.update("jax_compilation_cache_dir", folder if sound else None)
    compilation_cache.reset_cache()  # JAX asks only once whether there is a folder
    try:
        yield [] if sound else [f"note: {_source(cfg)}={folder} is not used: {LOSES_ORDER}."]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def _source(cfg: Config) -> str:
    return "jax_cache_dir" if cfg.jax_cache_dir else "JAX_COMPILATION_CACHE_DIR"
