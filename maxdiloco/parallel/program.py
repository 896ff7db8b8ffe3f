"""A program with a name, compiled at its first call; every compilation is reported."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh


def throttle_cpu(mesh: Mesh, arrays: Any) -> None:
    """On several emulated devices wait for arrays: a host that runs ahead deadlocks XLA:CPU."""
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(arrays)


def _abstract(args: Any) -> tuple:
    """What a program is compiled for, by value: jax 0.12 compares types by identity, and those of
    what a loaded executable returns have a layout of their own."""
    types = map(jax.typeof, jax.tree.leaves(args))
    return tuple((t.shape, t.dtype, t.weak_type, t.sharding, t.memory_space) for t in types)


class Program:
    """fn under jit, compiled once for each set of argument shapes.

    options: of jax.jit. on_compile(name, seconds, compiled) is called after each compilation.
    Arguments must keep the shardings of the first call.
    """

    def __init__(
        self,
        name: str,
        fn: Callable,
        *,
        donate: Sequence[int] = (),
        compiler_options: dict[str, Any] | None = None,
        on_compile: Callable[[str, float, jax.stages.Compiled], None],
        **options: Any,
    ):
        self.name = name
        self.compiled: dict[tuple, jax.stages.Compiled] = {}
        self._compiler_options = compiler_options
        self._on_compile = on_compile
        options = options | dict(donate_argnums=tuple(donate), compiler_options=compiler_options)
        self._jitted = jax.jit(fn, **options)

    def out_shapes(self, *args: Any) -> Any:
        """Shapes and dtypes of the results."""
        return jax.eval_shape(self._jitted, *args)

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """The executable for arguments (ShapeDtypeStructs) like args, compiled if there is none."""
        return self.lowered(*args)()

    def lowered(self, *args: Any) -> Callable[[], jax.stages.Compiled]:
        """Lower fn, which holds the GIL; what is returned compiles it, in any thread."""
        key = _abstract(args)
        if key in self.compiled:
            return lambda: self.compiled[key]
        start = time.perf_counter()
        lowered = self._jitted.lower(*args)
        lowering = time.perf_counter() - start

        def compile_():
            start = time.perf_counter()
            compiled = self.compiled[key] = lowered.compile()
            self._on_compile(self.name, lowering + time.perf_counter() - start, compiled)
            return compiled

        return compile_

    def fingerprint(self, *args: Any) -> str:
        """A digest of what is compiled for such arguments, to tell equal programs by."""
        text = self._jitted.lower(*args).as_text()
        whole = repr((text, _abstract(args), sorted((self._compiler_options or {}).items())))
        return hashlib.sha256(whole.encode()).hexdigest()

    def __call__(self, *args: Any) -> Any:
        """Run the executable; compile it first if there is none yet."""
        return self.compile(*args)(*args)
