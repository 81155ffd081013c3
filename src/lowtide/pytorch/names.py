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
        ("_softmax", "lower/quicken.py", "calls softmax without the dispatcher's detour"),
        ("_ops.OpOverload", "capture/pins.py capture/program.py costs/op.py lower/quicken.py", "tells ops from Python"),
        ("_ops.OpOverloadPacket", "run/branches.py", "tells ops of the user's from PyTorch's"),
        ("_ops.HigherOrderOperator", "run/backend.py run/readers.py", "finds graphs inside of graphs"),
        ("_guards.TracingContext.try_get", "lower/execute.py", "finds what the compiler notes about a graph"),
        ("fx.graph._BoxedCodeGen", "lower/execute.py", "lets graphs free their inputs"),
    ),
    *_under(
        "torch._C",
        ("_DisableAutocast", "costs/analytic.py", "works out results in the types of the graph"),
        ("DisableTorchFunction", "run/fakes.py", "makes fake tensors inside a copy"),
        ("TensorBase.clone", "run/fakes.py", "recognises the copy of a tensor"),
        ("_dynamo.eval_frame.set_code_exec_strategy", "run/entry.py", "compiles again after an error"),
        ("_len_torch_dispatch_stack", "run/diagnose.py", "sees dispatch modes around a call"),
        ("_autograd._top_saved_tensors_default_hooks", "run/diagnose.py", "sees hooks for saved tensors around a call"),
        ("_functorch.peek_interpreter_stack", "run/chain_guard.py run/diagnose.py", "sees torch.func around a call"),
        ("_will_engine_execute_node", "lower/accumulate.py", "asks where a gradient goes"),
        ("_autograd._get_current_graph_task_keep_graph", "lower/chain.py", "asks whether the graph is retained"),
        ("_autograd._profiler_enabled", "pytorch/profiler.py capture/chain.py", "sees a profiler of the user's"),
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
        ("DynamicOutputShapeException", "run/backend.py", "recognises shapes that depend on data"),
        ("FakeCopyMode", "run/fakes.py", "copies a model without its data"),
        ("FakeTensor", "costs/analytic.py lower/rewrite.py run/fakes.py run/rehearse.py", "shapes without data"),
        ("FakeTensorMode", "costs/analytic.py run/fakes.py run/fit.py run/rehearse.py", "shapes without data"),
    ),
    *_under(
        "torch.utils",
        ("_python_dispatch._disable_current_modes", "capture/shapes.py run/backend.py", "computes on real tensors"),
        ("_python_dispatch._get_current_dispatch_mode_stack", "run/diagnose.py", "names dispatch modes around a call"),
        ("_python_dispatch.is_traceable_wrapper_subclass", "run/chain_guard.py", "sees tensors made of tensors"),
        ("_pytree.tree_flatten", "blocks/position.py run/layers.py run/readers.py", "takes nested arguments apart"),
        ("_pytree.tree_unflatten", "blocks/position.py run/layers.py run/readers.py", "puts nested arguments together"),
        ("_pytree.tree_leaves", "run/outputs.py blocks/position.py", "finds tensors in arguments"),
        ("_pytree.tree_map_only", "run/verify.py", "copies tensors in arguments"),
    ),
    *_under(
        "torch.nn.modules.module",
        ("_global_forward_hooks", "blocks/memory.py run/entry.py", "sees hooks of all modules"),
        ("_global_forward_pre_hooks", "blocks/memory.py run/entry.py", "sees hooks of all modules"),
        ("_global_backward_hooks", "run/entry.py", "sees hooks of all modules"),
        ("_global_backward_pre_hooks", "run/entry.py", "sees hooks of all modules"),
    ),
    *_under(
        "torch.nn.utils",
        ("parametrize._cache_enabled", "run/chain_guard.py", "sees parametrizations that are cached"),
        ("prune.BasePruningMethod._tensor_name", "blocks/derived.py", "which parameter is pruned"),
    ),
    *_under("torch.autograd.forward_ad", ("_current_level", "run/chain_guard.py", "sees forward derivatives")),
    *_under(
        "torch.autograd.graph",
        ("_engine_run_backward", "blocks/autograd.py lower/accumulate.py", "runs backward, and sees which one runs"),
        ("_engine_run_backward.t_outputs", "lower/accumulate.py", "sees where the running backward began"),
        ("Node._sequence_nr", "capture/chain_profile.py", "tells older nodes from newer ones"),
    ),
    *_under(
        "torch.Tensor",
        ("_version", "lower/chain_tape.py blocks/position.py capture/chain_profile.py run/readers.py", "sees writes"),
        ("_backward_hooks", "blocks/autograd.py lower/accumulate.py", "sees hooks of tensors"),
        ("_post_accumulate_grad_hooks", "lower/accumulate.py", "sees hooks of parameters"),
        ("_indices", "capture/alias.py", "sizes of sparse tensors"),
        ("_values", "capture/alias.py", "sizes of sparse tensors"),
    ),
    *_under("torch.UntypedStorage", ("_cdata", "capture/alias.py blocks/spec.py run/fit.py", "which storage it is")),
    *_under(
        "torch.nn.Module",
        ("_call_impl", "run/wrapped.py run/rehearse.py", "the call with its hooks"),
        ("_compiled_call_impl", "run/wrapped.py", "where a planned call is put in"),
        ("_modules", "blocks/contents.py run/layers.py chains.py", "layers by name"),
        ("_parameters", "blocks/contents.py run/chain.py", "own parameters by name"),
        ("_buffers", "blocks/quiet.py blocks/contents.py blocks/position.py", "own buffers by name"),
        ("_forward_hooks", "blocks/contents.py", "sees hooks of modules"),
        ("_forward_pre_hooks", "blocks/contents.py", "sees hooks of modules"),
    ),
    *_under(
        "torch._ops.OpOverload",
        ("_schema", "capture/pins.py capture/program.py", "what an op changes"),
        ("_opname", "capture/pins.py capture/program.py capture/joint.py", "what an op is called"),
        ("_dispatch_cache", "capture/faithful.py", "traces ops as the kernels that eager runs"),
        ("py_kernels", "capture/faithful.py", "traces ops as the kernels that eager runs"),
    ),
    *_under(
        "torch.ops.aten",
        ("_unsafe_view", "capture/alias.py lower/quicken.py", "an op that makes views"),
        ("_softmax", "lower/quicken.py", "an op that is called in a quicker way"),
        ("_softmax_backward_data", "capture/sequence.py", "an op that may write over its input"),
        ("_log_softmax_backward_data", "capture/sequence.py", "an op that may write over its input"),
        ("_native_batch_norm_legit", "capture/normalise.py capture/pins.py", "an op with running statistics"),
        ("_native_batch_norm_legit_functional", "capture/normalise.py capture/pins.py", "the same, as it is traced"),
        ("_upsample_nearest_exact1d", "capture/faithful.py", "an op that is traced whole"),
        ("_upsample_nearest_exact2d", "capture/faithful.py", "an op that is traced whole"),
        ("_upsample_nearest_exact3d", "capture/faithful.py", "an op that is traced whole"),
        ("_scaled_dot_product_flash_attention", "costs/analytic.py", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_backward", "costs/analytic.py", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_for_cpu", "costs/analytic.py", "arithmetic of attention"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "costs/analytic.py", "arithmetic of attention"),
    ),
    *_under(
        "torch._inductor",
        ("config.patch", "run/backend.py", "sets options while a graph is compiled"),
        ("config.fallback_random", "run/backend.py", "keeps random numbers that nobody reads"),
    ),
    *_under(
        "torch._functorch",
        ("config.patch", "run/backend.py", "sets options while a graph is compiled"),
        ("config.backward_pass_autocast", "run/backend.py", "runs backward without autocast, as eager does"),
        ("_aot_autograd.descriptors.InputMutationAOTOutput", "capture/joint.py", "sees which inputs are written"),
        ("_aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs", "lower/execute.py", "allows a retained graph"),
        ("_aot_autograd.utils.make_boxed_func._boxed_call", "lower/execute.py", "takes inputs as a list to clear"),
    ),
    *_under(
        "torch._dynamo",
        ("OptimizedModule", "run/wrapped.py", "recognises a compiled model"),
        ("backends.common.aot_autograd", "pytorch/compiler.py run/backend.py", "captures forward and backward"),
        ("symbolic_convert.InstructionTranslatorBase", "run/branches.py", "sees where the model branches on data"),
        ("guards.GuardBuilder", "run/branches.py", "checks branches on data at every call"),
        ("guards._get_closure_vars", "run/branches.py", "checks branches on data at every call"),
        ("guards.install_guard", "run/branches.py", "checks branches on data at every call"),
        ("variables.ConstantVariable.create", "run/branches.py", "sees where the model branches on data"),
        ("variables.LazyVariableTracker", "run/branches.py", "sees where the model branches on data"),
        ("variables.TensorVariable", "run/branches.py", "sees where the model branches on data"),
        ("convert_frame.input_codes.seen", "run/entry.py", "compiles again after an error"),
        ("types.FrameAction.DEFAULT", "run/entry.py", "compiles again after an error"),
        ("types.FrameExecStrategy", "run/entry.py", "compiles again after an error"),
        ("exc.Unsupported", "run/diagnose.py", "recognises what cannot be traced"),
        ("exc.UserError", "run/diagnose.py", "recognises what cannot be traced"),
        ("exc.BackendCompilerFailed", "pytorch/compiler.py run/translate.py", "finds our errors in the compiler's"),
        ("exc.TorchDynamoException", "pytorch/compiler.py run/diagnose.py", "recognises the compiler's errors"),
        ("utils.counters", "pytorch/compiler.py run/session.py", "counts graph breaks"),
        ("config.trace_numpy", "run/entry.py", "runs NumPy as NumPy"),
        ("config.patch", "run/entry.py", "sets options while a model is traced"),
        ("config.ignore_logging_functions", "run/entry.py", "keeps log calls from cutting graphs"),
        ("config.skip_nnmodule_hook_guards", "run/entry.py", "sees hooks that are added later"),
        ("config.fake_tensor_cache_enabled", "run/entry.py", "true sizes of storages"),
        ("config.recompile_limit", "run/entry.py", "how many variants are compiled"),
        ("config.accumulated_recompile_limit", "run/entry.py", "how many variants are compiled"),
    ),
)
