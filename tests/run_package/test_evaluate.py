"""Loss, perplexity and bits per byte of an evaluation; of the replicas and their mean too."""

import math

import jax
import numpy as np
import pytest
from data.shards_on_disk import open_dataset
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.tiny_model import mesh_of

from maxdiloco.config import config
from maxdiloco.models.config import from_keys
from maxdiloco.models.model import Model
from maxdiloco.run import model as run_model
from maxdiloco.run import settings as run_settings
from maxdiloco.run.evaluation import Evaluation, Totals

SIZES = (
    "base_emb_dim=8 base_num_decoder_layers=1 base_mlp_dim=8 head_dim=4 base_num_query_heads=2 "
    "base_num_kv_heads=1 max_target_length=8 remat_policy=none logits_via_embedding=true"
).split()


def test_bits_per_byte_divides_by_the_bytes_of_the_targets():
    """6 nats over 4 targets of 3 bytes: 1.5 nats a token, 2 nats = 2.885 bits a byte. A byte is one
    byte, and the start of a document is none."""
    totals = Totals(cross_entropy=6.0, tokens=4, num_bytes=3)
    numbers = [1.5, pytest.approx(math.exp(1.5)), pytest.approx(2 / math.log(2))]
    names = ["loss", "perplexity", "bits_per_byte"]
    assert totals.metrics() == {f"eval/{n}": x for n, x in zip(names, numbers, strict=True)}
    assert list(totals.metrics("wiki")) == [f"eval/wiki/{name}" for name in names]
    assert "eval/bits_per_byte" not in Totals(6.0, 4, 0).metrics()
    assert math.isnan(Totals(0.0, 0, 0).loss)
    assert Totals(1e6, 1, 0).rates()["perplexity"] == math.inf
    found = run_model.token_bytes(run_settings.read_tokenizer(config.load(["vocab_size=300"], {})))
    assert found.dtype == np.int32 and found.sum() == 256 and found[256:].sum() == 0


@pytest.fixture
def evaluate(tmp_path):
    """(model, evaluate): the totals of parameters on a text; more keys are Evaluation's."""
    path = tmp_path / "a.txt"
    cfg = config.load([*SIZES, "vocab_size=257", f"eval_dataset_path={path}"], {})
    model = Model(from_keys(cfg))

    def totals(params, text, mesh, **keys):
        path.write_text(text)
        evaluation = Evaluation(model, mesh, length=8, on_compile=lambda *_: None, **keys)
        return evaluation(params, open_dataset(cfg, "eval"))

    return model, totals


@pytest.mark.usefixtures("few_compiler_passes")
@pytest.mark.parametrize("num_bytes", [0, 5])
def test_an_untrained_model_pays_the_logarithm_of_its_vocabulary(evaluate, devices, num_bytes):
    """Zero weights: ln V nats a target. 20 letters and the start of their document are two windows
    of 8 tokens, of which 7 targets count in each. Here each letter stands for some bytes."""
    model, totals = evaluate
    zeros = jax.tree.map(np.zeros_like, model.init(jax.random.key(0)))
    bytes_V = np.zeros(257, np.int32)
    bytes_V[ord("a")] = num_bytes
    found = totals(zeros, "a" * 20, mesh_of(devices), rows=3, num_sequences=-1, token_bytes=bytes_V)
    assert (found.tokens, found.num_bytes) == (14, 14 * num_bytes)
    assert found.loss == pytest.approx(math.log(257), rel=1e-6)


@pytest.mark.usefixtures("few_compiler_passes")
def test_each_slot_evaluates_its_own_parameters_on_its_own_sequences(evaluate, devices):
    """Two slots of one device, two windows: slot m adds up the loss of model m on window m. With
    one model in both slots it is the evaluation of that model. Control: of the other model it is
    another loss."""
    model, totals = evaluate
    first, second = (model.init(jax.random.key(seed)) for seed in (0, 1))
    mesh = mesh_of(devices, diloco=2)

    def of(params, *, sequences=2, per_position=False):
        where = NamedSharding(mesh, P("diloco") if per_position else P())
        text = "the quick fox "  # and the start of the document: 15 tokens
        return totals(
            jax.device_put(params, where), text, mesh, rows=2, num_sequences=sequences,
            token_bytes=np.ones(257, np.int32), per_position=per_position,
        )  # fmt: skip

    def per_position(*params):
        return of(jax.tree.map(lambda *x: np.stack(x), *params), per_position=True)

    window_0, both, others = of(second, sequences=1), of(second), of(first, sequences=1)
    found = per_position(first, second)
    expected = others.cross_entropy + both.cross_entropy - window_0.cross_entropy
    assert found.cross_entropy == pytest.approx(expected, rel=1e-6)
    assert (found.tokens, found.num_bytes) == (both.tokens, both.num_bytes)
    assert per_position(second, second).loss == pytest.approx(both.loss, rel=1e-6)
    assert abs(found.loss - both.loss) > 1e-4
