"""Links between real processes, of which one is stopped or killed."""

import pathlib
import signal
import subprocess
import sys
import time
import zlib

import link_process
import pytest
from link_tools import WAIT_S

COUNT = 3


class Run:
    """Three processes; those that are left are killed at the end."""

    def __init__(self, folder, *, rounds, timeout_s):
        script = pathlib.Path(link_process.__file__)
        arguments = [str(argument) for argument in (COUNT, rounds, timeout_s, folder)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), *arguments],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(COUNT)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()

    def wait_for_round(self, number):
        for process in self.processes:
            while (line := process.stdout.readline()) != f"round {number}\n":
                assert line, "it has ended"

    def ends(self, *ranks):
        """{rank: (exit code, last line)}."""
        last = {}
        for rank in ranks:
            output, _ = self.processes[rank].communicate(timeout=WAIT_S)
            last[rank] = self.processes[rank].returncode, output.splitlines()[-1]
        return last


def test_a_process_that_is_stopped_for_less_than_the_timeout_loses_nothing(tmp_path):
    """Longer than the silence after which connections are made anew: 6 / 4 s."""
    with Run(tmp_path, rounds=40, timeout_s=6) as run:
        run.wait_for_round(5)
        run.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        run.processes[1].send_signal(signal.SIGCONT)
        for rank, end in run.ends(0, 1, 2).items():
            checksum = 0
            for number in range(40):
                for peer in {0, 1, 2} - {rank}:
                    checksum = zlib.crc32(link_process.payload(peer, number), checksum)
            assert end == (0, f"all told True checksum {checksum}")


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_does_not_come_back_ends_the_others_with_5_and_its_name(tmp_path, fault):
    with Run(tmp_path, rounds=1_000_000, timeout_s=2.5) as run:
        run.wait_for_round(5)
        run.processes[2].send_signal(fault)
        for code, line in run.ends(0, 1).values():
            assert code == 5
            assert "process 2 at 127.0.0.1 port" in line
            assert "out of reach for 3 s (peer_timeout_seconds=2.5)" in line
        if fault == signal.SIGSTOP:
            run.processes[2].send_signal(signal.SIGCONT)
            assert run.ends(2)[2][0] == 5
