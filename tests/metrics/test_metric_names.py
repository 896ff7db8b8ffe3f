"""The definitions of metrics are those that a run logs, and docs/reference/metrics.md has them."""

import ast
import pathlib
import re

import numpy as np
import optax
import pytest
from models import tiny_model

from maxdiloco.metrics import definitions
from maxdiloco.metrics.definitions import METRICS
from maxdiloco.metrics.rows import learning_metrics
from maxdiloco.run import inner_step
from maxdiloco.run.evaluation import Totals
from scripts import metrics_page

ROOT = pathlib.Path(__file__).parents[2]
GROUPS = "learning|moe|data|diloco|perf|device|dcn|islands|eval"
NAME = re.compile(rf"({GROUPS})/[a-z*][\w*]*(/[\w*]+)?")
READERS = ("report", "planning")  # of rows, also of those of other trainers
VALUES = dict(
    num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=8, base_num_decoder_layers=1,
    load_balance_loss_weight=0.1, router_z_loss_weight=0.1,
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


@pytest.fixture(scope="module")
def logged():
    """The metrics that the package logs, with * for what differs from run to run."""
    sources = [p for p in (ROOT / "maxdiloco").rglob("*.py") if p.parent.name not in READERS]
    sources.remove(pathlib.Path(definitions.__file__))
    names = {name for path in sources for name in named_in(path.read_text(encoding="utf-8"))}
    names |= of_a_step().keys() | Totals(1.0, 1, 1).metrics().keys()
    names |= Totals(1.0, 1, 1).metrics("wiki").keys()
    names = {re.sub(r"(?<=_)\d+$", "*", name.replace("/wiki/", "/*/")) for name in names}
    return names - {"eval/sample"}  # a text


def test_every_logged_metric_is_defined_and_no_other(logged):
    defined = [re.sub(r"{\w+}", "*", metric.name) for metric in METRICS]
    assert sorted(defined) == sorted(logged)
    assert len(logged) > 40  # the control: so many are found, from steps, strings and f-strings
    assert logged >= {"learning/z_loss", "data/tokens_*", "perf/mfu", "eval/*/loss"}


def test_a_name_has_one_definition_and_a_label():
    """A placeholder stands for digits or a name; * of another metric is not matched."""
    for name, definition, label in (
        ("learning/loss", "learning/loss", "mean of the replicas"),
        ("learning/loss_replica_12", "learning/loss_replica_{replica}", "replica 12"),
        ("eval/wiki/loss", "eval/{text}/loss", "wiki"),
        ("data/tokens_a.b", "data/tokens_{source}", ""),
    ):
        (found,) = [metric for metric in METRICS if metric.match(name) is not None]
        assert (found.name, found.match(name)) == (definition, label)
        assert definitions.find(name) is found
    for name in ("learning/loss_replica_x", "learning/lossy", "eval//", "perf/per_device_tflops"):
        assert definitions.find(name) is None


def test_the_metrics_page_is_current():
    """And the script repairs a table that was edited by hand."""
    page = metrics_page.PAGE.read_text(encoding="utf-8")
    assert metrics_page.written(page) == page
    edited = page.replace("| `perf/mfu` |", "| `perf/mfv` |")
    assert edited != page and metrics_page.written(edited) == page
    prefixes = {metric.name.partition("/")[0] for metric in METRICS}
    assert prefixes == set(metrics_page.TITLES)  # no metric is missing on the page
