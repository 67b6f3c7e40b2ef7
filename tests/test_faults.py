"""Ten thousand faults over all modes and six optimizers; see fault_campaign.py."""

import itertools

import pytest
from fault_campaign import MODES, OPTIMIZERS, campaign

# Every second pair, so that each mode meets three optimizers and each optimizer half of
# the modes; the command runs all pairs.
PAIRS = [
    (mode, optimizer)
    for (i, mode), (j, optimizer) in itertools.product(
        enumerate(MODES), enumerate(OPTIMIZERS)
    )
    if (i + j) % 2 == 0
]
FAULTS = 10_000 / len(PAIRS)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(("mode", "optimizer"), PAIRS)
def test_no_fault_gets_through_and_no_good_step_is_lost(mode, optimizer):
    counts = campaign(mode, optimizer, FAULTS)
    assert counts["faults"] >= FAULTS
    assert counts["skipped"] == counts["bad steps"] > 0
    assert counts["contaminated"] == 0
    assert counts["good steps lost"] == 0
    assert counts["disagreements"] == 0
