# SPDX-License-Identifier: Apache-2.0
"""Any data set as a ``Source``: edges, features and labels, handed out in blocks.

Reading order: ``source`` (what a format hands over), ``reading`` (what a format is to the rest), ``registry`` (which
format a path has), ``formats`` (one a module), ``node_tables``, ``node_ids``, ``node_data`` and ``splits`` (ids,
features, labels and splits that come as tables or files), ``names`` (published data sets), ``files`` (bytes, lines,
tables).
"""
