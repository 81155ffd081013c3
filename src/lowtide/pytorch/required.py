"""Every private name of PyTorch that lowtide uses, and the check that PyTorch has them.

The check is made once, when the first name is needed; one error lists all that is missing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import get_annotations, signature
from types import FunctionType

import torch

from lowtide.errors import LowtideWarning, UnsupportedTorchError

OLDEST = (2, 13)
BEYOND = (2, 16)
TESTED = ("2.13.0", "2.15.0")
SUPPORTED = f"torch>={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"

_COMPILER = ("torch._dynamo.", "torch._functorch.", "torch._inductor.")


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name that PyTorch may move; attributes of objects stand under their class, arguments under their function."""

    path: str
    purpose: str

    @property
    def of_compiler(self) -> bool:
        """Return True if looking it up imports PyTorch's compiler, which takes seconds."""
        return self.path.startswith(_COMPILER)

    def __str__(self) -> str:
        return f"{self.path} ({self.purpose})"


def _under(prefix: str, *rows: tuple[str, str]) -> tuple[PrivateName, ...]:
    """Return the rows for names below `prefix`, each with its purpose."""
    return tuple(PrivateName(f"{prefix}.{name}", purpose) for name, purpose in rows)


NAMES: tuple[PrivateName, ...] = (
    *_under(
        "torch",
        ("_softmax", "calls softmax without the dispatcher's detour"),
        ("_ops.OpOverload", "tells ops from Python"),
        ("_ops.OpOverloadPacket", "tells ops of the user's from PyTorch's"),
        ("_ops.HigherOrderOperator", "finds graphs inside of graphs"),
        ("_guards.TracingContext.try_get", "finds what the compiler notes about a graph"),
        ("fx.graph._BoxedCodeGen", "lets graphs free their inputs"),
    ),
    *_under(
        "torch._C",
        ("_DisableAutocast", "works out results in the types of the graph"),
        ("DisableTorchFunction", "makes fake tensors inside a copy"),
        ("TensorBase.clone", "recognises the copy of a tensor"),
        ("_dynamo.eval_frame.set_code_exec_strategy", "compiles again after an error"),
        ("_len_torch_dispatch_stack", "sees dispatch modes around a call"),
        ("_functorch.peek_interpreter_stack", "sees torch.func around a call"),
        ("_will_engine_execute_node", "asks where a gradient goes"),
        ("_autograd._get_current_graph_task_keep_graph", "asks whether the graph is retained"),
        ("_autograd._top_saved_tensors_default_hooks", "sees hooks for saved tensors around a call"),
        ("_autograd._profiler_enabled", "sees a profiler of the user's"),
        ("_autograd._enable_profiler_legacy", "records the peak of one op"),
        ("_autograd._disable_profiler_legacy", "records the peak of one op"),
        ("_profiler.ProfilerConfig", "says what is recorded"),
        ("_profiler.ProfilerState.CPU", "says what is recorded"),
        ("_profiler._ExperimentalConfig", "says what is recorded"),
        ("_profiler._ExtraFields_Allocation", "reads allocator events"),
        ("_profiler._RecordFunctionFast", "labels ops in a recording"),
        ("_profiler._ProfilerEvent", "reads allocator events"),
    ),
    *_under(
        "torch._prims_common",
        ("is_non_overlapping_and_dense_or_false", "lays gradients out as eager does"),
        ("make_contiguous_strides_for", "lays gradients out as eager does"),
    ),
    *_under(
        "torch._subclasses.fake_tensor",
        ("DynamicOutputShapeException", "recognises shapes that depend on data"),
        ("FakeCopyMode", "copies a model without its data"),
        ("FakeTensor", "shapes without data"),
        ("FakeTensorMode", "shapes without data"),
    ),
    *_under(
        "torch.utils",
        ("_python_dispatch._disable_current_modes", "computes on real tensors"),
        ("_python_dispatch._get_current_dispatch_mode_stack", "names dispatch modes around a call"),
        ("_python_dispatch.is_traceable_wrapper_subclass", "sees tensors made of tensors"),
        ("_pytree.TreeSpec", "says how nested arguments were put together"),
        ("_pytree.tree_flatten", "takes nested arguments apart"),
        ("_pytree.tree_unflatten", "puts nested arguments together"),
        ("_pytree.tree_leaves", "finds tensors in arguments"),
        ("_pytree.tree_map_only", "copies tensors in arguments"),
    ),
    *_under(
        "torch.nn.modules.module",
        ("_global_forward_hooks", "sees hooks of all modules"),
        ("_global_forward_pre_hooks", "sees hooks of all modules"),
        ("_global_backward_hooks", "sees hooks of all modules"),
        ("_global_backward_pre_hooks", "sees hooks of all modules"),
    ),
    *_under(
        "torch.nn.utils",
        ("parametrize._cache_enabled", "sees parametrizations that are cached"),
        ("prune.BasePruningMethod._tensor_name", "which parameter is pruned"),
    ),
    *_under(
        "torch.autograd.forward_ad",
        ("_current_level", "sees forward derivatives"),
    ),
    *_under(
        "torch.autograd.graph",
        ("_engine_run_backward", "runs backward, and sees which one runs"),
        ("_engine_run_backward.t_outputs", "sees where the running backward began"),
        ("Node._sequence_nr", "tells older nodes from newer ones"),
    ),
    *_under(
        "torch.Tensor",
        ("_version", "sees changes in place"),
        ("_backward_hooks", "sees hooks of tensors"),
        ("_post_accumulate_grad_hooks", "sees hooks of parameters"),
        ("_indices", "sizes of sparse tensors"),
        ("_values", "sizes of sparse tensors"),
    ),
    *_under(
        "torch.UntypedStorage",
        ("_cdata", "which storage it is"),
    ),
    *_under(
        "torch.nn.Module",
        ("_call_impl", "the call with its hooks"),
        ("_compiled_call_impl", "where a planned call is put in"),
        ("_modules", "layers by name"),
        ("_parameters", "own parameters by name"),
        ("_buffers", "own buffers by name"),
        ("_forward_hooks", "sees hooks of modules"),
        ("_forward_pre_hooks", "sees hooks of modules"),
    ),
    *_under(
        "torch._ops.OpOverload",
        ("_schema", "what an op changes"),
        ("_opname", "what an op is called"),
        ("_dispatch_cache", "traces ops as the kernels that eager runs"),
        ("py_kernels", "traces ops as the kernels that eager runs"),
    ),
    *_under(
        "torch.ops.aten",
        ("_unsafe_view", "an op that makes views"),
        ("_softmax", "an op that is called in a quicker way"),
        ("_softmax_backward_data", "an op that may write over its input"),
        ("_log_softmax_backward_data", "an op that may write over its input"),
        ("_native_batch_norm_legit", "an op with running statistics"),
        ("_native_batch_norm_legit_functional", "the same, as it is traced"),
        ("_upsample_nearest_exact1d", "an op that is traced whole"),
        ("_upsample_nearest_exact2d", "an op that is traced whole"),
        ("_upsample_nearest_exact3d", "an op that is traced whole"),
        ("_scaled_dot_product_flash_attention", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_backward", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_for_cpu", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "arithmetic of attention"),
    ),
    *_under(
        "torch._inductor",
        ("config.patch", "sets options while a graph is compiled"),
        ("config.fallback_random", "keeps random numbers that nothing reads"),
    ),
    *_under(
        "torch._functorch",
        ("config.patch", "sets options while a graph is compiled"),
        ("config.backward_pass_autocast", "runs backward without autocast, as eager does"),
        ("_aot_autograd.descriptors.InputMutationAOTOutput", "sees which inputs are written"),
        ("_aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs", "allows a retained graph"),
        ("_aot_autograd.utils.make_boxed_func._boxed_call", "takes inputs as a list to clear"),
    ),
    *_under(
        "torch._dynamo",
        ("OptimizedModule", "recognises a compiled model"),
        ("backends.common.aot_autograd", "captures forward and backward"),
        ("symbolic_convert.InstructionTranslatorBase", "sees where the model branches on data"),
        ("variables.ConstantVariable.create", "sees where the model branches on data"),
        ("variables.LazyVariableTracker", "sees where the model branches on data"),
        ("variables.TensorVariable", "sees where the model branches on data"),
        ("guards.GuardBuilder.add_python_lambda_leaf_guard_to_root", "checks branches on data before a call"),
        ("guards._get_closure_vars", "checks branches on data before a call"),
        ("guards.install_guard", "checks branches on data before a call"),
        ("convert_frame.input_codes.seen", "compiles again after an error"),
        ("types.FrameAction.DEFAULT", "compiles again after an error"),
        ("types.FrameExecStrategy", "compiles again after an error"),
        ("exc.Unsupported", "recognises what cannot be traced"),
        ("exc.UserError", "recognises what cannot be traced"),
        ("exc.BackendCompilerFailed", "finds our errors in the compiler's"),
        ("exc.TorchDynamoException", "recognises the compiler's errors"),
        ("utils.counters", "counts graph breaks"),
        ("config.trace_numpy", "runs NumPy as NumPy"),
        ("config.patch", "sets options while a model is traced"),
        ("config.ignore_logging_functions", "keeps log calls from cutting graphs"),
        ("config.skip_nnmodule_hook_guards", "sees hooks that are added later"),
        ("config.fake_tensor_cache_enabled", "true sizes of storages"),
        ("config.recompile_limit", "how many variants are compiled"),
        ("config.accumulated_recompile_limit", "how many variants are compiled"),
    ),
)

# Classes whose objects have more attributes than they have themselves, and such an object.
_SAMPLES: dict[str, Callable[[], object]] = {
    "torch.nn.Module": lambda: torch.nn.Module(),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch._functorch._aot_autograd.utils.make_boxed_func": lambda: _boxed_function(),
}


def _boxed_function() -> object:
    make = import_module("torch._functorch._aot_autograd.utils").make_boxed_func
    boxed: object = make(lambda: None)
    return boxed


@cache
def check_pytorch() -> None:
    """Raise `UnsupportedTorchError` if PyTorch lacks a private name that lowtide uses; the compiler's are left out.

    A version beyond those supported that has them all is used, with a warning.
    """
    if missing_names(each for each in NAMES if not each.of_compiler):
        _refuse(missing_names(NAMES))
    if not OLDEST <= _version() < BEYOND:
        warnings.warn(_unknown_version(), LowtideWarning, stacklevel=2)


@cache
def check_compiler() -> None:
    """Raise `UnsupportedTorchError` if PyTorch's compiler lacks a private name that lowtide uses; imports it."""
    check_pytorch()
    missing = missing_names(each for each in NAMES if each.of_compiler)
    if missing:
        _refuse(missing)


def missing_names(names: Iterable[PrivateName]) -> list[PrivateName]:
    """Return those of `names` that PyTorch does not have."""
    return [each for each in names if not _exists(each.path)]


def _exists(path: str) -> bool:
    try:
        _resolve(path)
    except (AttributeError, ImportError):
        return False
    return True


def _resolve(path: str) -> object:
    """Return what stands under a dotted name."""
    if path == "torch":
        return torch
    parent, _, name = path.rpartition(".")
    holder = _resolve(parent)
    if hasattr(holder, name):
        return getattr(holder, name)
    if parent in _SAMPLES:
        return getattr(_SAMPLES[parent](), name)
    if isinstance(holder, FunctionType) and name in signature(holder).parameters:
        return signature(holder).parameters[name]
    if isinstance(holder, type) and name in get_annotations(holder):
        return get_annotations(holder)[name]
    return import_module(path)


def _version() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def _refuse(missing: list[PrivateName]) -> None:
    inside = OLDEST <= _version() < BEYOND
    listed = "\n".join(f"  {each}" for each in missing)
    remedy = (
        "This version is among them, so its installation may be damaged: install it again with "
        f"`pip install --force-reinstall 'torch=={torch.__version__}'`, and if that does not help, please report this."
        if inside
        else f"Install one of them with `pip install '{SUPPORTED}'`."
    )
    raise UnsupportedTorchError(
        f"PyTorch {torch.__version__} does not have what lowtide needs of its insides:\n{listed}\n"
        f"lowtide works with {SUPPORTED} and is tested with {_tested()}. {remedy}"
    )


def _unknown_version() -> str:
    return (
        f"PyTorch {torch.__version__} is not among the versions that lowtide knows ({SUPPORTED}; tested with "
        f"{_tested()}). All that lowtide needs of its insides is there, so it goes on; verify=True compares the first "
        "step with plain training bit for bit."
    )


def _tested() -> str:
    return f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"
