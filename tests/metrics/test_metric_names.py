"""docs/metrics.md lists the metrics that a run logs."""

import ast
import pathlib
import re

import numpy as np
import optax
import pytest
from models import tiny_model

from maxdiloco.evaluation.held_out import Totals
from maxdiloco.metrics.monitor import learning_metrics
from maxdiloco.trainer import inner_step

ROOT = pathlib.Path(__file__).parents[2]
GROUPS = "learning|moe|data|diloco|perf|device|dcn|islands|eval"
NAME = re.compile(rf"({GROUPS})/[a-z*][\w*]*(/[\w*]+)?")
READERS = ("page", "aot")  # of rows, also of those of other trainers
VALUES = dict(
    num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=8, base_num_decoder_layers=1,
    capacity_factor=1.0, load_balance_loss_weight=0.1, router_z_loss_weight=0.1,
)  # fmt: skip


def named_in(source):
    """The metrics that a module's strings name, with * for a value in an f-string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "*" for p in node.values]
            text = "".join(parts)
        else:
            text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and NAME.fullmatch(text) and not text.endswith(("/*", "_")):
            yield text


def of_a_step():
    """The metrics of a step of a mixture of experts with all its losses, on two replicas."""
    model = tiny_model.build(**VALUES)
    params, rule = tiny_model.params_of(model), optax.sgd(0.1)
    step = inner_step.make(model, rule, accumulation=1, nan_policy="skip")
    batch = tiny_model.batch() | {"learning_rate": np.float32([0.01])}
    *_, metrics = tiny_model.compiled(step)(params, rule.init(params), batch)
    return learning_metrics({name: np.stack([x, x]) for name, x in metrics.items()}, 0.1)


def documented(text):
    """The names in the first column of the table. `_0` and NAME stand for what differs."""
    cells = re.findall(r"^\| (.*?) \| ", text, re.M)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {re.sub(r"(?<=_)\d+$|NAME", "*", name) for name in names}


@pytest.fixture(scope="module")
def logged():
    sources = [p for p in (ROOT / "maxdiloco").rglob("*.py") if p.parent.name not in READERS]
    names = {name for path in sources for name in named_in(path.read_text(encoding="utf-8"))}
    names |= of_a_step().keys() | Totals(1.0, 1, 1).metrics().keys()
    names |= Totals(1.0, 1, 1).metrics("wiki").keys()
    names = {re.sub(r"(?<=_)\d+$", "*", name.replace("/wiki/", "/*/")) for name in names}
    # Documented together with the metrics of the first text, and not a metric but a text.
    return names - {"eval/*/perplexity", "eval/*/bits_per_byte", "eval/sample"}


def test_every_logged_metric_is_documented_and_no_other(logged):
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert logged == documented(text)
    assert len(logged) > 40  # the control: so many are found, from steps, strings and f-strings
    assert logged >= {"learning/z_loss", "data/tokens_*", "moe/dropped_tokens", "eval/*/loss"}
