"""Checkpoints in one process: what is saved comes back, whole and to the bit.

# R replicas  L layers  D model  F hidden
"""

import dataclasses
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_tools import folder_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.parameter_sets import restore_parameters
from maxdiloco.errors import CheckpointError
from maxdiloco.storage.run_folder import locate

REPLICATED = P()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    sent: jax.Array
    waiting: list


class Pair(NamedTuple):
    first: jax.Array
    second: tuple


@pytest.fixture
def place(mesh_of):
    """numbers(shape, spec): unequal values laid out on the mesh."""
    generator = np.random.default_rng(0)

    def numbers(shape, spec=REPLICATED, dtype=np.float32, memory_kind=None):
        values = (generator.standard_normal(shape) * 10).astype(dtype)
        sharding = NamedSharding(mesh_of(2, 2), spec, memory_kind=memory_kind)
        return jax.device_put(values, sharding)

    return numbers


@pytest.fixture
def items(place):
    params = {"w_LDF": place((4, 8, 6), P(None, "fsdp")), "norm_D": place((7,))}
    return {
        "outer_params": params,
        "state": {
            "inner": place((2, 4, 8, 6), P("diloco", None, "fsdp")),
            "optimizer": optax.adamw(1e-3).init(params),
            "slots": Slots(place((2, 5), P("diloco"), np.int8), [place((3,)), None]),
            "pair": Pair(place((5,), P(), jnp.bfloat16), (place((4,), P(), np.bool_),)),
            "nothing": optax.EmptyState(),
            "no_elements": place((0, 3)),
            "odd": place((4,)).at[:2].set(jnp.array([-0.0, jnp.nan])),
            "host": place((8, 2), P("fsdp"), memory_kind="pinned_host"),
        },
        "empty": optax.EmptyState(),
    }


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save(path, items, *steps, max_to_keep=None, meta=None, **options):
    with Checkpointer(folder_of(path), max_to_keep=max_to_keep, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, items, {"t": step} | (meta or {}))


def equal(a, b):
    """Same containers, dtypes, shardings and bits."""

    def same(x, y):
        return (
            x.dtype == y.dtype
            and x.sharding.is_equivalent_to(y.sharding, x.ndim)
            and x.sharding.memory_kind == y.sharding.memory_kind
            and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        )

    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(same, a, b))


@pytest.mark.parametrize("use_async", [True, False])
def test_any_pytree_comes_back_to_the_bit_with_its_shardings(tmp_path, items, use_async):
    assert items["state"]["host"].sharding.memory_kind == "pinned_host"
    meta = {"config": {"base_emb_dim": 8, "mlp": ["silu", None]}, "data": {"base": 12, "s0": 3}}
    save(tmp_path, items, 3, use_async=use_async, meta=meta)
    with Checkpointer(folder_of(tmp_path), max_to_keep=None) as checkpointer:
        restored = checkpointer.restore(lambda meta: abstract(items))
    assert restored.step == 3 and restored.meta == {"t": 3} | meta
    assert restored.path == folder_of(tmp_path) / "3"
    assert equal(restored.items, items)


@pytest.mark.parametrize("how", ["donated", "deleted"])
def test_the_state_may_go_as_soon_as_save_returns(tmp_path, place, held_write, how):
    """On CPU the copy on the host is a view of the buffer, which must not be used again."""
    x = place((1 << 16,), P("fsdp"))
    expected = np.array(x)  # a copy
    wanted = {"state": {"x": abstract(x)}}
    step = jax.jit(lambda x: x * 1.5 + 1.0, donate_argnums=0)
    with Checkpointer(folder_of(tmp_path), max_to_keep=None) as checkpointer:
        checkpointer.save(1, {"state": {"x": x}}, {})
        if how == "donated":
            for _ in range(5):
                x = step(x)
        else:
            x.delete()
        rubbish = jax.block_until_ready([place((1 << 16,), P("fsdp")) for _ in range(8)])
        assert checkpointer.steps() == []
        held_write.set()
        restored = checkpointer.restore(lambda meta: wanted)
    assert len(rubbish) == 8
    np.testing.assert_array_equal(restored.items["state"]["x"], expected)


THERE = "outer_params.w_LDF is float32[4, 8, 6]"
of = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    ("item", "change", "there", "here"),
    [
        ("outer_params", {"w_LDF": of((4, 8, 12), np.float32)}, THERE, "float32[4, 8, 12]"),
        ("outer_params", {"w_LDF": of((4, 8, 6), jnp.bfloat16)}, THERE, "bfloat16[4, 8, 6]"),
        ("outer_params", {"w_LDF": None}, THERE, "absent"),
        ("outer_params", {"b": of((2,), np.int8)}, "outer_params.b is absent", "int8[2]"),
        ("residual", {"a": of((2,), np.int8)}, "residual.a is absent", "int8[2]"),
    ],
)
def test_another_shape_dtype_leaf_or_item_is_refused(tmp_path, items, item, change, there, here):
    save(tmp_path, items, 1)
    leaves = abstract(items.get(item, {})) | change
    wanted = {item: {name: leaf for name, leaf in leaves.items() if leaf is not None}}
    with Checkpointer(folder_of(tmp_path), max_to_keep=1) as checkpointer:
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore(lambda meta: wanted)
    for named in (there, here, f"{folder_of(tmp_path)}/1 "):
        assert named in str(error.value)


def test_parameters_are_read_alone_and_cast(tmp_path, items):
    save(tmp_path, items, 1, 2)
    for item in ("state", "empty"):
        folder = folder_of(tmp_path) / "2" / item
        if folder.exists():
            folder.rmtree()  # damage that is no concern of the parameters ...
    (folder_of(tmp_path) / "2" / "seal.json").write_text(json.dumps({"files": {}}))  # ... unseen
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), items["outer_params"]
    )
    expected = np.asarray(items["outer_params"]["w_LDF"]).astype(jnp.bfloat16)
    for path in (locate(tmp_path, "run").path, folder_of(tmp_path) / "2"):
        params, _ = restore_parameters(path, lambda meta: wanted, key="k")
        assert params["w_LDF"].dtype == jnp.bfloat16
        assert params["w_LDF"].devices() == {jax.devices()[0]}  # as no sharding is given
        np.testing.assert_array_equal(params["w_LDF"], expected)


def test_a_path_without_a_checkpoint_is_named_with_its_key(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for path in (tmp_path / "absent", tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(CheckpointError, match=f"^load_parameters_path={path} "):
            restore_parameters(path, lambda meta: {}, key="load_parameters_path")


def test_an_empty_folder_has_no_checkpoint_and_a_file_is_refused(tmp_path):
    with Checkpointer(folder_of(tmp_path), max_to_keep=1) as checkpointer:
        assert checkpointer.restore(lambda meta: pytest.fail("asked")) is None
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=f"^base_output_directory: .*{tmp_path / 'run'}"):
        Checkpointer(folder_of(tmp_path), max_to_keep=1)
