# SPDX-License-Identifier: Apache-2.0
"""The ways to move bytes between files and memory, one a file, behind the seam in ``ooc.prefetch.engine``.

Reading order: ``ooc.prefetch.engine`` (what an engine promises), ``plain`` (system calls on threads, every result
checked), ``kernel_queue`` (many requests under way at once), ``direct`` (both together with O_DIRECT, or threads and
the page cache), ``kvikio`` (GPUDirect Storage), ``choice`` (which of them suits a folder, and why).
"""
