"""The door to PyTorch's compiler; importing it takes seconds."""

# ruff: noqa: E402 - the check comes before what it checks
from __future__ import annotations

from lowtide.pytorch.required import check_compiler

check_compiler()

from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._inductor import config as inductor_config

__all__ = [
    "BackendCompilerFailed",
    "InputMutationAOTOutput",
    "TorchDynamoException",
    "aot_autograd",
    "counters",
    "functorch_config",
    "inductor_config",
]
