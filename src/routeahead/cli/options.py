"""Options that several verbs share, and how their text becomes settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.config import CacheSize
from routeahead.errors import SettingsError

STREAM = "Streaming"
CONTROL = "Experiments"
TRACES = "Traces"
LOSSY = "Route-ahead"
NEIGHBOURS = "Other policies"

Model = Annotated[
    Path, typer.Argument(help="GGUF file; of a split model, any of its shards.", show_default=False)
]
CacheMb = Annotated[
    str,
    typer.Option(
        help="Expert cache in MiB; 'auto' sizes it from free memory, 0 keeps nothing.",
        rich_help_panel=STREAM,
    ),
]
ForceCache = Annotated[
    bool,
    typer.Option(
        "--force-cache",
        help="Allow a cache smaller than what one token routes to.",
        rich_help_panel=STREAM,
    ),
]
IoThreads = Annotated[
    int, typer.Option(help="Lanes: threads that read experts.", rich_help_panel=STREAM)
]
Overlap = Annotated[
    bool,
    typer.Option(help="Read later projections while earlier ones compute.", rich_help_panel=STREAM),
]
Dense = Annotated[
    str,
    typer.Option(
        help="Dense weights: 'anon' (read once, never dropped) or 'mmap' (mapped lazily).",
        rich_help_panel=STREAM,
    ),
]
DirectIo = Annotated[
    bool,
    typer.Option(help="Read experts past the page cache (O_DIRECT).", rich_help_panel=STREAM),
]
NExpertUsed = Annotated[
    int | None,
    typer.Option(
        help="Experts a token routes to, instead of the model's (lossy).",
        show_default="the model's",
        rich_help_panel=STREAM,
    ),
]
ReplayRouting = Annotated[
    Path | None,
    typer.Option(
        help="Route as this recorded trace did (random weights, real locality).",
        rich_help_panel=CONTROL,
    ),
]
RouteAhead = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Commit each decode layer's experts N MoE layers early, so that they are read in "
        "time (lossy); 0 is off.",
        rich_help_panel=LOSSY,
    ),
]
RouteAheadCompute = Annotated[
    str,
    typer.Option(
        help="Predict in the graph's callback ('inline') or on a thread of its own ('worker').",
        rich_help_panel=LOSSY,
    ),
]
RouteAheadLate = Annotated[
    str,
    typer.Option(
        help="A prediction that is late is waited for ('wait') or left to the router ('pass').",
        rich_help_panel=LOSSY,
    ),
]
GatePrecision = Annotated[
    str,
    typer.Option(
        help="Router matrices that predict: 'f32' (the model's own), 'f16' or 'int8'.",
        rich_help_panel=LOSSY,
    ),
]
DropColdExperts = Annotated[
    float,
    typer.Option(
        metavar="F",
        help="Do not read a missing expert whose share of the routing is below F / top-k (lossy); "
        "0 is off.",
        rich_help_panel=NEIGHBOURS,
    ),
]
DropRenorm = Annotated[
    bool,
    typer.Option(
        help="With --drop-cold-experts: scale the others' weights to the routing's mass.",
        rich_help_panel=NEIGHBOURS,
    ),
]
DropInPrefill = Annotated[
    bool,
    typer.Option(
        "--drop-in-prefill",
        help="With --drop-cold-experts: in prompts too.",
        rich_help_panel=NEIGHBOURS,
    ),
]
DropAware = Annotated[
    bool,
    typer.Option(
        help="With --drop-cold-experts: do not read early what a prediction says will be dropped.",
        rich_help_panel=NEIGHBOURS,
    ),
]
ExpertSubstitute = Annotated[
    float,
    typer.Option(
        metavar="M",
        help="Raise resident experts' selection scores by M times the score range (lossy); 0 is "
        "off.",
        rich_help_panel=NEIGHBOURS,
    ),
]
Prefetch = Annotated[
    int,
    typer.Option(
        metavar="K",
        help="Read ahead what the previous token routed to in the next K MoE layers; 0 is off.",
        rich_help_panel=NEIGHBOURS,
    ),
]
PredictPrefetch = Annotated[
    bool,
    typer.Option(
        "--predict-prefetch",
        help="Read ahead what the next layer's router says of this layer's input.",
        rich_help_panel=NEIGHBOURS,
    ),
]
PredictSpecMax = Annotated[
    int,
    typer.Option(
        metavar="M",
        help="With --predict-prefetch: missing experts to read a layer at most; 0 only keeps what "
        "is there.",
        rich_help_panel=NEIGHBOURS,
    ),
]
PredictLog = Annotated[
    bool,
    typer.Option(
        "--predict-log",
        help="Score how well routings could have been predicted; changes nothing, and is slow.",
        rich_help_panel=NEIGHBOURS,
    ),
]
Csv = Annotated[
    Path | None, typer.Option(help="Write a row a decoded token.", rich_help_panel=TRACES)
]
IoTrace = Annotated[
    Path | None,
    typer.Option(help="Write every read (.csv or .parquet).", rich_help_panel=TRACES),
]
RouteTrace = Annotated[
    Path | None,
    typer.Option(help="Write every routing (.csv or .parquet).", rich_help_panel=TRACES),
]
Throttle = Annotated[
    float,
    typer.Option(help="Read at most this many MiB/s, as a slower disk.", rich_help_panel=CONTROL),
]
ThrottleLatencyMs = Annotated[
    float, typer.Option(help="With --throttle: delay of each read.", rich_help_panel=CONTROL)
]
ForcedTokens = Annotated[
    str,
    typer.Option(
        help="Feed these tokens instead of sampling: a file of ids, or seed:N for random ones.",
        rich_help_panel=CONTROL,
    ),
]
Resident = Annotated[
    bool,
    typer.Option(
        "--resident",
        help="Load everything and stream nothing: the reference to compare with.",
        rich_help_panel=STREAM,
    ),
]


def cache_size(text: str) -> CacheSize:
    """'auto' or a whole number of MiB.

    Raises:
        SettingsError: neither.
    """
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"--cache-mb {text}: give a size in MiB, 0, or auto") from None


def streaming(*, cache_mb: str, **settings: Any) -> dict[str, Any]:
    """Fields of `routeahead.Settings` from the options above."""
    return {"cache_mb": cache_size(cache_mb), **settings}


def forced_tokens(text: str, count: int, n_vocab: int) -> list[int]:
    """At most `count` token ids: from a file (integers between white space), or random.

    Raises:
        SettingsError: the file cannot be read, or an id is not in the vocabulary.
    """
    if text.startswith("seed:"):
        try:
            rng = random.Random(int(text[5:]))
        except ValueError:
            raise SettingsError(f"--forced-tokens {text}: give seed:NUMBER") from None
        return [rng.randrange(n_vocab) for _ in range(count)]
    try:
        tokens = [int(word) for word in Path(text).read_text().split()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"--forced-tokens {text}: cannot read token ids: {error}") from None
    if not tokens:
        raise SettingsError(f"--forced-tokens {text}: no token ids in it")
    strange = [t for t in tokens if not 0 <= t < n_vocab]
    if strange:
        raise SettingsError(f"--forced-tokens {text}: {strange[0]} is not one of {n_vocab} ids")
    return tokens[:count]
