"""What `owner/repo:quant` means among the files of a repository."""

from __future__ import annotations

import pytest

from routeahead.errors import ModelError, SettingsError
from routeahead.hub.reference import ModelFiles, Reference, RepoFile, choose, models_of, parse

FILES = [
    "README.md",
    "mmproj-F16.gguf",
    "M-Q4_K_M.gguf",
    "M-Q8_0.gguf",
    "M-UD-Q2_K_XL.gguf",
    "BF16/M-BF16-00001-of-00002.gguf",
    "BF16/M-BF16-00002-of-00002.gguf",
    "M-IQ4_XS-00001-of-00002.gguf",  # its second shard is absent
    "M.i1-Q3_K_S.gguf",
]


def models(names: list[str]) -> list[ModelFiles]:
    return models_of(RepoFile(name, 10**9) for name in names)


@pytest.mark.parametrize(
    ("quant", "first"),
    [
        ("Q4_K_M", "M-Q4_K_M.gguf"),
        ("q8_0", "M-Q8_0.gguf"),
        ("UD-Q2_K_XL", "M-UD-Q2_K_XL.gguf"),
        ("Q2_K_XL", "M-UD-Q2_K_XL.gguf"),
        ("bf16", "BF16/M-BF16-00001-of-00002.gguf"),
        ("BF16/M-BF16-00001-of-00002.gguf", "BF16/M-BF16-00001-of-00002.gguf"),
        ("M-Q8_0.gguf", "M-Q8_0.gguf"),
        ("Q3_K_S", "M.i1-Q3_K_S.gguf"),
        ("", "M-Q4_K_M.gguf"),
    ],
)
def test_a_quantisation_means_one_model(quant: str, first: str) -> None:
    found = choose(models(FILES), Reference("o/r", quant))
    assert found.files[0].path == first


def test_a_set_has_all_its_shards() -> None:
    by_quant = {model.quant: model for model in models_of(RepoFile(n, 1) for n in FILES)}
    assert len(by_quant["BF16"].files) == 2 and by_quant["BF16"].complete
    assert not by_quant["IQ4_XS"].complete


def test_what_is_not_there_is_told_with_what_is() -> None:
    with pytest.raises(ModelError, match=r"Q5_K_M: no such.*o/r has.*Q4_K_M \(1\.0 GB\)"):
        choose(models(FILES), Reference("o/r", "Q5_K_M"))
    with pytest.raises(ModelError, match="no GGUF model"):
        choose([], Reference("o/r", ""))
    with pytest.raises(ModelError, match="several are called so; write one of A-Q8_0, B-Q8_0"):
        choose(models(["A-Q8_0.gguf", "B-Q8_0.gguf"]), Reference("o/r", "Q8_0"))


def test_references() -> None:
    assert parse("hf:o/r:Q8_0") == parse("o/r:Q8_0") == Reference("o/r", "Q8_0")
    assert str(parse("o/r")) == "o/r"
    for text in ("", "r", "o/r/x", "../r:Q8_0", "o/..", "hf:", "o/r:a:b", "/o/r", "o/r:../x"):
        with pytest.raises(SettingsError, match="write owner/repo:quant"):
            parse(text)
