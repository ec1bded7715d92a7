# SPDX-License-Identifier: Apache-2.0
"""Files read forwards in little memory: streams, text, tables, npy arrays, zip members, pickles, downloads."""
