"""Generated tasks with exact answers, and which of their items training never sees.

| kind | items | held out |
|---|---|---|
| sums | a + b and a - b, 0 <= a, b <= 99, no negative result | 5 % of the ordered pairs (a, b) |
| numbers | 0 to 999 in English words → French words | a tenth of 100 to 999 |
| capitals | country → capital | two of eight phrasings |
| functions | a described Python function → its code | a tenth of the function names |

A held-out a + b may have been seen as b + a. Whether an item is held out is decided by a hash of
the item, so that generating and grading agree without a list.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from facts import CAPITALS, NAME_PARTS

KINDS = ("sums", "numbers", "capitals", "functions")


@dataclass(frozen=True)
class Item:
    """A question and its answer; `prompt + answer + end` is a training document."""

    kind: str
    prompt: str
    answer: str
    end: str = "\n"


def held_out(key: str, share: float) -> bool:
    """Whether the item named `key` belongs to the `share` that training never sees."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


# --- sums ---


def sums(rng: random.Random, *, held: bool) -> Item:
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if held_out(f"sum {a} {b}", 0.05) == held:
            break
    minus = rng.random() < 0.5 and a >= b
    sign, result = ("-", a - b) if minus else ("+", a + b)
    # Training sees the bare form half of the time: more sums in as many tokens.
    if not held and rng.random() < 0.5:
        return Item("sums", f"{a} {sign} {b} =", f" {result}")
    return Item("sums", f"Question: What is {a} {sign} {b}?\nAnswer:", f" {result}")


# --- numbers ---


def _words(text: str) -> list[str]:
    return text.split()


_UNITS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_FRENCH_UNITS = _words(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze "
    "seize dix-sept dix-huit dix-neuf"
)
_FRENCH_TENS = {2: "vingt", 3: "trente", 4: "quarante", 5: "cinquante", 6: "soixante"}


def english(number: int) -> str:
    """0 to 999 in words, American style: three hundred forty two."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return _TENS[tens - 2] + (f" {_UNITS[units]}" if units else "")
    hundreds, rest = divmod(number, 100)
    return f"{_UNITS[hundreds]} hundred" + (f" {english(rest)}" if rest else "")


def french(number: int) -> str:
    """0 to 999 in words, with the hyphens of before 1990: trois cent quarante-deux."""
    if number < 20:
        return _FRENCH_UNITS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        if tens in (7, 9):  # counted on from sixty and from eighty
            tens, units = tens - 1, units + 10
        if tens == 8:
            return f"quatre-vingt-{_FRENCH_UNITS[units]}" if units else "quatre-vingts"
        if not units:
            return _FRENCH_TENS[tens]
        joint = " et " if units in (1, 11) else "-"
        return f"{_FRENCH_TENS[tens]}{joint}{_FRENCH_UNITS[units]}"
    hundreds, rest = divmod(number, 100)
    head = "cent" if hundreds == 1 else f"{_FRENCH_UNITS[hundreds]} cent"
    if not rest:
        return head + ("s" if hundreds > 1 else "")
    return f"{head} {french(rest)}"


def numbers(rng: random.Random, *, held: bool) -> Item:
    while True:
        # The small ones are the parts of all others: they come often, and are never held out.
        number = rng.randint(0, 99) if not held and rng.random() < 0.3 else rng.randint(100, 999)
        if (number >= 100 and held_out(f"number {number}", 0.1)) == held:
            break
    return Item("numbers", f"Translate to French: {english(number)}\nAnswer:", f" {french(number)}")


# --- capitals ---

_PHRASINGS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Name the capital of {}.",
    "What is the name of the capital city of {}?",
    "{} has which city as its capital?",
    "Tell me the capital of {}.",
)
_HELD_PHRASINGS = ("Which city is the capital city of {}?", "Can you name the capital of {}?")


def capitals(rng: random.Random, *, held: bool) -> Item:
    country = rng.choice(sorted(CAPITALS))
    phrasing = rng.choice(_HELD_PHRASINGS if held else _PHRASINGS)
    question = phrasing.format(country)
    return Item("capitals", f"Question: {question}\nAnswer:", f" {CAPITALS[country]}")


# --- functions ---

_OPERATIONS: dict[str, Callable[[str, int], str]] = {
    "adds {n} to {x}": lambda x, n: f"{x} + {n}",
    "subtracts {n} from {x}": lambda x, n: f"{x} - {n}",
    "multiplies {x} by {n}": lambda x, n: f"{x} * {n}",
    "divides {x} by {n}": lambda x, n: f"{x} / {n}",
    "returns the square of {x}": lambda x, n: f"{x} ** 2",
    "returns the length of {x}": lambda x, n: f"len({x})",
    "returns {x} in reverse": lambda x, n: f"{x}[::-1]",
    "returns the largest element of {x}": lambda x, n: f"max({x})",
    "returns the sum of {x}": lambda x, n: f"sum({x})",
    "returns the first {n} elements of {x}": lambda x, n: f"{x}[:{n}]",
    "tells whether {x} is greater than {n}": lambda x, n: f"{x} > {n}",
    "tells whether {x} is divisible by {n}": lambda x, n: f"{x} % {n} == 0",
}
_ARGUMENTS = ("a", "b", "x", "y", "n", "value", "items", "data", "values", "number")


def functions(rng: random.Random, *, held: bool) -> Item:
    while True:
        name = f"{rng.choice(NAME_PARTS)}_{rng.choice(NAME_PARTS)}"
        if held_out(f"function {name}", 0.1) == held:
            break
    text = rng.choice(list(_OPERATIONS))
    x, n = rng.choice(_ARGUMENTS), rng.randint(2, 20)
    prompt = f"# a function {name} that {text.format(x=x, n=n)}\ndef"
    answer = f" {name}({x}):\n    return {_OPERATIONS[text](x, n)}"
    return Item("functions", prompt, answer, end="\n\n")


_MAKERS: dict[str, Callable[..., Item]] = {
    "sums": sums, "numbers": numbers, "capitals": capitals, "functions": functions,
}  # fmt: skip


def item(kind: str, rng: random.Random, *, held: bool) -> Item:
    return _MAKERS[kind](rng, held=held)


def battery(each: int, seed: int = 0) -> Iterator[Item]:
    """`each` different held-out items of every kind."""
    for kind in KINDS:
        rng, seen = random.Random(f"{seed} {kind}"), set[str]()
        for _ in range(1000 * each):
            if len(seen) == each:
                break
            one = item(kind, rng, held=True)
            if one.prompt not in seen:
                seen.add(one.prompt)
                yield one
        if len(seen) < each:
            raise SystemExit(f"{kind}: only {len(seen)} items are held out, not {each}")
