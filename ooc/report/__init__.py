# SPDX-License-Identifier: Apache-2.0
"""Output about plans and runs for people: tables, drawings and pages. Nothing here decides how training runs."""
