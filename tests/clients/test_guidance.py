"""guidance calls `llama_decode` itself: a read error and a Ctrl-C end its generation."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
from support.readers import disk_error

from routeahead import Llama, ReadError
from routeahead.engine.streamed_model import Hooks
from routeahead.models import DEFAULT_MODEL

pytest.importorskip("guidance", reason="needs guidance: pip install -e '.[clients]'")

from guidance import models, select

pytestmark = pytest.mark.filterwarnings("ignore:Chat template", "ignore::DeprecationWarning")


class Faulty:
    """A reader; `fault` is called at the next read while it is set."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.fault: Any = None

    def read(self, *arguments: Any) -> int:
        fault, self.fault = self.fault, None
        if fault:
            fault()
        return int(self.inner.read(*arguments))

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def loaded() -> tuple[Llama, Faulty]:
    made: list[Faulty] = []

    def wrap(inner: Any) -> Faulty:
        made.append(Faulty(inner))
        return made[0]

    llm = Llama(DEFAULT_MODEL, n_ctx=256, n_threads=1, cache_mb=0, _hooks=Hooks(wrap_reader=wrap))
    return llm, made[0]


def answer(model: Any) -> str:
    grown = model + "Question: What is 50 - 6?\nAnswer: " + select(["44", "45", "46"], name="said")
    return str(grown["said"])


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(0.05)


@pytest.mark.parametrize(
    ("fault", "kept"), [(disk_error, ReadError), (interrupt, KeyboardInterrupt)]
)
def test_a_fault_ends_the_generation(
    loaded: tuple[Llama, Faulty], fault: Any, kept: type[BaseException]
) -> None:
    llm, reader = loaded
    model = models.LlamaCpp(llm, echo=False)
    reader.fault = fault
    with pytest.raises(BaseException) as caught:
        answer(model)
    if not isinstance(caught.value, KeyboardInterrupt):  # it arrived outside of llama_decode
        assert "llama_decode returned 2" in str(caught.value)
        with pytest.raises(kept):
            llm.check()
    assert answer(models.LlamaCpp(llm, echo=False)) == "44"


def test_answers_are_the_resident_ones(loaded: tuple[Llama, Faulty]) -> None:
    resident = Llama(DEFAULT_MODEL, n_ctx=256, n_threads=1, resident=True)
    assert answer(models.LlamaCpp(loaded[0], echo=False)) == "44"
    assert answer(models.LlamaCpp(resident, echo=False)) == "44"
