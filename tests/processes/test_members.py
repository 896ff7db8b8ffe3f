"""The processes of a run compare their values before anything is compiled."""

import concurrent.futures

from maxdiloco.errors import ConfigError, LostPeerError
from maxdiloco.processes import members
from maxdiloco.processes.coordination import Job


def compare(of_each, *, count=None, timeout_s=60):
    """What require_equal raises in each process; None for nothing. count: of processes, all."""

    def one(index):
        try:
            return members.require_equal(
                Job(index, count or len(of_each)),
                of_each[index],
                difference=lambda groups: f"differ \udcff: {groups}",  # a path that is no text
                timeout_s=timeout_s,
            )
        except (ConfigError, LostPeerError) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(of_each)) as threads:
        return list(threads.map(one, range(len(of_each))))


def test_equal_values_pass_and_only_hashes_travel(store):
    assert compare([{"steps": 8, "seed": 1}] * 3) == [None] * 3
    assert not any("steps" in value for value in store.written.values())


def test_all_processes_raise_the_same_line_and_one_of_each_hash_sends_its_values(store):
    """Those that agree with process 0 end, too: the run cannot begin without the others."""
    errors = compare([{"steps": 8}, {"steps": 8}, {"steps": 9}, {"steps": 9}, {"steps": 8}])
    assert all(type(error) is ConfigError and error.exit_code == 2 for error in errors)
    (line,) = {str(error) for error in errors}
    assert line == "differ \udcff: {(0, 1, 4): {'steps': 8}, (2, 3): {'steps': 9}}"
    assert {key for key in store.written if "values" in key} == {
        "maxdiloco/members/values/0",
        "maxdiloco/members/values/2",
    }


def test_a_process_that_never_sends_its_values_is_named(store):
    errors = compare([{}, {}], count=3, timeout_s=0.05)
    assert [type(error) for error in errors] == [LostPeerError] * 2
    assert str(errors[0]).startswith("process 2 has not sent its keys, as the same version of")
    assert ", for 0.05 s at most. See the end of its own output" in str(errors[0])
    assert str(errors[1]).startswith("process 0 has not sent whether the keys are equal since ")


def test_one_process_compares_with_nobody():
    assert compare([{}]) == [None]
