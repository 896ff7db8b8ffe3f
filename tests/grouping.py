"""Group tests for the workers of pytest-xdist: a file has one worker, and some files share one.

The tests of a file share module fixtures and compiled programs. xdist's own groups have no effect
with pytest 9.2: xdist 3.8 writes them to an attribute of a test that pytest no longer reads.
"""

import re

from xdist.scheduler import LoadScopeScheduling

# Files with the same mark share a worker: no two processes can load libtpu, and the import of torch
# takes 5 s.
SHARED = re.compile(r"pytest\.mark\.(tpu_aot|torch_import)\b")


class ByFile(LoadScopeScheduling):
    """Give a free worker the next file, or the files that share a mark."""

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        found = SHARED.search((self.config.rootpath / path).read_text(encoding="utf-8"))
        return found[1] if found else path


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
