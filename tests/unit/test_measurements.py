"""The page of measurements says what the runs left, and so does the README's table."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from routeahead.models import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measurements_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("measurements_page")


def test_the_page_is_what_the_runs_left(measurements_page: ModuleType) -> None:
    models = measurements_page.read_models(ROOT / "docs")
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    assert page == measurements_page.page(models), "run benchmarks/measurements_page.py docs"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == measurements_page.with_table(readme, models[0])
    table = readme.partition("<!-- measurements -->")[2].partition("<!-- end -->")[0]
    assert models[0].name == "embedded" and "--route-ahead 2" in table


def test_the_models_that_are_here_were_measured(measurements_page: ModuleType) -> None:
    embedded, second = measurements_page.read_models(ROOT / "docs")
    for model, path in ((embedded, DEFAULT_MODEL), (second, ROOT / "benchmarks/data/second.gguf")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert model.about["of"][path.name] == digest, f"{path}: run `make measurements`"


def test_lossless_settings_were_measured_to_lose_nothing(measurements_page: ModuleType) -> None:
    for model in measurements_page.read_models(ROOT / "docs"):
        for asked in (model.answers, model.decoded):
            assert asked["stream"]["answers"] == asked["baseline"]["answers"]
        for name in ("stream", "prefetch-1", "prefetch-2", "predicted-1", "predicted"):
            assert model.text[name]["text"]["kl_mean"] == 0
