"""Eight CPU devices, no silent promotion, and no warning that is not an error."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

# Scripts that tests start: importing them runs them.
collect_ignore = ["killed_worker.py", "process_worker.py", "resume_worker.py"]


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """Nothing promotes by accident, except where the inner optimizer needs it to.

    Optax's Adam, for one, multiplies integers with floats: such tests carry the
    marker ``standard_promotion``.
    """
    relaxed = request.node.get_closest_marker("standard_promotion")
    with (
        jax.numpy_dtype_promotion("standard" if relaxed else "strict"),
        jax.numpy_rank_promotion("allow" if relaxed else "raise"),
    ):
        yield
