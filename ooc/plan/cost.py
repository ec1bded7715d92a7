# SPDX-License-Identifier: Apache-2.0
"""What things cost on a machine, and which of two ways costs less."""

from ooc.plan.hardware import Hardware

MULTIPLIES_PER_PULL = 32
"""Multiply-adds of a dense product that take as long as pulling one value of one neighbour. Measured on two AVX-512
cores: 0.21 ns a pulled value (10M edges, 128 columns), 0.0067 ns a multiply-add (500k × 128 × 128)."""
PRODUCTS_PER_EPOCH = 3
"""Dense products of a linear map: forward, for its input's gradient, and for its weight's."""
PULLS_PER_EPOCH = 2
"""Pulls of an aggregation: forward and backward."""


def pull_seconds(
    hardware: Hardware,
    edges: int,
    columns: int,
    slab_columns: int,
    itemsize: int,
    *,
    rows: int = 0,
    source_rows: int = 0,
) -> float:
    """Seconds to sum ``columns`` columns of ``itemsize`` bytes over ``edges`` edges, ``slab_columns`` at a time.

    ``rows`` are the rows pulled, ``source_rows`` those of the slab (0: it is taken to be far larger than the cache).
    """
    whole, rest = divmod(columns, slab_columns)
    seconds = whole * _edge_seconds(hardware, slab_columns * itemsize, source_rows)
    seconds += _edge_seconds(hardware, rest * itemsize, source_rows) if rest else 0.0
    return edges * seconds + rows * (whole + (rest > 0)) * hardware.processor.pull_seconds_per_row


def _edge_seconds(hardware: Hardware, row_bytes: int, source_rows: int) -> float:
    """Seconds to add one row: so often as the cache holds of the slab it comes from there."""
    processor = hardware.processor
    far = processor.pull_seconds_per_edge.at(row_bytes)
    if processor.cached_pull_seconds_per_edge is None or not source_rows:
        return far
    near = min(far, processor.cached_pull_seconds_per_edge.at(row_bytes))
    hits = min(1.0, processor.cache_bytes / (row_bytes * source_rows))
    return hits * near + (1 - hits) * far


def local_seconds(hardware: Hardware, *, moved_bytes: int, multiplies: int, dtype: str) -> float:
    """Seconds of a row pass that loads and stores ``moved_bytes`` bytes and makes so many multiply-adds."""
    processor = hardware.processor
    rate = processor.multiplies_per_s.get(dtype, processor.multiplies_per_s["float32"])
    return moved_bytes / processor.stream_bytes_per_s + multiplies / rate


def ssd_seconds(hardware: Hardware, *, read_bytes: int, write_bytes: int, request_bytes: int) -> float:
    """Seconds to move so much in requests of ``request_bytes``, both ways at once."""
    disk = hardware.disk
    one_way = max(
        read_bytes / disk.read_bytes_per_s.at(request_bytes), write_bytes / disk.write_bytes_per_s.at(request_bytes)
    )
    return max(one_way, (read_bytes + write_bytes) / disk.both_ways_bytes_per_s)


def wire_seconds(hardware: Hardware, *, to_device_bytes: int, to_host_bytes: int) -> float:
    """Seconds between host and device, both ways at once; nothing where the CPU computes."""
    if hardware.wire is None:
        return 0.0
    wire = hardware.wire
    return max(to_device_bytes / wire.to_device_bytes_per_s, to_host_bytes / wire.to_host_bytes_per_s)


def together_seconds(hardware: Hardware, *seconds: float) -> float:
    """Seconds of resources that work at the same time: the busiest, and what of the others it does not hide."""
    longest = max(seconds)
    return longest + (1 - hardware.overlap) * (sum(seconds) - longest)


def aggregating_first_pays(
    *, rows_before: int, rows_after: int, edges_per_row: float, in_columns: int, out_columns: int
) -> bool:
    """Whether A(H) W beats A(H W) for a layer from ``rows_before`` active rows to ``rows_after``.

    Aggregating first pulls the layer's input instead of its output, and multiplies only the rows that the
    aggregation leaves.
    """
    product = PRODUCTS_PER_EPOCH * in_columns * out_columns
    pulled_value = PULLS_PER_EPOCH * MULTIPLIES_PER_PULL * edges_per_row * rows_after
    transform_first = rows_before * product + pulled_value * out_columns
    aggregate_first = rows_after * product + pulled_value * in_columns
    return aggregate_first < transform_first
