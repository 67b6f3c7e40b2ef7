"""Dynamic loss scaling for JAX, as one Optax wrapper."""

from importlib.metadata import version as _version

from . import interop as interop
from . import profiles as profiles
from . import rules as rules
from ._finite import all_finite as all_finite
from ._grad import scale_loss as scale_loss
from ._grad import unscale as unscale
from ._grad import value_and_scaled_grad as value_and_scaled_grad
from ._layers import layer_scaling as layer_scaling
from ._lookup import loss_scale as loss_scale
from ._lookup import metrics as metrics
from ._lookup import rollback_if_skipped as rollback_if_skipped
from ._lookup import scaler_state as scaler_state
from ._master_weights import MasterWeightsState as MasterWeightsState
from ._master_weights import master_weights as master_weights
from ._scaler_state import LossScalingState as LossScalingState
from ._scaler_state import ScalerState as ScalerState
from ._transform import loss_scaling as loss_scaling
from ._wrappers import dynamic_loss_scaling as dynamic_loss_scaling
from ._wrappers import no_loss_scaling as no_loss_scaling
from ._wrappers import static_loss_scaling as static_loss_scaling
from .debugging import Finding as Finding
from .debugging import GradientReport as GradientReport
from .debugging import History as History
from .debugging import LossScaleStalledError as LossScaleStalledError
from .debugging import Nonfinite as Nonfinite
from .debugging import ScaleSearch as ScaleSearch
from .debugging import diagnose as diagnose
from .debugging import find_scale as find_scale
from .debugging import gradient_report as gradient_report
from .debugging import locate_nonfinite as locate_nonfinite
from .debugging import raise_if_stalled as raise_if_stalled

__version__ = _version("optax-dls")

__all__ = (
    "Finding",
    "GradientReport",
    "History",
    "LossScaleStalledError",
    "LossScalingState",
    "MasterWeightsState",
    "Nonfinite",
    "ScaleSearch",
    "ScalerState",
    "all_finite",
    "diagnose",
    "dynamic_loss_scaling",
    "find_scale",
    "gradient_report",
    "interop",
    "layer_scaling",
    "locate_nonfinite",
    "loss_scale",
    "loss_scaling",
    "master_weights",
    "metrics",
    "no_loss_scaling",
    "profiles",
    "raise_if_stalled",
    "rollback_if_skipped",
    "rules",
    "scale_loss",
    "scaler_state",
    "static_loss_scaling",
    "unscale",
    "value_and_scaled_grad",
)
