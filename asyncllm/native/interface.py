"""ctypes declarations of the library's C interface, read from ``src/interface.h``."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from ctypes import POINTER, Structure, Union
from pathlib import Path
from typing import Any

_HEADER_TEXT = re.sub("//.*", "", (Path(__file__).parent / "src" / "interface.h").read_text())

_SCALAR_TYPES: Mapping[str, Any] = {
    "void": None,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
}

OP_KINDS = tuple(name.lower() for name in re.findall(r"\bOP_(\w+) = ", _HEADER_TEXT))
"""Names of ops, in the order of ``enum OpKind`` and of the members of the union ``Op.args``."""

NUM_STEP_SIZES = int(re.findall(r"\bNUM_SIZES = (\d+)", _HEADER_TEXT)[0])


def _ctypes_type(declaration: str, structs: Mapping[str, type[Structure]]) -> Any:
    """The ctypes type of a field, parameter or result; a pointer to data is ``c_void_p``."""
    kind = re.findall(r"\w+", declaration.removeprefix("const "))[0]
    if "*" not in declaration:
        return structs.get(kind) or _SCALAR_TYPES[kind]
    if kind == "char":
        return ctypes.c_char_p
    return POINTER(structs[kind]) if kind in structs else ctypes.c_void_p


def _read_fields(body: str, structs: Mapping[str, type[Structure]]) -> list[tuple[str, Any]]:
    """Fields of a structure. The members of the union ``Op.args`` are named after the ops."""
    fields: list[tuple[str, Any]] = []
    statements = r"\s*(?:union {(.*?)} (\w+);|([^;]+);)"
    for members, union, declaration in re.findall(statements, body, re.S):
        if union:
            kinds = (kind for _, kind in _read_fields(members, structs))
            namespace = {"_fields_": list(zip(OP_KINDS, kinds, strict=True))}
            fields.append((union, type(union, (Union,), namespace)))
            continue
        kind = _ctypes_type(declaration, structs)
        if declaration.endswith("[NUM_SIZES]"):
            kind *= NUM_STEP_SIZES
        names = re.findall(r"(\w+)(?:\[NUM_SIZES\])?(?:,|$)", declaration)
        fields += [(name, kind) for name in names]
    return fields


def _read_structs() -> dict[str, type[Structure]]:
    structs: dict[str, type[Structure]] = {}
    for name, body in re.findall(r"typedef struct (\w+) {(.*?)\n}", _HEADER_TEXT, re.S):
        structs[name] = type(name, (Structure,), {"_fields_": _read_fields(body, structs)})
    return structs


STRUCTS: Mapping[str, type[Structure]] = _read_structs()
"""ctypes structures by their names in the interface."""

Op: Any = STRUCTS["Op"]

OP_ARG_STRUCTS: Mapping[str, type[Structure]] = dict(dict(Op._fields_)["args"]._fields_)
"""ctypes structures of the ops' arguments, by the ops' names."""


def _read_signatures() -> dict[str, tuple[Any, list[Any]]]:
    signatures: dict[str, tuple[Any, list[Any]]] = {}
    prototype = r"^(\w[\w* ]+[ *])asyncllm_(\w+)\(([^)]*)\);"
    for result, name, parameters in re.findall(prototype, _HEADER_TEXT, re.M):
        types = [_ctypes_type(each.strip(), STRUCTS) for each in parameters.split(",")]
        signatures[name] = (
            _ctypes_type(result, STRUCTS),
            [kind for kind in types if kind is not None],
        )
    return signatures


SIGNATURES: Mapping[str, tuple[Any, list[Any]]] = _read_signatures()
"""Result and argument types of the library's functions, by name without the prefix
``asyncllm_``."""
