# SPDX-License-Identifier: Apache-2.0
"""What layers that run as they are make of a row with many edges, piece by piece of these."""
