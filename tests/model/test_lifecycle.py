"""A model's life: what it takes is given back, whoever uses it, and in whatever process."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.library import CONTEXT, PROMPTS, THREADS, Library, evaluate
from support.processes import in_child, limited

from routeahead import Llama, SettingsError, UseError
from routeahead.experts.reader import Reader

Load = Callable[..., Llama]
NAME = "qwen3moe"
PROCESS = psutil.Process()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held(path: Path) -> tuple[int, int, int]:
    """Threads, descriptors, and bytes of memory of this process that hold that model."""
    lanes = sum(t.name.startswith(("lane-", "watcher", "predictor")) for t in threading.enumerate())
    files = sum(file.path == str(path.resolve()) for file in PROCESS.open_files())
    return lanes, files, PROCESS.memory_info().rss


def new(path: Path, **settings: object) -> Llama:
    return Llama(path, n_ctx=CONTEXT, n_threads=THREADS, **settings)


@pytest.mark.parametrize("how", ["close", "del"])
@pytest.mark.parametrize("settings", [{}, {"route_ahead": 1}], ids=["plain", "route-ahead"])
def test_everything_is_given_back(
    large: Path, no_collector: None, how: str, settings: dict[str, object]
) -> None:
    """Without a garbage collection; the model of 70 MB is wholly in the cache each time."""
    kept = []
    before = (0, 0, 0)
    for round_ in range(6):
        llm = new(large, cache_mb=200, **settings)
        evaluate(llm, PROMPTS[0])
        if how == "close":
            llm.close()
            kept.append(llm)
        del llm
        after = held(large)
        if round_ == 0:
            before = after  # what libraries keep for good
    assert after[:2] == (0, 0)
    assert after[2] < before[2] + (20 << 20)


def test_sampling_with_a_processor_leaves_no_cycle(library: Library, no_collector: None) -> None:
    path = library.path(NAME)
    llm = new(path, cache_mb=64)
    stream = llm.generate(PROMPTS[0][0], logits_processor=[lambda _, scores: scores])
    next(stream)
    del stream
    del llm
    assert held(path)[:2] == (0, 0)


RELOADS = """
import sys
from routeahead import Llama
budgets, closed = [], []
for _ in range(10):
    llm = Llama(sys.argv[1], n_ctx=64, n_threads=1)
    llm.eval(list(range(3, 60)))
    budgets.append(llm.source.cache.budget)
    if sys.argv[2] == "close":
        llm.close()
        closed.append(llm)
    del llm
print(*budgets)
"""


@pytest.mark.parametrize("how", ["close", "del"])
def test_the_tenth_load_finds_the_memory_of_the_first(large: Path, how: str) -> None:
    """Under a limit that has room for three such caches beside what is kept free."""
    done = limited(700, [sys.executable, "-c", RELOADS, str(large), how])
    assert done.returncode == 0, done.stderr
    budgets = [int(text) for text in done.stdout.split()]
    assert len(budgets) == 10 and budgets[-1] >= 0.9 * budgets[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.eval([5]),
        lambda llm: next(llm.generate([5, 6])),
        lambda llm: llm("Hello", max_tokens=2),
        lambda llm: next(llm("Hello", max_tokens=2, stream=True)),
        lambda llm: llm.create_chat_completion([{"role": "user", "content": "Hello"}]),
        lambda llm: llm.tokenize(b"Hello"),
        lambda llm: llm.detokenize([5]),
        lambda llm: llm.save_state(),
        lambda llm: llm.sample(),
        lambda llm: llm.n_vocab(),
        lambda llm: llm.token_eos(),
        lambda llm: llm.ctx,
    ],
)
@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
def test_use_after_close(load: Load, use: Callable[[Llama], object], resident: bool) -> None:
    llm = load(NAME, resident=True) if resident else load(NAME, cache_mb=64)
    llm.eval(PROMPTS[0][0])
    llm.close()
    llm.close()
    with pytest.raises(UseError, match="this model is closed: load it again"):
        use(llm)


def test_close_inside_a_call(load: Load, library: Library) -> None:
    """From a policy, a criterion or a signal handler: the call still needs the memory."""
    llm = load(NAME, cache_mb=64)

    def closing(*_: object) -> bool:
        llm.close()
        return False

    with pytest.raises(UseError, match="cannot be closed inside a call"):
        next(llm.generate(PROMPTS[0][0], stopping_criteria=closing))
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])


# --- processes ---


@pytest.mark.parametrize("settings", [{}, {"route_ahead": 1}], ids=["plain", "route-ahead"])
def test_fork(load: Load, library: Library, settings: dict[str, object]) -> None:
    """A child ends, is told what to do, closes; the parent's model does not notice."""
    llm = load(NAME, cache_mb=64, **settings)
    evaluate(llm, PROMPTS[0])
    assert in_child(lambda: None) == (0, "None")
    status, said = in_child(lambda: llm.eval(PROMPTS[1][0]))
    assert status == 0 and "UseError" in said and "load it in the child" in said
    status, said = in_child(lambda: next(llm.generate(PROMPTS[1][0])))
    assert status == 0 and "UseError" in said
    assert in_child(llm.close) == (0, "None")
    if not settings:
        np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])


def test_fork_while_lanes_read(load: Load) -> None:
    """Locks that a lane holds at the fork are free in the child."""

    class Slow:
        def __init__(self, inner: Reader) -> None:
            self.inner, self.close = inner, inner.close

        def read(self, *arguments: object) -> int:
            time.sleep(0.002)
            return self.inner.read(*arguments)  # type: ignore[arg-type]

    llm = load(NAME, cache_mb=0, wrap_reader=Slow)
    running = threading.Thread(target=evaluate, args=(llm, PROMPTS[0]))
    running.start()
    outcomes = [in_child(lambda: llm.eval([5])) for _ in range(5)]
    running.join()
    assert all(status == 0 and "UseError" in said for status, said in outcomes)


def test_child_writes_nothing_into_the_parents_traces(library: Library, tmp_path: Path) -> None:
    from routeahead.telemetry.recorder import Outputs

    csv = tmp_path / "steps.csv"
    llm = new(library.path(NAME), cache_mb=64, outputs=Outputs(csv=csv))
    llm.phase = "decode"
    for token in PROMPTS[0][0]:
        llm.eval([token])
    before = csv.read_bytes()
    assert in_child(lambda: None) == (0, "None")
    assert csv.read_bytes() == before
    llm.close()
    tokens = [line.split(",")[0] for line in csv.read_text().splitlines()[1:]]
    assert tokens == [str(n + 1) for n in range(len(PROMPTS[0][0]))]


# --- threads ---


def test_threads_share_a_model(load: Load) -> None:
    """Whole completions run one after the other, and each is what it is alone."""
    llm = load(NAME, cache_mb=64, seed=1)
    prompts = ["ab", "the quick", "zebra", "0123456789"]

    def complete(prompt: str) -> str:
        return llm(prompt, max_tokens=12, temperature=0)["choices"][0]["text"]

    alone = {prompt: complete(prompt) for prompt in prompts}
    wrong: list[object] = []

    def work(prompt: str) -> None:
        for _ in range(4):
            try:
                text = complete(prompt)
                if text != alone[prompt]:
                    wrong.append((prompt, text))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def in_thread(work: Callable[[], object]) -> object:
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_stream_that_another_thread_cut_into(load: Load, library: Library) -> None:
    llm = load(NAME, cache_mb=64)
    stream = llm.generate(PROMPTS[0][0], temp=0)
    next(stream)
    in_thread(lambda: llm.eval([7]))
    with pytest.raises(UseError, match="another thread used this model between two tokens"):
        next(stream)
    np.testing.assert_array_equal(evaluate(llm, PROMPTS[0]), library.resident(NAME)[0])


def test_a_stream_may_be_read_by_several_threads_in_turn(load: Load) -> None:
    """As servers with a pool of threads do."""
    llm = load(NAME, cache_mb=64)
    alone = [c["choices"][0]["text"] for c in llm("abc", max_tokens=6, temperature=0, stream=True)]
    stream = llm("abc", max_tokens=6, temperature=0, stream=True)
    texts = [in_thread(lambda: next(stream))["choices"][0]["text"] for _ in alone]
    assert texts == alone


def test_one_thread_may_use_the_model_between_two_tokens(load: Load) -> None:
    """As with llama-cpp-python: what the caller does in order has one meaning."""
    llm = load(NAME, cache_mb=64)
    stream = llm.generate(PROMPTS[0][0], temp=0)
    next(stream)
    llm.tokenize(b"abc")
    llm.save_state()
    next(stream)


def test_parallel_loads_leave_stdout_alone(library: Library) -> None:
    script = (
        "import itertools, sys, threading, time\n"
        "import llama_cpp.llama_cpp as C\n"
        "from routeahead import Llama\n"
        "load_file, number = C.llama_model_load_from_file, itertools.count()\n"
        "def slow(*arguments):  # the loads overlap, each ends at another time\n"
        "    time.sleep(0.1 + 0.05 * (next(number) % 4))\n"
        "    return load_file(*arguments)\n"
        "C.llama_model_load_from_file = slow\n"
        "def load():\n"
        "    for _ in range(3): Llama(sys.argv[1], n_ctx=64, n_threads=1, cache_mb=64).close()\n"
        "threads = [threading.Thread(target=load) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print('still here')\n"
    )
    command = [sys.executable, "-c", script, str(library.path(NAME))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


# --- state ---


@pytest.mark.parametrize("copied", [lambda llm: pickle.loads(pickle.dumps(llm)), copy.deepcopy])
def test_a_copy_has_the_same_settings(
    load: Load, library: Library, copied: Callable[[Llama], Llama]
) -> None:
    llm = load(NAME, cache_mb=1, io_threads=3, overlap=False, n_expert_used=2)
    twin = copied(llm)
    assert twin.settings == llm.settings and twin.n_ctx() == llm.n_ctx()
    assert twin.source and twin.source.cache.budget == 1 << 20
    np.testing.assert_array_equal(evaluate(twin, PROMPTS[0]), evaluate(llm, PROMPTS[0]))
    twin.close()


def test_what_cannot_be_copied_says_so(load: Load) -> None:
    llm = load(NAME, cache_mb=64, wrap_reader=lambda reader: reader)
    with pytest.raises(UseError, match="cannot be pickled or copied"):
        pickle.dumps(llm)


def test_state_moves_between_instances(load: Load, library: Library) -> None:
    """Of the same model with other streaming settings; the second is bit by bit the first."""
    first, second = load(NAME, cache_mb=64), load(NAME, cache_mb=0, io_threads=1)
    prompt, *tokens = PROMPTS[0]
    first.eval(prompt)
    second.load_state(first.save_state())
    second.phase = "decode"
    second.eval(tokens[0])
    row = np.ctypeslib.as_array(second._ctx.get_logits_ith(-1), shape=(second.n_vocab(),))
    np.testing.assert_array_equal(row, library.resident(NAME)[0][1])


# --- more experts than the graph has room for ---


def test_more_experts_than_the_graph_has_room_for() -> None:
    """llama.cpp ends the process for this; the embedded model has 32 experts."""
    from routeahead.models import DEFAULT_MODEL

    with pytest.raises(SettingsError, match=r"n_expert_used=32: .* has no room for so many"):
        Llama(DEFAULT_MODEL, n_ctx=64, n_threads=1, cache_mb=64, n_expert_used=32)
    llm = Llama(DEFAULT_MODEL, n_ctx=64, n_threads=1, cache_mb=64, n_expert_used=20)
    llm.eval([5, 6, 7])
    llm.close()
