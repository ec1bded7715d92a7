# SPDX-License-Identifier: Apache-2.0
"""What people are shown of plans and runs: tables, drawings, progress. Listens and reads; decides nothing."""
