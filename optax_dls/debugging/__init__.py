"""Finding out what is wrong with a run; ``python -m optax_dls.debugging run.jsonl``."""

from ._diagnose import diagnose as diagnose
from ._find_scale import ScaleSearch as ScaleSearch
from ._find_scale import find_scale as find_scale
from ._gradient_report import GradientReport as GradientReport
from ._gradient_report import gradient_report as gradient_report
from ._history import History as History
from ._locate import locate_nonfinite as locate_nonfinite
from ._nonfinite import Nonfinite as Nonfinite
from ._run import Finding as Finding
from ._stalled import LossScaleStalledError as LossScaleStalledError
from ._stalled import raise_if_stalled as raise_if_stalled

__all__ = (
    "Finding",
    "GradientReport",
    "History",
    "LossScaleStalledError",
    "Nonfinite",
    "ScaleSearch",
    "diagnose",
    "find_scale",
    "gradient_report",
    "locate_nonfinite",
    "raise_if_stalled",
)
