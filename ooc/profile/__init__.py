# SPDX-License-Identifier: Apache-2.0
"""The profile: how fast this machine is, measured with the program's own parts, for the planner.

Reading order: ``bench`` (how things are timed), ``disk``, ``processor``, ``epoch`` (what each measures), ``profile``
(all of it together, as a ``Hardware``, kept for each machine and disk). Nothing here changes a result: plans depend on
the profile, but what they compute does not.
"""

from ooc.profile.profile import Profile, Reading, cached, keep, known_hardware, measure

__all__ = ["Profile", "Reading", "cached", "keep", "known_hardware", "measure"]
