"""llama-cpp-python's own tests, with `routeahead.Llama` in place of `llama_cpp.Llama`.

    python tests/clients/upstream.py WORK_FOLDER

Downloads the source archive of the installed llama-cpp-python with pip (75 MB), and runs its tests
with the plain class and then with each cache size. Wherever they download a model from a hub, they
get the embedded one, and what they expect of their own models' texts is replaced by what the plain
class answers here. Tests of dense, recurrent and embedding models fail with both classes then.
Prints a table of the outcomes, and exits with 1 if one differs from the plain class's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
CELLS = {
    "llama_cpp.Llama": None,
    "cache_mb=0": "0",
    "cache_mb=2": "2",
    'cache_mb="auto"': "auto",
}


def main() -> None:
    work = Path(sys.argv[1])
    source = fetch(work)
    golden(source)
    outcomes = {cell: run(source, work, cell, cache) for cell, cache in CELLS.items()}
    report(outcomes)


def fetch(work: Path) -> Path:
    """The unpacked source archive, tests and vocabularies only."""
    name = f"llama_cpp_python-{version('llama-cpp-python')}"
    archive = work / f"{name}.tar.gz"
    if not archive.exists():
        pin = f"llama-cpp-python=={version('llama-cpp-python')}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary",
                   "llama-cpp-python", pin, "--dest", str(work)]  # fmt: skip
        subprocess.run(command, check=True)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if re.search(r"/tests/|/models/ggml-vocab", member.name):
                tar.extract(member, work, filter="data")
    return work / name


def golden(source: Path) -> None:
    """Replaces what the tests expect of Qwen3.5-0.8B by what the plain class answers here."""
    from llama_cpp import Llama, LlamaGrammar

    from routeahead.models import DEFAULT_MODEL

    llm = Llama(str(DEFAULT_MODEL), n_ctx=32, n_batch=32, n_threads=1, flash_attn=True,
                verbose=False)  # fmt: skip
    fox = "The quick brown fox jumps over the lazy dog. The quick brown fox"
    continued = llm.create_completion(fox, max_tokens=6, temperature=0.0, seed=1337)
    chosen = llm.create_completion(
        "The capital of france is paris, 'true' or 'false'?:\n",
        max_tokens=4, top_k=50, top_p=0.9, temperature=0.8, seed=1337,
        grammar=LlamaGrammar.from_string('root ::= "true" | "false"'),
    )  # fmt: skip
    path = source / "tests/test_llama.py"
    tests = path.read_text(encoding="utf-8")
    for expected, actual in (
        ('== " jumps over the lazy dog."', f"== {continued['choices'][0]['text']!r}"),
        ('== "true"', f"== {chosen['choices'][0]['text']!r}"),
    ):
        if expected not in tests:
            raise SystemExit(f"{path}: expects no {expected} any more: correct {__file__}")
        tests = tests.replace(expected, actual)
    path.write_text(tests, encoding="utf-8")


def run(source: Path, work: Path, cell: str, cache: str | None) -> dict[str, str]:
    """Outcome of each test with one class."""
    results = work / f"{cache}.xml"
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {"UPSTREAM_CACHE_MB": cache or "", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin", "--rootdir", source,
               "-p", "no:cacheprovider", f"--junitxml={results}", "tests"]  # fmt: skip
    print(f"--- {cell}", flush=True)
    subprocess.run(command, cwd=source, env={**os.environ, **changed}, check=False)
    outcomes = {}
    for case in ET.parse(results).iter("testcase"):
        bad = next(
            (child.tag for child in case if child.tag in ("failure", "error", "skipped")), ""
        )
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = bad or "passed"
    return outcomes


def report(outcomes: dict[str, dict[str, str]]) -> None:
    plain, *others = outcomes
    print("\n| outcome | " + " | ".join(outcomes) + " |\n|---" + "|---" * len(outcomes) + "|")
    for kind in ("passed", "failure", "error", "skipped"):
        counts = [sum(outcome == kind for outcome in of.values()) for of in outcomes.values()]
        print(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    failing = [name for name, outcome in outcomes[plain].items() if outcome != "passed"]
    print("\nnot passed by the plain class:", *failing, sep="\n  ")
    different = [
        f"{name}: {outcomes[plain][name]}, with {cell} {outcomes[cell].get(name)}"
        for cell in others
        for name in outcomes[plain]
        if outcomes[cell].get(name) != outcomes[plain][name]
    ]
    print("\ndifferent:", *(different or ["none"]), sep="\n  ")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
