"""Reading a routing trace: both formats, and files that are not one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.traces import HEADER, NAMES, ROWS, csv_text

from routeahead.telemetry.route_trace import COLUMNS, Batch, RouteTrace, TraceError, read_trace

BATCHES = [
    Batch("prefill", 0, 0, (7, 3, 5)),
    Batch("prefill", 1, 2, (4, 1)),
    Batch("decode", 2, 0, (5, 7)),
    Batch("decode", 2, 2, (1, 0)),
    Batch("decode", 3, 0, (7, 5)),
    Batch("decode", 3, 2, (2, 1)),
]


def write_parquet(path: Path, metadata: dict[str, str], **replaced: Any) -> Path:
    columns = dict(zip(COLUMNS, map(list, zip(*ROWS, strict=True)), strict=True)) | replaced
    parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return path


FACTS = {"routeahead": json.dumps({"layers": {"0": 30, "2": 60}, "model": "m"})}


def test_csv_becomes_batches_in_the_order_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(csv_text())
    trace = read_trace(path)
    assert trace == RouteTrace({0: 30, 2: 60}, BATCHES)
    assert trace.decoded_tokens() == [[2, 3], [4, 5]]


def test_parquet_reads_as_the_csv_does(tmp_path: Path) -> None:
    narrow = pa.array([row[0] for row in ROWS], pa.uint8())
    extra = pa.array([0.5] * len(ROWS))
    path = write_parquet(tmp_path / "t.parquet", FACTS, phase=narrow, weight=extra)
    assert read_trace(path) == RouteTrace({0: 30, 2: 60}, BATCHES)


def test_turns_of_a_single_layer_are_batches_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(csv_text([(0, 0, 0, 0, 7), (1, 1, 0, 0, 7), (0, 2, 0, 0, 7), (0, 3, 0, 0, 3)]))
    assert read_trace(path).batches == [
        Batch("prefill", 0, 0, (7,)),
        Batch("decode", 1, 0, (7,)),
        Batch("prefill", 2, 0, (7, 3)),
    ]


def test_ubatches_of_a_prefill_are_batches_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    ubatch = [(0, 0, 0, 0, 7), (0, 0, 2, 0, 4)]
    path.write_text(csv_text([*ubatch, *ubatch]))
    assert [batch.layer for batch in read_trace(path).batches] == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lacks the columns phase, step"),
        (HEADER + NAMES.replace("slot", "place") + "\n0,1,2,0,0,5,0.5\n", "lacks the columns slot"),
        (csv_text([]), "no routed slot"),
        (csv_text([(1, 2, 0, 0, 5), (1, 2, 1, 0, 5)]), "expert of layer 1"),
        (csv_text().replace("_bytes=60", "_bytes=0"), "expert of layer 2"),
        (csv_text([(1, 2, 0, 0, 5), (2, 2, 0, 1, 6)]), "entry 2: there is no phase 2"),
        (csv_text([(1, 2, 0, 0, 5), (1, 2, 0, 1, -1)]), "entry 2: there is no expert -1"),
        (csv_text([(1, 2, 0, 1, 5), (1, 2, 0, 0, 6)]), "entry 2: slot 0 follows slot 1"),
        (csv_text() + "0,1,4,zero,0,5,0.5\n", "'zero'"),
        (csv_text() + "0,1,4\n", "Row #15"),
        ("GGUF\udcff", "not a routing trace"),
    ],
)
def test_a_malformed_csv_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(path, says)


def test_a_malformed_parquet_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"PAR1 but not really")
    assert_refused(path, "not a routing trace")
    assert_refused(write_parquet(path, {}), "facts")
    assert_refused(write_parquet(path, {"routeahead": "{"}), "metadata")
    assert_refused(write_parquet(path, FACTS, slot=[None] * len(ROWS)), "not a routing trace")
    assert_refused(write_parquet(path, FACTS, expert=[0.5] * len(ROWS)), "not a routing trace")
    lacking = parquet.read_table(path).drop_columns(["expert"])
    parquet.write_table(lacking, path)
    assert_refused(path, "lacks the columns expert")


def test_a_missing_trace_is_one_clear_line(tmp_path: Path) -> None:
    for name in ("none.csv", "none.parquet"):
        assert_refused(tmp_path / name, "No such file")


def assert_refused(path: Path, says: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert "\n" not in message


def test_first_layers_end_in_a_layer_that_routes_the_last_prompt_token_only(tmp_path: Path) -> None:
    rows = [(0, step, layer, 0, 10 * step + layer) for layer in range(3) for step in range(2)] + [
        (1, 2, layer, 0, 20 + layer) for layer in range(3)
    ]
    lines = ["# layer=0 expert_bytes=5", "# layer=1 expert_bytes=5", "# layer=2 expert_bytes=5"]
    lines += ["phase,step,layer,slot,expert", *(",".join(map(str, row)) for row in rows)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    cut = read_trace(path).first_layers(2)
    assert cut.batches == [
        Batch("prefill", 0, 0, (0, 10)),
        Batch("prefill", 1, 1, (11,)),
        Batch("decode", 2, 0, (20,)),
        Batch("decode", 2, 1, (21,)),
    ]
    assert set(cut.expert_bytes) == {0, 1} and len(cut.slots) == 5


def test_rows_that_were_verified_together_are_one_batch(tmp_path: Path) -> None:
    """Guesses that were wrong are routed again, as what was right: the last one counts."""
    path = tmp_path / "t.csv"
    rows = [(1, 1, 0, 0, 7), (1, 2, 0, 0, 3), (1, 1, 2, 0, 1), (1, 2, 2, 0, 2)]
    path.write_text(csv_text([*rows, (1, 2, 0, 0, 5), (1, 2, 2, 0, 4)]))
    trace = read_trace(path)
    assert trace.batches == [
        Batch("decode", 1, 0, (7, 3)),
        Batch("decode", 1, 2, (1, 2)),
        Batch("decode", 2, 0, (5,)),
        Batch("decode", 2, 2, (4,)),
    ]
    assert len(trace.decoded_tokens()) == 2
    assert {key: ids.tolist() for key, ids in trace.selections().items()} == {
        (1, 0): [7], (1, 2): [1], (2, 0): [5], (2, 2): [4],
    }  # fmt: skip
