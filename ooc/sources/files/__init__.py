# SPDX-License-Identifier: Apache-2.0
"""Files read forwards in small memory: streams, text, tables, npy arrays, zip members, pickles, downloads."""
