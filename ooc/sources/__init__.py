# SPDX-License-Identifier: Apache-2.0
"""Any data set as a ``Source``: edges, features and labels, handed out in blocks.

Reading order: ``source`` (what a format hands over), ``reading`` (what a format is to the rest), ``registry`` (which
format a path has), ``formats`` (one a module), ``labels`` (labels and splits of any kind), ``columns``,
``numbered`` (ids of any kind become nodes) and ``node_data`` (features and labels that come as tables or files),
``names`` (published data sets), ``files`` (bytes, lines, tables).
"""
