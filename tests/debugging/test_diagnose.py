"""What the findings say, where the settings come from, and the command.

Which run has which finding is the table in ``test_diagnose_table.py``.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_diagnose_table import (
    AND_A_BURST,
    FEW,
    STEPS,
    TIME,
    Told,
    moved,
    moved_formerly,
    now_and_then,
    only,
    recorded,
    written,
)

import optax_dls as dls
from optax_dls.debugging.__main__ import main

ALL = range(STEPS)
NOWHERE: list[int] = []
DOWN_TO_128 = 2.0 ** np.maximum(14 - np.arange(STEPS), 7.0)
TO_THE_FLOOR = 2.0 ** np.maximum(14 - np.arange(STEPS), -14.0)
FALLS = 2.0 ** np.maximum(np.arange(62) - 49, 0)
FALL = 2.0 + np.exp(-np.arange(STEPS) / 80)


def one(columns, name, **settings):
    found = {finding.name: finding for finding in dls.diagnose(columns, **settings)}
    return found[name]


def names(columns, **settings):
    return [finding.name for finding in dls.diagnose(columns, **settings)]


def where(steps, value, elsewhere):
    return np.where(np.isin(np.arange(STEPS), steps), value, elsewhere)


class TestSkippedSteps:
    def test_a_finding_prints_its_numbers_causes_and_cures(self):
        text = str(
            one(written(STEPS, skips=ALL, scale=DOWN_TO_128), "overflow at the floor")
        )
        assert text.splitlines()[0] == (
            "overflow at the floor: 392 steps were lost although the scale was at its floor "
            "2^7"
        )
        assert "\n  Likely: not the scale" in text
        assert "\n  Try: locate_nonfinite" in text

    def test_why_steps_are_lost_is_said_once(self):
        """Not as a collapse, either, whose cure would be another rule."""
        skips = range(5, STEPS)
        columns = written(STEPS, skips=skips, scale=np.roll(TO_THE_FLOOR, 4))
        assert names(columns) == ["overflow at the floor"]
        assert "default settings" not in "".join(map(str, dls.diagnose(columns)))

    def test_what_falls_and_falls_says_how_far(self):
        (finding,) = dls.diagnose(
            written(62, skips=range(50, 62), scale=2.0**15 / FALLS)
        )
        assert finding.evidence == (
            "the last 12 steps were skipped, none was applied since step 49, and the scale "
            "went from 2^15 to 2^3"
        )

    @pytest.mark.parametrize(
        ("loss", "kind"),
        [(np.nan, "NaN"), (np.inf, "inf"), ([np.nan, np.inf], "NaN or inf")],
    )
    def test_a_loss_that_is_never_finite_is_told_by_its_kind(self, loss, kind):
        columns = written(10, loss=np.resize(loss, 10), skips=[0, 1, 2])
        history = recorded(
            columns | {"grads_finite": columns["consecutive_skips"] == 0}
        )
        evidence = one(history, "loss not finite").evidence
        assert evidence.startswith(
            f"the loss is {kind} in all 10 records (3 of them skipped)"
        )

    def test_an_infinite_update_that_was_applied_is_counted(self):
        norms = where([7, 8], np.inf, 1.0)
        finding = one(written(STEPS, update_norm=norms), "updates not finite")
        assert finding.evidence == "the update was not finite on 2 applied steps"

    def test_a_loss_that_is_nan_after_some_steps_names_both_causes(self):
        def cause(first):
            skips = range(first, STEPS)
            columns = written(STEPS, skips=skips, loss=where(skips, np.nan, 2.0))
            return one(columns, "loss not finite")

        assert cause(2).causes.startswith("a learning rate")
        assert cause(200).causes.startswith("NaN or inf in the data")
        assert (
            "from step 200 on, in 200 records (200 of them skipped)"
            in cause(200).evidence
        )

    @pytest.mark.parametrize("told", [True, False])
    def test_value_is_advised_where_the_scale_falls_on_bad_batches(self, told):
        skips = range(9, STEPS, 20)
        scale = 2.0**15 if told else 2.0 ** (15.0 - (np.arange(STEPS) + 11) // 20)
        columns = written(
            STEPS, skips=skips, loss=where(skips, np.nan, FALL), scale=scale
        )
        finding = one(columns, "bad batches")
        assert "not finite in 20 of 400 records, and 20 of these" in finding.evidence
        assert ("value=loss" in finding.advice) == (not told)

    def test_a_loss_that_is_finite_is_not_to_blame_at_the_floor(self):
        def cause(**columns):
            columns = written(STEPS, skips=ALL, scale=TO_THE_FLOOR, **columns)
            return one(columns, "overflow at the floor").causes

        assert cause().startswith("not the scale: NaN or inf in the data")
        assert cause(loss=FALL).startswith("neither the scale nor the loss")

    def test_a_fixed_scale_leaves_open_what_is_not_recorded(self):
        def cause(**columns):
            columns = written(STEPS, skips=range(9, STEPS, 20), **columns)
            return one(columns, "overflow at a fixed scale").causes

        assert "given as value=" in cause()
        assert "value=" not in cause(loss=FALL)

    def test_where_the_scale_stays_the_loss_is_to_blame(self):
        skips = range(9, STEPS, 20)
        scale = np.where(np.arange(STEPS) < 5, 2.0**14, 2.0**15)
        kept = one(written(STEPS, skips=skips, scale=scale), "frequent overflow")
        assert (
            kept.causes
            == "batches whose loss is not finite, since the scale stayed on them"
        )
        assert "value=loss" not in kept.advice  # it has that already

    def test_refused_updates_leave_open_what_is_not_recorded(self):
        finite = {"grads_finite": np.ones(STEPS, bool)}
        without = one(written(STEPS, skips=ALL, **finite), "updates not finite")
        with_loss = one(
            written(STEPS, skips=ALL, loss=FALL, **finite), "updates not finite"
        )
        assert "or the loss given as value=" in without.causes
        assert "value=" not in with_loss.causes

    def test_the_leaf_that_is_never_finite_is_named(self):
        skips = range(9, STEPS, 5)
        leaf = where(skips, "['out']", "").astype(object)
        columns = written(STEPS, skips=skips, nonfinite_leaf=leaf)
        finding = one(columns, "the same leaf every time")
        assert finding.evidence == "79 of 79 overflows are in ['out']"
        # Where the loss is not finite, all leaves are bad, and the first says nothing.
        columns["loss"] = where(skips, np.nan, FALL)
        assert names(columns) == ["bad batches"]

    def test_leaves_that_take_turns_are_not_named(self):
        skips = range(9, STEPS, 5)
        leaf = where(skips, np.resize(["['in']", "['out']"], STEPS), "").astype(object)
        columns = written(STEPS, skips=skips, nonfinite_leaf=leaf)
        assert "the same leaf every time" not in names(columns)

    def test_a_collapse_says_how_long_the_way_back_is(self):
        skips = range(150, 170)
        down = 2.0 ** (15.0 - np.clip(np.arange(STEPS) - 149, 0, 20))
        finding = one(
            written(STEPS, skips=skips, scale=down), "collapsed after a burst"
        )
        assert "20 skips in a row took the scale from 2^15 to 2^-5" in finding.evidence
        assert "after 230 applied steps it is at 2^-5" in finding.evidence
        assert "it needs 40000 more" in finding.evidence
        assert finding.causes == (
            "a burst of bad batches, and a rule that doubles the scale only after 2000 "
            "finite steps in a row"
        )
        assert finding.advice.startswith(
            "dynamic_loss_scaling with its default settings"
        )

    def test_an_update_on_a_skipped_step_is_the_wrong_order(self):
        columns = written(STEPS, skips=[100, 200], update_norm=np.ones(STEPS))
        (finding,) = dls.diagnose(columns)
        assert finding.name == "a wrapper in the wrong order"
        assert finding.evidence.startswith("on 2 of 2 skipped steps")


class TestSlide:
    """Overflows that come one by one, each of which halves the scale."""

    NAME = "slid after single overflows"
    PERIODIC = np.arange(20_000) % 1000 == 999
    SLOW = "doubles it only after 2000 finite steps in a row"

    def test_it_says_how_often_at_which_scales_and_where_to(self):
        finding = one(moved(self.PERIODIC), self.NAME)
        assert finding.evidence == (
            "20 single overflows took the scale from 2^15 to 2^-5; they came every 1000 "
            "steps above 2^5 and every 1000 below, so a lower scale did not help"
        )
        assert finding.causes == (
            "bad batches now and then, and a rule that halves the scale at each overflow and "
            f"{self.SLOW}; or, where it is never over, gradients that grow"
        )
        assert finding.advice == (
            "dynamic_loss_scaling with its default settings, which returns to its level "
            "after such an overflow; value=loss in tx.update, where the loss is not finite; "
            "a look at the batches that are skipped; grad_norm= in the history, which tells "
            "the two apart"
        )

    def test_what_it_advises_helps(self):
        columns = moved(self.PERIODIC, recovery_interval=10)
        assert dls.diagnose(columns) == []
        assert columns["loss_scale"].min() >= 2.0**13

    def test_a_loss_that_is_nan_leaves_no_other_cause(self):
        bad = 2.0 + np.random.default_rng(0).random(FEW.size)
        finding = one(moved(FEW, loss=np.where(FEW, np.nan, bad)), self.NAME)
        assert finding.causes.endswith(self.SLOW)
        assert "value=loss" in finding.advice and "grad_norm" not in finding.advice

    def test_value_is_not_advised_where_the_loss_is_finite(self):
        loss = 2.0 + np.random.default_rng(0).random(FEW.size)
        assert "value=loss" not in one(moved(FEW, loss=loss), self.NAME).advice

    def test_norms_of_the_gradients_tell_bad_batches_from_growth(self):
        noise = np.random.default_rng(0).normal(size=TIME.size)
        grown = moved(TIME < 0, 17.7 + noise - TIME / 1000)
        assert "gradients that grow" in one(grown, self.NAME).causes
        assert dls.diagnose(grown | {"grad_norm": 2.0 ** (TIME / 1000)}) == []
        steady = moved(FEW, grad_norm=np.ones(FEW.size))
        assert "gradients that grow" not in one(steady, self.NAME).causes

    def test_with_gaps_the_interval_of_the_rule_is_not_known(self):
        columns = only(moved(FEW), slice(9, None, 10))
        assert "only after many finite steps in a row" in one(columns, self.NAME).causes

    def test_a_rule_that_returns_is_not_called_slow(self):
        """Bad batches may come faster than the scale grows, whatever the rule."""
        skips = np.arange(30, 1000, 30)
        falls = 2.0 ** (15 - np.searchsorted(skips, np.arange(1000), "right") // 2)
        scale = np.where(np.isin(np.arange(1000) % 60, range(30, 42)), falls / 2, falls)
        finding = one(written(1000, skips=skips, scale=scale), self.NAME)
        assert finding.causes.startswith("bad batches now and then; or")
        assert "default settings" not in finding.advice

    def test_the_former_default_is_not_taken_for_a_rule_that_returns(self):
        """It came back from a burst, but not from one overflow."""
        columns = moved_formerly(AND_A_BURST)
        assert np.any(np.diff(columns["loss_scale"]) > 0)
        finding = one(columns, self.NAME)
        assert "finite steps in a row" in finding.causes
        assert finding.advice.startswith(
            "dynamic_loss_scaling with its default settings"
        )

    def test_a_way_down_that_ends_at_the_floor_is_over_there(self):
        finding = one(moved(now_and_then(40_000, 300)), self.NAME)
        assert finding.evidence.startswith("29 single overflows took the scale")
        assert "to 2^-14; they came" in finding.evidence


class TestProgress:
    def test_a_divergence_is_told_by_the_loss(self):
        loss = [2.3, 28000.0] + (STEPS - 2) * [np.nan]
        columns = written(STEPS, loss=loss, skips=range(2, STEPS), scale=TO_THE_FLOOR)
        (finding,) = dls.diagnose(columns)
        assert finding.evidence == (
            "the loss went from 2.3 at step 0 to 2.8e+04 at step 1, and is not finite from "
            "step 2 on"
        )
        assert finding.causes.startswith("a learning rate that is too high")

    @pytest.mark.parametrize(
        ("scale", "skips", "advice"),
        [
            (2.0**15, NOWHERE, "find_scale for a higher init_scale"),
            (2.0**32, NOWHERE, "a higher max_scale"),
            (2.0**15, [100, 300], "layer_scaling"),
        ],
    )
    def test_gradients_too_small_are_cured_by_where_the_scale_is(
        self, scale, skips, advice
    ):
        share = np.full(STEPS, np.nan)
        share[-1] = 0.4
        columns = written(STEPS, scale=scale, skips=skips, underflow_share=share)
        finding = one(columns, "gradients too small")
        assert finding.evidence.startswith(
            "40% of the entries still round to zero at the"
        )
        assert advice in finding.advice

    def test_a_little_underflow_where_the_scale_cannot_grow_is_no_finding(self):
        columns = written(STEPS, skips=[100, 300], underflow_share=np.full(STEPS, 0.1))
        assert dls.diagnose(columns) == []

    def test_underflow_is_no_divergence(self):
        columns = written(
            STEPS,
            loss=np.linspace(0.1, 9.0, STEPS),
            underflow_share=np.full(STEPS, 0.5),
        )
        assert names(columns) == ["gradients too small"]

    def test_updates_that_round_away_are_told_from_updates_of_zero(self):
        rounded = written(
            STEPS, loss=np.full(STEPS, 2.302585), update_norm=np.full(STEPS, 1e-4)
        )
        zero = rounded | {"update_norm": np.zeros(STEPS)}
        assert "float16 parameters" in one(rounded, "the parameters do not move").causes
        assert "norm 0.0001" in one(rounded, "the parameters do not move").evidence
        assert "a loss of tiny weight" in one(zero, "the parameters do not move").causes

    def test_the_ceiling_has_its_causes_and_what_tells_them_apart(self):
        scale = 2.0 ** np.minimum(15 + np.arange(STEPS) // 10, 32)
        (finding,) = dls.diagnose(written(STEPS, scale=scale))
        assert "never scaled" in finding.causes and "tiny" in finding.causes
        assert "update_norm" in finding.advice
        moving = 1 + np.random.default_rng(0).random(STEPS)
        assert dls.diagnose(written(STEPS, scale=scale, update_norm=moving)) == []


class TestSettings:
    def test_what_is_given_wins_over_what_the_history_says_over_what_it_shows(self):
        columns = written(STEPS, skips=ALL, scale=DOWN_TO_128)
        told = Told(columns, min_scale=2.0**6, max_scale=2.0**32)
        assert names(columns) == ["overflow at the floor"]
        assert names(told) == ["no step applied"]  # not at its floor, it says
        assert names(told, min_scale=128.0) == ["overflow at the floor"]

    def test_a_static_scale_is_known_by_its_bounds(self):
        columns = written(STEPS, skips=range(0, STEPS, 3), scale=1024.0)
        told = Told(columns, min_scale=1024.0, max_scale=1024.0)
        assert names(told) == names(columns) == ["overflow at a fixed scale"]

    def test_a_growth_interval_is_read_off_the_record(self):
        """Or every probe of a short one would be an overflow too much."""
        skipped = np.arange(STEPS) % 20 == 19
        scale = np.where((np.arange(STEPS) + 10) % 20 < 9, 2.0**16, 2.0**15)
        columns = written(STEPS, skips=np.flatnonzero(skipped), scale=scale)
        assert dls.diagnose(columns) == []
        assert names(columns, growth_interval=2000) == ["frequent overflow"]

    def test_a_history_knows_which_loss_was_recorded(self):
        """In its arrays, NaN throughout stands for none, too."""
        columns = written(30, scale=1.0, grads_finite=np.ones(30, bool))
        assert dls.diagnose(recorded(columns)) == []
        assert dls.diagnose(recorded(columns).arrays()) == []
        columns["loss"] = np.full(30, np.nan)
        assert names(recorded(columns)) == ["loss not finite"]
        columns["loss"] = np.full(30, np.nan, np.float32)
        assert names(columns) == ["loss not finite"]

    def test_a_history_is_read_as_its_file_is(self, tmp_path):
        history = recorded(
            written(STEPS, skips=ALL, loss=FALL, scale=DOWN_TO_128)
            | {"grads_finite": np.zeros(STEPS, bool)}
        )
        history.save(tmp_path / "run.jsonl")
        loaded = dls.History.load(tmp_path / "run.jsonl")
        assert dls.diagnose(history) == dls.diagnose(loaded) != []


class TestStalled:
    def stalled(self, steps=40):
        tx = dls.dynamic_loss_scaling(optax.sgd(0.1))
        params, history = jnp.zeros(1), dls.History()
        state = tx.init(params)
        update = jax.jit(tx.update)
        for _ in range(steps):
            _, state = update(jnp.array([jnp.nan]), state, params)
            history.append(dls.metrics(state), loss=1.0)
        return state, history

    def test_the_error_has_the_findings_instead_of_general_advice(self):
        state, history = self.stalled()
        dls.raise_if_stalled(state, 40, history)
        with pytest.raises(
            dls.LossScaleStalledError, match="The last 40 steps"
        ) as error:
            dls.raise_if_stalled(state, 20, history)
        assert "were not.\noverflow at the floor: " in str(error.value)
        assert "default settings" not in str(error.value)
        with pytest.raises(
            dls.LossScaleStalledError, match="Look for NaN or inf"
        ) as error:
            dls.raise_if_stalled(state, 20)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("history", [dls.History(), {}, dls.History().arrays()])
    def test_an_empty_history_does_not_hide_the_stall(self, history):
        state, _ = self.stalled(3)
        with pytest.raises(dls.LossScaleStalledError, match="Look for NaN or inf"):
            dls.raise_if_stalled(state, 2, history)

    def test_what_is_no_history_is_refused_before_the_run_stalls(self):
        state = dls.dynamic_loss_scaling(optax.sgd(0.1)).init(jnp.zeros(1))
        with pytest.raises(TypeError, match="must be a History or its arrays"):
            dls.raise_if_stalled(state, history="run.jsonl")  # type: ignore[arg-type]


class TestCommand:
    @pytest.fixture
    def file(self, tmp_path):
        columns = written(STEPS, skips=ALL, loss=FALL, scale=DOWN_TO_128)
        recorded(columns | {"grads_finite": np.zeros(STEPS, bool)}).save(
            tmp_path / "run.jsonl"
        )
        return tmp_path / "run.jsonl"

    def test_prints_findings_and_writes_the_picture(self, file):
        done = subprocess.run(
            [sys.executable, "-m", "optax_dls.debugging", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert done.stdout.startswith("overflow at the floor: ")
        assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    def test_takes_the_settings_and_where_to_draw(self, file, capsys):
        out = file.with_suffix(".pdf")
        assert main([str(file), "--min-scale", "64", "--out", str(out)]) == 1
        assert capsys.readouterr().out.startswith("no step applied: ")
        assert out.read_bytes().startswith(b"%PDF")

    def test_says_that_nothing_is_wrong(self, tmp_path, capsys):
        columns = written(STEPS, loss=FALL, grads_finite=np.ones(STEPS, bool))
        recorded(columns).save(tmp_path / "run.jsonl")
        assert main([str(tmp_path / "run.jsonl")]) == 0
        assert "nothing is wrong in 400 records" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["none.jsonl"], "there is no file none.jsonl"),
            (["folder"], "folder is a folder; give the file"),
            (["junk.jsonl"], "Line 1 of junk.jsonl is not a record"),
            (["empty.jsonl"], "empty.jsonl holds no record"),
            (["run.jsonl", "--out", "nowhere/a.png"], "there is no folder nowhere"),
            (["run.jsonl", "--out", "a.xyz"], "needs an ending that matplotlib knows"),
            (["run.jsonl", "--out", "folder"], "give a file such as folder/run.png"),
            (
                ["run.jsonl", "--min-scale", "8", "--max-scale", "2"],
                "at most max_scale",
            ),
            (
                ["run.jsonl", "--growth-interval", "0"],
                "growth_interval must be at least 1",
            ),
        ],
    )
    def test_what_it_cannot_use_is_one_line_and_code_two(
        self, file, arguments, message, capsys, monkeypatch
    ):
        monkeypatch.chdir(file.parent)
        (file.parent / "folder").mkdir()
        (file.parent / "junk.jsonl").write_text("junk\n")
        (file.parent / "empty.jsonl").write_text("")
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
        usage, error = capsys.readouterr().err.splitlines()
        assert usage.startswith("usage: ")
        assert message in error

    def test_help_has_defaults_and_exit_codes(self, capsys):
        with pytest.raises(SystemExit) as exit:
            main(["--help"])
        help = " ".join(capsys.readouterr().out.split())
        assert exit.value.code == 0
        assert help.count("default: that of the record") == 3
        for default in ("2000)", "2^-14)", "2^32)", "exit codes: 0 nothing is wrong 1"):
            assert default in help


class TestRefused:
    @pytest.mark.parametrize("history", [None, "run.jsonl"])
    def test_what_is_no_history(self, history):
        with pytest.raises(TypeError, match="must be a History or its arrays"):
            dls.diagnose(history)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"growth_interval": 0}, "growth_interval must be at least 1"),
            ({"min_scale": 0.0}, "min_scale must be above 0 and finite"),
            ({"max_scale": np.nan}, "max_scale must be above 0 and finite"),
            (
                {"min_scale": 8.0, "max_scale": 2.0},
                "min_scale must be at most max_scale",
            ),
        ],
    )
    def test_settings_that_no_rule_has(self, settings, message):
        with pytest.raises(ValueError, match=message):
            dls.diagnose(written(STEPS), **settings)

    @pytest.mark.parametrize("history", [dls.History(), written(0)])
    def test_an_empty_history(self, history):
        with pytest.raises(ValueError, match=r"history is empty. Append dls.metrics"):
            dls.diagnose(history)

    def test_columns_that_are_missing(self):
        with pytest.raises(ValueError, match="no column 'total_skips'"):
            dls.diagnose({k: v for k, v in written(3).items() if k != "total_skips"})

    def test_the_columns_of_a_whole_population(self):
        columns = {k: np.stack([v, v], 1) for k, v in written(3).items()}
        with pytest.raises(ValueError, match="pass one member"):
            dls.diagnose(columns)
