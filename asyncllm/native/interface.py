"""ctypes declarations of the library's C interface, ``src/interface.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any

_P, _I, _N, _F = c_void_p, c_int64, c_int32, c_float

NUM_DRAW_SCALARS = 5
"""Number of scalars in ``gpu.batch.sampling_table.DRAW_SCALARS``, in the order of SampleArgs'
pointers."""


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Makes the fields of a structure from types and space-separated names."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class AttentionArgs(ctypes.Structure):
    """``AttentionArgs`` of the interface."""

    _fields_ = _fields(
        (_P, "q"),
        (_I, "q_token_stride q_head_stride"),
        (_P, "cache"),
        (_I, "kv_stride block_stride slot_stride head_stride"),
        (_P, "out block_table"),
        (_I, "table_stride table_width"),
        (_P, "query_start seq_lens lines"),
        (_I, "table_lines rows num_tokens heads kv_heads head_dim num_blocks block_size window"),
        (_F, "scale softcap"),
        (_P, "sinks"),
        (_N, "dtype"),
    )


class RopeArgs(ctypes.Structure):
    """``RopeArgs`` of the interface."""

    _fields_ = _fields(
        (_P, "qkv"),
        (_I, "token_stride"),
        (_P, "table"),
        (_I, "table_rows table_width"),
        (_P, "positions q_norm k_norm v_norm"),
        (_F, "eps"),
        (_P, "cache"),
        (_I, "kv_stride block_stride slot_stride head_stride"),
        (_P, "slots"),
        (_I, "num_tokens heads kv_heads head_dim num_blocks block_size"),
        (_N, "dtype norm_dtype whole_norms"),
    )


class SampleArgs(ctypes.Structure):
    """``SampleArgs`` of the interface."""

    _fields_ = [
        *_fields((_P, "logits"), (_I, "row_stride rows vocab_size"), (_P, "req_indices positions")),
        ("scalars", _P * NUM_DRAW_SCALARS),
        *_fields((_I, "lines"), (_P, "last_sampled out"), (_N, "dtype")),
    ]


class LogitsArgs(ctypes.Structure):
    """``LogitsArgs`` of the interface."""

    _fields_ = _fields(
        (_P, "logits"),
        (_I, "row_stride rows vocab_size"),
        (_P, "out req_indices positions host_token_ids last_sampled"),
        (_I, "lines words"),
        (_P, "mask_slots mask_words"),
        (_I, "num_masks"),
        (_P, "restricted num_bias num_stop_ids min_end allowed bias_ids bias_values stop_ids"),
        (_I, "max_bias max_stop_ids"),
        (_P, "counted_from repetition frequency presence counts in_prompt"),
        (_N, "dtype rules penalties"),
    )


class RoutingArgs(ctypes.Structure):
    """``RoutingArgs`` of the interface."""

    _fields_ = _fields(
        (_P, "logits"),
        (_I, "stride num_experts top_k num_groups top_groups"),
        (_P, "correction"),
        (_F, "scale least_sum"),
        (_P, "expert_scale"),
        (_N, "sigmoid renormalise"),
        (_P, "ids weights"),
        (_N, "dtype"),
    )


class ExpertsArgs(ctypes.Structure):
    """``ExpertsArgs`` of the interface."""

    _fields_ = _fields(
        (_P, "gate_up down x"),
        (_I, "x_stride"),
        (_P, "ids weights shared"),
        (_I, "shared_stride"),
        (_P, "gate"),
        (_I, "gate_stride"),
        (_P, "out"),
        (_I, "num_experts top_k width inner"),
        (_F, "alpha limit"),
        (_N, "dtype activation"),
    )


class StateRowsArgs(ctypes.Structure):
    """``StateRows`` of the interface."""

    _fields_ = _fields((_P, "lines starts query_start"), (_I, "rows num_tokens num_slots"))


class ConvArgs(ctypes.Structure):
    """``ConvArgs`` of the interface."""

    _fields_ = [
        ("rows", StateRowsArgs),
        *_fields(
            (_P, "x"),
            (_I, "x_stride"),
            (_P, "weight state out"),
            (_I, "channels width"),
            (_N, "dtype"),
        ),
    ]


class DeltaArgs(ctypes.Structure):
    """``DeltaArgs`` of the interface."""

    _fields_ = [
        ("rows", StateRowsArgs),
        *_fields(
            (_P, "qkv"),
            (_I, "qkv_stride"),
            (_P, "gates"),
            (_I, "gates_stride"),
            (_P, "dt_bias log_rate state out"),
            (_I, "key_heads value_heads key_dim value_dim"),
            (_N, "dtype"),
        ),
    ]


class GroupedArgs(ctypes.Structure):
    """``GroupedArgs`` of the interface."""

    _fields_ = _fields(
        (_P, "values"), (_I, "n k row_bytes group"), (_P, "scales zeros bias"),
        (_N, "dtype scale_dtype"),
    )  # fmt: skip


class RoundArgs(ctypes.Structure):
    """``RoundArgs`` of the interface."""

    _fields_ = _fields(
        (_P, "values"), (_I, "n k row_stride"), (_P, "values_out scales zeros"), (_N, "dtype bits")
    )  # fmt: skip


_ROWS = "lines starts counts table"
_FIELDS: dict[str, list[tuple[str, Any]]] = {
    "tokens": _fields(
        (_P, _ROWS),
        (_I, "table_lines table_width"),
        (_P, "token_ids positions query_start seq_lens"),
    ),
    "slots": _fields((_P, _ROWS), (_I, "table_lines table_width block_size"), (_P, "slots")),
    "gather": _fields((_P, "weights ids out"), (_F, "scale"), (_N, "dtype")),
    "select": _fields(
        (_P, "x"), (_I, "x_stride x_rows"), (_P, "ids out"), (_I, "width"), (_F, "scale"),
        (_N, "dtype"),
    ),
    "linear": _fields(
        (_P, "weights x"), (_I, "x_stride"), (_P, "y"), (_I, "y_stride"), (_N, "dtype")
    ),
    "rms_norm": _fields(
        (_P, "x"), (_I, "x_stride"), (_P, "residual"), (_I, "residual_stride"),
        (_P, "weight out"), (_I, "width parts"), (_F, "eps multiplier scale"),
        (_N, "dtype weight_dtype"),
    ),
    "gated_mul": _fields(
        (_P, "gate"), (_I, "gate_stride"), (_P, "up"), (_I, "up_stride"), (_P, "out"),
        (_I, "width"), (_N, "dtype activation"),
    ),
    "add": _fields(
        (_P, "x"), (_I, "x_stride"), (_P, "residual"), (_I, "residual_stride width"),
        (_F, "multiplier scale"), (_N, "dtype"),
    ),
    "softcap": _fields((_P, "x"), (_I, "stride width"), (_F, "cap"), (_N, "dtype")),
    "argmax": _fields((_P, "weights x"), (_I, "x_stride"), (_P, "out"), (_N, "dtype")),
    "gated_norm": _fields(
        (_P, "x"), (_I, "x_stride"), (_P, "gate"), (_I, "gate_stride"), (_P, "weight out"),
        (_I, "heads head_size"), (_F, "eps"), (_N, "dtype"),
    ),
    "sigmoid_mul": _fields(
        (_P, "x"), (_I, "x_stride"), (_P, "gate"), (_I, "gate_stride"), (_P, "out"), (_I, "width"),
        (_N, "dtype"),
    ),
}  # fmt: skip
ARGS: Mapping[str, type[ctypes.Structure]] = {
    name: type(f"{name}_args", (ctypes.Structure,), {"_fields_": fields})
    for name, fields in _FIELDS.items()
} | {
    "rope_and_cache": RopeArgs,
    "attention": AttentionArgs,
    "routing": RoutingArgs,
    "experts": ExpertsArgs,
    "causal_conv": ConvArgs,
    "gated_delta": DeltaArgs,
}
"""Argument structures of a program's ops, by the ops' names."""

OP_KINDS = (
    "tokens", "slots", "gather", "select", "linear", "rms_norm", "rope_and_cache", "attention",
    "gated_mul", "add", "softcap", "routing", "experts", "argmax",
    "causal_conv", "gated_delta", "gated_norm", "sigmoid_mul",
)  # fmt: skip
"""Names of ops, in the order of ``OpKind``."""

NUM_SIZES = 5


class _AnyArgs(ctypes.Union):
    _fields_ = list(ARGS.items())


class Op(ctypes.Structure):
    """``Op`` of the interface."""

    _fields_ = [*_fields((_N, "kind size x_size")), ("args", _AnyArgs)]


class ProgramArgs(ctypes.Structure):
    """``Program`` of the interface."""

    _fields_ = [
        ("ops", POINTER(Op)),
        *_fields((_I, "num_ops op_bytes num_writing_ops")),
        ("capacity", _I * NUM_SIZES),
    ]


class JobArgs(ctypes.Structure):
    """``Job`` of the interface."""

    _fields_ = [
        ("program", POINTER(ProgramArgs)),
        ("sizes", _I * NUM_SIZES),
        *_fields((_P, "to source"), (_I, "num_bytes")),
        ("draw", SampleArgs),
        *_fields(
            (_P, "greedy"),
            (_I, "num_tokens"),
            (_P, "tokens lines positions table"),
            (_I, "table_lines table_width failed number"),
            (_N, "status"),
        ),
    ]


SIGNATURES: Mapping[str, tuple[Any, list[Any]]] = {
    "sources": (c_char_p, []),
    "best_isa": (c_char_p, []),
    "lengthen_slice": (None, []),
    "create": (_P, [_N, c_char_p]),
    "close": (None, [_P]),
    "isa": (c_char_p, [_P]),
    "pack": (_P, [_P, _P, _N, _I, _I, _I, _P, _P]),
    "pack_grouped": (_P, [_P, POINTER(GroupedArgs)]),
    "round": (_N, [_P, POINTER(RoundArgs)]),
    "free_weights": (None, [_P]),
    "weights_bytes": (_I, [_P]),
    "linear": (_N, [_P, _P, _P, _I, _P, _I, _I, _N]),
    "linear_argmax": (_N, [_P, _P, _P, _I, _P, _I, _N]),
    "gather": (_N, [_P, _P, _P, _I, _P, _F, _N]),
    "attention": (_N, [_P, POINTER(AttentionArgs)]),
    "rms_norm": (_N, [_P, _P, _I, _P, _I, _P, _N, _F, _F, _F, _P, _I, _I, _N]),
    "add": (_N, [_P, _P, _I, _P, _I, _F, _F, _I, _I, _N]),
    "softcap": (_N, [_P, _P, _I, _F, _I, _I, _N]),
    "rope_and_cache": (_N, [_P, POINTER(RopeArgs)]),
    "gated_mul": (_N, [_P, _P, _I, _P, _I, _P, _I, _I, _N, _N]),
    "read": (_N, [_P, _P, _I, POINTER(ctypes.c_uint64)]),
    "sample": (_N, [_P, POINTER(SampleArgs)]),
    "process_logits": (_N, [_P, POINTER(LogitsArgs)]),
    "top_logprobs": (_N, [_P, _P, _I, _I, _I, _N, _P, _I, _P, _P]),
    "select": (_N, [_P, _P, _I, _I, _P, _I, _P, _I, _F, _N]),
    "routing": (_N, [_P, POINTER(RoutingArgs), _I]),
    "experts": (_N, [_P, POINTER(ExpertsArgs), _I]),
    "causal_conv": (_N, [_P, POINTER(ConvArgs)]),
    "gated_delta": (_N, [_P, POINTER(DeltaArgs)]),
    "gated_norm": (_N, [_P, POINTER(ARGS["gated_norm"]), _I]),
    "sigmoid_mul": (_N, [_P, POINTER(ARGS["sigmoid_mul"]), _I]),
    "run": (_N, [_P, POINTER(ProgramArgs), POINTER(_I), POINTER(_I)]),
    "submit": (_N, [_P, POINTER(JobArgs)]),
    "wait": (_N, [_P, POINTER(JobArgs)]),
}
"""Result and argument types of the library's functions, by name without the prefix."""
