# SPDX-License-Identifier: Apache-2.0
"""Formats that have only edges."""
