"""The table of rules: one observed call -> what it does to a gradient. Pure data and functions.

Whether a gradient did pass is never decided here: that is observed. These rules name the reason
where it did not, and say which calls carry data at all.
"""

from __future__ import annotations

from typing import Final

from gradtrace._records import CutKind

# Calls that tell something about a tensor, or manage it, and pass on none of its values.
METADATA: Final = frozenset(
    """
    shape ndim dtype device layout size dim stride numel nelement element_size storage_offset
    is_cuda is_cpu is_sparse is_sparse_csr is_quantized is_meta is_mps is_xpu is_mkldnn is_nested
    is_ipu is_maia is_mtia is_vulkan is_xla is_leaf is_complex is_floating_point is_signed is_conj
    is_neg is_inference is_contiguous is_shared is_pinned is_coalesced is_same_size is_set_to
    is_distributed is_tensor is_storage requires_grad grad_fn grad_dtype output_nr _version
    retains_grad name names has_names itemsize nbytes ndimension data_ptr _cdata _is_view get_device
    _nested_tensor_size untyped_storage storage _typed_storage storage_type dense_dim sparse_dim
    _dimI _dimV _nnz dim_order qscheme q_scale q_zero_point record_stream
    register_hook register_post_accumulate_grad_hook retain_grad _backward_hooks
    _post_accumulate_grad_hooks _has_symbolic_sizes_strides share_memory_ __dlpack_device__
    __cuda_array_interface__ __len__ __hash__ __dir__ __repr__ __reduce_ex__ __setstate__
    result_type can_cast promote_types is_autocast_enabled get_default_dtype set_default_dtype
    broadcast_shapes _set_grad_enabled is_grad_enabled is_inference_mode_enabled
    _record_function_enter_new _record_function_exit._RecordFunction _use_cudnn_rnn_flatten_weight
    """.split()
)

# Calls by which a value leaves torch.
ESCAPES: Final = frozenset(
    """
    item numpy tolist __float__ __int__ __bool__ __index__ __complex__ __array__ __dlpack__
    __format__ __contains__ is_nonzero equal allclose to_dlpack _local_scalar_dense
    """.split()
)

# Escapes after which a tensor outside torch's sight may share the storage.
SHARING_ESCAPES: Final = frozenset({"numpy", "__array__", "__dlpack__", "to_dlpack"})

# Ops that read only a shape, a dtype or a device: no data flows through them.
SHAPE_ONLY: Final = frozenset(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like empty_permuted
    new_empty new_empty_strided new_zeros new_ones new_full broadcast_shapes
    zero_ fill_ uniform_ normal_ random_ exponential_ geometric_ log_normal_ cauchy_
    """.split()
)

# Positions of arguments of which only a shape, a dtype or a device is read.
SHAPE_ONLY_ARGUMENTS: Final = {
    "expand_as": frozenset({1}),
    "view_as": frozenset({1}),
    "reshape_as": frozenset({1}),
    "type_as": frozenset({1}),
    "to": frozenset({1}),
    "resize_as_": frozenset({1}),
    "new_tensor": frozenset({0}),
    "sum_to_size": frozenset({1}),
    "full_like": frozenset({0}),
    "new_full": frozenset({0}),
    "fill_": frozenset({0}),
    "copy_": frozenset({0}),
    "set_": frozenset({0}),
}

# Ops with several results, the values of each of which come from one input alone.
PAIRWISE: Final = frozenset(
    """
    broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d
    _pack_padded_sequence _pad_packed_sequence
    """.split()
)

# SHAPE_ONLY ops that take data too, beside the tensor whose shape they read.
_WITH_DATA: Final = frozenset({"full_like", "new_full", "fill_"})
SHAPE_ONLY_ENTIRELY: Final = SHAPE_ONLY - _WITH_DATA

# What these ops do, they do whatever the grad mode: the reason by their name.
STOPS: Final = {
    "detach": CutKind.DETACH,
    "detach_copy": CutKind.DETACH,
    "detach_": CutKind.DETACH_,
    "data": CutKind.DATA,
    "data =": CutKind.DATA,
    "tensor": CutKind.COPY,
    "as_tensor": CutKind.COPY,
    "asarray": CutKind.COPY,
    "new_tensor": CutKind.COPY,
    "scalar_tensor": CutKind.COPY,
    "Tensor": CutKind.COPY,
    "Parameter": CutKind.COPY,
    "Buffer": CutKind.COPY,
    "Variable": CutKind.COPY,
    "deepcopy": CutKind.COPY,
    "set_": CutKind.COPY,
    "from_numpy": CutKind.COPY,
    "from_dlpack": CutKind.COPY,
    "shared storage": CutKind.COPY,
}

_BY_FLAVOUR: Final = {
    "within_copy": CutKind.COPY,
    "through_data": CutKind.DATA,
    "through_detach": CutKind.DETACH,
    "pass": CutKind.FIRST_ORDER,
    "checkpoint": CutKind.NO_GRAD,
}

# Ops without a derivative although their result can be floating.
_NO_DERIVATIVE: Final = frozenset(
    """
    argmax argmin argsort argwhere nonzero bucketize searchsorted histc histogram multinomial
    count_nonzero isnan isinf isfinite isclose eq ne lt le gt ge logical_and logical_or
    logical_not logical_xor __and__ __or__ __xor__ __invert__ bitwise_and bitwise_or bitwise_not
    bitwise_xor one_hot heaviside unique bincount signbit
    """.split()
)


# In-place calls that leave the values in memory as they are.
SAME_VALUES: Final = frozenset(
    """
    detach_ requires_grad_ rename_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_
    as_strided_ set_
    """.split()
)
_READS_LIKE_A_WRITE: Final = frozenset({"__invert__", "__index__", "__int__", "__iter__"})


def writes(op: str) -> bool:
    """Whether an op of this name writes to its first argument."""
    if op == "setitem":
        return True
    if op.startswith("__i") and op.endswith("__"):
        return op not in _READS_LIKE_A_WRITE
    return op.endswith("_") and not op.endswith("__")


def stop_kind(op: str, grad_mode: str, flavour: str, floating: bool) -> CutKind:
    """Name what stops a gradient at an op through which none passes.

    Args:
        op: The op's name.
        grad_mode: "grad", "no_grad" or "inference_mode" while it ran.
        flavour: "function" for a custom Function, "checkpoint" for re-entrant checkpointing,
            "within_copy" inside `copy.deepcopy`, "through_data" for a write through `.data`,
            "through_detach" for one into a leaf's memory through its `detach()`.
        floating: Whether its result is floating or complex, so that it could carry a gradient.

    Returns:
        The kind. The nearest reason wins: a detach under no_grad is a detach.
    """
    if flavour in _BY_FLAVOUR:
        return _BY_FLAVOUR[flavour]
    if op in STOPS:
        return STOPS[op]
    if not floating or op in _NO_DERIVATIVE:
        return CutKind.NO_GRADIENT if flavour == "function" else CutKind.NON_DIFFERENTIABLE
    if grad_mode == "no_grad":
        return CutKind.NO_GRAD
    if grad_mode == "inference_mode":
        return CutKind.INFERENCE_MODE
    return CutKind.NO_GRADIENT if flavour == "function" else CutKind.NON_DIFFERENTIABLE
