"""Eight CPU devices, no silent promotion, and no warning that is not an error."""

import functools
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import optax
import pytest

import optax_dls as dls

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


@pytest.fixture(scope="session")
def make():
    """dynamic_loss_scaling, with a first scale of 1024 and, where none is given, SGD.

    Equal arguments give the same transformation, so that its steps are compiled once.
    """
    sgd = optax.sgd(1.0)

    @functools.lru_cache(maxsize=None, typed=True)
    def make(inner=sgd, *, init_scale=1024.0, **settings):
        return dls.dynamic_loss_scaling(inner, init_scale=init_scale, **settings)

    return make
