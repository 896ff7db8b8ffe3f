"""The decoder against an independent float64 NumPy oracle, and what its layout promises."""

import logging

import jax
import jax.numpy as jnp
import model_oracle
import numpy as np
import options
import pytest
import tiny_model
from flax import nnx
from tiers import corner

from maxdiloco.config import config
from maxdiloco.diloco.fragments import Vocabulary
from maxdiloco.models.build import ModelSettings, build_model
from maxdiloco.models.decoder import DecoderLayer
from maxdiloco.models.kernels.rotation import rotate
from maxdiloco.models.remat import POLICIES
from maxdiloco.models.rope import RopeConfig, rotation
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.run import assemble
from maxdiloco.run import settings as run_settings

VARIANTS = {
    "grouped queries, gated, untied": {},
    "tied, plain gelu, one head each": dict(
        logits_via_embedding=True, mlp_activations=("gelu",), base_num_kv_heads=4
    ),
    "soft-caps": dict(attn_logits_soft_cap=0.7, final_logits_soft_cap=0.9),
    "window, no qk-norm": dict(sliding_window_size=3, use_qk_norm="false"),
    "one shared key/value head, relu": dict(base_num_kv_heads=1, mlp_activations=("relu",)),
    "short rotary wavelength, no z-loss": dict(rope_max_timescale=50.0, z_loss_multiplier=0.0),
    **options.EACH,
}


@pytest.mark.parametrize("name", corner(VARIANTS, list(VARIANTS)[::3]))
def test_loss_and_gradient_are_those_of_the_oracle(name):
    """float32 against float64: 1e-5 of the sums over 27 tokens of packed documents. A row is
    padding alone."""
    cfg = tiny_model.config(**VARIANTS[name])
    model = tiny_model.build(**VARIANTS[name])
    params, batch = tiny_model.params_of(model), tiny_model.batch()
    (total, aux), gradient = tiny_model.value_and_gradient(model)(params, batch)
    flat, structure = jax.tree.flatten(model_oracle.float64(params))

    def oracle(leaves):
        tree = jax.tree.unflatten(structure, leaves)
        return model_oracle.loss(tree, batch["tokens"], batch["segment_ids"], cfg)

    def total_of(leaves):
        found = oracle(leaves)
        return found["cross_entropy"] + found["z_loss"]

    expected = oracle(flat)
    assert expected["tokens"] == 4 + 3 + 2 + 6 + 11
    for part, value in expected.items():
        np.testing.assert_allclose(aux[part], value, rtol=1e-5)
    np.testing.assert_allclose(total, total_of(flat), rtol=1e-5)
    tiny_model.assert_slopes(total_of, flat, jax.tree.leaves(gradient), step=1e-5, slack=1e-4)


# These add parameters or take them away; a model without them has none of that shape. The others
# change no number here, or cannot be left out.
OTHER_PARAMETERS = {
    *("norm_placement", "use_qk_norm", "head_dim", "base_num_decoder_layers"),
    *("logits_via_embedding", "latent_attention", "base_num_kv_heads"),
}
SAME_NUMBERS = {"remat_policy"}


@pytest.mark.parametrize("name", options.EACH)
def test_the_oracle_tells_every_option_from_its_absence(name):
    """Control of the test above: with any of the option's keys left out the loss is another, by
    several times what that test allows."""
    changes = options.EACH[name]
    params = model_oracle.float64(tiny_model.params_of(tiny_model.build(**changes)))
    batch = tiny_model.batch()

    def loss(**keys):
        cfg = tiny_model.config(**keys)
        found = model_oracle.loss(params, batch["tokens"], batch["segment_ids"], cfg)
        return found["cross_entropy"]

    with_all, rests = loss(**changes), {}
    for key in changes.keys() - OTHER_PARAMETERS - SAME_NUMBERS:
        rests[key] = {k: v for k, v in changes.items() if k != key}
    scaling = changes.get("rope_scaling", {})
    for entry in scaling.keys() & {"beta_fast", "truncate", "attention_factor"}:
        less = {name: value for name, value in scaling.items() if name != entry}
        rests[entry] = changes | {"rope_scaling": less}
    for key, without in rests.items():
        assert abs(loss(**without) / with_all - 1) > 3e-5, key


@pytest.fixture(scope="module")
def usual():
    """Value and gradient of a model that keeps everything, compiled; its parameters; and what
    they give for the batch."""
    model = tiny_model.build()
    run, params = tiny_model.value_and_gradient(model), tiny_model.params_of(model)
    return run, params, run(params, tiny_model.batch())


@pytest.mark.parametrize(
    ("policy", "pattern", "iterations"), [("none", (), 7), ("minimal", ("local", "global"), 3)]
)
def test_a_gpus_program_computes_the_same(policy, pattern, iterations):
    """Seven layers, which two kinds do not divide: no loop over them; control: there is one. Halves
    change places in a reversal, activations are formed again, logits are reduced at once."""
    keys = dict(base_num_decoder_layers=7, attention_pattern=pattern, sliding_window_size=4)
    scanned = tiny_model.build(**keys, remat_policy=policy)
    of_gpu = tiny_model.with_kernels(
        scanned, unroll_layers=True, rotation="reverse", recompute_activations=True,
        one_pass_logsumexp=True,
    )  # fmt: skip
    params, batch = tiny_model.params_of(scanned), tiny_model.batch()
    found, expected = (
        tiny_model.value_and_gradient(model)(params, batch) for model in (of_gpu, scanned)
    )
    tiny_model.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    bodies = 1 if pattern == () else 3  # of both kinds, and of the layer after the loop
    for model, at_once, more in ((scanned, 1, 0), (of_gpu, iterations, 1)):
        equations = tiny_model.equations(model.loss, params, batch)
        names = [equation.primitive.name for equation in equations]
        scans = [
            equation.params["unroll"]
            for equation in equations
            if equation.primitive.name == "scan" and equation.params["length"] == iterations
        ]
        assert scans == [at_once]
        assert (names.count("rev"), names.count("reduce")) == (2 * bodies * more, more)
        layers_again = bodies if policy == "minimal" else 0
        assert names.count("remat2") == layers_again + bodies * more


REMADE = [name for name in POLICIES if name != "none"]


@pytest.mark.parametrize("policy", corner(REMADE, ["minimal", "full"]))
def test_what_a_layer_keeps_does_not_change_the_gradient(policy, usual):
    """Recomputed values are the same up to the order in which a compiler fuses."""
    _, params, (_, expected) = usual
    remade = tiny_model.build(remat_policy=policy)
    _, gradient = tiny_model.value_and_gradient(remade)(params, tiny_model.batch())
    tiny_model.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_policies_run_more_matmuls_the_less_they_keep():
    """A layer has 7 weight matmuls and, in its one block of queries, 2 of attention. full runs
    all again but the last, w_out, whose result no gradient needs; save_context spares the 2 of
    attention; save_qkv_context 3 more; minimal only remakes activations."""
    batch = tiny_model.batch()
    counts = {}
    for policy in POLICIES:
        model = tiny_model.build(remat_policy=policy)
        step = jax.make_jaxpr(jax.value_and_grad(model.loss, has_aux=True))
        counts[policy] = str(step(tiny_model.params_of(model), batch)).count("dot_general")
    extra = {policy: count - counts["none"] for policy, count in counts.items()}
    assert extra == dict(none=0, minimal=0, save_qkv_context=3, save_context=6, full=8)


def test_bfloat16_compute_keeps_float32_weights_and_gradients(usual):
    """The loss differs from the float32 one by bf16 rounding, 2^-8, at most."""
    _, params, ((expected, _), _) = usual
    half = tiny_model.build(dtype="bfloat16")
    (total, _), gradient = tiny_model.value_and_gradient(half)(params, tiny_model.batch())
    assert total != expected
    np.testing.assert_allclose(total, expected, rtol=2**-8)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}


def test_a_token_outside_the_vocabulary_shows_in_the_loss(usual):
    run, params, _ = usual
    batch = tiny_model.batch()
    batch["tokens"][0, 3] = 32
    assert np.isnan(run(params, batch)[0][0])


def test_types_and_kernels_of_products_follow_the_backend():
    """dtype=auto; grouped products have kernels on a TPU and on a GPU that can have them. Weights
    have weight_dtype."""
    for backend, capability, dtype, kernel in (
        ("cpu", "", "float32", "xla"), ("gpu", "8.6", "bfloat16", "triton"),
        ("gpu", "7.5", "bfloat16", "xla"), ("tpu", "", "bfloat16", "megablox"),
    ):  # fmt: skip
        cfg = tiny_model.config(dtype="auto")
        model = build_model(
            ModelSettings.from_keys(cfg, backend=backend),
            backend=backend,
            compute_capability=capability,
        )
        kernels = model.kernels
        assert (model.config.dtype, kernels.grouped_matmul) == (jnp.dtype(dtype), kernel)
        of_gpu = {kernels.unroll_layers, kernels.one_pass_logsumexp, kernels.recompute_activations}
        assert of_gpu == {backend == "gpu"}
        assert (kernels.rotation == "reverse") == (backend == "gpu")
        assert kernels.products.scattered_gradients == (backend == "tpu")
    for keys, unrolled, chunk in (
        (dict(base_num_decoder_layers=48, vocab_size=2**15), True, 2**12),
        (dict(base_num_decoder_layers=49, vocab_size=2**18), False, 2**10),
    ):
        kernels = tiny_model.build(backend="gpu", **keys).kernels
        assert (kernels.unroll_layers, kernels.head_chunk) == (unrolled, chunk)
    init = tiny_model.build(weight_dtype="bfloat16").init
    shapes = jax.eval_shape(init, jax.random.key(0))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"bfloat16"}


def test_the_choice_of_kernels_is_logged(caplog):
    """Once for each model, with the backend; and the line of a run has the same words."""
    caplog.set_level(logging.INFO, logger="maxdiloco.models")
    kernels = tiny_model.build(backend="tpu", dtype="auto", num_experts=2).kernels
    (record,) = caplog.records
    assert "tpu" in record.getMessage() and kernels.describe() in record.getMessage()
    for chosen in (kernels.attention, kernels.grouped_matmul):
        assert chosen in kernels.describe()


def test_logical_axes_name_every_dim():
    """A leaf of layers counts them first; the vocabulary's dim is told to the fragments."""
    model = tiny_model.build()
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    sizes = {
        "layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24, "vocab": 32,
    }  # fmt: skip

    def check(path, leaf, names):
        assert len(names) == len(leaf.shape)
        for name, size in zip(names, leaf.shape, strict=True):
            assert name == "norm" or sizes[name] == size
        assert ("layers" in names) == (path[0].key == "layers")

    jax.tree_util.tree_map_with_path(check, shapes, model.logical_axes)
    assert model.logical_axes["layers"]["attention"]["out"] == (
        "layers", "heads", "head_dim", "embed",
    )  # fmt: skip
    axes = model.layer_axis
    assert set(jax.tree.leaves(axes["layers"])) == {0}
    assert axes["embedding"] == Vocabulary(0) and axes["head"] == Vocabulary(1)
    assert axes["final_norm"] == {"scale": None}


def test_first_activations_and_logits_have_unit_variance_and_layers_start_different():
    """Embedding and head are scaled so, tied or not; matrices that write to the residual stream
    have 1 / sqrt(2 layers) of the others' spread."""
    for tied in (False, True):
        model = tiny_model.build(
            logits_via_embedding=tied, base_emb_dim=128, vocab_size=512, base_mlp_dim=256
        )
        params = tiny_model.compiled(model.init)(jax.random.key(0))
        decoder = model.decoder(params)
        x = decoder.embedding(np.arange(512, dtype=np.int32)[None])
        w = decoder.head_weight()
        assert np.std(x) == pytest.approx(1, abs=0.02)
        assert np.std(w) * np.sqrt(128) == pytest.approx(1, abs=0.02)
        mlp = params["layers"]["mlp"]
        assert np.std(mlp["w_up"]) * np.sqrt(128) == pytest.approx(1, abs=0.02)
        assert np.std(mlp["w_out"]) * np.sqrt(256) == pytest.approx(0.5, abs=0.02)
        query = np.asarray(params["layers"]["attention"]["query"])
        assert np.abs(query[0] - query[1]).max() > 0.1


@pytest.mark.parametrize(
    ("borders", "ramp"),
    [
        # 64 tokens turn a pair 32 times at -1.2, so at pair 0; once at 2.4, so at pair 3.
        (dict(beta_fast=32.0, beta_slow=1.0), [0, 1 / 3, 2 / 3, 1]),
        # 0.001 times at 9.4, beyond the last number of a head, 7.
        (dict(beta_fast=32.0, beta_slow=0.001), [0, 1 / 7, 2 / 7, 3 / 7]),
        # 2 times at 1.66: a step.
        (dict(beta_fast=2.0, beta_slow=2.0, truncate=False), [0, 0, 1, 1]),
    ],
)
def test_yarn_divides_between_the_borders_and_within_the_head(borders, ramp):
    """The frequencies of the four pairs of a head of 8 are kept where the ramp is 0, and divided by
    the factor where it is 1."""
    rope = RopeConfig(50.0, "yarn", 4.0, 64, attention_factor=1.0, **borders)
    angles_I = np.arcsin(rotation(jnp.ones((1, 1)), 8, rope).sin_BLI[0, 0])
    stretched = angles_I * 50.0 ** np.array([0, 0.25, 0.5, 0.75])
    np.testing.assert_allclose(stretched, 1 - 0.75 * np.array(ramp), rtol=1e-4)


@pytest.mark.parametrize("form", ["permute", "reverse"])
def test_halves_change_places_to_the_same_bits(form):
    """Result and gradient by autodiff of the plain way; another angle is the control."""
    rng = np.random.default_rng(0)
    x_BLNH, d_BLNH = (jnp.asarray(rng.normal(size=(2, 5, 3, 8)), jnp.bfloat16) for _ in range(2))

    def both(form, first_position):
        rope = rotation(first_position + jnp.arange(5)[None], 8, RopeConfig(100.0))
        out, back = jax.vjp(lambda x: rotate(form, x, rope), x_BLNH)
        return np.asarray([out, *back(d_BLNH)], np.float32)

    np.testing.assert_array_equal(both(form, 0), both("concatenate", 0))
    assert np.any(both(form, 0) != both("concatenate", 1))


@pytest.mark.parametrize(
    "backend, dtype", [("tpu", "bfloat16"), ("tpu", "float32"), ("cpu", "bfloat16")]
)
def test_the_product_rotates_where_it_is_exact_and_fuses(backend, dtype):
    """On a TPU in bfloat16: its products of float32 are rounded, and elsewhere slices fuse."""
    cfg = tiny_model.config(dtype=dtype, max_target_length=128, attention="autoselected")
    model = build_model(ModelSettings.from_keys(cfg, backend=backend), backend=backend)
    assert model.kernels.attention == ("splash" if backend == "tpu" else "dot_product")
    x = jax.ShapeDtypeStruct((1, 128, model.config.emb_dim), model.config.dtype)

    def layer(x_BLD):
        rope = rotation(jnp.arange(128)[None], model.config.head_dim, RopeConfig(100.0))
        attend = lambda q, k, v, sinks: (q, None)  # noqa: E731
        rngs = nnx.Rngs(params=0)
        layer = DecoderLayer(model.config, model.kernels, has_experts=False, rngs=rngs)
        graph, weights = nnx.split(layer, nnx.Param)
        weights = jax.tree.map(lambda w: w.astype(model.config.dtype), weights)
        return nnx.merge(graph, weights)(x_BLD, rope, attend)[0]

    swaps = str(jax.make_jaxpr(layer)(x)).count("name=_by_permutation")
    assert swaps == (2 if (backend, dtype) == ("tpu", "bfloat16") else 0)


def test_a_run_begins_with_the_same_bits_on_any_mesh():
    """Two slices of two devices, each with half of a matrix; beside one device."""
    keys = ["model_name=tiny", "hardware=cpu", "dcn_diloco_parallelism=2", "ici_fsdp_parallelism=2"]
    cfg = config.load(keys, {})
    mesh = mesh_lib.build(run_settings.read_mesh(cfg), jax.devices()[:4])
    parts = assemble.assemble(
        run_settings.read(cfg, mesh), mesh, total_steps=1, on_compile=lambda *_: None
    )
    state = parts.init(np.uint32(5))
    init = jax.jit(lambda seed: parts.model.init(jax.random.key(seed)))
    leaves, expected = map(jax.tree.leaves, (state.outer, init(np.uint32(5))))
    for leaf, like in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(leaf, like)
