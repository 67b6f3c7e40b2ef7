"""Rules: how the loss scale moves. Pure functions on scalars, no trees."""

from ._classic import DynamicRuleState as DynamicRuleState
from ._dynamic import dynamic as dynamic
from ._gradual import GradualRuleState as GradualRuleState
from ._gradual import gradual as gradual
from ._hysteresis import HysteresisRuleState as HysteresisRuleState
from ._hysteresis import Refill as Refill
from ._level import LevelRuleState as LevelRuleState
from ._log_normal import LogNormalRuleState as LogNormalRuleState
from ._log_normal import log_normal as log_normal
from ._overflow_rate import OverflowRateRuleState as OverflowRateRuleState
from ._overflow_rate import overflow_rate as overflow_rate
from ._retrying import RetryingRuleState as RetryingRuleState
from ._retrying import retrying as retrying
from ._rule import Rule as Rule
from ._static import NoScalingState as NoScalingState
from ._static import none as none
from ._static import static as static

__all__ = (
    "DynamicRuleState",
    "GradualRuleState",
    "HysteresisRuleState",
    "LevelRuleState",
    "LogNormalRuleState",
    "NoScalingState",
    "OverflowRateRuleState",
    "Refill",
    "RetryingRuleState",
    "Rule",
    "dynamic",
    "gradual",
    "log_normal",
    "none",
    "overflow_rate",
    "retrying",
    "static",
)
