# SPDX-License-Identifier: Apache-2.0
"""How opaque layers compute a row with many edges, piece by piece of these edges."""
