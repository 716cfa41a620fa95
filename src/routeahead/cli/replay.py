"""`routeahead replay`: what a cache would do, from a recorded routing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from routeahead.cli import options
from routeahead.cli.terminal import print_facts, size
from routeahead.config import Settings
from routeahead.errors import SettingsError
from routeahead.experts.layout import MIB
from routeahead.replay.eviction import Policy
from routeahead.replay.hits import replay as replay_trace
from routeahead.replay.time_model import Machine, simulate
from routeahead.telemetry.route_trace import read_trace

ENGINES = Policy(Settings.cache_policy)  # what a run evicts by, unless told otherwise


def _machine_option(text: str, *names: str, default: str | bool = False) -> Any:
    """An option that describes the machine; `default` is what help shows (False: nothing)."""
    panel = "Time of a token"
    return typer.Option(*names, help=text, show_default=default, rich_help_panel=panel)


Bandwidth = Annotated[float | None, _machine_option("MiB/s from disk, all lanes together.")]
ComputeMs = Annotated[
    float | None, _machine_option("Time that one layer computes when it waits for nothing.")
]
LatencyMs = Annotated[
    float | None,
    _machine_option("Time before a read's bytes flow.", default=f"{Machine.latency_s * 1e3:g}"),
]
LaneCount = Annotated[
    int | None, _machine_option("Reads in flight at most.", default=str(Machine.lanes))
]
RouteAhead = Annotated[
    int | None,
    _machine_option(
        "MoE layers by which the routing is known ahead.", default=str(Machine.route_ahead)
    ),
]
Reads = Annotated[
    int | None,
    _machine_option(
        "Reads that bring an expert: 1 from a file that `pack` wrote.", default=str(Machine.reads)
    ),
]
Overlap = Annotated[
    bool | None,
    _machine_option(
        "Read later projections while earlier ones compute.",
        "--overlap/--no-overlap",
        default="overlap" if Machine.overlap else "no-overlap",
    ),
]


def replay(
    trace: Annotated[
        Path, typer.Argument(help="A recorded routing, .csv or .parquet.", show_default=False)
    ],
    cache_mb: Annotated[
        int,
        typer.Option(
            parser=options.size_option,
            metavar="SIZE",
            help="Expert cache in MiB, or as 4G.",
            show_default=False,
        ),
    ],
    policy: Annotated[Policy, typer.Option(help="Which experts are evicted.")] = ENGINES,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Replay the first MoE layers only.", show_default="all"),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Decoded tokens that only fill the cache, as in `bench`.")
    ] = 0,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Decoded tokens that count after them.", show_default="all"),
    ] = None,
    bandwidth: Bandwidth = None,
    compute_ms: ComputeMs = None,
    latency_ms: LatencyMs = None,
    lanes: LaneCount = None,
    route_ahead: RouteAhead = None,
    reads: Reads = None,
    overlap: Overlap = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a recorded routing through a cache: hits, evictions and what a token reads.

    With --bandwidth and --compute-ms also how long a token takes on a machine like that.

    \b
    routeahead run model.gguf -p "Hello" --route-trace routes.csv
    routeahead replay routes.csv --cache-mb 2000
    routeahead replay routes.csv --cache-mb 2G --bandwidth 2000 --compute-ms 1.5
    """
    machine = _machine(
        bandwidth=_scaled(bandwidth, MIB),
        compute_s=_scaled(compute_ms, 1e-3),
        latency_s=_scaled(latency_ms, 1e-3),
        lanes=lanes,
        route_ahead=route_ahead,
        reads=reads,
        overlap=overlap,
    )
    recorded = read_trace(trace)
    if layers:
        recorded = recorded.first_layers(layers)
    if warmup or tokens:
        recorded = recorded.counting(warmup, tokens)
    result = replay_trace(recorded, cache_mb * MIB, policy)
    report: dict[str, Any] = {
        "policy": policy.value,
        "cache_mb": cache_mb,
        "tokens": result.tokens,
        "decode_hit_rate": result.hit_rate,
        "hits": result.hits,
        "misses": result.misses,
        "evictions": result.evictions,
        "bytes_read": result.bytes_read,
        "mib_per_token": result.bytes_per_token / MIB,
    }
    if machine:
        times = simulate(recorded, result.misses_by_batch, machine)
        report |= {
            "machine": asdict(machine),
            "s_per_token": times.token_s,
            "compute_s_per_token": times.compute_s,
            "stall_s_per_token": times.stall_s,
            "io_s_per_token": times.io_s,
        }
    if as_json:
        print(json.dumps(report))
    else:
        print_facts(_rows(report))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _machine(**options: Any) -> Machine | None:
    """The machine to model, or None where no option speaks of one."""
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return None
    if not {"bandwidth", "compute_s"} <= given.keys():
        raise SettingsError("the time of a token needs both --bandwidth and --compute-ms")
    return Machine(**given).validate()


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("cache", f"{report['cache_mb']:,} MiB, {report['policy']}"),
        ("decoded tokens", f"{report['tokens']:,}"),
        ("hit rate", f"{report['decode_hit_rate']:.1%}"),
        ("hits, misses", f"{report['hits']:,}, {report['misses']:,}"),
        ("evictions", f"{report['evictions']:,}"),
        ("read", size(report["bytes_read"])),
        ("  a token", f"{report['mib_per_token']:,.1f} MiB"),
    ]
    if "machine" in report:
        rows += [
            ("a token takes", _ms(report["s_per_token"])),
            ("  compute", _ms(report["compute_s_per_token"])),
            ("  stall", _ms(report["stall_s_per_token"])),
            ("lane time", f"{_ms(report['io_s_per_token'])} a token"),
        ]
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
