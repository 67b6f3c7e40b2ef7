"""The scaler states of other systems, read in the middle of a run and written again."""

import dataclasses
import functools
import json
import pathlib

import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dls as dls
from optax_dls import profiles

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())
# What each system held after so many steps of a recording, as it saves it.
MIDWAY = [
    (
        *("torch", "random_p0.2_n3", 18),
        {
            "scale": 2.0**15,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": 1,
        },
    ),
    (
        *("megatron", "random_p0.2_n2_hysteresis2", 34),
        {
            "scale": np.array([2**27], np.float32),
            "growth_tracker": 0,
            "hysteresis_tracker": 1,
        },
    ),
    *(
        (
            *("deepspeed", f"random_p0.2_n2_shift3_consecutive{consecutive}", 32),
            {
                "cur_scale": 2.0**24,
                "cur_iter": 32,
                "last_overflow_iter": 30,
                "scale_window": 2,
                "cur_hysteresis": left,
                "raise_error": False,
            },
        )
        for consecutive, left in ((False, 2), (True, 3))
    ),
    ("flax", "random_p0.2_n3", 21, {"scale": 2.0**14, "fin_steps": 2}),
    ("jmp", "random_p0.2_n3", 21, {"loss_scale": 2.0**14, "counter": 2, "period": 3}),
]


@functools.cache
def recorded_case(system, name):
    """The optimizer of a recording, its run from a state, the flags and the scales."""
    (case,) = [c for c in GOLDEN["systems"][system] if c["name"] == name]
    finite = np.array([flag == "." for flag in GOLDEN["flags"][case["flags"]]])
    exponents, path = GOLDEN["scales"][case["scales"]]
    scales = [2.0 ** exponents[ord(c) - 48] for c in path]
    config = {k: v for k, v in case["config"].items() if k != "jit"}
    tx = dls.loss_scaling(optax.sgd(1.0), getattr(profiles, system)(**config))

    @jax.jit
    def go_on(state, finite):
        def step(state, is_finite):
            grads = jnp.where(is_finite, dls.loss_scale(state), jnp.inf)
            _, state = tx.update(grads, state)
            return state, dls.loss_scale(state)

        return jax.lax.scan(step, state, finite)[1]

    return tx, go_on, finite, scales


@pytest.fixture
def state():
    return dls.dynamic_loss_scaling(optax.sgd(1.0)).init(jnp.zeros(2))


@pytest.mark.parametrize(("system", "name", "steps", "saved"), MIDWAY)
def test_goes_on_where_the_recorded_system_was(system, name, steps, saved):
    tx, go_on, finite, recorded = recorded_case(system, name)
    fresh = tx.init(jnp.zeros(()))
    state = dls.interop.import_scaler(system, saved, fresh)
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, fresh)
    np.testing.assert_array_equal(go_on(state, finite[steps:]), recorded[steps:])


@pytest.mark.parametrize("steps", range(22))
def test_goes_on_from_any_step_of_deepspeed(steps):
    """Its growths are counted from the last overflow, ours from the last growth."""
    case = ("deepspeed", "overflow_after_two_growths_n3")
    tx, go_on, finite, recorded = recorded_case(*case)
    saved = {
        "cur_scale": recorded[steps - 1] if steps else 65536.0,
        "cur_iter": steps,
        "last_overflow_iter": max(np.flatnonzero(~finite[:steps]), default=-1),
        "scale_window": 3,
    }
    state = dls.interop.import_scaler("deepspeed", saved, tx.init(jnp.zeros(())))
    after = slice(steps, steps + 16)
    np.testing.assert_array_equal(go_on(state, finite[after]), recorded[after])


@pytest.mark.parametrize(("system", "name", "steps", "saved"), MIDWAY)
def test_out_and_in_again_is_the_same_state(system, name, steps, saved):
    tx, *_ = recorded_case(system, name)
    fresh = tx.init(jnp.zeros(2))
    state = dls.interop.import_scaler(system, saved, fresh)
    settings = {"scale_window": 2} if system == "deepspeed" else {}
    exported = dls.interop.export_scaler(system, state, **settings)
    if system != "megatron":
        assert all(type(value) in (int, float) for value in exported.values())
        assert json.loads(json.dumps(exported)) == exported
    again = dls.interop.import_scaler(system, exported, fresh)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_flax_and_jmp_take_what_is_exported_and_give_it_back(state):
    five = {"loss_scale": jnp.float32(512), "growth_count": jnp.int32(5)}
    saved = dict(zip(("loss_scale", "counter"), five.values(), strict=True))
    old, state = state, dls.interop.import_scaler("jmp", saved, state)
    exported = dls.interop.export_scaler("flax", state)
    as_flax = flax.serialization.from_state_dict(DynamicScale(), exported)
    assert (as_flax.scale, as_flax.fin_steps) == (512.0, 5)
    as_jmp = jmp.DynamicLossScale(
        *map(jnp.asarray, dls.interop.export_scaler("jmp", state).values())
    )
    for system, saved in (
        ("flax", flax.serialization.to_state_dict(as_flax)),
        ("jmp", {f.name: getattr(as_jmp, f.name) for f in dataclasses.fields(as_jmp)}),
    ):
        again = dls.interop.import_scaler(system, saved, old)
        assert {name: optax.tree.get(again, name) for name in five} == five


def test_a_bfloat16_scale_and_a_negative_tracker_are_taken(state):
    saved = {"loss_scale": jnp.bfloat16(8), "counter": jnp.int32(-3)}
    state = dls.interop.import_scaler("jmp", saved, state)
    assert float(dls.loss_scale(state)) == 8.0
    assert int(optax.tree.get(state, "growth_count")) == 0


def test_torch_gets_all_the_keys_that_its_load_state_dict_wants(state):
    assert dls.interop.export_scaler("torch", state, growth_interval=100) == {
        "scale": 32768.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 100,
        "_growth_tracker": 0,
    }


def test_megatron_gets_what_becomes_a_tensor_and_two_numbers(state):
    exported = dls.interop.export_scaler("megatron", state)
    scale = exported.pop("scale")
    assert isinstance(scale, np.ndarray)  # for torch.from_numpy
    assert (scale.dtype, scale.shape, scale.item()) == (np.float32, (1,), 32768.0)
    assert exported == {"growth_tracker": 0, "hysteresis_tracker": 1}
    assert all(type(value) is int for value in exported.values())


@pytest.mark.parametrize("left", [1, 0, -3])
def test_deepspeed_gets_a_hysteresis_at_which_it_backs_off(left):
    """It backs off where its count is 1, and counts on from anywhere else."""
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0), hysteresis=2)
    state = optax.tree.set(tx.init(jnp.zeros(2)), overflows_left=jnp.int32(left))
    assert dls.interop.export_scaler("deepspeed", state)["cur_hysteresis"] == 1


class CudaTensor:
    """As torch's: no array can be made of it, and item() gives its number."""

    def __init__(self, *values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    def item(self):
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.values[0]


def test_tensors_on_a_gpu_are_taken(state):
    saved = {
        "scale": CudaTensor(1024.0),
        "growth_tracker": CudaTensor(7),
        "hysteresis_tracker": 2,
    }
    state = dls.interop.import_scaler("megatron", saved, state)
    assert float(dls.loss_scale(state)) == 1024.0
    assert int(optax.tree.get(state, "growth_count")) == 7


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(
            ("scale", value, r"saved\['scale'\] must be one number, got")
            for value in (CudaTensor(1.0, 2.0), [1.0, 2.0], [], "8", None, 8j, 10**400)
        ),
        *(  # where the other system lost it
            ("scale", value, "scale must be a finite number from 2")
            for value in (0.0, np.inf, np.nan, 2.0**-130)
        ),
        *(
            ("fin_steps", value, r"saved\['fin_steps'\] must be a whole number within")
            for value in (0.5, 2.0**31, np.nan, np.inf)
        ),
    ],
)
def test_a_number_that_cannot_be_right_is_refused(key, value, message, state):
    saved = {"scale": 8.0, "fin_steps": 3, key: value}
    with pytest.raises(ValueError, match=message):
        dls.interop.import_scaler("flax", saved, state)


@pytest.mark.parametrize("system", dls.interop.SYSTEMS)
def test_a_scale_below_its_level_goes_out_with_its_own_finite_steps(system):
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0), recovery_interval=5)
    state = tx.init(jnp.zeros(()))
    for grads in (1.0,) * 6 + (jnp.inf, 1.0, 1.0):
        _, state = tx.update(jnp.asarray(grads), state)
    assert int(optax.tree.get(state, "growth_count")) == 8
    exported = dls.interop.export_scaler(system, state)
    counts = ("_growth_tracker", "growth_tracker", "fin_steps", "counter", "cur_iter")
    assert [exported[key] for key in counts if key in exported] == [2]


def test_a_tolerated_overflow_ends_the_finite_steps_in_a_row():
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0), hysteresis=2)
    state = tx.init(jnp.zeros(()))
    for grads in (1.0, 1.0, jnp.inf, 1.0):
        _, state = tx.update(jnp.asarray(grads), state)
    exported = dls.interop.export_scaler("megatron", state)
    assert (exported["growth_tracker"], exported["hysteresis_tracker"]) == (1, 1)


def test_under_the_default_rule_an_imported_scale_is_the_level():
    tx = dls.dynamic_loss_scaling(optax.sgd(1.0), growth_interval=5)
    saved = {"scale": 64.0, "fin_steps": 4}
    state = dls.interop.import_scaler("flax", saved, tx.init(jnp.zeros(())))
    assert float(optax.tree.get(state, "level")) == 64.0
    _, state = tx.update(jnp.array(1.0), state)
    assert float(dls.loss_scale(state)) == 128.0
    assert dls.interop.export_scaler("flax", state)["fin_steps"] == 0


def test_reaches_the_scaler_in_any_state_and_keeps_its_sharding():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    tx = optax.chain(
        dls.loss_scaling(optax.adam(1.0), dls.rules.retrying(dls.rules.dynamic()))
    )
    state = jax.device_put(tx.init(jnp.zeros(8)), NamedSharding(mesh, P()))
    new = dls.interop.import_scaler("flax", {"scale": 8.0, "fin_steps": 3}, state)
    assert float(dls.loss_scale(new)) == 8.0
    assert int(optax.tree.get(new, "growth_count")) == 3
    assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(
        lambda x: x.sharding, state
    )


DEEPSPEED = {
    "cur_scale": 8.0,
    "cur_iter": 9,
    "last_overflow_iter": 3,
    "scale_window": 2,
}


@pytest.mark.parametrize(
    ("system", "saved", "message"),
    [
        (
            "tf",
            {},
            r"must be one of \['deepspeed', 'flax', 'jmp', 'megatron', 'torch'\]",
        ),
        ("torch", {}, "saved has no 'scale'"),
        ("deepspeed", DEEPSPEED | {"cur_iter": 3}, "cur_iter must be above"),
        ("deepspeed", DEEPSPEED | {"scale_window": 0}, "scale_window at least 1, got"),
    ],
)
def test_a_saved_state_that_cannot_be_right_is_refused(system, saved, message, state):
    with pytest.raises(ValueError, match=message):
        dls.interop.import_scaler(system, saved, state)


def test_the_order_of_the_arguments_is_in_the_error(state):
    with pytest.raises(TypeError, match=r"import_scaler\(system, saved, state\)"):
        dls.interop.import_scaler("torch", state, {"scale": 8.0})


def test_a_setting_that_the_system_does_not_save_is_refused(state):
    with pytest.raises(ValueError, match="does not save 'period'.* saves: none"):
        dls.interop.export_scaler("jmp", state, period=3)


@pytest.mark.parametrize(
    ("make_state", "message"),
    [
        (
            dls.static_loss_scaling(optax.sgd(1.0), 8.0).init,
            "must be of a dynamic rule",
        ),
        (
            jax.vmap(dls.dynamic_loss_scaling(optax.sgd(1.0)).init),
            "must hold one scale",
        ),
        (lambda params: 3.0, "Not a number"),
    ],
)
def test_a_state_without_exactly_one_dynamic_scale_is_refused(make_state, message):
    with pytest.raises(TypeError, match=message):
        dls.interop.export_scaler("torch", make_state(jnp.ones(3)))
