"""Loads a model without letting llama.cpp read its weights.

llama.cpp has no option to leave tensors unread, but for tensors whose names match a pattern it
accepts a buffer type to put them in. Ours is the CPU's (`struct ggml_backend_buffer_type`) with two
functions replaced, and a third in each buffer that it makes (`struct ggml_backend_buffer`):

* `get_name`, because the loader keys its buffers by that name;
* `alloc_buffer`, which reserves addresses and commits nothing;
* `init_tensor`, called for each tensor before anything is read: it points `->data` into the arena
  and spoils the first byte of the tensor's name, so that the loader looks the name up in the file,
  finds no such weight, and goes on without reading.

Where layers go to a device, only what stays in host memory is ours: llama.cpp places and reads the
rest itself, and no more than that.

The names are restored after the load. Every step depends on the layout of these structs, which
`Placement()` first checks against ggml's public getters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from llama_cpp import llama_cpp as C

from routeahead.errors import StreamError
from routeahead.experts.arena import Reservation
from routeahead.llamacpp import ggml

_BUFFER_TYPE_WORDS = 8  # six interface functions, device, context
_GET_NAME, _ALLOC_BUFFER = 0, 1
_INIT_TENSOR = 2  # slot in a buffer's interface
_BUFFER_WORDS = 32  # words of a buffer that are searched for its type

_GetName = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_AllocBuffer = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_InitTensor = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

_NAME = b"RouteAheadArena"
ALL_TENSORS = ".*"
_ROUNDED = 1 + 1e-6  # llama.cpp counts in float32
_ADAPTER = (".lora_a", ".lora_b")  # of another file, from which llama.cpp fills them itself


class _Override(ctypes.Structure):
    """Mirror of `struct llama_model_tensor_buft_override` (llama.h)."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def _overrides(pattern: str, kind: int) -> Any:
    """One override, and the end of the list."""
    return (_Override * 2)(_Override(pattern.encode(), kind), _Override(None, None))


def _word(address: int, index: int) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(address + index * ggml.POINTER)


class Placement:
    """Places the tensors of one model whose names match `pattern` at the address that `place(name)`
    gives; None if its files have no such tensor.

    Keep it alive as long as the model lives: llama.cpp holds pointers into it.

    Attributes:
        tensors: name → address of the ggml tensor, filled by the load.

    Raises:
        StreamError: the installed library's structs have another layout.
    """

    def __init__(
        self,
        place: Callable[[str], int | None],
        pattern: str = ALL_TENSORS,
        *,
        others: float = 0.0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """
        Prepares a load.

        Args:
            others: the share of the files' bytes that llama.cpp may read, into what is not ours.
            progress: called with the share that it has read.
        """
        ggml.check_layout()
        self._place = place
        self._base = ggml.library()
        self._name = ctypes.create_string_buffer(_NAME)
        self._callbacks = (
            _GetName(lambda _: ctypes.addressof(self._name)),
            _AllocBuffer(self._alloc_buffer),
            _InitTensor(self._init_tensor),
        )
        self._type: Any = self._copy_cpu_type()
        self._type_word = self._find_type_word()
        self._overrides = _overrides(pattern, ctypes.addressof(self._type))
        self._reservations: list[Reservation] = []
        self._buffers: list[int] = []
        self._spoiled: list[tuple[int, bytes]] = []  # a tied output has its embedding's name
        self.tensors: dict[str, int] = {}
        self._fault: BaseException | None = None
        self._others, self._tell = others, progress
        self._progress = C.llama_progress_callback(self._read)

    def inject(self, params: Any) -> None:
        """Makes a load with `params` use this placement."""
        params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        # Called before each tensor that is really read, with the share that was: refuses too much.
        params.progress_callback = self._progress

    def finish(self, *, loaded: bool) -> None:
        """Restores the tensors' names after the load.

        Raises:
            StreamError: a callback of this class failed during the load.
        """
        if loaded:
            for buffer in self._buffers:
                _word(buffer, _INIT_TENSOR).value = None  # no Python call from here on
            for first, original in self._spoiled:
                ctypes.c_char.from_address(first).value = original
        if loaded and not self.tensors:
            raise StreamError("llama.cpp placed no tensor where it was told to")
        if self._fault:
            raise StreamError(f"placing the tensors failed: {self._fault}") from self._fault

    def close(self) -> None:
        """Gives the addresses back. llama.cpp must have freed the model."""
        for reservation in self._reservations:
            reservation.close()
        self._reservations.clear()

    def bind(self, name: str, address: int, stride: int, count: int) -> None:
        """Puts the slices of an expert tensor at `address` and `stride` bytes from one to the next;
        products may ask for those below `count`. Takes effect from the next node that runs."""
        tensor = ggml.tensor_at(self.tensors[name])
        tensor.data, tensor.nb[2], tensor.nb[3] = address, stride, stride * count
        tensor.ne[2] = count

    def _read(self, share: float, _data: Any) -> bool:
        if self._tell and share <= self._others:
            self._tell(share)
        return share <= self._others * _ROUNDED or share >= 1.0

    def _copy_cpu_type(self) -> Any:
        base = self._base
        source = base.ggml_backend_cpu_buffer_type()
        words = [_word(source, index).value for index in range(_BUFFER_TYPE_WORDS)]
        copy: Any = (ctypes.c_void_p * _BUFFER_TYPE_WORDS)(*words)
        copy[_GET_NAME] = ctypes.cast(self._callbacks[0], ctypes.c_void_p).value
        copy[_ALLOC_BUFFER] = ctypes.cast(self._callbacks[1], ctypes.c_void_p).value
        ours = ctypes.addressof(copy)
        same = (
            base.ggml_backend_buft_name(ours) == _NAME
            and base.ggml_backend_buft_is_host(ours)
            and base.ggml_backend_buft_get_alignment(ours)
            == base.ggml_backend_buft_get_alignment(source)
            and base.ggml_backend_buft_get_device(ours) == base.ggml_backend_buft_get_device(source)
        )
        if not same:
            raise StreamError("ggml's buffer types are laid out differently")
        return copy

    def _find_type_word(self) -> int:
        """Index of the word in a buffer that holds its type, found by value."""
        base = self._base
        memory = ctypes.create_string_buffer(256)
        aligned = -(-ctypes.addressof(memory) // 64) * 64
        buffer = base.ggml_backend_cpu_buffer_from_ptr(aligned, 64)
        try:
            kind = base.ggml_backend_buffer_get_type(buffer)
            found = [i for i in range(3, _BUFFER_WORDS) if _word(buffer, i).value == kind]
            if not found or [_word(buffer, found[0] + i).value for i in (1, 2)] != [aligned, 64]:
                raise StreamError("ggml's buffers are laid out differently")
            calls: list[tuple[int, int]] = []

            def record(buffer: int, tensor: int) -> int:
                calls.append((buffer, tensor))
                return 0

            probe = _InitTensor(record)
            _word(buffer, _INIT_TENSOR).value = ctypes.cast(probe, ctypes.c_void_p).value
            status = base.ggml_backend_buffer_init_tensor(buffer, 0x1234)
            _word(buffer, _INIT_TENSOR).value = None
            if status or calls != [(buffer, 0x1234)]:
                raise StreamError("ggml's buffer interface is laid out differently")
            return found[0]
        finally:
            base.ggml_backend_buffer_free(buffer)

    def _alloc_buffer(self, _type: int, nbytes: int) -> int | None:
        try:
            # Addresses only, so that ggml's allocator has something to count in.
            reservation = Reservation(nbytes)
            buffer: int = self._base.ggml_backend_cpu_buffer_from_ptr(reservation.address, nbytes)
            _word(buffer, self._type_word).value = ctypes.addressof(self._type)
            _word(buffer, _INIT_TENSOR).value = ctypes.cast(
                self._callbacks[2], ctypes.c_void_p
            ).value
            if self._base.ggml_backend_buffer_get_type(buffer) != ctypes.addressof(self._type):
                raise StreamError("ggml's buffers are laid out differently")
            self._reservations.append(reservation)
            self._buffers.append(buffer)
            return buffer
        except BaseException as error:  # must not cross into C
            self._fault = error
            return None

    def _init_tensor(self, _buffer: int, address: int) -> int:
        try:
            tensor = ggml.tensor_at(address)
            name = tensor.name.decode()
            place = self._place(name)
            if place is None and name.endswith(_ADAPTER):
                return 0
            if place is None:
                raise StreamError(f"the model's files have no {name}")
            tensor.data = place
            first = address + ggml.Tensor.name.offset
            self._spoiled.append((first, tensor.name[:1]))
            ctypes.c_char.from_address(first).value = b"\x01"
            self.tensors[name] = address
            return 0
        except BaseException as error:  # must not cross into C; any status but 0 ends the load
            self._fault = error
            return -1


class ExpertsInRam:
    """Makes a load that streams nothing keep the tensors of that pattern in host memory, whatever
    goes to a device. Keep it alive as long as the model lives."""

    def __init__(self, pattern: str) -> None:
        kind = ggml.library().ggml_backend_cpu_buffer_type()
        self._overrides = _overrides(pattern, kind)

    def inject(self, params: Any) -> None:
        """Makes a load with `params` use it."""
        params.tensor_buft_overrides = ctypes.addressof(self._overrides)
