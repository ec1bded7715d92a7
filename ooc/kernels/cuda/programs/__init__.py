# SPDX-License-Identifier: Apache-2.0
"""The Triton programs that run on the GPU, one family a module. Without a GPU they run in Triton's interpreter."""
