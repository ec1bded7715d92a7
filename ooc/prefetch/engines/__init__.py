# SPDX-License-Identifier: Apache-2.0
"""The I/O engines, one per file, behind the interface in ``ooc.prefetch.engine``.

Reading order: ``ooc.prefetch.engine`` (the interface), ``plain`` (system calls on threads, every result checked),
``kernel_queue`` (many requests in progress at once), ``direct`` (both together with O_DIRECT, or threads and the page
cache), ``kvikio`` (GPUDirect Storage), ``choice`` (which of them suits a folder, and why).
"""
