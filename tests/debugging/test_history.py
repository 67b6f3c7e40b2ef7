"""The record of a training run: no waiting, no repair, and nothing lost on the way."""

import concurrent.futures
import copy
import json
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dls as dls

TOO_MANY = (
    '{"step": 0, "loss_scale": 1.0, "grads_finite": true, "consecutive_skips": 0, '
    '"total_skips": 2147483648}'
)
CORE = ("loss_scale", "grads_finite", "consecutive_skips", "total_skips")


def metrics(scale=1024.0, finite=True, consecutive=0, total=0):
    return {
        "loss_scale": jnp.float32(scale),
        "grads_finite": jnp.bool_(finite),
        "consecutive_skips": jnp.int32(consecutive),
        "total_skips": jnp.int32(total),
    }


def train(grads_and_losses, **history_settings):
    """A history of steps with the given true gradients and losses."""
    tx = dls.dynamic_loss_scaling(optax.sgd(0.1), init_scale=1024.0)
    state, history = tx.init(jnp.zeros(2)), dls.History(**history_settings)
    for grads, loss in grads_and_losses:
        scaled = jnp.asarray(grads, jnp.float32) * dls.loss_scale(state)
        norm = optax.tree.norm(dls.unscale(scaled, state))
        _, state = tx.update(scaled, state)
        history.append(dls.metrics(state), loss=jnp.float32(loss), norm=norm)
    return history


def same(history, other):
    assert list(map(repr, history)) == list(map(repr, other))  # repr: NaN is not NaN


class TestReports:
    def test_loss_and_gradient_norm_are_the_true_ones(self):
        """https://github.com/wandb/wandb/issues/9092"""
        tx = dls.static_loss_scaling(optax.sgd(0.1), 1024.0)
        params = jnp.zeros(2)
        state, history = tx.init(params), dls.History()
        loss, grads = dls.value_and_scaled_grad(
            lambda w: jnp.float32(3.0) + w @ jnp.array([3.0, 4.0])
        )(params, state=state)
        norm = optax.tree.norm(dls.unscale(grads, state))
        _, state = tx.update(grads, state, params)
        history.append(dls.metrics(state), loss=loss, norm=norm)
        assert history[0]["loss"] == 3.0
        assert history[0]["norm"] == 5.0
        assert history[0]["loss_scale"] == 1024.0

    def test_the_mean_over_applied_steps_is_finite(self):
        """https://github.com/microsoft/Swin-Transformer/issues/47"""
        steps = [([1.0, 0.0], 1.0), ([np.inf, 0.0], 1.0), ([0.0, 3.0], 1.0)]
        columns = train(steps).arrays()
        assert columns["norm"].tolist() == [1.0, np.inf, 3.0]
        applied = columns["consecutive_skips"] == 0
        assert columns["norm"][applied].mean() == 2.0

    def test_a_loss_that_was_nan_is_reported_as_nan(self, tmp_path):
        """https://github.com/huggingface/trl/issues/6702"""
        steps = [([1.0, 0.0], 1.0), ([np.nan, 0.0], np.nan), ([1.0, 0.0], 1.0)]
        history = train(steps)
        history.save(tmp_path / "run.jsonl")
        for read in (history, dls.History.load(tmp_path / "run.jsonl")):
            columns = read.arrays()
            np.testing.assert_array_equal(columns["loss"], [1.0, np.nan, 1.0])
            assert columns["consecutive_skips"].tolist() == [0, 1, 0]
            assert columns["total_skips"].tolist() == [0, 1, 1]

    def test_appending_does_not_wait_for_the_device(self):
        """https://github.com/huggingface/accelerate/issues/1714

        The step still computes when its loss has been appended.
        """

        def slow(x):  # a second or so; XLA runs on a CPU in the background what has @
            return jax.lax.fori_loop(0, 40, lambda i, y: y @ x * 1e-3, x)[0, 0]

        x, step = jnp.ones((1000, 1000)), jax.jit(slow)
        one, values, history = jnp.float32(1.0), metrics(), dls.History()
        step(x).block_until_ready()  # compiles
        history.append(values, loss=one)
        history.append(values, loss=one)
        with jax.transfer_guard_device_to_host("disallow_explicit"):
            loss = step(x)
            history.append(values, loss=loss)
            history.append(values, loss=one)
            repr(history)
            assert not loss.is_ready()
        assert len(history.arrays()["loss"]) == 4
        assert loss.is_ready()

    def test_only_reading_converts(self, monkeypatch):
        """https://github.com/huggingface/accelerate/issues/1714"""
        reads, device_get = [], jax.device_get

        def spy(tree):
            reads.append(jax.tree.leaves(tree))
            return device_get(tree)

        monkeypatch.setattr(jax, "device_get", spy)
        history = dls.History()
        for value in (metrics(), metrics(2.0)):
            history.append(value, loss=jnp.float32(1.0))
        history.extend({k: v[None] for k, v in metrics().items()})
        assert not reads
        assert history[-1]["loss_scale"] == 1024.0
        assert len(reads) == 1
        list(history), history.arrays()
        assert len([leaf for leaves in reads for leaf in leaves]) == 14  # each once


class TestAppend:
    def test_a_record_is_plain_python(self):
        history = dls.History()
        history.append(metrics(), loss=jnp.float32(0.5), where="params['w']", lr=1e-3)
        assert (
            history[-1]
            == history[0]
            == {
                "step": 0,
                "loss_scale": 1024.0,
                "grads_finite": True,
                "consecutive_skips": 0,
                "total_skips": 0,
                "loss": 0.5,
                "where": "params['w']",
                "lr": 1e-3,
            }
        )
        kinds = [type(value) for value in history[0].values()]
        assert kinds == [int, float, bool, int, int, float, str, float]
        assert list(history[0])[:6] == ["step", *CORE, "loss"]

    @pytest.mark.parametrize(
        "value",
        [
            jnp.bfloat16(0.5),
            jnp.float16(0.5),
            np.float32(0.5),
            np.float64(0.5),
            np.array(0.5),
            0.5,
        ],
        ids=lambda value: type(value).__name__ + str(getattr(value, "dtype", "")),
    )
    def test_every_kind_of_number_is_taken(self, value):
        history = dls.History()
        history.append(metrics(), loss=value)
        assert history[0]["loss"] == 0.5
        assert type(history[0]["loss"]) is float

    def test_metrics_on_the_host_are_taken_too(self):
        history = dls.History()
        history.append(jax.device_get(metrics()))
        history.append({k: v.item() for k, v in metrics().items()})
        assert history.arrays()["loss_scale"].dtype == np.float32

    def test_a_state_that_is_donated_afterwards_stays_in_the_history(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(0.1), growth_interval=1)
        step = jax.jit(lambda g, s: tx.update(g, s)[1], donate_argnums=1)
        state, history = tx.init(jnp.zeros(2)), dls.History()
        for _ in range(3):
            state = step(jnp.ones(2), state)
            history.append(dls.metrics(state))
            step(jnp.ones(2), jax.tree.map(jnp.copy, state))
            old, state = state, step(jnp.ones(2), state)
            assert old.scaler.loss_scale.is_deleted()
        assert history.arrays()["loss_scale"].tolist() == [2.0**16, 2.0**18, 2.0**20]

    def test_reading_between_appends_changes_nothing(self):
        history = dls.History()
        for i in range(5):
            history.append(metrics(total=i), loss=jnp.float32(i))
            assert history[-1]["total_skips"] == i
        assert history.arrays()["loss"].tolist() == [0, 1, 2, 3, 4]

    def test_more_rows_than_a_buffer_has_and_changing_names(self):
        history, value = dls.History(), metrics()
        for i in range(600):
            extras = {"norm": jnp.float32(i)} if i % 280 == 0 else {}
            history.append(value, loss=i, **extras)
        columns = history.arrays()
        assert columns["loss"].tolist() == list(range(600))
        assert np.flatnonzero(~np.isnan(columns["norm"])).tolist() == [0, 280, 560]

    def test_steps_count_up_from_where_one_was_named(self):
        history = dls.History()
        for step in (None, 10, None):
            history.append(metrics(), step=step)
        history.extend({k: v[None] for k, v in metrics().items()})
        assert history.arrays()["step"].tolist() == [0, 10, 11, 12]

    @pytest.mark.parametrize("explicit", [False, True])
    def test_replicated_values_and_a_context_mesh(self, explicit):
        kind = getattr(jax.sharding.AxisType, "Explicit" if explicit else "Auto")
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        value = jax.device_put(metrics(), everywhere)
        stacked = {k: jnp.broadcast_to(v, 8) for k, v in metrics().items()}
        losses = jax.device_put(jnp.arange(8.0), split)
        elsewhere = jax.device_put(jnp.float32(1.0), jax.devices()[3])
        history = dls.History()
        with jax.set_mesh(mesh):
            history.append(value, loss=elsewhere)
            history.append(value, loss=jnp.float32(2.0))
            history.extend(jax.device_put(stacked, everywhere), loss=losses)
        history.append(metrics(), loss=3.0)
        assert history.arrays()["loss"].tolist() == [1, 2, *range(8), 3]

    def test_few_arrays_wait_on_the_device(self):
        history, value, before = dls.History(), metrics(), len(jax.live_arrays())
        for i in range(2000):
            history.append(value, loss=i)
        assert len(jax.live_arrays()) - before <= 4 * 512
        assert history.arrays()["loss"].tolist() == list(range(2000))

    def test_threads_may_append_to_one(self):
        history, value = dls.History(), metrics()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for _ in range(400):
                pool.submit(history.append, value, loss=jnp.float32(1.0))
            for _ in range(20):
                pool.submit(history.arrays)
        assert history.arrays()["step"].tolist() == list(range(400))

    @pytest.mark.parametrize(
        "copied", [copy.copy, copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))]
    )
    def test_a_copy_goes_on_by_itself(self, copied):
        history = dls.History(dls.static_loss_scaling(optax.sgd(0.1), 8.0), capacity=3)
        history.append(metrics(), loss=jnp.float32(1.0))
        other = copied(history)
        history.append(metrics(2.0))
        other.append(metrics(4.0))
        assert history.arrays()["loss_scale"].tolist() == [1024.0, 2.0]
        assert other.arrays()["loss_scale"].tolist() == [1024.0, 4.0]
        assert other.settings == history.settings


class TestSettings:
    def test_those_of_the_rule_come_with_the_optimizer(self, tmp_path):
        tx = dls.dynamic_loss_scaling(optax.sgd(0.1), min_scale=2.0, growth_interval=7)
        history = dls.History(tx)
        assert history.settings == {
            "init_scale": 2.0**15,
            "min_scale": 2.0,
            "max_scale": 2.0**32,
            "growth_interval": 7.0,
        }
        history.append(metrics())
        history.save(tmp_path / "run.jsonl")
        loaded = dls.History.load(tmp_path / "run.jsonl")
        assert loaded.settings == history.settings
        assert len(loaded) == 1

    def test_a_fixed_scale_is_both_bounds(self):
        for tx, scale in (
            (dls.static_loss_scaling(optax.sgd(0.1), 64.0), 64.0),
            (dls.no_loss_scaling(optax.sgd(0.1)), 1.0),
        ):
            settings = dls.History(tx).settings
            assert settings["min_scale"] == settings["max_scale"] == scale

    def test_arrays_are_no_settings(self):
        tx = dls.dynamic_loss_scaling(optax.sgd(0.1), min_scale=jnp.float32(2.0))
        assert "min_scale" not in dls.History(tx).settings

    @pytest.mark.parametrize("tx", [optax.sgd(0.1), 1000])
    def test_something_without_a_rule_is_refused(self, tx):
        with pytest.raises(TypeError, match="tx must be what loss_scaling"):
            dls.History(tx)


class TestExtend:
    def test_a_scan_gives_the_same_records_as_a_loop(self):
        grads = jnp.array([[1.0], [jnp.inf], [2.0], [jnp.nan]])
        tx = dls.dynamic_loss_scaling(optax.sgd(0.1), growth_interval=1)

        def step(state, grads):
            _, state = tx.update(grads, state)
            return state, (dls.metrics(state), grads[0])

        loop, scan = dls.History(), dls.History()
        state = tx.init(jnp.zeros(1))
        for g in grads:
            state, (values, loss) = step(state, g)
            loop.append(values, loss=loss, epoch=7)
        _, (stacked, losses) = jax.lax.scan(step, tx.init(jnp.zeros(1)), grads)
        scan.extend(stacked, loss=losses, epoch=7)
        same(
            [dict(sorted(r.items())) for r in loop],
            [dict(sorted(r.items())) for r in scan],
        )

    def test_more_than_the_capacity_keeps_the_last(self):
        history = dls.History(capacity=3)
        history.append(metrics())
        history.extend({k: jnp.broadcast_to(v, 5) for k, v in metrics().items()})
        assert history.arrays()["step"].tolist() == [3, 4, 5]
        assert (len(history), history.dropped) == (3, 3)

    def test_a_long_scan_leaves_the_last_rows(self):
        history = dls.History(capacity=10)
        stacked = {k: jnp.broadcast_to(v, 10**6) for k, v in metrics().items()}
        history.extend(stacked, loss=np.arange(10**6), leaf=["w"] * 10**6)
        assert history.arrays()["loss"].tolist() == list(range(10**6 - 10, 10**6))
        assert history[-1]["step"] == 10**6 - 1
        assert history[-1]["leaf"] == "w"
        assert history.dropped == 10**6 - 10

    def test_arrays_of_the_host_are_copied(self):
        stacked = {k: np.asarray(v)[None] for k, v in metrics().items()}
        history, losses = dls.History(), np.array([1.0])
        history.extend(stacked, loss=losses)
        losses[0] = 2.0
        assert history[0]["loss"] == 1.0

    def test_no_steps_are_nothing(self):
        history = dls.History()
        history.extend({k: jnp.zeros(0, v.dtype) for k, v in metrics().items()})
        assert len(history) == 0


class TestBound:
    def test_the_oldest_records_go_and_are_counted(self):
        history = train([([1.0, 0.0], loss) for loss in range(5)], capacity=2)
        assert [record["loss"] for record in history] == [3.0, 4.0]
        assert repr(history) == "History(2 records, steps 3 to 4, 3 dropped)"

    @pytest.mark.parametrize(
        ("capacity", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)]
    )
    def test_a_capacity_that_is_none(self, capacity, error):
        with pytest.raises(error, match="capacity must be"):
            dls.History(capacity=capacity)


class TestArrays:
    def test_dtypes_and_missing_values(self):
        history = dls.History()
        history.append(metrics(), where="w", epoch=1, flag=True)
        history.append(metrics(), loss=None, norm=2.0, epoch=2, flag=False)
        columns = history.arrays()
        kinds = {name: column.dtype.kind for name, column in columns.items()}
        for name, kind in zip(
            ("where", "epoch", "flag", "norm", "loss"), "Uibff", strict=True
        ):
            assert kinds[name] == kind
        assert columns["step"].dtype == np.int64
        for name, value in metrics().items():
            assert columns[name].dtype == value.dtype
        assert columns["where"].tolist() == ["w", ""]
        np.testing.assert_array_equal(columns["norm"], [np.nan, 2.0])
        np.testing.assert_array_equal(columns["loss"], [np.nan, np.nan])

    def test_an_empty_history_has_the_columns(self):
        columns = dls.History().arrays()
        assert list(columns) == ["step", *CORE, "loss"]
        assert all(column.shape == (0,) for column in columns.values())


class TestFile:
    def test_every_value_survives(self, tmp_path):
        history = dls.History()
        for value in (0.1, math.nan, math.inf, -math.inf, 1e-45):
            history.append(metrics(finite=False), loss=jnp.float32(value), x=value)
        history.append(metrics(2.0**-14), where='a "b"\nü', flag=True, n=2**40)
        history.save(tmp_path / "run.jsonl")
        loaded = dls.History.load(tmp_path / "run.jsonl")
        same(history, loaded)
        for name, column in history.arrays().items():
            np.testing.assert_array_equal(column, loaded.arrays()[name])
            assert column.dtype == loaded.arrays()[name].dtype

    def test_a_line_is_strict_json(self, tmp_path):
        history = dls.History()
        history.append(metrics(), loss=math.nan, norm=-math.inf)
        history.save(str(tmp_path / "run.jsonl"))

        def refuse(constant):
            raise AssertionError(constant)

        (line,) = (tmp_path / "run.jsonl").read_text().splitlines()
        record = json.loads(line, parse_constant=refuse)
        assert (record["loss"], record["norm"]) == ("nan", "-inf")
        assert '"grads_finite": true' in line
        assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]

    def test_a_half_written_last_line_is_left_out(self, tmp_path):
        path = tmp_path / "run.jsonl"
        history = train([([1.0, 0.0], 1.0)] * 2)
        history.save(path)
        whole = path.read_text()
        second = whole.index("\n") + 1
        for end in range(second, len(whole)):
            path.write_text(whole[:end])
            assert len(dls.History.load(path)) == (2 if end == len(whole) - 1 else 1)

    def test_a_run_goes_on_after_loading(self, tmp_path):
        train([([1.0, 0.0], 1.0)] * 5).save(tmp_path / "run.jsonl")
        history = dls.History.load(tmp_path / "run.jsonl", capacity=4)
        assert history.dropped == 1
        history.append(metrics())
        assert history.arrays()["step"].tolist() == [2, 3, 4, 5]

    @pytest.mark.parametrize("bad", ["", "{", "[]", '{"step": 1}', "null", TOO_MANY])
    def test_a_line_that_is_no_record_is_named(self, tmp_path, bad):
        path = tmp_path / "run.jsonl"
        train([([1.0, 0.0], 1.0)]).save(path)
        path.write_text(f"{bad}\n{path.read_text()}")
        with pytest.raises(ValueError, match="Line 1 of .*run.jsonl is not a record"):
            dls.History.load(path)


def population():
    tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
    return dls.metrics(jax.vmap(tx.init)(jnp.zeros((3, 2))))


class TestErrors:
    @pytest.mark.parametrize("values", [{}, {"loss": 1.0}, None, 1024.0])
    def test_metrics_must_be_the_dict_of_metrics(self, values):
        with pytest.raises(TypeError, match="metrics must be the dict of .*Pass dls"):
            dls.History().append(values)

    def test_a_population_is_refused_and_the_cure_works(self):
        with pytest.raises(ValueError, match=r"got shape \(3,\).* one History each"):
            dls.History().append(population())
        history = dls.History()
        history.append({k: v[1] for k, v in population().items()})
        assert history[0]["loss_scale"] == 2.0**15

    def test_steps_of_a_population_or_one_step_cannot_extend(self):
        stacked = {k: jnp.stack([v] * 4) for k, v in population().items()}
        for values in (stacked, metrics()):
            with pytest.raises(ValueError, match=r"have the shape \(steps,\)"):
                dls.History().extend(values)
        history = dls.History()
        history.extend({k: v[:, 1] for k, v in stacked.items()})
        assert len(history) == 4

    @pytest.mark.parametrize("loss", [jnp.zeros(3), jnp.zeros((2, 1)), jnp.float32(1)])
    def test_a_loss_of_another_length_cannot_extend(self, loss):
        stacked = {k: jnp.stack([v] * 2) for k, v in metrics().items()}
        with pytest.raises(ValueError, match="for loss"):
            dls.History().extend(stacked, loss=loss)

    @pytest.mark.parametrize("shape", [(1,), (2, 2)])
    @pytest.mark.parametrize("array", [jnp.ones, np.ones])
    def test_a_loss_that_is_no_scalar(self, array, shape):
        with pytest.raises(ValueError, match="loss must be a scalar .* Reduce it"):
            dls.History().append(metrics(), loss=array(shape))

    @pytest.mark.parametrize(
        "value", [1j, jnp.complex64(1), [1.0], object(), jax.random.key(0), b"x"]
    )
    def test_a_value_that_is_no_number(self, value):
        with pytest.raises(TypeError, match="norm must be a real number"):
            dls.History().append(metrics(), norm=value)

    @pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
    def test_a_string_that_would_come_back_as_a_number(self, text):
        with pytest.raises(ValueError, match="where is the string"):
            dls.History().append(metrics(), where=text)

    @pytest.mark.parametrize(
        ("more", "keywords"),
        [({}, {"loss_scale": 1.0}), ({"loss": 1.0}, {"loss": 1.0}), ({"step": 1}, {})],
    )
    def test_a_name_given_twice(self, more, keywords):
        with pytest.raises(ValueError, match="is given twice"):
            dls.History().append({**metrics(), **more}, **keywords)

    def test_a_loss_in_the_dict_is_the_loss(self):
        history = dls.History()
        history.append({**metrics(), "loss": jnp.float32(2.0)})
        assert history[0]["loss"] == 2.0

    @pytest.mark.parametrize("step", [jnp.int32(1), 1.0, "1", True])
    def test_a_step_that_is_not_on_the_host(self, step):
        with pytest.raises(TypeError, match="step must be a whole number on the host"):
            dls.History().append(metrics(), step=step)

    def test_inside_jit(self):
        history = dls.History()
        with pytest.raises(TypeError, match="is traced.*extend"):
            jax.jit(lambda values: history.append(values))(metrics())
        assert len(history) == 0

    @pytest.mark.parametrize("index", [0, -1])
    def test_an_index_out_of_range(self, index):
        with pytest.raises(IndexError, match="the history has 0"):
            dls.History()[index]

    def test_a_slice(self):
        with pytest.raises(TypeError, match="takes one index"):
            dls.History()[:2]  # type: ignore[index]


def test_a_column_of_text_goes_with_the_steps():
    history = dls.History()
    stacked = {name: np.stack([value, value]) for name, value in metrics().items()}
    history.extend(stacked, nonfinite_leaf=[None, "['w']"])
    assert "nonfinite_leaf" not in history[0]
    assert history[1]["nonfinite_leaf"] == "['w']"
    assert history.arrays()["nonfinite_leaf"].tolist() == ["", "['w']"]
    with pytest.raises(ValueError, match="one text for each of the 2 steps, got 1"):
        history.extend(stacked, nonfinite_leaf=["['w']"])
    with pytest.raises(ValueError, match="given twice"):
        history.extend(stacked | {"leaf": np.array(["a", "b"])}, leaf=["a", "b"])
    with pytest.raises(TypeError, match="a list of strings and None"):
        history.extend(stacked, leaf=["a", 1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="must be a scalar"):
        history.append(metrics(), leaf=["a"])  # type: ignore[arg-type]
