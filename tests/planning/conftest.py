"""Plans as a user asks for them."""

import json

import pytest

from maxdiloco import plan


@pytest.fixture
def planned(tmp_path, capsys):
    """Exit code, the plan as JSON (None where there is none) and what was printed."""

    def planned(*argv):
        path = tmp_path / "plan.json"
        path.unlink(missing_ok=True)
        code = plan.main([*argv, f"report={path}"])
        return code, json.loads(path.read_text()) if path.exists() else None, capsys.readouterr()

    return planned
