"""The unit tests import no llama.cpp, and numba only where a test compiles something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COLLECT = """
import sys, pytest
status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", sys.argv[1]])
print(*{"llama_cpp", "numba"} & sys.modules.keys())
sys.exit(status)
"""


def test_unit_tests_import_no_llama_cpp() -> None:
    """Collected alone, in a process of its own."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(folder)],
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *collected, imported = done.stdout.splitlines()
    assert any("test_unit_tests_import_no_llama_cpp" in line for line in collected)
    assert imported == ""
