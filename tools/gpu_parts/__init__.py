# SPDX-License-Identifier: Apache-2.0
"""The parts of ``tools/gpu_check``, each of which can be left out.

    report       what was measured, what was left out and why, what failed; the table
    clock        times of calls on a device, several of them taking turns
    parts        the parts by name, and how long each may take
    worker       the process that they run in
    suite        the tests of the GPU's kernels
    ceilings     what the machine can do at best: memory, PCIe, dense products, disk
    pulls        sums over neighbours against torch's and PyG's
    epochs       whole epochs against PyG full-batch, and in an eighth of the memory
    overlap      what of copies lies under computing, and the trace of it
    large        a graph shaped like papers100M: forecasts beforehand, then epochs
    bars         what is to be shown, and whether it was
    rehearsal    the host as a device of its own
    compilation  every kernel compiled for a GPU that is not there: for tools/kernel_table and the tests

None imports at its top what a machine may lack: torch and NumPy are enough to begin.
"""
