# SPDX-License-Identifier: Apache-2.0
"""Any data set as a ``Source``: edges, features and labels, read in blocks.

Reading order: ``source`` (what a format provides), ``reading`` (the interface of a format), ``registry`` (which format
a path has), ``formats`` (one per module), ``labels`` (labels and splits of any kind), ``columns`` (of tables),
``numbered`` (ids of any kind become nodes) and ``node_data`` (features and labels from tables or files), ``names``
(published data sets), ``files`` (bytes, lines, tables).
"""
