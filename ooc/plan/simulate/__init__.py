# SPDX-License-Identifier: Apache-2.0
"""A program's instructions replayed against the rates of a machine: when what happens, and how long it takes."""
