"""What the package takes from JAX that has no public name."""

import pathlib
from types import SimpleNamespace

import jax
import pytest

import maxdiloco
from maxdiloco.errors import LostPeerError
from maxdiloco.processes import coordination

# As jaxlib 0.10.2 words it; some lines are left out.
LATE = """DEADLINE_EXCEEDED: Barrier timed out. Id: x::0. Please look at the task logs.
# of tasks that reached the barrier: 2/3.
The first task at the barrier: 0. Some timed out task names:
2


"""


def test_one_file_alone_imports_what_is_private_to_jax():
    """JAX may change it in any version: then this file is the one to mend."""
    folder = pathlib.Path(maxdiloco.__file__).parent
    users = {path.name for path in folder.rglob("*.py") if "jax._src" in path.read_text()}
    assert users == {"coordination.py"}


@pytest.mark.parametrize("text, who", [(LATE, "process 2"), ("CANCELLED: gone", "a process")])
def test_a_barrier_that_not_all_reach_says_who_is_late_with_what(monkeypatch, text, who):
    """JAX's own error is a traceback of six lines."""

    def late(*_):
        raise jax.errors.JaxRuntimeError(text)

    client = SimpleNamespace(wait_at_barrier=late, blocking_key_value_get=late)
    monkeypatch.setattr(coordination.distributed, "global_state", SimpleNamespace(client=client))
    with pytest.raises(LostPeerError, match=rf"^{who} has not compiled its programs since \d\d:"):
        coordination.meet("x", "compiled its programs", timeout_s=2)
    with pytest.raises(LostPeerError, match=r"^process 7 has not sent its name since .*for 2 s at"):
        coordination.value_of(7, "x", "its name", timeout_s=2)
