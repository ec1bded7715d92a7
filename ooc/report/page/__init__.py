# SPDX-License-Identifier: Apache-2.0
"""``ooc report``: runs as one HTML file that needs no network.

Reading order: ``figures`` (all that is shown of a run, as plain data, and what it comes to, in words), ``charts``,
``document``.
"""
