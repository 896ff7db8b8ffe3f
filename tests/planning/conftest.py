"""Plans from the command line."""

import json

import pytest
from run import run_program

from maxdiloco import plan


@pytest.fixture
def planned(tmp_path):
    """Call the planner; return the plan of its report, or None, and its Run."""

    def planned(*argv):
        path = tmp_path / "plan.json"
        path.unlink(missing_ok=True)
        run = run_program(plan.main, *argv, f"report={path}")
        return json.loads(path.read_text()) if path.exists() else None, run

    return planned
