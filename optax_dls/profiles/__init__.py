"""Rules that move the scale exactly as other systems do, off-by-ones included.

Each takes the arguments of its system, under their own names and with their defaults, and
gives a :class:`~optax_dls.rules.Rule`:

    tx = loss_scaling(optax.adamw(3e-4), profiles.torch(init_scale=2.0**12))

The scales are those of the system bit for bit (where it computes in float32, or its factors
are powers of two), as recordings of them show: ``tests/test_profiles.py`` prints the table.
Three things differ, since nobody wants them: a scale that leaves [2**-100, 2**126], on its
way to 0 or inf, stops there; a step whose gradients are not finite is always skipped; and
gradients are always unscaled with the scale that multiplied their loss. Where a system
raises an error at its floor, the scale stays there, see ``raise_if_stalled``.
"""

from ._growth_and_backoff import apex_amp as apex_amp
from ._growth_and_backoff import apex_fp16_utils as apex_fp16_utils
from ._growth_and_backoff import apex_hysteresis as apex_hysteresis
from ._growth_and_backoff import chainer as chainer
from ._growth_and_backoff import colossalai as colossalai
from ._growth_and_backoff import deepspeed as deepspeed
from ._growth_and_backoff import fairseq as fairseq
from ._growth_and_backoff import flax as flax
from ._growth_and_backoff import jamp as jamp
from ._growth_and_backoff import jaxamp as jaxamp
from ._growth_and_backoff import jmp as jmp
from ._growth_and_backoff import keras as keras
from ._growth_and_backoff import megatron as megatron
from ._growth_and_backoff import metaseq as metaseq
from ._growth_and_backoff import mindspore as mindspore
from ._growth_and_backoff import mindspore_manager as mindspore_manager
from ._growth_and_backoff import mpx as mpx
from ._growth_and_backoff import openseq2seq_backoff as openseq2seq_backoff
from ._growth_and_backoff import openseq2seq_logmax as openseq2seq_logmax
from ._growth_and_backoff import optax_apply_if_finite as optax_apply_if_finite
from ._growth_and_backoff import paddle as paddle
from ._growth_and_backoff import paddle_static as paddle_static
from ._growth_and_backoff import tensorflow as tensorflow
from ._growth_and_backoff import tf_keras as tf_keras
from ._growth_and_backoff import torch as torch

__all__ = (
    "apex_amp",
    "apex_fp16_utils",
    "apex_hysteresis",
    "chainer",
    "colossalai",
    "deepspeed",
    "fairseq",
    "flax",
    "jamp",
    "jaxamp",
    "jmp",
    "keras",
    "megatron",
    "metaseq",
    "mindspore",
    "mindspore_manager",
    "mpx",
    "openseq2seq_backoff",
    "openseq2seq_logmax",
    "optax_apply_if_finite",
    "paddle",
    "paddle_static",
    "tensorflow",
    "tf_keras",
    "torch",
)
