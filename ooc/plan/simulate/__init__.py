# SPDX-License-Identifier: Apache-2.0
"""The simulator: replay a program's instructions against a machine's rates, to tell when each thing happens and how
long it takes."""
