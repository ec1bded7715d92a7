# SPDX-License-Identifier: Apache-2.0
"""What runs on the GPU: Triton programs, one family a module. Without a GPU they run in Triton's interpreter."""
