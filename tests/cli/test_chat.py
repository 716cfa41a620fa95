"""`routeahead chat`, from a pipe and in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.library import Library

COMMAND = [sys.executable, "-m", "routeahead.cli.main", "chat", "-t", "1", "--temp", "0"]
NUMBER = "Translate to French: seven hundred ninety eight"
ANSWER = "sept cent quatre-vingt-dix-huit"


def piped(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_conversation_from_a_pipe() -> None:
    lines = [
        "What is 12 + 30?",
        "What is the \\",
        "capital of France?",
        "/set temp nan",
        "/set temp 0.0",
        "/set nothing 1",
        "/set seed",
        "/dance",
        '"""',
        NUMBER,
        '"""',
        "/reset",
        "/system You are terse.",
        "What is 12 + 30?",
        "word " * 2000,
        "/set",
        "/help",
        "/quit",
        "never read",
    ]
    done = piped("\n".join(lines), "--cache-mb", 2)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert answers[0] == "42" and answers[2] == ANSWER  # the one between was asked in two lines
    assert len(answers) == 4
    notes = done.stderr
    prompts = [tuple(map(int, found)) for found in re.findall(r"prompt (\d+) \((\d+) new\)", notes)]
    first, second, third, fourth = prompts
    assert first[0] == first[1]
    # A turn evaluates what is new in it: the conversation before it is in the context.
    assert first[0] < second[0] < third[0] and second[1] < second[0] and third[1] < third[0]
    assert fourth[0] < third[0]  # it began anew
    figures = r"tok/s · .* · stall \d+% · hits [\d.]+% · [\d.]+ MiB a token"
    assert len(re.findall(figures, notes)) == 4
    assert "/set temp: give 0 to 100" in notes
    assert notes.count("/set: give one of temp, top_p") == 2
    assert "/dance: no such command" in notes and "/system TEXT" in notes
    assert "tokens and the context 1024" in notes  # and the conversation goes on
    assert "temp 0.0" in notes and "never read" not in notes + done.stdout
    assert "\x1b" not in notes + done.stdout  # no colours in a pipe


def test_a_system_message_a_limit_and_a_resident_model() -> None:
    done = piped(NUMBER, "--system", "You translate.", "-n", 2, "--resident")
    assert done.returncode == 0 and done.stdout.startswith("sept")
    assert "2 tokens" in done.stderr and "cut at the limit" in done.stderr
    assert "stall" not in done.stderr


OWN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._terminal, inner = pty.openpty()
        environment = {"HOME": str(home), "TERM": "xterm", "XDG_STATE_HOME": str(home / "s")}
        # Not `pty.fork`: this process has threads, and a fork of it may hang before it execs.
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=os.environ | environment,
            start_new_session=True,
        )
        os.close(inner)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """What was shown up to a pattern; later waits begin behind it."""
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.S)):
            assert time.monotonic() < until, self.seen
            if select.select([self._terminal], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self._terminal, 4096).decode("utf-8", "replace")
                except OSError:  # the program has ended
                    raise AssertionError(self.seen) from None
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def end(self) -> int:
        status = self.process.wait(60)
        os.close(self._terminal)
        return status


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    # A token takes a tenth of a second, so that there is time to stop it.
    slow = ["--cache-mb", "0", "--throttle", "6"]
    started = Terminal([*COMMAND, *slow], tmp_path)
    yield started
    started.process.kill()
    started.process.wait()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("> ")
    terminal.type(NUMBER + "\n")
    terminal.wait_for("sept")
    terminal.type("\x03")
    stopped = terminal.wait_for("> ")
    assert "[stopped]" in stopped and "huit" not in stopped and "tok/s" in stopped
    terminal.type("half a line\x03")  # at the prompt it drops the line
    try:
        terminal.wait_for("> ", 3)
    except AssertionError:  # CPython's `input` notices at the next key if it was just beginning
        terminal.type("\x03")
        terminal.wait_for("> ")
    terminal.type("/reset\n")
    terminal.wait_for("> ")
    terminal.type("What is 12 + 30?\n")
    assert "42" in terminal.wait_for("tok/s.*> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    history = (tmp_path / "s" / "routeahead" / "chat").read_text().splitlines()
    assert history == [NUMBER, "/reset", "What is 12 + 30?"]


def test_a_model_that_reasons(library: Library) -> None:
    """A random model writes no marker: the template is seen to ask for reasoning or not."""
    from routeahead import Llama
    from routeahead.chat.template import ChatTemplate

    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}"
        "<think>\n{% endif %}"
    )
    llm = Llama(library.path("qwen3moe"), n_ctx=64, n_threads=1, resident=True)
    try:
        llm.metadata["tokenizer.chat_template"] = template
        made = ChatTemplate(llm)
        asked = [{"role": "user", "content": "a"}]
        assert made.form.reasoning and made.prompt(asked).thinking
        quiet = made.prompt(asked, variables={"enable_thinking": False})
        assert not quiet.thinking and quiet.tokens != made.prompt(asked).tokens
    finally:
        llm.close()
