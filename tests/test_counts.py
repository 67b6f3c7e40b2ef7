"""What the compiled update costs, in counts: memory, copies, conditionals, reductions.

Seconds depend on the machine, these do not; they fail when a change makes them worse.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import optax_dls as dls

UPDATES = 4_000_000  # bytes: a million float32 updates, returned out of the conditional
# Bytes: scale, flag, two skip counters.
COUNTERS = 4 + 1 + 4 + 4
SCALER = COUNTERS + 4 * len(dls.rules.LevelRuleState._fields)


@pytest.fixture(scope="module")
def measured():
    worker = pathlib.Path(__file__).parent / "count_worker.py"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return json.loads(
        subprocess.check_output([sys.executable, str(worker)], env=environment)
    )


@pytest.fixture(params=["one leaf", "float32 gradients", "64 leaves"])
def counts(request, measured):
    return measured["counts"][request.param]


def test_one_program_for_finite_skipped_and_growing_steps(measured):
    assert measured["compilations"] == 1


def test_a_step_of_open_size_can_be_exported(measured):
    assert measured["exports"]


def test_temporary_memory_is_that_of_the_updates(counts):
    """No float32 copy of the gradients, and no second set of moments."""
    assert counts["dynamic"]["temporary"] < 1.01 * UPDATES


def test_parameters_and_moments_are_updated_in_place(counts):
    assert counts["dynamic"]["aliased"] == counts["bare"]["aliased"] + SCALER


def test_no_array_is_copied_but_zero_updates(counts, request):
    leaves = 64 if request.node.callspec.params["counts"] == "64 leaves" else 1
    assert counts["dynamic"]["copies"] <= leaves - 1


def test_one_conditional(counts):
    assert counts["dynamic"]["conditionals"] == 1
    assert counts["none"]["conditionals"] == counts["bare"]["conditionals"] == 0


def test_one_read_of_the_gradients_eight_alike_at_a_time(measured):
    assert measured["counts"]["one leaf"]["dynamic"]["reductions"] == 1
    assert measured["counts"]["64 leaves"]["dynamic"]["reductions"] <= 64 / 8 + 1


def test_large_leaves_are_read_alone(measured):
    assert 8 <= measured["counts"]["large leaves"]["dynamic"]["reductions"] <= 8 + 1


def test_the_largest_gradient_costs_a_second_read_to_those_who_ask(measured):
    assert measured["counts"]["one leaf"]["limit"]["reductions"] == 2
    assert measured["counts"]["64 leaves"]["limit"]["reductions"] <= 64 + 64 / 8 + 2


def test_no_loss_scaling_is_the_bare_optimizer(counts):
    none, bare = counts["none"], counts["bare"]
    assert none == bare | {"aliased": bare["aliased"] + COUNTERS}


def test_float16_parameters_have_float32_moments_in_place(measured):
    counts = measured["counts"]["float16 parameters"]
    parameters, moments, step = 2_000_000, 2 * 4_000_000, 4
    assert counts["dynamic"]["aliased"] == parameters + moments + step + SCALER
    assert counts["dynamic"]["temporary"] < 1.01 * UPDATES
    assert counts["dynamic"]["copies"] == 0
