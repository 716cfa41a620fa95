"""Loads model files, each in a forked process, and says what became of it.

    python -m support.load_server SOUND_MODEL

reads paths from stdin and answers each with one line of JSON: `status` ("loaded", "refused",
"exception", or what ended the process), `message` (all that it said) and `rss` (its peak in bytes).
The sound model is loaded first, so that what is imported and compiled once is there for all.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

LIMIT_S = 30
_LOADED, _REFUSED, _EXCEPTION = 0, 10, 20
_NAMES = {_LOADED: "loaded", _REFUSED: "refused", _EXCEPTION: "exception"}


class LoadServer:
    """Starts the process that `python -m support.load_server` describes."""

    def __init__(self, sound: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.load_server", sound],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        assert self._ask("") == {"ready": True}

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def load(self, path: Path) -> dict[str, Any]:
        return self._ask(str(path))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def use(path: str) -> None:
    """Loads a model and evaluates, tokenises and detokenises a little."""
    from routeahead import Llama

    warnings.simplefilter("ignore")  # what is loaded whole says so, with llama.cpp's own words
    llm = Llama(path, n_ctx=32, n_batch=32, n_threads=1, cache_mb=0, io_threads=1)
    tokens = llm.tokenize("Hello, wörld \n\0 1 + 2".encode(), special=True)[:8]
    llm.eval([token for token in tokens if token >= 0] or [0])  # a wrong tokenizer gives -1
    llm.phase = "decode"
    llm.eval([llm.sample(temp=0)])
    llm.detokenize(list(range(min(64, llm.n_vocab()))))
    llm.close()


def _child(path: str, said: int) -> NoReturn:
    os.dup2(said, 1)
    os.dup2(said, 2)
    signal.alarm(LIMIT_S)
    from routeahead.errors import RouteAheadError

    status = _LOADED
    if path == "ABORT":  # shows that an abort is told from an error
        os.abort()
    try:
        use(path)
    except RouteAheadError as error:
        status = _REFUSED
        os.write(1, str(error).encode(errors="surrogateescape"))
    except BaseException:
        status = _EXCEPTION
        os.write(1, traceback.format_exc().encode(errors="replace"))
    os._exit(status)


def _serve(path: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _child(path, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        message = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    name = _NAMES.get(code) or (signal.Signals(-code).name if code < 0 else f"exit {code}")
    return {
        "status": name,
        "message": message.decode(errors="replace"),
        "rss": usage.ru_maxrss * 1024,
    }


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    use(sys.argv[1])
    sys.stdin.readline()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_serve(line.rstrip("\n"))), flush=True)


if __name__ == "__main__":
    main()
