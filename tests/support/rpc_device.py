"""A device that every machine has: llama.cpp's RPC backend, with a server on the loopback.

Its memory is another process's, so the CPU cannot read it, and the scheduler treats it as it treats
a GPU. Its kernels are the CPU's, so what is computed there equals what is computed here to the last
bit. Nothing of it is in a wheel; it is compiled, in seconds, against the installed llama-cpp-python
from the source archive of the same version, and kept in `build/device`.

    python tests/support/rpc_device.py PORT LIBRARY     # the server; ends with its standard input
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp

ROOT = Path(__file__).parents[2]
LIB = Path(llama_cpp.__file__).parent / "lib"
_SOURCES = ("include/", "src/ggml-rpc/", "src/ggml-impl.h", "src/ggml-backend-impl.h")
_START_S = 20

LAYERS = "ROUTEAHEAD_TEST_LAYERS"
"""The environment variable that says how many layers go there (`on_device.py`)."""

DEVICE = "ROUTEAHEAD_TEST_DEVICE"
"""The one that says which device: "rpc" or "vulkan"."""


class Unavailable(Exception):
    """There is no such device here; says why in a line."""


def backend() -> Path:
    """The compiled backend.

    Raises:
        Unavailable: it cannot be compiled here.
    """
    folder = ROOT / "build/device" / version("llama-cpp-python")
    library = folder / "libggml-rpc.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(source(_SOURCES), library)
    return library


def source(parts: tuple[str, ...]) -> Path:
    """The folder of ggml, with what begins with one of `parts` unpacked from the source archive.

    Raises:
        Unavailable: the archive cannot be downloaded.
    """
    number = version("llama-cpp-python")
    folder = ROOT / "build/device" / number
    archive = folder / f"llama_cpp_python-{number}.tar.gz"
    if not archive.exists():
        pin = f"llama-cpp-python=={number}"
        _run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
             "llama-cpp-python", pin, "--dest", str(folder)],
            f"the source of {pin} cannot be downloaded",
        )  # fmt: skip
    base = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp/ggml/"
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            inside = member.name.startswith(base)
            if inside and member.name.removeprefix(base).startswith(parts):
                tar.extract(member, folder, filter="data")
    return folder / base


def _compile(ggml: Path, library: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if not compiler:
        raise Unavailable("there is no C++ compiler")
    made = library.with_suffix(".part")
    folders = [f"-I{ggml / folder}" for folder in ("include", "src", "src/ggml-rpc")]
    sources = [str(ggml / "src/ggml-rpc" / name) for name in ("ggml-rpc.cpp", "transport.cpp")]
    _run(
        [compiler, "-std=c++17", "-O2", "-fPIC", "-shared",
         "-DGGML_BACKEND_SHARED", "-DGGML_SHARED", *folders, *sources,
         "-o", str(made), f"-L{LIB}", "-lggml-base", "-lpthread"],
        "the backend cannot be compiled",
    )  # fmt: skip
    made.rename(library)


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise Unavailable(f"{failure}: {reason}")


def _llama() -> ctypes.CDLL:
    """libllama, with its symbols there for the backend."""
    return ctypes.CDLL(str(LIB / "libllama.so"), mode=ctypes.RTLD_GLOBAL)


class Vulkan:
    """Mesa's software device, if `vulkan_device.sh` has compiled the backend."""

    def __init__(self) -> None:
        library = ROOT / "build/device" / version("llama-cpp-python") / "libggml-vulkan.so"
        if not library.exists():
            raise Unavailable(f"{library} is missing: tests/support/vulkan_device.sh makes it")
        os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
        llama, vulkan = _llama(), ctypes.CDLL(str(library))
        vulkan.ggml_backend_vk_reg.restype = ctypes.c_void_p
        llama.ggml_backend_register.argtypes = [ctypes.c_void_p]
        llama.ggml_backend_register(vulkan.ggml_backend_vk_reg())

    def close(self) -> None:
        pass


class Server:
    """The device's process. Close every model on it first: the exit would wait for ever."""

    def __init__(self) -> None:
        library = backend()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [sys.executable, __file__, str(self.port), str(library)]
        self._process = subprocess.Popen(  # in a session of its own: a Ctrl-C is not for it
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._register(library)

    def _register(self, library: Path) -> None:
        """Makes the device known to the llama.cpp of this process."""
        endpoint = f"127.0.0.1:{self.port}"
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.2).close()
                break
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise Unavailable("its server does not start") from None
                time.sleep(0.02)
        llama, rpc = _llama(), ctypes.CDLL(str(library))
        add: Any = rpc.ggml_backend_rpc_add_server
        add.restype, add.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        register: Any = llama.ggml_backend_register
        register.argtypes = [ctypes.c_void_p]
        register(add(endpoint.encode()))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)


def serve(port: int, library: str) -> None:
    """Runs the server until standard input ends, which it does with the process that started it."""

    def end() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    llama, rpc = _llama(), ctypes.CDLL(library)
    llama.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(llama.ggml_backend_dev_by_type(0))
    start: Any = rpc.ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    start.argtypes = [*start.argtypes, ctypes.c_void_p]
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, devices)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
