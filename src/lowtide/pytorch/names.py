"""The table of every private name of PyTorch that lowtide uses: where, and what for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name that PyTorch may move; attributes of objects stand under their class, arguments under their function."""

    path: str
    files: tuple[str, ...]
    purpose: str

    @property
    def of_compiler(self) -> bool:
        """Whether looking it up imports PyTorch's compiler, which takes seconds."""
        return self.path.startswith(_COMPILER)

    def __str__(self) -> str:
        return f"{self.path} ({self.files[0]}: {self.purpose})"


_COMPILER = ("torch._dynamo.", "torch._functorch.")


def _under(prefix: str, *rows: tuple[str, str, str]) -> tuple[PrivateName, ...]:
    """Return the rows for names below `prefix`, each with its files and purpose."""
    return tuple(PrivateName(f"{prefix}.{name}", tuple(files.split()), purpose) for name, files, purpose in rows)


NAMES: tuple[PrivateName, ...] = (
    *_under(
        "torch",
        ("_softmax", "lower/execute.py", "calls softmax without the dispatcher's detour"),
        (
            "_ops.OpOverload",
            "pytorch/ops.py capture/recompute_rules.py capture/program.py lower/execute.py",
            "tells ops from Python",
        ),
        ("_ops.HigherOrderOperator", "runtime/backend.py", "finds graphs inside of graphs"),
        ("_guards.TracingContext.try_get", "lower/execute.py", "finds what the compiler notes about a graph"),
        ("fx.graph._BoxedCodeGen", "lower/execute.py", "lets graphs free their inputs"),
    ),
    *_under(
        "torch._C",
        ("_DisableAutocast", "pytorch/ops.py", "works out results in the types of the graph"),
        ("DisableTorchFunction", "runtime/dry_run.py", "makes fake tensors inside a copy"),
        ("TensorBase.clone", "runtime/dry_run.py", "recognises the copy of a tensor"),
        ("_dynamo.eval_frame.set_code_exec_strategy", "runtime/compiled_call.py", "compiles again after an error"),
        ("_len_torch_dispatch_stack", "runtime/failure_causes.py", "sees dispatch modes around a call"),
        (
            "_functorch.peek_interpreter_stack",
            "pytorch/dispatch_modes.py runtime/failure_causes.py",
            "sees torch.func around a call",
        ),
        ("_will_engine_execute_node", "lower/early_accumulation.py", "asks where a gradient goes"),
        (
            "_autograd._get_current_graph_task_keep_graph",
            "pytorch/autograd_graph.py",
            "asks whether the graph is retained",
        ),
        (
            "_autograd._profiler_enabled",
            "pytorch/profiler.py",
            "sees a profiler of the user's",
        ),
        ("_autograd._enable_profiler_legacy", "pytorch/profiler.py measure.py", "records the peak of one op"),
        ("_autograd._disable_profiler_legacy", "pytorch/profiler.py measure.py", "records the peak of one op"),
        ("_profiler.ProfilerConfig", "pytorch/profiler.py measure.py", "says what is recorded"),
        ("_profiler.ProfilerState.CPU", "measure.py", "says what is recorded"),
        ("_profiler._ExperimentalConfig", "pytorch/profiler.py measure.py", "says what is recorded"),
        ("_profiler._ExtraFields_Allocation", "pytorch/profiler.py measure.py", "reads allocator events"),
        ("_profiler._RecordFunctionFast", "lower/rewrite.py", "labels ops in a recording"),
        ("_profiler._ProfilerEvent", "pytorch/profiler.py measure.py", "reads allocator events"),
    ),
    *_under(
        "torch._prims_common",
        ("is_non_overlapping_and_dense_or_false", "capture/gradient_layout.py", "lays gradients out as eager does"),
        ("make_contiguous_strides_for", "capture/gradient_layout.py", "lays gradients out as eager does"),
    ),
    *_under(
        "torch._subclasses.fake_tensor",
        ("DynamicOutputShapeException", "runtime/backend.py", "recognises shapes that depend on data"),
        ("FakeCopyMode", "runtime/dry_run.py", "copies a model without its data"),
        (
            "FakeTensor",
            "costs/analytic.py lower/rewrite.py runtime/dry_run.py runtime/dry_run.py",
            "shapes without data",
        ),
        (
            "FakeTensorMode",
            "costs/analytic.py runtime/dry_run.py runtime/memory_fit.py runtime/dry_run.py",
            "shapes without data",
        ),
    ),
    *_under(
        "torch.utils",
        (
            "_python_dispatch._disable_current_modes",
            "capture/shape_only_inputs.py runtime/backend.py",
            "computes on real tensors",
        ),
        (
            "_python_dispatch._get_current_dispatch_mode_stack",
            "runtime/failure_causes.py",
            "names dispatch modes around a call",
        ),
        (
            "_python_dispatch.is_traceable_wrapper_subclass",
            "blocks/chain.py",
            "sees tensors made of tensors",
        ),
        ("_pytree.tree_flatten", "blocks/block/position.py blocks/layers.py", "takes nested arguments apart"),
        ("_pytree.tree_unflatten", "blocks/block/position.py blocks/layers.py", "puts nested arguments together"),
        ("_pytree.tree_leaves", "runtime/output_tensors.py blocks/block/position.py", "finds tensors in arguments"),
        ("_pytree.TreeSpec", "pytorch/nested.py", "how nested arguments were nested"),
        ("_pytree.tree_map_only", "runtime/verify.py", "copies tensors in arguments"),
    ),
    *_under(
        "torch.nn.modules.module",
        ("_global_forward_hooks", "pytorch/module_parts.py", "sees hooks of all modules"),
        ("_global_forward_pre_hooks", "pytorch/module_parts.py", "sees hooks of all modules"),
    ),
    *_under(
        "torch.nn.utils",
        ("parametrize._cache_enabled", "pytorch/module_parts.py", "sees parametrizations that are cached"),
        ("prune.BasePruningMethod._tensor_name", "pytorch/module_parts.py", "which parameter is pruned"),
    ),
    *_under("torch.autograd.forward_ad", ("_current_level", "pytorch/dispatch_modes.py", "sees forward derivatives")),
    *_under(
        "torch.autograd.graph",
        (
            "_engine_run_backward",
            "pytorch/autograd_graph.py lower/early_accumulation.py",
            "runs backward, and sees which one runs",
        ),
        ("_engine_run_backward.t_outputs", "lower/early_accumulation.py", "sees where the running backward began"),
        ("Node._sequence_nr", "pytorch/autograd_graph.py", "tells older nodes from newer ones"),
    ),
    *_under(
        "torch.Tensor",
        (
            "_version",
            "pytorch/tensor_versions.py",
            "sees changes in place",
        ),
        ("_backward_hooks", "pytorch/autograd_graph.py lower/early_accumulation.py", "sees hooks of tensors"),
        ("_post_accumulate_grad_hooks", "lower/early_accumulation.py", "sees hooks of parameters"),
        ("_indices", "capture/alias.py", "sizes of sparse tensors"),
        ("_values", "capture/alias.py", "sizes of sparse tensors"),
    ),
    *_under(
        "torch.UntypedStorage",
        ("_cdata", "pytorch/storages.py capture/alias.py runtime/memory_fit.py", "which storage it is"),
    ),
    *_under(
        "torch.nn.Module",
        ("_call_impl", "runtime/wrap.py runtime/dry_run.py", "the call with its hooks"),
        ("_compiled_call_impl", "runtime/wrap.py", "where a planned call is put in"),
        ("_modules", "pytorch/module_parts.py", "layers by name"),
        ("_parameters", "pytorch/module_parts.py", "own parameters by name"),
        (
            "_buffers",
            "pytorch/module_parts.py",
            "own buffers by name",
        ),
        ("_forward_hooks", "pytorch/module_parts.py", "sees hooks of modules"),
        ("_forward_pre_hooks", "pytorch/module_parts.py", "sees hooks of modules"),
    ),
    *_under(
        "torch._ops.OpOverload",
        ("_schema", "capture/recompute_rules.py capture/program.py", "what an op changes"),
        ("_opname", "capture/recompute_rules.py capture/program.py capture/build_program.py", "what an op is called"),
        ("_dispatch_cache", "capture/kept_kernels.py", "traces ops as the kernels that eager runs"),
        ("py_kernels", "capture/kept_kernels.py", "traces ops as the kernels that eager runs"),
    ),
    *_under(
        "torch.ops.aten",
        ("_unsafe_view", "capture/alias.py lower/execute.py", "an op that makes views"),
        ("_softmax", "lower/execute.py", "an op that is called in a quicker way"),
        ("_softmax_backward_data", "capture/fused_op.py", "an op that may write over its input"),
        ("_log_softmax_backward_data", "capture/fused_op.py", "an op that may write over its input"),
        (
            "_native_batch_norm_legit",
            "capture/normalise.py capture/recompute_rules.py",
            "an op with running statistics",
        ),
        (
            "_native_batch_norm_legit_functional",
            "capture/normalise.py capture/recompute_rules.py",
            "the same, as it is traced",
        ),
        ("_upsample_nearest_exact1d", "capture/kept_kernels.py", "an op that is traced whole"),
        ("_upsample_nearest_exact2d", "capture/kept_kernels.py", "an op that is traced whole"),
        ("_upsample_nearest_exact3d", "capture/kept_kernels.py", "an op that is traced whole"),
        ("_scaled_dot_product_flash_attention", "pytorch/ops.py", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_backward", "pytorch/ops.py", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_for_cpu", "pytorch/ops.py", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "pytorch/ops.py", "arithmetic of attention"),
    ),
    *_under(
        "torch._functorch",
        ("config.patch", "runtime/backend.py", "sets options while a graph is compiled"),
        ("config.backward_pass_autocast", "runtime/backend.py", "runs backward without autocast, as eager does"),
        (
            "_aot_autograd.descriptors.InputMutationAOTOutput",
            "capture/build_program.py",
            "sees which inputs are written",
        ),
        ("_aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs", "lower/execute.py", "allows a retained graph"),
        ("_aot_autograd.utils.make_boxed_func._boxed_call", "lower/execute.py", "takes inputs as a list to clear"),
    ),
    *_under(
        "torch._dynamo",
        ("OptimizedModule", "runtime/wrap.py", "recognises a compiled model"),
        ("backends.common.aot_autograd", "pytorch/compiler.py runtime/backend.py", "captures forward and backward"),
        (
            "symbolic_convert.InstructionTranslatorBase",
            "runtime/input_branches.py",
            "sees where the model branches on data",
        ),
        ("variables.ConstantVariable.create", "runtime/input_branches.py", "sees where the model branches on data"),
        ("variables.LazyVariableTracker", "runtime/input_branches.py", "sees where the model branches on data"),
        ("variables.TensorVariable", "runtime/input_branches.py", "sees where the model branches on data"),
        ("convert_frame.input_codes.seen", "runtime/compiled_call.py", "compiles again after an error"),
        ("types.FrameAction.DEFAULT", "runtime/compiled_call.py", "compiles again after an error"),
        ("types.FrameExecStrategy", "runtime/compiled_call.py", "compiles again after an error"),
        ("exc.Unsupported", "runtime/failure_causes.py", "recognises what cannot be traced"),
        ("exc.UserError", "runtime/failure_causes.py", "recognises what cannot be traced"),
        (
            "exc.BackendCompilerFailed",
            "pytorch/compiler.py runtime/compiler_errors.py",
            "finds our errors in the compiler's",
        ),
        (
            "exc.TorchDynamoException",
            "pytorch/compiler.py runtime/failure_causes.py",
            "recognises the compiler's errors",
        ),
        ("utils.counters", "pytorch/compiler.py runtime/session.py", "counts graph breaks"),
        ("config.trace_numpy", "runtime/compiled_call.py", "runs NumPy as NumPy"),
        ("config.patch", "runtime/compiled_call.py", "sets options while a model is traced"),
        ("config.ignore_logging_functions", "runtime/compiled_call.py", "keeps log calls from cutting graphs"),
        ("config.skip_nnmodule_hook_guards", "runtime/compiled_call.py", "sees hooks that are added later"),
        ("config.fake_tensor_cache_enabled", "runtime/compiled_call.py", "true sizes of storages"),
        ("config.recompile_limit", "runtime/compiled_call.py", "how many variants are compiled"),
        ("config.accumulated_recompile_limit", "runtime/compiled_call.py", "how many variants are compiled"),
    ),
)
