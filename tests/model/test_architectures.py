"""Every architecture that the installed llama.cpp has with experts, compared with its resident run.

docs/models.md says what is found. What llama.cpp knows is asked of it, so that a new architecture
cannot be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from support import architectures
from support.architecture_runs import CELLS, Examination, Loaded, page, refuses, rows_of
from support.architecture_table import EXPERTS, INNER, MODELS, TOP_K, WIDTH
from support.library import CONTEXT, PROMPTS, evaluate
from support.llama_library import LlamaLibrary
from support.reference import Resident
from support.speculation import Fortune, Spy, text

from routeahead import Llama, ModelError, SettingsError
from routeahead.cli.inspect import facts
from routeahead.doctor.device import OnDevice
from routeahead.engine.offload import plan
from routeahead.engine.packing import write_packed
from routeahead.engine.streamed_model import Hooks
from routeahead.llamacpp.eval_callback import layer_of
from routeahead.llamacpp.gguf_file import read_layout
from routeahead.telemetry.recorder import Outputs

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
ROWS = {row.model: row for row in rows_of(PAGE)}

# Each of them asks something of the engine that no fixture of the other tests asks.
DAILY = [
    "grovemoe",  # a second top-k in each layer, for experts that stay in memory
    "nemotron_h_moe:puzzle",  # another top-k in each layer
    "deepseek4:table3",  # experts that a table gives to each token
    "smallthinker",  # a router that runs before the attention
    "llada-moe",  # no KV cache
    "nomic-bert-moe",  # neither, and one vector for a text
    "bailingmoe2:further",  # a block that a run does not load
    "llama4",  # one expert a token, weighted before the experts
    "qwen3moe:all",  # all experts a token
    "nemotron_h_moe:latent",  # experts narrower than the hidden vectors
    "qwen3moe:BF16 router",
    "refact",  # experts that the graph does not use
    "deci",  # no experts
]

Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def llama_library() -> Iterator[LlamaLibrary]:
    library = LlamaLibrary()
    yield library
    library.close()


@pytest.fixture(scope="module")
def written(llama_library: LlamaLibrary, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Path of a model of that name, which is written once."""
    folder, paths = tmp_path_factory.mktemp("architectures"), dict[str, Path]()

    def write(name: str) -> Path:
        if name not in paths:
            paths[name] = architectures.write(folder, name, llama_library)
        return paths[name]

    return write


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in DAILY else [pytest.mark.slow]) for n in MODELS],
)
def test_as_the_page_says(written: Write, name: str) -> None:
    assert Examination(name, written(name)).row() == ROWS[name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in DAILY else [pytest.mark.slow]) for n in MODELS],
)
def test_packed(written: Write, tmp_path: Path, name: str) -> None:
    """The logits of the original, resident, with every cache, and one read an expert."""
    path, target = written(name), tmp_path / "packed.gguf"
    layout = read_layout(path)
    if not layout.experts:
        with pytest.raises(ModelError, match="has no experts"):
            write_packed(path, target)
        return
    write_packed(path, target)
    assert len(read_layout(target).pieces) == len(layout.moe_layers)
    resident = Resident(path, n_ctx=CONTEXT, threads=1)
    if resident.has_memory:
        Examination(name, target).same([resident.evaluate(batches) for batches in PROMPTS])
    resident.close()


def test_the_page_is_what_its_rows_make() -> None:
    assert list(ROWS) == list(MODELS)
    version = PAGE.partition("llama-cpp-python ")[2].partition(")")[0]
    assert page(list(ROWS.values()), version) == PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_route_ahead_in_the_graph(written: Write, name: str) -> None:
    """Where routers can be lent, and where they cannot, it is what is computed inline."""
    path = written(name)
    if not read_layout(path).experts:
        return
    for weights in ("true", "predicted"):
        found = []
        for compute in ("inline", "graph"):
            chosen = {"route_ahead_compute": compute, "route_ahead_weights": weights}
            with Loaded(path, "evicting", {"route_ahead": 1, **chosen}) as llm:
                if llm._ctx.memory is None:
                    return
                logits = [evaluate(llm, batches) for batches in PROMPTS]
                facts = llm.policies.report(llm.counters.decode)["route_ahead"]
                found.append((logits, facts["committed"], facts["by_reason"]))
        for inline, graph in zip(found[0][0], found[1][0], strict=True):
            np.testing.assert_array_equal(graph, inline)
        assert found[0][1:] == found[1][1:]


@pytest.mark.slow
def test_no_architecture_is_missing(llama_library: LlamaLibrary, tmp_path: Path) -> None:
    """If this fails, add what it names to `support.architecture_table`, and write the page anew."""
    assert architectures.unlisted(llama_library, tmp_path) == {}


def test_a_missing_architecture_is_seen(
    llama_library: LlamaLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = llama_library.architectures()
    assert {model.arch for model in MODELS.values()} <= set(known) and "bert" in known
    monkeypatch.setattr(llama_library, "architectures", lambda: ["qwen3", "qwen3moe", "apertus"])
    monkeypatch.setattr(architectures, "MODELS", {})
    monkeypatch.setattr(architectures, "WITHOUT_EXPERTS", set())
    missing = architectures.unlisted(llama_library, tmp_path)
    assert missing["qwen3moe"] == "has experts"
    assert "xielu" in missing["apertus"] and "qwen3" not in missing


def test_ubatches_of_a_model_with_two_topks(written: Write) -> None:
    path, settings = written("grovemoe"), {"n_ctx": CONTEXT, "n_ubatch": 4, "n_threads": 1}
    batches = PROMPTS[0]
    with (
        closing(Llama(path, resident=True, **settings)) as resident,
        closing(Llama(path, cache_mb=0, _hooks=Hooks(poison=True), **settings)) as llm,
    ):
        np.testing.assert_array_equal(evaluate(llm, batches), evaluate(resident, batches))
        decode, layout = llm.counters.decode, llm.layout
        routed = len(batches[1:]) * TOP_K * len(layout.moe_layers)
        assert decode.hits + decode.misses == routed


def test_the_layer_of_a_copy() -> None:
    assert layer_of(b"ffn_moe_topk-17") == layer_of(b"ffn_moe_topk-17 (copy)") == 17


def test_a_topk_for_each_layer(written: Write) -> None:
    layout = read_layout(written("nemotron_h_moe:puzzle"))
    sizes = layout.bytes_by_layer()
    assert [layout.top_k(layer) for layer in layout.moe_layers] == [4, 2, 6]
    assert layout.n_expert_used == 6
    assert layout.token_bytes() == 4 * sizes[1] + 2 * sizes[3] + 6 * sizes[5]
    there = OnDevice(plan(layout, 0, free=0, context=CONTEXT, rows=1), [], 0, 0, 0)
    assert ("experts", "16 a layer, top-2 or 4 or 6") in facts(layout, 1 << 40, there)
    with pytest.raises(SettingsError, match="n_expert_used: this model has a number of its own"):
        Llama(layout.shards[0].path, cache_mb=0, n_expert_used=2)


def test_dropping_judges_by_the_topk_of_the_layer(written: Write) -> None:
    """A threshold of 1 / top-k drops something in every layer, also where top-k is the smallest."""
    with Loaded(written("nemotron_h_moe:puzzle"), "evicting", {"drop_cold_experts": 1.0}) as llm:
        dropped = set()
        policy = llm.policies.all[0]
        weighted = policy.weighted

        def watch(routing: object) -> None:
            weighted(routing)  # type: ignore[arg-type]
            if routing.dropped is not None:  # type: ignore[attr-defined]
                dropped.add(routing.layer)  # type: ignore[attr-defined]

        policy.weighted = watch  # type: ignore[method-assign]
        for batches in PROMPTS:
            evaluate(llm, batches)
        assert dropped == set(llm.layout.moe_layers)


def test_inspect_counts_what_a_run_loads(written: Write) -> None:
    path = written("bailingmoe2:further")
    whole = read_layout(path)
    with Loaded(path, "none", {}) as llm:
        loaded = llm.layout
    counted = whole.loaded()
    assert counted.moe_layers == loaded.moe_layers == whole.moe_layers[:-1]
    assert counted.expert_bytes == loaded.expert_bytes < whole.expert_bytes
    assert counted.dense_bytes == loaded.dense_bytes


def test_a_resident_model_without_kv_cache_refuses_too(written: Write) -> None:
    with closing(Llama(written("llada-moe"), resident=True, n_ctx=CONTEXT, n_threads=1)) as llm:
        refuses(llm)


def test_a_trace_with_a_topk_for_each_layer(written: Write, tmp_path: Path) -> None:
    """What was recorded drives the same model to the same logits."""
    path, trace = written("nemotron_h_moe:puzzle"), tmp_path / "route.csv"
    outputs, batches = Outputs(route_trace=trace), PROMPTS[0]
    with Loaded(path, "none", {"outputs": outputs}) as llm:
        expected = evaluate(llm, batches)
    with Loaded(path, "none", {"replay_routing": trace}) as llm:
        np.testing.assert_array_equal(evaluate(llm, batches), expected)


# --- adapters ---

RANK = 4
ADAPTED = {
    "attention": {"attn_q.weight": ((), 128, WIDTH), "attn_output.weight": ((), WIDTH, 128)},
    "router": {"ffn_gate_inp.weight": ((), EXPERTS, WIDTH)},
    "experts": {
        "ffn_gate_exps.weight": ((EXPERTS,), INNER, WIDTH),
        "ffn_up_exps.weight": ((EXPERTS,), INNER, WIDTH),
        "ffn_down_exps.weight": ((EXPERTS,), WIDTH, INNER),
    },
}


def write_adapter(path: Path, part: str) -> Path:
    """A LoRA adapter for one part of each layer of the qwen3moe model."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "qwen3moe")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for layer in range(4):
        for name, (experts, rows, width) in ADAPTED[part].items():
            for suffix, shape in (("a", (RANK, width)), ("b", (rows, RANK))):
                values = rng.normal(0, 0.2, (*experts, *shape)).astype(np.float32)
                writer.add_tensor(f"blk.{layer}.{name}.lora_{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("part", ADAPTED)
def test_adapters(written: Write, tmp_path: Path, part: str) -> None:
    path, adapter = written("qwen3moe"), write_adapter(tmp_path / "adapter.gguf", part)
    expected = []
    for given in (None, adapter):
        resident = Resident(path, n_ctx=CONTEXT, threads=1, adapter=given)
        expected.append([resident.evaluate(batches) for batches in PROMPTS])
        resident.close()
    assert not np.array_equal(expected[0][0], expected[1][0])
    for cell in CELLS:
        with Loaded(path, cell, {"lora_path": str(adapter)}) as llm:
            for batches, logits in zip(PROMPTS, expected[1], strict=True):
                np.testing.assert_array_equal(evaluate(llm, batches), logits)


TAKES_BACK = {
    "llama4": True,
    "smallthinker": True,
    "deepseek4:table3": False,
    "nemotron_h_moe": False,
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in TAKES_BACK else [pytest.mark.slow]) for n in MODELS]
)
def test_guesses_are_verified_or_refused(written: Write, name: str) -> None:
    """A text with guesses has the resident run's logits in every row, or they are refused."""
    path, prompt = written(name), PROMPTS[0][0]
    plain = Llama(path, n_ctx=CONTEXT, n_threads=1, resident=True)
    known = [*prompt, *text(plain, prompt, 60, temp=0.0)] if plain._ctx.memory else []
    plain.close()
    try:
        llm = Llama(path, n_ctx=CONTEXT, n_threads=1, cache_mb=0, draft_model=Fortune(known))
    except SettingsError as error:
        assert "cannot be cut back" in str(error)
        assert not TAKES_BACK.get(name, False)
        return
    assert TAKES_BACK.get(name, True)
    with closing(llm):
        spy = Spy().watch(llm)
        text(llm, prompt, 60, temp=0.0)
        assert llm.counters.decode.drafted > llm.counters.decode.accepted > 0
    resident = Resident(path, n_ctx=CONTEXT, threads=1)
    spy.assert_as(resident)
    resident.close()
