# SPDX-License-Identifier: Apache-2.0
"""``ooc report``: runs as one HTML file that needs no network.

Reading order: ``figures`` (everything shown of a run as plain data, and conclusions in words), ``charts``,
``document``.
"""
