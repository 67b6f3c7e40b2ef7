"""Ten thousand faults over all modes and six optimizers; see fault_campaign.py."""

import pytest
from fault_campaign import MODES, OPTIMIZERS, campaign

FAULTS = 10_000


@pytest.mark.standard_promotion
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_no_fault_gets_through_and_no_good_step_is_lost(mode, optimizer):
    counts = campaign(mode, optimizer, FAULTS / (len(MODES) * len(OPTIMIZERS)))
    assert counts["faults"] >= FAULTS / (len(MODES) * len(OPTIMIZERS))
    assert counts["skipped"] == counts["faults"]
    assert counts["contaminated"] == 0
    assert counts["good steps lost"] == 0
    assert counts["disagreements"] == 0
