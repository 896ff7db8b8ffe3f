"""What the library refuses and tells: trees, batches, defaults, states that are not finite."""

import dataclasses
import inspect
import pathlib
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import maxdiloco
from maxdiloco import Checkpointer, DiLoCo, Island, Stacked, restore_state, save_state
from maxdiloco.config import config
from maxdiloco.config.keys import KEYS
from maxdiloco.diloco import outer_rate
from maxdiloco.diloco.combinations import RADIAL
from maxdiloco.engine.settings import ExchangeSettings
from maxdiloco.errors import NumericsError
from maxdiloco.run import settings as run_settings

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/use-as-a-library.md").read_text(encoding="utf-8")
PAGES = ROOT / "docs/site_pages.py"
BATCH = np.ones((2, 1), np.float32)


def inner_step(params, opt_state, batch):
    return {"w": params["w"] - 0.1 * batch.mean()}, opt_state, {"loss": batch.mean()}


def make(**options):
    return DiLoCo(inner_step, **(dict(num_replicas=2, sync_period=10) | options))


def broken(algorithm, *, memory="params"):
    """A state after one step in which replica 1, or theta, is not finite, and no flag says so."""
    state, _ = algorithm.step(algorithm.init({"w": jnp.ones((3, 2))}, ()), BATCH)
    whole = vars(state)[memory]
    bad = whole["w"].at[1, 0].set(np.nan)
    return replace(state, **{memory: {"w": bad}})


@pytest.mark.parametrize(
    ("params", "opt_state", "named"),
    [
        ({"a": 1.0}, (), r"params\['a'\] .*float"),
        ({"a": np.ones(2)}, {"n": 0}, r"opt_state\['n'\] .*int"),
        ({}, (), "params "),
        ({"a": np.ones((0, 3))}, (), r"params\['a'\] .*\(0, 3\)"),
        ({"n": np.zeros(3, np.int32)}, (), r"params\['n'\] .*int32"),
    ],
)
def test_a_tree_that_cannot_be_trained_is_named(params, opt_state, named):
    with pytest.raises(ValueError, match=named):
        make().init(params, opt_state)


@pytest.mark.parametrize("tree", ["params", "opt_state"])
def test_a_leaf_that_is_sharded_over_another_mesh_is_refused(tree):
    """Control: a copy on every device of that mesh is no loss, nor is the mesh of DiLoCo."""
    devices = np.array(jax.devices()[:2])
    mesh, other = Mesh(devices[None], ("diloco", "fsdp")), Mesh(devices, ("model",))
    algorithm = DiLoCo(inner_step, num_replicas=1, sync_period=10, mesh=mesh)

    def bind(mesh, spec):
        w = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, spec))
        trees = {"params": {"w": jnp.ones((4, 2))}, "opt_state": {"w": jnp.ones((4, 2))}}
        return algorithm.bind(**trees | {tree: {"w": w}})

    with pytest.raises(ValueError, match=rf"{tree}\['w'\] .*'model'.*'diloco', 'fsdp'"):
        bind(other, P("model"))
    bind(other, P())
    assert bind(mesh, P("fsdp")).state.params["w"].sharding.spec[0] == "diloco"


@pytest.mark.parametrize("x", [np.ones((1, 3)), np.float32(1)])
def test_a_batch_without_the_replica_dim_is_named(x):
    algorithm = make()
    with pytest.raises(ValueError, match=r"batch\['x'\] .*num_replicas=2"):
        algorithm.step(algorithm.init({"w": jnp.ones(3)}, ()), {"x": x})


W, SHORT = np.ones((3, 2), np.float32), np.ones(2, np.float32)
BFLOAT16 = {"w": W.astype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ((BFLOAT16, 1, {}), [r"params['w']", "float32[3, 2]", "bfloat16[3, 2]"]),
        (({"w": SHORT}, 1, {}), ["params['w']", "float32[3, 2]", "float32[2]"]),
        (({"v": SHORT}, 1, {}), ["params['w']", "float32[3, 2]", "absent"]),
        (({"w": W, "v": 1}, 1, {}), ["params['v']", "absent", "int32[]"]),
        (({"w": None}, 1, {}), ["params['w']", "absent"]),
        (({"w": "?"}, 1, {}), ["params['w']", "str"]),
        (({"w": W}, 1.0, {}), ["opt_state", "int32[]", "float32[]"]),
        (({"w": W}, (1,), {}), ["opt_state was int32[]", "absent"]),
        (({"w": W}, 1, {"loss": "?"}), ["metrics['loss']", "str"]),
        (({"w": W}, 1), ["2"]),
        (None, []),
    ],
)
def test_a_step_that_changes_its_trees_is_refused_by_name(returned, named):
    """When the first step is traced; nothing has been compiled for it, and the state is whole."""
    compiled = []
    algorithm = DiLoCo(
        lambda params, opt_state, batch: returned,
        num_replicas=2,
        sync_period=10,
        on_compile=lambda name, *_: compiled.append(name),
    )
    state = algorithm.init({"w": jnp.ones((3, 2))}, jnp.zeros((), jnp.int32))
    with pytest.raises(ValueError, match="inner_step returned") as refused:
        algorithm.step(state, BATCH)
    assert all(word in str(refused.value) for word in named) and "\n" not in str(refused.value)
    assert compiled == ["init"] and not state.params["w"].is_deleted()


def test_a_step_that_changes_a_container_is_refused_by_name():
    """Lists and tuples have the same paths."""
    algorithm = DiLoCo(lambda p, o, b: (p, list(o), {}), num_replicas=2, sync_period=10)
    state = algorithm.init({"w": jnp.ones(3)}, (jnp.zeros(()),))
    with pytest.raises(ValueError, match="opt_state was .*inner_step returned"):
        algorithm.step(state, BATCH)


def test_a_step_with_keys_and_python_numbers_for_arrays_is_taken():
    """Control: what is equal as an array is kept."""
    algorithm = DiLoCo(
        lambda p, o, b: (p, o | {"n": 0}, {"loss": 1.0}), num_replicas=2, sync_period=9
    )
    opt_state = {"key": jax.random.key(0), "n": jnp.zeros((), jnp.int32)}
    state, metrics = algorithm.step(algorithm.init({"w": jnp.ones(3)}, opt_state), BATCH)
    assert state.opt_state["n"].dtype == jnp.int32 and metrics["loss"].shape == (2,)


@pytest.mark.parametrize("what", ["params", "outer"])
def test_a_state_that_is_not_finite_is_neither_returned_nor_saved(tmp_path, what):
    """Between two sends no flag shows it; the good checkpoints stay."""
    algorithm = make()
    whose = r"params\['w'\] of replica 1" if what == "params" else r"outer parameters\['w'\]"
    with Checkpointer(tmp_path, max_to_keep=1) as saver:
        good = algorithm.init({"w": jnp.ones((3, 2))}, ())
        save_state(saver, algorithm, good)
        bad = broken(algorithm, memory=what)
        for use in (
            algorithm.check_finite,
            algorithm.outer_params,
            lambda state: save_state(saver, algorithm, state),
        ):
            with pytest.raises(NumericsError, match=f"step 1: {whose} "):
                use(bad)
        saver.wait()
        assert saver.steps() == [0]
    make().close()  # before the first step there is nothing to report
    if what == "params":  # a run that reads nothing else does not end without an error
        algorithm = make()
        state, _ = algorithm.step(broken(algorithm), BATCH)
        with pytest.raises(NumericsError, match="step 2: .* replica 1"):
            algorithm.close()
        del state


def test_a_restore_names_the_arguments_that_changed(tmp_path):
    first = make(alpha=0.5, outer_lr=0.7)
    state = first.init({"w": jnp.ones(3)}, ())
    said = []
    with Checkpointer(tmp_path, max_to_keep=1, say=said.append) as saver:
        save_state(saver, first, state)
        for options in (
            dict(alpha=0.5),
            dict(aggregation=RADIAL, outer_lr=0.4, sync_period=5),
        ):
            second = make(**options)
            second.bind({"w": jnp.ones(3)}, ())
            assert restore_state(saver, second).t == 0
    (line,) = said
    for change in ("alpha 0.5 -> 0.0", f"aggregation mean -> {RADIAL}", "outer_lr 0.7 -> 0.4"):
        assert change in line
    assert "sync_period 10 -> 5" in line and line.count("->") == 4


ARGUMENTS = set(inspect.signature(DiLoCo).parameters)
ARGUMENTS |= {field.name for field in dataclasses.fields(ExchangeSettings)}
TRAINER_KEYS = {key for key in KEYS if "_" in key} - ARGUMENTS
REFUSED = [
    dict(num_replicas=0), dict(num_replicas=True), dict(num_replicas=2.0), dict(sync_period=0),
    dict(num_fragments=11), dict(num_fragments=2), dict(outer_lr=float("nan")),
    dict(num_fragments=3, layer_axis={"w": Stacked(0, (0, 2, 3))}),
    dict(num_fragments=9, layer_axis={"w": 0}), dict(layer_axis={"w": 5}), dict(layer_axis=[0, 1]),
    dict(overlap_steps=10), dict(overlap_steps=1, round_overlap="eager"), dict(round_overlap="?"),
    dict(alpha=2), dict(outer_lr=-1), dict(outer_momentum=1), dict(outer_lr=1, outer_optimizer=1),
    dict(outer_optimizer="?"), dict(exchange_dtype="?"), dict(error_feedback=True),
    dict(aggregation="?"), dict(aggregation=RADIAL, round_overlap="eager"), dict(collective="?"),
    dict(collective="reduce_scatter", aggregation=RADIAL), dict(num_nonlayer_fragments=0),
    dict(collective="reduce_scatter", exchange_dtype="topk"), dict(outer_memory="?"),
    dict(collective="reduce_scatter", round_overlap="eager"), dict(transport="?"),
    dict(offsets=[1, 2]), dict(num_fragments=2, offsets=[1, 11]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "axis", "named"), [(6, "diloco", "num_replicas=6 "), (4, "data", "'diloco'")]
)
def test_a_mesh_that_does_not_fit_the_replicas_is_named(devices, replicas, axis, named):
    with pytest.raises(ValueError, match=named):
        make(num_replicas=replicas, mesh=jax.sharding.Mesh(np.array(devices[:4]), (axis,)))


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_errors_name_arguments_and_no_key_of_the_trainer(options):
    with pytest.raises(ValueError, match="|".join([*options, "diloco"])) as refused:
        make(**options).bind({"w": jnp.ones((3, 2))}, ())
    words = set(re.findall(r"\w+", str(refused.value)))
    assert not words & TRAINER_KEYS


def test_a_nan_outer_gradient_names_no_key_of_the_trainer():
    """Control: the trainer's keys are known here."""
    algorithm = DiLoCo(lambda p, o, b: ({"w": p["w"] / 0}, o, {}), num_replicas=2, sync_period=1)
    state, _ = algorithm.step(algorithm.init({"w": jnp.ones(3)}, ()), BATCH)
    with pytest.raises(NumericsError) as stopped:
        algorithm.check_finite(state, exchanges_only=True)
    assert not set(re.findall(r"\w+", str(stopped.value))) & TRAINER_KEYS
    assert {"learning_rate", "nan_policy", "num_diloco_fragments"} <= TRAINER_KEYS


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, []),
        ({"round_overlap": "delayed"}, ["diloco_round_overlap=delayed"]),
        ({"num_replicas": 4}, []),
        ({"num_replicas": 4, "aggregation": RADIAL}, [f"diloco_aggregation={RADIAL}"]),
    ],
)
def test_the_library_s_outer_rate_and_momentum_are_the_trainer_s(options, keys):
    settings = make(**options).settings
    cfg = run_settings.with_replicas(config.load(keys, {}), options.get("num_replicas", 2))
    assert settings.outer_lr == cfg.diloco_outer_lr
    assert settings.outer_momentum == cfg.diloco_outer_momentum == outer_rate.MOMENTUM


def test_the_docstrings_name_every_argument():
    """The site generates the Python API from them."""
    for made, text in (
        (DiLoCo, inspect.getdoc(DiLoCo.__init__)),
        (Island, inspect.getdoc(Island.__init__)),
        (Checkpointer, f"{inspect.getdoc(Checkpointer)} {Checkpointer.__init__.__doc__}"),
        (ExchangeSettings, inspect.getdoc(ExchangeSettings)),
    ):
        for argument in inspect.signature(made).parameters:
            assert re.search(rf"(?m)\b{argument}\b[^\n]*:", text), (made, argument)
    for name in maxdiloco.__all__:
        assert f"maxdiloco.{name}\n" in PAGES.read_text(encoding="utf-8"), name


def test_each_replica_has_its_own_typed_keys():
    """A single key and an array of keys, of two kinds. Raw keys are copied."""
    key = jax.random.key(7, impl="rbg")
    opt_state = {"a": key, "b": jax.random.split(jax.random.key(1), (2, 3)), "raw": jnp.arange(2)}
    algorithm = make(num_replicas=4)
    state = algorithm.init({"w": jnp.ones(3)}, opt_state)
    found = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        state.opt_state,
    )
    assert state.opt_state["a"].dtype == key.dtype
    for m in range(4):
        own = jax.random.key_data(jax.random.fold_in(key, m))
        np.testing.assert_array_equal(found["a"][m], own)
        own = jax.random.key_data(jax.random.fold_in(opt_state["b"][1, 2], m))
        np.testing.assert_array_equal(found["b"][m, 1, 2], own)
        np.testing.assert_array_equal(found["raw"][m], [0, 1])
    assert len({x.tobytes() for x in np.asarray(found["b"]).reshape(24, -1)}) == 24


class Dropped(nnx.Module):
    """What dropout leaves of its input; `w` is the parameter that DiLoCo needs."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(3))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


@pytest.mark.parametrize("kept_in_opt_state", [True, False])
def test_masks_of_an_nnx_model_differ_where_opt_state_holds_its_keys(kept_in_opt_state):
    """Two replicas, the same data, two steps. A step that closes over the keys draws one mask."""
    graphdef, params, rest = nnx.split(Dropped(nnx.Rngs(0)), nnx.Param, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def dropped(params, opt_state, batch):
        model = nnx.merge(graphdef, params, opt_state if kept_in_opt_state else rest)
        kept = model(batch) > 0
        new = nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[2])
        return params, new if kept_in_opt_state else opt_state, kept

    algorithm = DiLoCo(dropped, num_replicas=2, sync_period=10)
    state = algorithm.init(params, rest)
    masks = []
    for _ in range(2):
        state, kept = algorithm.step(state, np.ones((2, 64), np.float32))
        masks += np.asarray(kept).tolist()
    assert len({tuple(mask) for mask in masks}) == (4 if kept_in_opt_state else 1)


KERNEL = nnx.initializers.ones_init()
RULES = [("embed", "fsdp"), ("mlp", None)]


def nnx_params(names, rules, mesh):
    """The parameters of an NNX layer that is created on a mesh."""
    init = nnx.with_partitioning(KERNEL, names)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        layer = nnx.Linear(8, 4, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def linen_params(names, rules, mesh):
    """The parameters of the same layer in Linen."""
    init = linen.with_logical_partitioning(KERNEL, names)
    layer = linen.Dense(4, use_bias=False, kernel_init=init)

    def boxed():
        return layer.init(jax.random.key(0), jnp.zeros((1, 8)))["params"]

    specs = linen.get_partition_spec(jax.eval_shape(boxed))
    shardings = linen.logical_to_mesh_sharding(specs, mesh, rules)
    return jax.jit(lambda: linen.unbox(boxed()), out_shardings=shardings)()


@pytest.mark.parametrize(
    ("create", "names", "rules"),
    [
        (nnx_params, ("fsdp", None), []),
        (nnx_params, ("embed", "mlp"), RULES),
        (linen_params, ("embed", "mlp"), RULES),
    ],
)
def test_shardings_from_rules_of_flax_are_kept(create, names, rules):
    """Mesh axes and logical names; the step constrains an activation of one replica."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("diloco", "fsdp"))

    def constrained(params, opt_state, batch):
        y = jax.lax.with_sharding_constraint(batch @ params["kernel"], P("fsdp"))
        return params, opt_state, y

    algorithm = DiLoCo(constrained, num_replicas=2, sync_period=10, mesh=mesh)
    state = algorithm.init(create(names, rules, mesh), ())
    state, y = algorithm.step(state, np.ones((2, 6, 8), np.float32))
    assert state.params["kernel"].sharding.spec == P("diloco", "fsdp", None)
    assert algorithm.outer_params(state)["kernel"].sharding.spec == P("fsdp", None)
    np.testing.assert_array_equal(y, np.full((2, 6, 4), 8))


@pytest.fixture(scope="module")
def example():
    """The names that the example of the page defines."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names = {}
    exec(program, names)
    return names


def test_the_example_of_the_page_learns(example):
    """The prediction is the sum of eight ones. Before the training it is near 0."""
    assert example["state"].t == 60
    assert np.mean(example["losses"][-10:]) < 0.2 * example["losses"][0]
    (var,) = [x["var"] for x in example["batch_stats"].values()]
    assert (np.asarray(var) > 0).all()
    assert 4 < example["prediction"].item() < 12
