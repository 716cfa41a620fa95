"""Questions to the installed llama.cpp, each answered in a process of its own.

llama.cpp ends the process over what it asserts, and a file of an architecture that nobody has tried
may be such a case. One process therefore has the library loaded, and forks for each question.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Shapes = dict[str, list[int]]  # tensor → ggml shape


class Refused(Exception):
    """llama.cpp does not take the file; the message is what it said."""


class LlamaLibrary:
    """Answers come from llama.cpp alone: nothing of the package under test is imported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.llama_library"],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def architectures(self) -> list[str]:
        """Names of all architectures that it knows."""
        names: list[str] = self._ask("architectures")
        return names

    def tensors(self, metadata: Path) -> Shapes:
        """What a model with the metadata of that file may have, required or not.

        Raises:
            Refused: it cannot be a model's.
        """
        shapes: Shapes = self._ask("tensors", str(metadata))
        return shapes

    def trial(self, model: Path) -> None:
        """Loads a model and evaluates a few tokens.

        Raises:
            Refused: that fails, or gives numbers that are not finite.
        """
        self._ask("trial", str(model))

    def close(self) -> None:
        self._process.communicate("")

    def _ask(self, *question: str) -> Any:
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        if answer["refused"] is not None:
            raise Refused(answer["refused"])
        return answer["value"]


# --- in the process that forks ---


def _serve() -> None:
    _Log()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(_in_a_fork(_QUESTIONS[name], arguments)), flush=True)


def _in_a_fork(answer: Callable[..., Any], arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            _Log.lines.clear()
            try:
                outcome = {"value": answer(*arguments), "refused": None}
            except Exception as error:
                said = [line for line in _Log.lines if re.search("error|missing|fail", line)]
                outcome = {"refused": " | ".join([str(error), *said[-3:]])}
            os.write(told.fileno(), json.dumps(outcome).encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        if status == 0:
            return dict(json.load(told))
        errors.seek(0)
        asserted = re.findall(r"GGML_ASSERT.*|.*rror.*", errors.read().decode(errors="replace"))
        return {"refused": f"ended with status {status}: {' '.join(asserted[-2:])}"}


class _Log:
    """Keeps what llama.cpp says."""

    lines: list[str] = []  # noqa: RUF012

    def __init__(self) -> None:
        from llama_cpp import llama_cpp as C

        @C.llama_log_callback
        def keep(_level: int, text: bytes, _: object) -> None:
            _Log.lines.append(text.decode(errors="replace").strip())

        _Log.callback = keep  # type: ignore[attr-defined]  # lives as long as the process
        C.llama_log_set(keep, None)
        C.llama_backend_init()


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def _init_from_metadata(metadata: int, seen: Callable[[int], None]) -> bool:
    """Whether a model can be made of metadata alone; `seen` gets the address of each tensor."""
    from llama_cpp import llama_cpp as C

    make = C._lib.llama_model_init_from_user
    make.restype = ctypes.c_void_p
    make.argtypes = [ctypes.c_void_p, _Callback, ctypes.c_void_p, C.llama_model_params]
    callback = _Callback(lambda tensor, _: seen(tensor))
    return bool(make(metadata, callback, None, C.llama_model_default_params()))


def _architectures() -> list[str]:
    """The library has no list to ask for, but says whether it knows a name. All texts in it are
    tried, and all ends of them: a linker keeps "bert" as the end of "nomic-bert"."""
    from llama_cpp import llama_cpp as C

    lib = C._lib
    lib.gguf_init_empty.restype = ctypes.c_void_p
    lib.gguf_set_val_str.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    lib.gguf_free.argtypes = [ctypes.c_void_p]
    texts = re.findall(rb"(?<=\0)[a-z][a-z0-9_.\-]{1,31}(?=\0)", Path(lib._name).read_bytes())
    ends = {text[start:] for text in texts for start in range(len(text) - 1)}
    known = []
    for name in sorted(ends):
        _Log.lines.clear()
        metadata = lib.gguf_init_empty()
        lib.gguf_set_val_str(metadata, b"general.architecture", name)
        _init_from_metadata(metadata, lambda _: None)
        lib.gguf_free(metadata)
        if not any("unknown model architecture" in line for line in _Log.lines):
            known.append(name.decode())
    return known


def _tensors(path: str) -> Shapes:
    from llama_cpp import llama_cpp as C

    from support.router_reference import Tensor

    lib = C._lib

    class Parameters(ctypes.Structure):
        _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]

    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, Parameters]
    shapes: Shapes = {}

    def see(address: int) -> None:
        tensor = Tensor.from_address(address)
        shapes[tensor.name.decode()] = list(tensor.ne)

    metadata = lib.gguf_init_from_file(path.encode(), Parameters(True, None))
    if not _init_from_metadata(metadata, see):
        raise ValueError("no model")
    return shapes


def _trial(path: str) -> None:
    from support.reference import Resident

    model = Resident(Path(path), threads=1)
    if model.has_memory:
        numbers = model.evaluate([list(range(3, 23)), [40], [41]])
    else:
        model.close()
        model = Resident(Path(path), threads=1, embeddings=True)
        numbers = model.embed(list(range(3, 23)))
    if not math.isfinite(float(numbers.sum())):
        raise ValueError("its output is not finite")


_QUESTIONS: dict[str, Callable[..., Any]] = {
    "architectures": _architectures,
    "tensors": _tensors,
    "trial": _trial,
}

if __name__ == "__main__":
    _serve()
