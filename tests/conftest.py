"""What holds for every test: eight emulated CPU devices, no deadlines, and which tests run when.

XLA's persistent compilation cache stays off: a test must not depend on what an earlier run left.
"""

import importlib.util
import os
import signal

import hypothesis
import jax
import jaxlib
import pytest
from grouping import pytest_xdist_make_scheduler  # noqa: F401  a hook of pytest-xdist

# In the environment too, so that programs started by a test agree. They choose their own number of
# devices and read keys from M_*, so nothing of that kind reaches them from the caller's shell.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_NUM_CPU_DEVICES", None)
for _name in [name for name in os.environ if name.startswith("M_")]:
    del os.environ[_name]
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs behind it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs of a test would inherit it
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# No deadline: the first example of a test may compile. In CI the examples are the same every time.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


def pytest_sessionstart(session):
    """In the default tier XLA:CPU's older code generation, which later versions than 0.10 lack: it
    compiles in about half the time, and has wrong values for what some full tests compute with rda,
    and other last bits for int2. DEFAULT_CODE_GENERATION of run.py gives a process the newer one.
    """
    if jaxlib.__version__.startswith("0.10.") and "not full" in session.config.option.markexpr:
        os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"


@pytest.fixture(scope="session")
def devices():
    """The eight emulated CPU devices."""
    found = jax.devices()
    assert [device.platform for device in found] == ["cpu"] * 8
    return found


@pytest.fixture
def few_compiler_passes():
    """For tests whose time is compilation, and whose claim no pass of the compiler decides."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_collection_modifyitems(items):
    """Skip tests whose libraries are absent. The dearest come first: workers then end together."""
    absent = importlib.util.find_spec("libtpu") is None
    no_cuda = importlib.util.find_spec("jax_cuda12_plugin") is None
    for item in items:
        if item.get_closest_marker("tpu_aot") and absent:
            item.add_marker(pytest.mark.skip(reason="needs libtpu: install the extra [tpu]"))
        if item.get_closest_marker("gpu_aot") and no_cuda:
            item.add_marker(pytest.mark.skip(reason="needs the plugin, see scripts/test.sh"))

    def dearest_first(item):
        libtpu = item.get_closest_marker("tpu_aot") is not None
        return not libtpu, item.path.parent.name != "integration"

    items.sort(key=dearest_first)
