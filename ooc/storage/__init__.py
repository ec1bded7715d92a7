# SPDX-License-Identifier: Apache-2.0
"""Stores on disk: Zarr v3 groups of arrays whose chunks are raw rows."""
