# SPDX-License-Identifier: Apache-2.0
"""Input of the commands: options, files and the environment, and the models and optimizers made from them."""
