"""`routeahead chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from routeahead.chat.generation import Ask, Generation, Sampling
from routeahead.chat.segments import Parts
from routeahead.chat.template import ChatTemplate
from routeahead.cli import options, terminal
from routeahead.cli.open_model import open_model
from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.telemetry.counters import Totals, share

HELP = """\
/system TEXT      begin anew with this system message
/reset            begin anew
/set              show the settings
/set NAME VALUE   change one, as in /set temp 0.7
/quit             leave; so does Ctrl-D
A line that ends with \\ goes on in the next one; so does text between lines of \"\"\".
Ctrl-C stops an answer."""
HISTORY_LINES = 1000

# Name in /set → field of `Sampling`, its type and its range.
SETTINGS: dict[str, tuple[str, type, float, float]] = {
    "temp": ("temperature", float, 0, 100),
    "top_p": ("top_p", float, 0, 1),
    "top_k": ("top_k", int, 0, 1 << 30),
    "min_p": ("min_p", float, 0, 1),
    "repeat_penalty": ("repeat_penalty", float, 0.01, 100),
    "seed": ("seed", int, 0, (1 << 32) - 1),
}
# A model may write what a terminal takes for a command; these characters begin them.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@options.with_settings
def chat(
    model: options.Model = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    n: Annotated[int | None, typer.Option("-n", min=1, help="Tokens of an answer at most.")] = None,
    temp: Annotated[float, typer.Option(min=0, help="Temperature; 0 decodes greedily.")] = 0.8,
    seed: Annotated[
        int | None, typer.Option(min=0, max=(1 << 32) - 1, help="Seed.", show_default="random")
    ] = None,
    think: Annotated[
        bool, typer.Option("--think/--no-think", help="Let the model reason, if its template asks.")
    ] = True,
    threads: options.Threads = None,
    context: options.Context = None,
    **settings: Any,
) -> None:
    """Talk with a model: a message a line, /help for what else there is."""
    options.announce(model)
    path = options.model_path(model)
    with terminal.progress() as say:
        llm = open_model(path, settings, say, context=context, threads=threads, waits=True)
    try:
        conversation = Conversation(llm, system, n, Sampling(temperature=temp, seed=seed), think)
        if sys.stdin.isatty():
            conversation.show("/help lists the commands, Ctrl-D leaves.")
        for message in _messages():
            try:
                if message.startswith("/"):
                    if not conversation.command(message):
                        break
                elif message.strip():
                    conversation.say(message)
            except SettingsError as error:
                conversation.show(str(error))
    finally:
        llm.close()


class Conversation:
    """What was said, how the next answer is drawn, and how both are shown.

    Attributes:
        messages: as OpenAI's API has them.
        sampling: changed by /set.
    """

    def __init__(
        self, llm: Llama, system: str, limit: int | None, sampling: Sampling, think: bool
    ) -> None:
        self._llm, self._limit, self.sampling = llm, limit, sampling
        self._template = ChatTemplate(llm)
        self._variables: dict[str, Any] = {} if think else {"enable_thinking": False}
        self._out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._notes = Console(
            stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self.messages: list[dict[str, str]] = []
        self._begin(system)

    def show(self, text: str) -> None:
        """A note that is no part of the conversation."""
        self._notes.print(text, style="dim")

    def _begin(self, system: str) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    # --- an answer ---

    def say(self, message: str) -> None:
        """Sends a message and prints the answer as it comes; Ctrl-C ends the answer.

        What was printed stays part of the conversation.

        Raises:
            SettingsError: the conversation does not fit; the message is no part of it then.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        prompt = self._template.prompt(asked, variables=self._variables)
        shown = self._template.shown(calls=False)
        ask = Ask(prompt.tokens, self.sampling, self._limit, shown=shown)
        generation = Generation(self._llm, ask)
        before = replace(self._llm.counters.decode)
        parts = self._template.parts(calls=False, thinking=prompt.thinking)
        answer, pieces = "", generation.pieces()
        try:
            for segment in self._segments(pieces, parts):
                if segment.kind == "text":
                    answer += segment.text
                style = "dim" if segment.kind == "reasoning" else ""
                self._out.print(segment.text.translate(_CONTROL), end="", style=style)
        except KeyboardInterrupt:
            self._out.print(" [stopped]", end="", style="dim")
        finally:
            pieces.close()
        self._out.print()
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        self.show(self._figures(generation, self._llm.counters.decode.minus(before)))

    @staticmethod
    def _segments(pieces: Any, parts: Parts) -> Iterator[Any]:
        """The parts of an answer; a blank line between reasoning and text."""
        last = None
        for source in (
            (segment for piece in pieces for segment in parts.feed(piece.text)),
            parts.close(),
        ):
            for segment in source:
                if last and last != segment.kind:
                    yield replace(segment, text="\n\n" + segment.text)
                else:
                    yield segment
                last = segment.kind

    def _figures(self, generation: Generation, step: Totals) -> str:
        """One line: how fast, what it waited for, what was in memory."""
        rate = step.kept / step.wall_s if step.wall_s else 0.0
        new = generation.prompt_tokens - generation.cached_tokens
        parts = [
            f"{len(generation.tokens)} tokens",
            f"{rate:.1f} tok/s",
            f"prompt {generation.prompt_tokens} ({new} new)",
        ]
        if self._llm.source:
            stall = step.stall_s / step.wall_s if step.wall_s else 0.0
            parts += [
                f"stall {stall:.0%}",
                f"hits {share(step.hits, step.hits + step.misses)}",
                f"{step.per_token('bytes_read') / MIB:.1f} MiB a token",
            ]
        if generation.finish == "length":
            parts.append("cut at the limit")
        return " · ".join(parts)

    # --- commands ---

    def command(self, line: str) -> bool:
        """Obeys a line that begins with a slash; False if it ends the conversation.

        Raises:
            SettingsError: it cannot be obeyed.
        """
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            self.show(HELP)
        elif name == "/reset":
            self._begin(self.messages[0]["content"] if self._has_system() else "")
        elif name == "/system":
            self._begin(rest)
        elif name == "/set":
            self._set(*rest.split())
        else:
            raise SettingsError(f"{name}: no such command; /help lists them")
        return True

    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "system"

    def _set(self, *words: str) -> None:
        if not words:
            values = (f"{n} {getattr(self.sampling, f)}" for n, (f, *_) in SETTINGS.items())
            self.show("\n".join(values))
            return
        if len(words) != 2 or words[0] not in SETTINGS:
            raise SettingsError(f"/set: give one of {', '.join(SETTINGS)} and a value")
        field, kind, low, high = SETTINGS[words[0]]
        try:
            value = kind(words[1])
        except ValueError:
            value = None
        if value is None or not low <= value <= high:  # NaN fails both comparisons
            raise SettingsError(f"/set {words[0]}: give {low:g} to {high:g}")
        self.sampling = replace(self.sampling, **{field: value})


def _messages() -> Iterator[str]:
    """Messages from the terminal, with editing and history, or from a pipe."""
    if not sys.stdin.isatty():
        yield from _joined(iter(sys.stdin.readline, ""))
        return
    save = _edit_lines()
    try:
        yield from _joined(_typed())
    finally:
        save()


def _typed() -> Iterator[str]:
    """Lines that are typed; Ctrl-C drops one, Ctrl-D ends."""
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Messages of one line or several."""
    for line in lines:
        message = line.rstrip("\n")
        if message.strip() == '"""':
            yield "\n".join(iter(lambda: next(lines, '"""').rstrip("\n"), '"""'))
            continue
        while message.endswith("\\"):
            message = message[:-1] + "\n" + next(lines, "").rstrip("\n")
        yield message


def _edit_lines() -> Any:
    """Turns line editing on; returns what writes the history."""
    try:
        import readline
    except ImportError:  # Python was built without it
        return lambda: None
    base = os.environ.get("XDG_STATE_HOME")
    path = (Path(base) if base else Path.home() / ".local" / "state") / "routeahead" / "chat"
    readline.set_history_length(HISTORY_LINES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            readline.read_history_file(path)
    except OSError:
        return lambda: None  # no history is no reason not to talk

    def save() -> None:
        try:
            readline.write_history_file(path)
            path.chmod(0o600)
        except OSError:
            pass

    return save
