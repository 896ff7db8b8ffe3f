"""The start of a run as far as the compile of its programs, which fails here or is not reached."""

import run_tools

from maxdiloco.errors import ConfigError
from maxdiloco.metrics.compiles import CompileLog


def test_the_remedy_is_of_the_policy_that_was_chosen(tmp_path, monkeypatch, capsys):
    """remat_policy=auto is `full` where nothing says how much memory a device has."""

    def all_of(self, calls, *, room):
        raise ConfigError(room)

    monkeypatch.setattr(CompileLog, "all_of", all_of)
    keys = dict(enable_checkpointing="false", optimizer_memory_host_offload="true")
    for policy, remedy in (("auto", ""), ("minimal", ", remat_policy=full")):
        assert run_tools.run(tmp_path, policy, remat_policy=policy, **keys) == 2
        assert capsys.readouterr().err == (
            "ConfigError: Use more devices in a slice, a smaller per_device_batch_size"
            f"{remedy} or diloco_outer_memory=pinned_host.\n"
        )
