# SPDX-License-Identifier: Apache-2.0
"""What the user sees while work goes on: bars, lines, the live view of a training. Listeners of the core's events."""
