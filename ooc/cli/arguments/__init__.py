# SPDX-License-Identifier: Apache-2.0
"""What commands are told: options, files and the environment, and what models and optimizers are made of them."""
