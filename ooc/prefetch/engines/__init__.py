# SPDX-License-Identifier: Apache-2.0
"""The ways to move bytes between files and memory, one a file, behind the seam in ``ooc.prefetch.engine``.

Reading order: ``ooc.prefetch.engine`` (what an engine promises), ``plain`` (system calls on threads, every result
checked, and the page cache), ``kernel_queue`` and ``direct`` (O_DIRECT, many requests under way at once), ``kvikio``
(GPUDirect Storage), ``choice`` (which of them suits a folder, and why).
"""
