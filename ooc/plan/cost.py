# SPDX-License-Identifier: Apache-2.0
"""What things cost, relative to one another."""

MULTIPLIES_PER_PULL = 32
"""Multiply-adds of a dense product that take as long as pulling one value of one neighbour. Measured on two AVX-512
cores: 0.21 ns a pulled value (10M edges, 128 columns), 0.0067 ns a multiply-add (500k × 128 × 128)."""
PRODUCTS_PER_EPOCH = 3
"""Dense products of a linear map: forward, for its input's gradient, and for its weight's."""
PULLS_PER_EPOCH = 2
"""Pulls of an aggregation: forward and backward."""
SECONDS_PER_MULTIPLY = 1e-11
"""Of a dense product with the element-wise work around it. An estimate: the 6.7e-12 measured above for the product
alone, and half as much again."""
SSD_BYTES_PER_S = 2e9
"""An estimate: about what sequential O_DIRECT reads of 1 MiB gave on the virtio NVMe of that machine, and writes."""
SSD_BOTH_WAYS_BYTES_PER_S = 3e9
"""An estimate of both at once."""
SECONDS_PER_PULLED_VALUE = 8e-11
"""Of one column of one neighbour, in wide slabs."""
NARROW_SLAB_COLUMNS = 24
"""Columns at which a gathered row costs twice what its values do: a random access each. Fitted, with the figure above,
to slabs of 8 to 128 columns of 500k nodes and 10M edges."""
SECONDS_PER_LOCAL_VALUE = 2e-9
"""Of one value that a row pass loads or stores, with the products and the element-wise work that go with it: a
3-layer GraphSAGE of 128 columns in memory. An estimate."""
SECONDS_PER_BLOCK = 2.5e-4
"""Of what moving a block costs however small it is, a third of it in the kernel."""
SECONDS_PER_STEP = 2e-4
"""Of what a step costs however few rows it has. Both from 8,000 blocks of 1 MiB in 3,400 steps, which took 3 s of one
core."""


def pull_seconds(edges: int, columns: int, slab_columns: int) -> float:
    """Seconds to sum ``columns`` columns over ``edges`` edges, ``slab_columns`` at a time."""
    return edges * columns * SECONDS_PER_PULLED_VALUE * (1 + NARROW_SLAB_COLUMNS / slab_columns)


def local_seconds(rows: int, columns: int) -> float:
    """Seconds of a row pass over ``rows`` rows that loads and stores ``columns`` columns in all."""
    return rows * columns * SECONDS_PER_LOCAL_VALUE


def ssd_seconds(*, read_bytes: int, write_bytes: int) -> float:
    """Seconds to move so much, both ways at once."""
    one_way = max(read_bytes, write_bytes) / SSD_BYTES_PER_S
    return max(one_way, (read_bytes + write_bytes) / SSD_BOTH_WAYS_BYTES_PER_S)


def recomputing_pays(*, multiplies: int, saved_ssd_bytes: int) -> bool:
    """Whether drawing a matrix again by so many multiply-adds beats moving so many bytes to and from the SSD."""
    return multiplies * SECONDS_PER_MULTIPLY < saved_ssd_bytes / SSD_BYTES_PER_S


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
