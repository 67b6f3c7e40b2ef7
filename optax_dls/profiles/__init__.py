"""Rules that move the scale exactly as other systems do, off-by-ones included.

Each profile takes the arguments of its system, under the names and with the defaults that
they have there, and gives a :class:`~optax_dls.rules.Rule`:

    tx = loss_scaling(optax.adamw(3e-4), profiles.torch(init_scale=2.0**12))

The scales equal those of the system bit for bit, where it computes in float32 or where its
factors are powers of two. ``tests/test_profiles.py`` replays recordings of the systems and
prints the table. Three things differ on purpose. A scale on its way to 0 or inf stops at
2**-100 or 2**126. A step whose gradients are not finite is always skipped. Gradients are
always unscaled with the scale that multiplied their loss.

Where a system raises an error at its floor, the scale stays at the floor; call
``raise_if_stalled`` for an error.
"""

from ._growth_and_backoff import apex_hysteresis as apex_hysteresis
from ._growth_and_backoff import colossalai as colossalai
from ._growth_and_backoff import deepspeed as deepspeed
from ._growth_and_backoff import flax as flax
from ._growth_and_backoff import megatron as megatron
from ._growth_and_backoff import paddle as paddle
from ._growth_and_backoff import paddle_static as paddle_static
from ._growth_and_backoff import torch as torch
from ._one_factor import apex_amp as apex_amp
from ._one_factor import apex_fp16_utils as apex_fp16_utils
from ._one_factor import jamp as jamp
from ._one_factor import jaxamp as jaxamp
from ._one_factor import jmp as jmp
from ._one_factor import keras as keras
from ._one_factor import mindspore as mindspore
from ._one_factor import mindspore_manager as mindspore_manager
from ._one_factor import mpx as mpx
from ._one_factor import openseq2seq_backoff as openseq2seq_backoff
from ._one_factor import tensorflow as tensorflow
from ._one_factor import tf_keras as tf_keras
from ._other_rules import chainer as chainer
from ._other_rules import fairseq as fairseq
from ._other_rules import metaseq as metaseq
from ._other_rules import openseq2seq_logmax as openseq2seq_logmax
from ._other_rules import optax_apply_if_finite as optax_apply_if_finite

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
