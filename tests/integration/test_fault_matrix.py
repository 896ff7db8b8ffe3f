"""Each fault of a process, a link or an unauthenticated client, at each moment of the schedule.

The processes are on hosts of their own (network namespaces), so this needs root and iproute2. A run
that ends is started again, and its parameters are those of a run without a fault, bit for bit.
"""

import os
import shutil

import pytest
from tiers import full

from benchmarks import link_faults
from benchmarks.link import faults
from benchmarks.link.hosts import Link

TIMEOUT_S = 8
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need root and iproute2",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(link, keys, digests of the parameters) of a run without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    own = {"peer_timeout_seconds": TIMEOUT_S, "num_slices": 2, "jax_cache_dir": folder / "cache"}
    link, keys = Link(10.0), link_faults.KEYS | own
    named = keys | {"run_name": "run", "base_output_directory": folder}
    faults.run_without_fault(2, link, folder / "logs", named)
    return link, keys, faults.digests(folder / "run", keys["steps"])


CASES = [
    (fault, moment) for fault in link_faults.all_faults(TIMEOUT_S) for moment in link_faults.MOMENTS
]


@pytest.mark.parametrize("fault, moment", [full(*case) for case in CASES])
def test_a_fault_ends_with_its_code_and_equal_bits_or_changes_nothing(
    undisturbed, tmp_path, fault, moment
):
    """Exit code 5 and a line that names the lost process, or 0; never a hang."""
    link, keys, digests = undisturbed
    chosen = link_faults.all_faults(TIMEOUT_S)[fault]
    case = link_faults.run(fault, chosen, moment, 2, link, tmp_path, keys, digests)
    assert case.problems == [] and case.equal
