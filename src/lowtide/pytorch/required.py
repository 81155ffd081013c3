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
from types import FunctionType, SimpleNamespace

import torch
import torch.distributed

from lowtide.errors import LowtideWarning, UnsupportedTorchError

OLDEST = (2, 13)
BEYOND = (2, 16)
TESTED = ("2.13.0", "2.15.0")
SUPPORTED = f"torch>={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"

# The compiler imports the last of them.
_COMPILER = ("torch._dynamo.", "torch._functorch.", "torch._inductor.", "torch.distributed.fsdp.")


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name that PyTorch may move; attributes of objects stand under their class, arguments under their function."""

    path: str
    purpose: str

    @property
    def of_compiler(self) -> bool:
        """Return True if looking it up imports PyTorch's compiler, which takes seconds."""
        return self.path.startswith(_COMPILER)

    @property
    def of_generator(self) -> bool:
        """Return True if looking it up imports Inductor's code generator, which the exact engine does without."""
        return self.path.startswith("torch._inductor.") and not self.path.startswith("torch._inductor.config")

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
        ("_guards.TracingContext", "traces a graph again"),
        ("_guards.TracingContext.try_get", "finds what the compiler notes about a graph"),
        ("_guards.tracing", "traces a graph again"),
        ("compiler._compile_session_context", "traces a graph again while other threads train"),
        ("fx.graph._BoxedCodeGen", "lets graphs free their inputs"),
    ),
    *_under(
        "torch._C",
        ("_DisableAutocast", "works out results in the types of the graph"),
        ("DisableTorchFunction", "makes fake tensors inside a copy"),
        ("TensorBase.clone", "recognises the copy of a tensor"),
        ("_dynamo.eval_frame.set_code_exec_strategy", "compiles again after an error"),
        ("_storage_Use_Count", "sees who holds the result of a collective"),
        ("_len_torch_dispatch_stack", "sees dispatch modes around a call"),
        ("_functorch.peek_interpreter_stack", "sees torch.func around a call"),
        ("_will_engine_execute_node", "asks where a gradient goes"),
        ("_autograd._get_current_graph_task_keep_graph", "asks whether the graph is retained"),
        ("_autograd._pop_saved_tensors_default_hooks", "traces a layer in a call that keeps nothing"),
        ("_autograd._push_saved_tensors_default_hooks", "traces a layer in a call that keeps nothing"),
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
        "torch._library.custom_ops",
        ("OPDEFS.get", "finds the Python functions of custom ops"),
        ("CustomOpDef._init_fn", "finds the Python functions of custom ops"),
        ("CustomOpDef._backend_fns", "finds the Python functions of custom ops"),
    ),
    *_under(
        "torch._prims_common",
        ("is_non_overlapping_and_dense_or_false", "lays gradients out as eager does"),
        ("make_contiguous_strides_for", "lays gradients out as eager does"),
    ),
    *_under(
        "torch._subclasses.fake_tensor",
        ("DataDependentOutputException", "recognises branches on data that is not there"),
        ("DynamicOutputShapeException", "recognises shapes that depend on data"),
        ("FakeCopyMode", "copies a model without its data"),
        ("FakeTensor", "shapes without data"),
        ("FakeTensorMode", "shapes without data"),
    ),
    *_under(
        "torch.utils",
        ("_python_dispatch._disable_current_modes", "computes on real tensors"),
        ("_python_dispatch.TorchDispatchMode", "counts what code between blocks makes, on tensors without data"),
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
        "torch.autograd.Variable",
        ("_execution_engine.queue_callback", "sees where a backward pass ends"),
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
        ("Node._input_metadata", "sizes of the gradients that arrive at a node"),
    ),
    *_under(
        "torch.Tensor",
        ("_use_count", "sees who holds the result of a collective"),
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
        ("_backward_hooks", "sees hooks of modules"),
        ("_backward_pre_hooks", "sees hooks of modules"),
    ),
    *_under(
        "torch.nn.parallel.DistributedDataParallel",
        ("_get_active_ddp_module", "whose buckets gradients go to"),
        ("_module_parameters", "whose gradients go to buckets"),
        ("_has_rebuilt_buckets", "whether the order of gradients still makes buckets"),
        ("_comm_hooks", "what reducing a bucket takes"),
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
        "torch._inductor",
        ("config.cpp_wrapper", "reads the code that is generated"),
        ("config.fx_graph_cache", "generates code without compiling it"),
        ("config.cpp.cxx", "says which C++ compiler is looked for"),
        ("compile_fx.compile_fx", "compiles both halves of a step"),
        ("compile_fx.compile_fx_inner", "generates the code of a graph"),
        ("custom_graph_pass.CustomPartitionerFn", "cuts the joint graph as a plan says"),
        ("output_code.CompiledFxGraph.source_code", "reads the code that is generated"),
        ("output_code.CompiledFxGraph.constants", "reads the code that is generated"),
        ("graph.GraphLowering.save_output_code", "generates code without compiling it"),
        ("virtualized.V.graph", "knows the layouts that code gives to results"),
        ("select_algorithm.extern_kernels", "knows what generated code calls"),
        ("cpp_builder.get_cpp_compiler", "looks for the C++ compiler"),
    ),
    *_under(
        "torch._functorch",
        ("config.enable_autograd_cache", "never runs the code of another plan"),
        ("config.force_non_lazy_backward_lowering", "knows the code of backward before forward runs"),
        ("_aot_autograd.graph_compile.collect_fw_donated_buffer_idxs", "knows what backward may write over"),
        ("config.patch", "sets options while a graph is compiled"),
        ("config.backward_pass_autocast", "runs backward without autocast, as eager does"),
        ("_aot_autograd.descriptors.InputMutationAOTOutput", "sees which inputs are written"),
        ("_aot_autograd.descriptors.SubclassGetAttrAOTInput.base", "finds the parts of tensors made of tensors"),
        ("_aot_autograd.descriptors.SubclassSizeAOTInput.base", "finds the parts of tensors made of tensors"),
        ("_aot_autograd.descriptors.SubclassStrideAOTInput.base", "finds the parts of tensors made of tensors"),
        ("_aot_autograd.graph_compile.aot_dispatch_autograd_graph", "traces backward for other layouts of gradients"),
        ("_aot_autograd.graph_compile.aot_dispatch_autograd_graph.fw_metadata", "says which layouts are traced"),
        ("_aot_autograd.schemas.MemoryFormatMeta.size", "takes gradients as they come"),
        ("_aot_autograd.schemas.MemoryFormatMeta.stride", "takes gradients as they come"),
        ("_aot_autograd.schemas.PlainTensorMeta.memory_format", "takes gradients as they come"),
        ("_aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs", "allows a retained graph"),
        ("_aot_autograd.schemas.ViewAndMutationMeta.subclass_tangent_meta", "takes gradients as they come"),
        ("_aot_autograd.schemas.ViewAndMutationMeta.traced_tangents", "traces backward for other layouts of gradients"),
        ("_aot_autograd.utils.make_boxed_func._boxed_call", "takes inputs as a list to clear"),
    ),
    *_under(
        "torch._dynamo",
        ("OptimizedModule", "recognises a compiled model"),
        ("backends.common.aot_autograd", "captures forward and backward"),
        ("error_on_graph_break", "ends tracing at the first break"),
        ("symbolic_convert.InliningInstructionTranslator", "remembers calls that cut the graph"),
        ("symbolic_convert.InliningInstructionTranslator.inline_call", "remembers calls that cut the graph"),
        ("symbolic_convert.InstructionTranslatorBase", "sees where the model branches on data"),
        ("variables.ConstantVariable.create", "sees where the model branches on data"),
        ("variables.LazyVariableTracker", "sees where the model branches on data"),
        ("variables.TensorVariable", "sees where the model branches on data"),
        ("variables.UnspecializedNNModuleVariable", "remembers calls that cut the graph"),
        ("variables.UserMethodVariable", "remembers calls that cut the graph"),
        ("guards.GuardBuilder.add_python_lambda_leaf_guard_to_root", "checks branches on data before a call"),
        ("guards._get_closure_vars", "checks branches on data before a call"),
        ("guards.install_guard", "checks branches on data before a call"),
        ("pgo.FrameStateSizeEntry", "makes floats that change inputs of a graph"),
        ("pgo.auto_dynamic", "makes floats that change inputs of a graph"),
        ("variables.builder.process_automatic_dynamic", "makes floats that change inputs of a graph"),
        ("variables.builder.VariableBuilder.wrap_symfloat", "tells 0.0 from -0.0"),
        ("source.is_constant_source", "tells 0.0 from -0.0"),
        ("source.AttrSource", "limits traced queues"),
        ("variables.builder.VariableBuilder.wrap_listlike", "limits traced queues"),
        ("variables.lists.DequeVariable.call_method", "limits traced queues"),
        ("guards.GuardBuilder.CONSTANT_MATCH", "limits traced queues"),
        ("source.RandomValueSource", "leaves random floats of Python to eager"),
        ("variables.builder.VariableBuilder.wrap_unspecialized_primitive", "leaves random floats of Python to eager"),
        ("variables.ctx_manager.GradModeVariable.create", "traces inference mode inside of training"),
        ("variables.ctx_manager.InferenceModeVariable.create", "traces inference mode inside of training"),
        ("convert_frame.compile_lock", "traces one graph at a time"),
        ("convert_frame.input_codes.seen", "compiles again after an error"),
        ("convert_frame.ConvertFrameAssert", "counts functions that the compiler leaves alone"),
        ("types.FrameAction.DEFAULT", "compiles again after an error"),
        ("types.FrameExecStrategy", "compiles again after an error"),
        ("exc.Unsupported", "recognises what cannot be traced"),
        ("exc.UserError", "recognises what cannot be traced"),
        ("exc.unimplemented", "ends a graph before what is left to eager"),
        (
            "variables.TensorVariable.call_method",
            "sees where the model branches on data, ends a graph before what is left to eager",
        ),
        ("exc.BackendCompilerFailed", "finds our errors in the compiler's"),
        ("exc.TorchDynamoException", "recognises the compiler's errors"),
        ("utils.counters", "counts graph breaks"),
        ("utils.get_optimize_ddp_mode", "sees whether graphs are cut at buckets"),
        ("config.trace_numpy", "runs NumPy as NumPy"),
        ("config.patch", "sets options while a model is traced"),
        ("config.ignore_logging_functions", "keeps log calls from cutting graphs"),
        ("config.skip_nnmodule_hook_guards", "sees hooks that are added later"),
        ("config.fake_tensor_cache_enabled", "true sizes of storages"),
        ("config.recompile_limit", "how many variants are compiled"),
        ("config.accumulated_recompile_limit", "how many variants are compiled"),
        ("config.optimize_ddp", "leaves graphs whole under DistributedDataParallel"),
        ("config.skip_fsdp_guards", "tells sharded layers apart"),
        ("config.allow_rnn", "traces code around recurrent modules"),
    ),
)
if torch.distributed.is_available():
    NAMES += _under(
        "torch.distributed.distributed_c10d",
        ("_get_default_store", "what ranks tell each other without communicating"),
        ("_resolve_process_group", "finds the processes that a collective is between"),
    )
    NAMES += _under("torch.ops", ("_c10d_functional.wait_tensor", "waits for a collective"))


# Nothing of it is imported without the compiler, which imports it anyway.
if torch.distributed.is_available():
    NAMES += _under(
        "torch.distributed.fsdp",
        ("FSDPModule._get_fsdp_state", "finds what FSDP keeps for a sharded module"),
        ("_fully_shard._fsdp_state.FSDPState._fsdp_param_groups", "finds parameters that are gathered together"),
        ("_fully_shard._fsdp_state.FSDPState._is_root", "tells models from their parts"),
        ("_fully_shard._fsdp_state.FSDPState._state_ctx", "tells a call from one inside of another"),
        ("_fully_shard._fsdp_state.FSDPState._states_to_forward_prefetch", "knows what is gathered ahead"),
        ("_fully_shard._fsdp_state.FSDPState._states_to_backward_prefetch", "knows what is gathered ahead"),
        ("_fully_shard._fsdp_param_group.FSDPParamGroup._reshard_after_forward", "knows when parameters are let go"),
        ("_fully_shard._fsdp_param_group.FSDPParamGroup._all_gather_comm", "refuses what it does not know"),
        ("_fully_shard._fsdp_param_group.FSDPParamGroup._reduce_scatter_comm", "refuses what it does not know"),
        ("_fully_shard._fsdp_param_group.FSDPParamGroup._all_reduce_hook", "refuses what it does not know"),
        ("_fully_shard._fsdp_param_group.FSDPParamGroup._partial_reduce_output", "knows which gradients wait"),
        ("_fully_shard._fsdp_param_group.FSDPParamGroup._use_post_forward_mesh", "knows what stays of them"),
        ("_fully_shard._fsdp_param.FSDPParam._orig_size", "sizes of unsharded gradients"),
        ("_fully_shard._fsdp_param.FSDPParam._unsharded_param", "tells unsharded parameters from activations"),
    )

# Classes whose objects have more attributes than they have themselves, and such an object.
_SAMPLES: dict[str, Callable[[], object]] = {
    "torch.nn.Module": lambda: torch.nn.Module(),
    "torch.nn.parallel.DistributedDataParallel": lambda: _replica(),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch._library.custom_ops.CustomOpDef": lambda: _custom_op(),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": lambda: _fsdp_state(),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": lambda: _fsdp_group(),
    "torch._functorch._aot_autograd.utils.make_boxed_func": lambda: _boxed_function(),
}


def _replica() -> object:
    """Return an object with the attributes of a replica, of which a real one needs other processes."""
    return SimpleNamespace(**dict.fromkeys(torch.nn.parallel.DistributedDataParallel.__init__.__code__.co_names))


def _custom_op() -> object:
    """Return an object with the attributes of a custom op, of which a real one would stay in PyTorch's registry."""
    made = import_module("torch._library.custom_ops").CustomOpDef.__init__
    return SimpleNamespace(**dict.fromkeys(made.__code__.co_names))


def _boxed_function() -> object:
    make = import_module("torch._functorch._aot_autograd.utils").make_boxed_func
    boxed: object = make(lambda: None)
    return boxed


def _fsdp_state() -> object:
    found: object = import_module("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState()
    return found


def _fsdp_group() -> object:
    """Return a group of no parameters."""
    fsdp = import_module("torch.distributed.fsdp")
    make = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group").FSDPParamGroup
    policies = {"mp_policy": fsdp.MixedPrecisionPolicy(), "offload_policy": fsdp.OffloadPolicy()}
    found: object = make([], (), None, None, torch.device("cpu"), shard_placement_fn=None, **policies)
    return found


@cache
def check_pytorch() -> None:
    """Raise `UnsupportedTorchError` if PyTorch lacks a private name that lowtide uses; the compiler's are left out.

    A version beyond those supported that has them all is used, with a warning.
    """
    if missing_names(each for each in NAMES if not each.of_compiler):
        _refuse(missing_names(each for each in NAMES if not each.of_generator))
    if not OLDEST <= _version() < BEYOND:
        warnings.warn(_unknown_version(), LowtideWarning, stacklevel=2)


@cache
def check_compiler() -> None:
    """Raise `UnsupportedTorchError` if PyTorch's compiler lacks a private name that lowtide uses; imports it."""
    check_pytorch()
    missing = missing_names(each for each in NAMES if each.of_compiler and not each.of_generator)
    if missing:
        _refuse(missing)


@cache
def check_generator() -> None:
    """Raise `UnsupportedTorchError` if PyTorch's code generator lacks a private name that lowtide uses; imports it."""
    check_compiler()
    missing = missing_names(each for each in NAMES if each.of_generator)
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
