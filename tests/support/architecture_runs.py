"""What streaming does to a model of each architecture, and the page that says so.

cd tests && python -m support.architecture_runs ../docs/models.md    # writes the page, in minutes
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import llama_cpp
import numpy as np

from routeahead import Llama, ModelError
from routeahead.engine.streamed_model import Hooks
from routeahead.llamacpp.gguf_file import read_layout
from support import architectures
from support.architecture_table import MODELS
from support.library import CONTEXT, PROMPTS, evaluate, token_batches
from support.llama_library import LlamaLibrary
from support.reference import Logits, Resident

CELLS = ("none", "evicting", "full")
TEXT = token_batches(3, prompt=20, decode=0)[0]
STEPS = [token_batches(4, prompt=6, decode=8)]  # what policies are tried on
DECODED = 8


@dataclass(frozen=True)
class Row:
    """One model's line of the page, as text.

    Attributes:
        layers: those with experts, and how many experts they have.
        identical: caches with which all numbers equalled the resident run's, bit for bit.
        predicted: layers whose router reproduces its own choice outside of the graph.
        committed: routings that route-ahead 1 committed, of those behind the first MoE layer.
        dropping, substitution: "yes" where experts were dropped or substituted.
    """

    model: str
    layers: str
    top_k: str
    identical: str
    predicted: str
    committed: str
    dropping: str
    substitution: str
    note: str = ""


class Examination:
    """Runs one model in all ways that the page speaks of. AssertionError if one is wrong."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path

    def row(self) -> Row:
        resident = Resident(self._path, n_ctx=CONTEXT, threads=1)
        generates = resident.has_memory
        expected = [resident.evaluate(batches) for batches in PROMPTS] if generates else []
        resident.close()
        if not read_layout(self._path).experts:
            return self._whole(expected)
        with self._load("none") as llm:
            layout = llm.layout
            numbers = [layout.top_k(layer) for layer in layout.moe_layers]
        top_k = " or ".join(str(number) for number in sorted(set(numbers)))
        layers = f"{len(numbers)} × {layout.n_expert}"
        if not generates:
            same = self._embeds()
            note = "no KV cache: `embed` works, generating is refused"
            return Row(self._name, layers, top_k, same, "", "", "", "", note)
        same, routed = self.same(expected)
        if not routed:
            return Row(self._name, layers, top_k, same, "", "", "", "", "its graph uses no experts")
        predicted = self._predicted()
        committed, note = self._committed()
        dropping, substitution = self._lossy()
        return Row(
            self._name, layers, top_k, same, predicted, committed, dropping, substitution, note
        )

    def _whole(self, expected: Sequence[Logits]) -> Row:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            llm = Llama(
                self._path,
                n_ctx=CONTEXT,
                n_batch=CONTEXT,
                n_threads=1,
                cache_mb=1,
                force_cache=True,
            )
        assert any("the whole model is loaded: it has no experts" in str(w.message) for w in told)
        with closing(llm):
            for batches, logits in zip(PROMPTS, expected, strict=True):
                np.testing.assert_array_equal(evaluate(llm, batches), logits)
        return Row(self._name, "0", "", "", "", "", "", "", "has no experts: loaded whole")

    def same(self, expected: Sequence[Logits]) -> tuple[str, bool]:
        """Compares the logits of PROMPTS, with each cache. Also whether the graph routes at all."""
        decoded = sum(len(batches) - 1 for batches in PROMPTS)
        for cell in CELLS:
            with self._load(cell) as llm:
                for batches, logits in zip(PROMPTS, expected, strict=True):
                    np.testing.assert_array_equal(evaluate(llm, batches), logits)
                layout, source, decode = llm.layout, llm.source, llm.counters.decode
                assert source
                routed = decode.hits + decode.misses
                if not routed:
                    continue
                assert routed == decoded * sum(map(layout.top_k, layout.moe_layers))
                assert decode.misses == routed if cell == "none" else decode.hits > 0
                evicts = cell == "evicting" and layout.token_bytes() < layout.expert_bytes
                assert source.cache.evictions > 0 or not evicts
                assert source.cache.evictions == 0 or cell != "full"
        return f"{len(CELLS)} of {len(CELLS)}", routed > 0

    def _embeds(self) -> str:
        resident = Resident(self._path, n_ctx=CONTEXT, threads=1, embeddings=True)
        expected = resident.embed(TEXT)
        resident.close()
        for cell in CELLS:
            with self._load(cell, embedding=True) as llm:
                llm.tokenize = lambda *_, **__: list(TEXT)  # type: ignore[method-assign]
                got = np.array(llm.embed("text"), np.float32).reshape(expected.shape)
                np.testing.assert_array_equal(got, expected)
                assert llm.counters.prefill.bytes_read > 0
                refuses(llm)
        return f"{len(CELLS)} of {len(CELLS)}"

    def _predicted(self) -> str:
        with self._load("evicting", predict_log=True) as llm:
            evaluate(llm, STEPS[0])
            control = llm.policies.report(llm.counters.decode)["predictors"]["control"]
            found = [one for one in control["by_layer"].values() if one["routings"]]
            assert all(one["accuracy"] == 1 and one["routings"] == DECODED for one in found)
            return f"{len(found)} of {len(control['by_layer'])}"

    def _committed(self) -> tuple[str, str]:
        with self._load("evicting", route_ahead=1) as llm:
            evaluate(llm, STEPS[0])
            facts = llm.policies.report(llm.counters.decode)["route_ahead"]
            reasons = facts["by_reason"]
            reasons = {why: n for why, n in reasons.items() if n and why not in _BY_DESIGN}
            assert facts["passed_through"] == sum(reasons.values()) and not facts["disarmed"]
            possible = DECODED * (len(llm.layout.moe_layers) - 1)
            assert facts["committed"] + facts["passed_through"] == possible
            left = ", ".join(f"{n // DECODED} layers: {why}" for why, n in reasons.items())
            return f"{facts['committed']} of {possible}", left

    def _lossy(self) -> tuple[str, str]:
        answers = []
        for setting, count in (
            ("drop_cold_experts", "dropped"),
            ("expert_substitute", "substituted"),
        ):
            with self._load("evicting", **{setting: 0.9}) as llm:
                evaluate(llm, STEPS[0])
                report = llm.policies.report(llm.counters.decode)
                found = report["drop" if count == "dropped" else "substitute"][count]
                answers.append("yes" if found else "none")
        return answers[0], answers[1]

    def _load(self, cell: str, **settings: object) -> Loaded:
        return Loaded(self._path, cell, settings)


_BY_DESIGN = ("structural", "prefill")


def refuses(llm: Llama) -> None:
    """A model without a KV cache says in one line that it generates nothing, and what works."""
    for attempt in (lambda: llm.eval(TEXT), lambda: llm("x", max_tokens=2)):
        try:
            attempt()
        except ModelError as error:
            assert "no KV cache" in str(error) and "embed" in str(error)
            assert "\n" not in str(error)
        else:
            raise AssertionError("it generated")


class Loaded:
    """A streamed model in a `with` block."""

    def __init__(self, path: Path, cell: str, settings: dict[str, object]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # few experts a token, under dropping
            self._llm = Llama(
                path, n_ctx=CONTEXT, n_batch=CONTEXT, n_ubatch=CONTEXT, n_threads=1, cache_mb=1,
                force_cache=True, io_threads=1, _hooks=Hooks(poison=True), **settings,
            )  # fmt: skip
        layout, source = self._llm.layout, self._llm.source
        assert source
        least = layout.token_bytes()
        assert least > 0
        source.cache.budget = {"none": 0, "evicting": least, "full": layout.expert_bytes}[cell]

    def __enter__(self) -> Llama:
        return self._llm

    def __exit__(self, *_: object) -> None:
        self._llm.close()


# --- the page ---

_HEADS = (
    "model", "MoE layers × experts", "top-k", "bit-identical", "predictable layers",
    "route-ahead 1 committed", "dropping", "substitution", "",
)  # fmt: skip
_TEXT = """\
# Models

Every architecture that the installed llama.cpp (llama-cpp-python {version}) has with experts,
run as a tiny random model of it: logits, or embeddings, compared bit by bit with a resident run of
plain llama.cpp, with no cache, one that evicts and one that holds everything. *Predictable layers*
are those whose router gives its own choice when it is computed outside of the graph, which
`--route-ahead` and `--predict-prefetch` need; the others pass through (*unranked*: a table gives
each token its experts). What follows a colon is a variant; a name of a format is how the experts
are stored. `cd tests && python -m support.architecture_runs ../docs/models.md` writes this page.

{counts}

"""


def page(rows: Sequence[Row], version: str) -> str:
    """The whole page; `version` is llama-cpp-python's."""
    arches = {row.model.partition(":")[0] for row in rows}
    whole = sum(row.identical == f"{len(CELLS)} of {len(CELLS)}" for row in rows)
    embedding = sum("no KV cache" in row.note for row in rows)
    dense = sum("no experts:" in row.note for row in rows)
    counts = (
        f"{len(rows)} models of {len(arches)} architectures: {whole} are identical with every "
        f"cache. {embedding} of these\nhave no KV cache: they embed, and generating is refused. "
        f"{dense} others have no experts in this llama.cpp\nand are loaded whole."
    )
    lines = [_HEADS, ["---"] * len(_HEADS), *map(astuple, rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return _TEXT.format(version=version, counts=counts) + table


def rows_of(text: str) -> list[Row]:
    """The rows of a page."""
    lines = [line.strip("|\n").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [Row(*(cell.strip() for cell in line[: len(fields(Row))])) for line in lines[2:]]


def main(target: Path) -> None:
    library, rows = LlamaLibrary(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            path = architectures.write(Path(folder), name, library)
            rows.append(Examination(name, path).row())
            print(*astuple(rows[-1]), sep=" | ", flush=True)
            for file in Path(folder).iterdir():
                file.unlink()
    library.close()
    target.write_text(page(rows, llama_cpp.__version__), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
