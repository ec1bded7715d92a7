# SPDX-License-Identifier: Apache-2.0
"""``python -m ooc``: the command without its installed script."""

import sys

from ooc.cli import main

sys.exit(main())
