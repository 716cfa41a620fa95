"""Structs and functions of ggml that llama-cpp-python does not expose.

The tensor struct is declared here and checked once against ggml's own public functions
(`check_layout`), so that a library with another layout is noticed at start and not as a wrong
token. `placement` knows the structs of buffers and checks those. docs/llama-cpp.md lists all of
them; a function that is declared here and missing in the library makes a start fail, so only those
that are used are declared.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp._ctypes_extensions import load_shared_library

from routeahead.errors import StreamError

MAX_DIMS = 4
MAX_SRC = 10
POINTER = ctypes.sizeof(ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """Mirror of `struct ggml_tensor` (ggml.h) up to and including its name."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * MAX_DIMS),
        ("nb", ctypes.c_size_t * MAX_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


class _InitParams(ctypes.Structure):
    """Mirror of `struct ggml_init_params` (ggml.h)."""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class GgufInitParams(ctypes.Structure):
    """Mirror of `struct gguf_init_params` (gguf.h)."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


class _Object(ctypes.Structure):
    """Mirror of `struct ggml_object` (ggml.c), which stands before each tensor of a context."""

    _fields_ = [
        ("offs", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("next", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
    ]


_PTR, _SIZE, _STR = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
_I64, _INT = ctypes.c_int64, ctypes.c_int

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_PTR, [_InitParams]),
    "ggml_free": (None, [_PTR]),
    "ggml_new_tensor_2d": (_PTR, [_PTR, _INT, _I64, _I64]),
    "ggml_new_tensor_3d": (_PTR, [_PTR, _INT, _I64, _I64, _I64]),
    "ggml_mul_mat_id": (_PTR, [_PTR, _PTR, _PTR, _PTR]),
    "ggml_view_2d": (_PTR, [_PTR, _PTR, _I64, _I64, _SIZE, _SIZE]),
    "ggml_set_name": (_PTR, [_PTR, _STR]),
    "ggml_get_name": (_PTR, [_PTR]),
    "ggml_get_data": (_PTR, [_PTR]),
    "ggml_nbytes": (_SIZE, [_PTR]),
    "ggml_set_abort_callback": (_PTR, [_PTR]),
    "ggml_op_name": (_STR, [_INT]),
    "ggml_type_name": (_STR, [_INT]),
    "ggml_unary_op_name": (_STR, [_INT]),
    "ggml_mul_mat": (_PTR, [_PTR, _PTR, _PTR]),
    "ggml_cast": (_PTR, [_PTR, _PTR, _INT]),
    "ggml_add": (_PTR, [_PTR, _PTR, _PTR]),
    "ggml_soft_max": (_PTR, [_PTR, _PTR]),
    "ggml_sigmoid": (_PTR, [_PTR, _PTR]),
    "ggml_softplus": (_PTR, [_PTR, _PTR]),
    "ggml_sqrt": (_PTR, [_PTR, _PTR]),
    "ggml_argsort": (_PTR, [_PTR, _PTR, _INT]),
    "ggml_row_size": (_SIZE, [_INT, _I64]),
    "ggml_quantize_chunk": (_SIZE, [_INT, _PTR, _PTR, _I64, _I64, _I64, _PTR]),
    "ggml_new_graph_custom": (_PTR, [_PTR, _SIZE, ctypes.c_bool]),
    "ggml_graph_overhead_custom": (_SIZE, [_SIZE, ctypes.c_bool]),
    "ggml_build_forward_expand": (None, [_PTR, _PTR]),
    "ggml_backend_cpu_buffer_from_ptr": (_PTR, [_PTR, _SIZE]),
    "ggml_backend_buffer_get_type": (_PTR, [_PTR]),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, [_PTR]),
    "ggml_backend_buffer_init_tensor": (_INT, [_PTR, _PTR]),
    "ggml_backend_buffer_free": (None, [_PTR]),
    "ggml_backend_cpu_buffer_type": (_PTR, []),
    "ggml_backend_buft_name": (_STR, [_PTR]),
    "ggml_backend_buft_is_host": (ctypes.c_bool, [_PTR]),
    "ggml_backend_buft_get_alignment": (_SIZE, [_PTR]),
    "ggml_backend_buft_get_device": (_PTR, [_PTR]),
    "ggml_backend_tensor_get": (None, [_PTR, _PTR, _SIZE, _SIZE]),
    "ggml_backend_tensor_set": (None, [_PTR, _PTR, _SIZE, _SIZE]),
    "ggml_backend_dev_count": (_SIZE, []),
    "ggml_backend_dev_get": (_PTR, [_SIZE]),
    "ggml_backend_dev_type": (_INT, [_PTR]),
    "ggml_backend_dev_name": (_STR, [_PTR]),
    "ggml_backend_dev_memory": (None, [_PTR, ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)]),
    "gguf_init_from_file": (_PTR, [_STR, GgufInitParams]),
    "gguf_free": (None, [_PTR]),
    "gguf_get_data_offset": (_SIZE, [_PTR]),
    "gguf_get_n_tensors": (_I64, [_PTR]),
    "gguf_get_tensor_name": (_STR, [_PTR, _I64]),
    "gguf_get_tensor_ne": (ctypes.POINTER(_I64), [_PTR, _I64]),
    "gguf_get_tensor_type": (_INT, [_PTR, _I64]),
    "gguf_get_tensor_offset": (_SIZE, [_PTR, _I64]),
    "gguf_get_tensor_size": (_SIZE, [_PTR, _I64]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Returns ggml as llama.cpp uses it, with the functions above declared.

    They are looked up through libllama, which finds them in the libraries that it has loaded: a
    wheel may hold libggml-base under several names, and opening another name would load a second
    copy.

    Raises:
        StreamError: the installed llama-cpp-python lacks one of them.
    """
    folder = Path(llama_cpp.__file__).parent / "lib"
    base: ctypes.CDLL = load_shared_library("llama", folder)
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(base, name)
        except AttributeError:
            raise StreamError(
                f"{folder} has no {name}: install a llama-cpp-python of the supported range"
            ) from None
        function.restype, function.argtypes = result, arguments
    return base


class Plan(ctypes.Structure):
    """Mirror of `struct ggml_cplan` (ggml-cpu.h)."""

    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    ]


class Traits(ctypes.Structure):
    """Mirror of `struct ggml_type_traits_cpu` (ggml-cpu.h): the kernels of a data type."""

    _fields_ = [
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    ]


_COMPUTE: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_type_traits_cpu": (ctypes.POINTER(Traits), [_INT]),
    "ggml_graph_plan": (Plan, [_PTR, _INT, _PTR]),
    "ggml_graph_compute": (_INT, [_PTR, ctypes.POINTER(Plan)]),
}


@functools.cache
def compute_library() -> ctypes.CDLL:
    """Returns ggml's CPU backend, to compute graphs of our own.

    Raises:
        StreamError: the library does not export it, because it loads the CPU backend as a plug-in.
    """
    base = library()
    for name, (result, arguments) in _COMPUTE.items():
        try:
            function = getattr(base, name)
        except AttributeError:
            raise StreamError(f"this llama-cpp-python does not export {name}") from None
        function.restype, function.argtypes = result, arguments
    return base


def new_context(nbytes: int) -> int:
    """Returns a context for `nbytes` of tensor and graph structs, whose data lies elsewhere.

    Free it with `ggml_free`.
    """
    context: int = library().ggml_init(_InitParams(nbytes, None, True))
    return context


def tensor_at(address: int) -> Tensor:
    """The tensor struct at `address`, in place: a write to it is a write to ggml's tensor."""
    return Tensor.from_address(address)


def tensors_after(address: int) -> Iterator[int]:
    """Addresses of the tensors that were made after the one at `address`, in its context."""
    place = _Object.from_address(address - ctypes.sizeof(_Object))
    start = address - place.offs
    while place.next:
        place = _Object.from_address(place.next)
        if place.type == 0:  # a tensor
            yield start + place.offs


def type_name(ggml_type: int) -> str:
    """Name of a data type, such as "F32"."""
    name: bytes = library().ggml_type_name(ggml_type)
    return name.decode().upper()


def type_code(name: str) -> int:
    """Number of the data type that ggml calls `name`: "F32", "F16", "Q8_0" or "I32"."""
    return {"F32": 0, "F16": 1, "Q8_0": 8, "I32": 26}[name]


def op_name(tensor: Tensor) -> str:
    """The tensor's operation, such as "MUL_MAT"; a unary one by its own name, such as "SIGMOID"."""
    base = library()
    name: bytes = base.ggml_op_name(tensor.op)
    if name == b"UNARY":
        name = base.ggml_unary_op_name(tensor.op_params[0])
    return name.decode()


@functools.cache
def op_code(name: str) -> int:
    """Number of the operation that ggml calls `name`, such as "MUL_MAT_ID".

    Raises:
        StreamError: no operation has that name.
    """
    base = library()
    # ggml_op_name does not check its argument, so the scan stays below the number of operations.
    for code in range(90):
        if base.ggml_op_name(code).decode() == name:
            return code
    raise StreamError(f"ggml has no operation named {name}")


@functools.cache
def check_layout() -> None:
    """Compares `Tensor` with what ggml's public functions return for real tensors.

    Raises:
        StreamError: they differ, so this library cannot be used for streaming.
    """
    base = library()
    context = base.ggml_init(_InitParams(1 << 20, None, False))
    try:
        weights = base.ggml_new_tensor_3d(context, 0, 8, 4, 6)
        rows = base.ggml_new_tensor_3d(context, 0, 8, 1, 2)
        ids = base.ggml_new_tensor_2d(context, 26, 3, 2)
        view = base.ggml_view_2d(context, ids, 2, 2, 12, 4)
        product = base.ggml_mul_mat_id(context, weights, rows, ids)
        base.ggml_set_name(product, b"probe-17")
        t, v = tensor_at(product), tensor_at(view)
        facts = {
            "type": (type_name(t.type), type_name(tensor_at(ids).type)) == ("F32", "I32"),
            "name": base.ggml_get_name(product) == product + Tensor.name.offset
            and t.name == b"probe-17",
            "data": t.data == base.ggml_get_data(product) is not None,
            "ne": list(t.ne) == [4, 3, 2, 1] and list(tensor_at(weights).ne) == [8, 4, 6, 1],
            "nb": t.nb[3] == base.ggml_nbytes(product) and v.nb[1] == 12,
            "op": t.op == op_code("MUL_MAT_ID"),
            "src": list(t.src)[:4] == [weights, rows, ids, None],
            "object": list(tensors_after(rows)) == [ids, view, product],
            "view": v.view_src == ids and v.view_offs == 4 and v.data == tensor_at(ids).data + 4,
        }
    finally:
        base.ggml_free(context)
    wrong = [name for name, same in facts.items() if not same]
    if wrong:
        raise StreamError(
            f"ggml_tensor of llama-cpp-python {llama_cpp.__version__} is laid out differently "
            f"(fields {', '.join(wrong)})"
        )
