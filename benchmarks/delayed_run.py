"""`routeahead run`, slower: every decode takes DELAY_MS milliseconds longer.

    routeahead bench MODEL --cell 'plain:' --cell 'late: DELAY_MS=5 benchmarks/delayed_run.py'

`self_check.py` uses it to see whether the bench detects a difference that is certainly there. The
package itself does not know DELAY_MS.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from routeahead.cli.main import main


def delay_decodes(seconds: float) -> None:
    """Adds the delay inside what the engine times, so that it counts as time of the token."""
    # Not at the top: routeahead sets OpenMP's variables and must be imported before llama.cpp.
    from llama_cpp._internals import LlamaContext

    decode = LlamaContext.decode

    def delayed(context: LlamaContext, batch: Any) -> None:
        time.sleep(seconds)
        decode(context, batch)

    LlamaContext.decode = delayed


if __name__ == "__main__":
    delay_decodes(float(os.environ["DELAY_MS"]) / 1e3)
    sys.argv.insert(1, "run")
    main()
