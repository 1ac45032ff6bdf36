"""What planning starts from: the hardware line, or a file that was measured."""

from __future__ import annotations

import json
import math

import pytest

from dmuon_core.planning.hardware import Hardware, parse_hardware, parse_quantity, rate_at
from dmuon_core.planning.traffic import Kind


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("400GB/s", "bytes/s", 4e11),
        ("400 GBps", "bytes/s", 4e11),
        ("400Gb/s", "bytes/s", 5e10),
        ("100Gbit/s", "bytes/s", 1.25e10),
        ("1.5GiB/s", "bytes/s", 1.5 * 2**30),
        ("3e9 B/s", "bytes/s", 3e9),
        ("4e14 FLOP/s", "FLOP/s", 4e14),
        ("400T", "FLOP/s", 4e14),
        ("1.2PFLOP/s", "FLOP/s", 1.2e15),
        ("989TFLOPS", "FLOP/s", 9.89e14),
        ("10us", "seconds", 1e-5),
        ("2 ms", "seconds", 2e-3),
        ("0.5", "share", 0.5),
        ("80GB", "bytes", 8e10),
        ("16GiB", "bytes", 2**34),
        ("1PiB/s", "bytes/s", 2.0**50),
        ("3kiB/s", "bytes/s", 3072),
    ],
)
def test_quantities(text: str, kind: str, value: float) -> None:
    assert math.isclose(parse_quantity(text, kind, "it"), value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("fast", "bytes/s"),
        ("400", "bytes/s"),
        ("400", "FLOP/s"),
        ("80", "bytes"),
        ("0GB/s", "bytes/s"),
        ("-1T", "FLOP/s"),
        ("10", "seconds"),
        ("1.5", "share"),
        ("8Gb", "bytes"),
        ("1e400", "bytes"),
        ("1e300PB/s", "bytes/s"),
    ],
)
def test_a_quantity_of_another_kind_is_refused(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match=r"it='.*write it like"):
        parse_quantity(text, kind, "it")


def test_a_line_and_what_it_leaves_out() -> None:
    found = parse_hardware("intra=400GB/s, flops=400T,overlap=0.9")
    assert found == Hardware(4e11, None, ((1.0, 4e14),), ((1.0, 4e14),), overlap=0.9)
    assert found.bandwidth(Kind.PUBLISH, crosses_nodes=True) == 4e11
    assert parse_hardware("intra=1GB/s,inter=2GB/s,flops=1T,ns_flops=2T").ns_flops == ((1.0, 2e12),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("intra=1GB/s,flop=1T", "did you mean 'flops'"),
        ("intr=1GB/s,flops=1T", "did you mean 'intra'"),
        ("intra=1GB/s", "flops is missing"),
        ("flops=1T", "intra is missing"),
        ("intra,flops=1T", "'intra' has no value"),
        ("nothing.json", "no file nothing.json; make it with"),
        ("", "intra is missing"),
        ("intra=1GB/s,intra=2GB/s,flops=1T", "'intra' occurs twice"),
    ],
)
def test_a_malformed_line_says_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hardware(line)


def test_a_measured_file_comes_back(tmp_path) -> None:
    rates = ((64.0, 1e9), (256.0, 4e9))
    hardware = Hardware(1e9, 2e9, rates, rates, 3e9, 1e-4, 2e-3, 0.25, {Kind.REDUCE: 5e8})
    path = tmp_path / "machine.json"
    path.write_text(hardware.to_json())
    assert parse_hardware(str(path)) == hardware
    path.write_text(json.dumps({"intra": 1e9, "flops": 1e9, "algorithms": {"GOSSIP": 1}}))
    with pytest.raises(ValueError, match="no collective 'GOSSIP'"):
        parse_hardware(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"intra": 0, "flops": 1e12}', "intra must be a number above 0, got 0"),
        ('{"intra": NaN, "flops": 1e12}', "intra must be a number above 0, got nan"),
        ('{"intra": -1, "flops": 1e12}', "got -1"),
        ('{"intra": 1e9, "flops": 1e400}', "flops must be a number above 0, got inf"),
        ('{"intra": 1e9, "flops": 0}', "flops must be a number above 0"),
        ('{"intra": 1e9, "flops": [[0, 1e9], [100, 1e9]]}', "flops must be a number above 0"),
        ('{"intra": 1e9, "flops": 1e12, "overlap": 5}', "overlap must be a number from 0 to 1"),
        ('{"intra": 1e9, "flops": 1e12, "latency": -1}', "latency must be a number of at least 0"),
        ('{"intra": 1e9, "flops": 1e12, "algorithms": ["BROADCAST"]}', "algorithms must be an object"),
        ('{"intra": 1e9, "flops": 1e12, "algorithms": {"REDUCE": 0}}', "REDUCE must be a number above 0"),
        ('{"intra": 1e9, "flops": 1e12, "intra": 2e9}', "'intra' occurs twice"),
        ("{", "as JSON"),
    ],
)
def test_a_malformed_file_says_what_is_wrong(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_hardware(str(path))


def test_rates_between_measured_sizes() -> None:
    rate = ((64.0, 1e9), (256.0, 4e9))
    assert [rate_at(rate, size) for size in (8, 64, 256, 999)] == [1e9, 1e9, 4e9, 4e9]
    assert math.isclose(rate_at(rate, 128), 2e9)
