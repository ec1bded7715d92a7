# SPDX-License-Identifier: Apache-2.0
"""What ``propagate`` of a layer of one's own computes, taken apart into values of rows and sums over edges."""
