# SPDX-License-Identifier: Apache-2.0
"""The display of running work: bars, lines, and the live view of a training. All listen to the core's events."""
